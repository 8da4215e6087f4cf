// What attention over either kind of cache shares: a chunk of rows and its state, what a row sees, where blocks lie.

constexpr int kChunkRows = 24;     // rows whose state stays in the L1 cache
constexpr float kLog2E = 1.44269504f;

// Some rows of one item, and their state. Row r of the chunk is query head (first_row + r) % group of query token
// (first_row + r) / group of the item.
struct Chunk {
  int first_row, rows;
  int first_tile_rows;                     // rows of every row tile but perhaps the last
  int64_t visible_begin[kChunkRows];       // positions a row sees: [begin, end)
  int64_t visible_end[kChunkRows];
  int64_t begin, end;                      // their union
  float max[kChunkRows];                   // of the partition
  float sum[kChunkRows];
  float total_max[kChunkRows];             // of the partitions merged so far
  float total_sum[kChunkRows];
  Operand q[kChunkRows * kMaxHeadDim];     // as the cache's score product reads it
  float scores[kChunkRows * kScoreStep];   // of the partition; then, from the same row's beginning, its weights
  float acc[kChunkRows * kMaxHeadDim];     // [row][head_dim]
  float total[kChunkRows * kMaxHeadDim];
  float q_scale[kChunkRows], weight_scale[kChunkRows];  // of operands for an int8 cache, and their sums
  int32_t q_sum[kChunkRows], weight_sum[kChunkRows];
  float value_scale[kPartition];           // of the partition's tokens, in an int8 cache
};

// Positions [begin, end) of a chunk in one partition that starts at `first`.
struct Span {
  int64_t first, begin, end;
};

// Where a row's q goes: row `row` of a tile of `rows` that begins at row `first` of the chunk.
struct TileRow {
  int first, row, rows;
};

inline int group_size(const AttentionArgs* a) { return a->num_heads / a->num_kv_heads; }

// Offset of the item's row in rows of `ld`: ldq for q, num_heads * head_dim for out.
inline int64_t row_offset(const AttentionArgs* a, const AttentionItem* item, int row, int64_t ld) {
  const int64_t token = item->q_begin + row / group_size(a);
  const int64_t head = item->kv_head * group_size(a) + row % group_size(a);
  return token * ld + head * a->head_dim;
}

inline float* out_row(const AttentionArgs* a, const AttentionItem* item, int row) {
  return a->out + row_offset(a, item, row, static_cast<int64_t>(a->num_heads) * a->head_dim);
}

// Scores are in units of log2: what q is multiplied by.
inline float query_factor(const AttentionArgs* a) {
  return a->softcap > 0.0f ? a->scale / a->softcap : a->scale * kLog2E;
}

// All of the chunk but its q. Rows go through products of at most `most` rows, as evenly as they can.
inline void begin_chunk(const AttentionArgs* a, const AttentionItem* item, int first_row, int rows, int most,
                        Chunk* chunk) {
  chunk->first_row = first_row;
  chunk->rows = rows;
  const int tiles = (rows + most - 1) / most;
  chunk->first_tile_rows = (rows + tiles - 1) / tiles;
  const int64_t first_position = a->seq_lens[item->seq] - a->cu_seqlens_q[item->seq + 1];
  chunk->begin = INT64_MAX;
  chunk->end = 0;
  for (int r = 0; r < rows; ++r) {
    const int64_t position = first_position + item->q_begin + (first_row + r) / group_size(a);
    chunk->visible_end[r] = position + 1;
    chunk->visible_begin[r] = a->window > 0 && position >= a->window ? position - a->window + 1 : 0;
    if (chunk->visible_begin[r] < chunk->begin) chunk->begin = chunk->visible_begin[r];
    if (chunk->visible_end[r] > chunk->end) chunk->end = chunk->visible_end[r];
    chunk->total_max[r] = -kInfinity;
    chunk->total_sum[r] = 0.0f;
  }
}

inline TileRow tile_row(const Chunk* chunk, int r) {
  const int row = r % chunk->first_tile_rows, first = r - row, left = chunk->rows - first;
  return {first, row, left < chunk->first_tile_rows ? left : chunk->first_tile_rows};
}

// +inf in lanes [lo, hi), -inf in the others: the minimum with it hides what a row does not see.
inline f32v visible_lanes(int lo, int hi) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = i >= lo && i < hi ? kInfinity : -kInfinity;
  return v_load(lanes);
}

// Tokens of a partition that a row sees, in whole vectors; both `end` where it sees none.
struct Reach {
  int first, last;
};

// Hides the scores of the tokens outside [lo, hi), applies the softcap and finds the row's largest score.
inline Reach finish_scores(const AttentionArgs* a, Chunk* chunk, int r, int lo, int hi, int end) {
  float* scores = chunk->scores + r * kScoreStep;
  if (lo >= hi) {
    chunk->max[r] = -kInfinity;
    return {end, end};
  }
  const Reach reach = {lo / kLanes * kLanes, (hi + kLanes - 1) / kLanes * kLanes};
  f32v most = v_set1(-kInfinity);
  for (int t = reach.first; t < reach.last; t += kLanes) {
    f32v x = v_load(scores + t);
    const bool whole = t >= lo && t + kLanes <= hi;
    if (a->softcap > 0.0f) x = v_mul(v_set1(a->softcap * kLog2E), v_tanh(x));
    if (!whole) x = v_min(x, visible_lanes(lo - t, hi - t));
    if (!whole || a->softcap > 0.0f) v_store(scores + t, x);
    most = v_max(most, x);
  }
  chunk->max[r] = v_hmax(most);
  return reach;
}

// Where the block's K, and V, of the item's head begin in the cache, in bytes.
inline int64_t block_offset(const AttentionArgs* a, const AttentionItem* item, int64_t block) {
  const int64_t id = a->block_table[static_cast<int64_t>(item->seq) * a->max_blocks + block];
  return id * a->block_stride + item->kv_head * a->head_stride;
}
