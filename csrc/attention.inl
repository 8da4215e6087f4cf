// Attention over the paged KV cache: softmax(q k / sqrt(d)) v, partition by partition.
//
// A row is one query head of one query token. The rows that share a KV head are computed together, so each block of K
// and V is read once for all of them. A partition is 256 positions (kPartition), several blocks of the cache:
//
//   positions   0 ........ 255 | 256 ....... 511 | 512 ...            partitions, each from a fresh (max, sum, acc)
//               [blk][blk]...  | [blk][blk]...   |
//
// A partition takes three passes: the scores of all its tokens, their softmax row by row, and the weighted sum of V.
// The largest score is known before the first weight: nothing is ever rescaled, and acc stays in registers.
//
// Both products are C[rows][n] = A[rows][k] B[k / 2][n][2]: scores = q K with n = tokens of a block, k = head_dim, and
// acc = p V with n = head_dim, k = tokens of the partition. Every element of C is one chain in ascending k, so how rows
// are grouped cannot change a bit. A token that a row does not see has weight zero and adds zero times a finite V. V of
// tokens that no row of the chunk sees is never multiplied: it may be anything.
//
// Scores are in units of log2, so that a weight is 2^(score - max): scale and log2(e) are folded into q, or, with a
// softcap, log2(e) into the cap.

constexpr int kChunkRows = 24;     // rows whose state stays in the L1 cache
constexpr float kLog2E = 1.44269504f;

// kLanes values as operands of a product. On AVX-512 rounded to bf16.
inline void store_operands(Operand* to, f32v x) {
#if defined(HEADRACE_ISA_AVX512)
  const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(x);
  __builtin_memcpy(to, &rounded, sizeof(rounded));
#else
  v_store(to, x);
#endif
}

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
  Operand q[kChunkRows * kMaxHeadDim];
  float scores[kChunkRows * kScoreStep];   // of the partition; then, from the same row's beginning, its weights
  float acc[kChunkRows * kMaxHeadDim];     // [row][head_dim]
  float total[kChunkRows * kMaxHeadDim];
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

void begin_chunk(const AttentionArgs* a, const AttentionItem* item, int first_row, int rows, Chunk* chunk) {
  chunk->first_row = first_row;
  chunk->rows = rows;
  const int tiles = (rows + kQueryTile - 1) / kQueryTile;
  chunk->first_tile_rows = (rows + tiles - 1) / tiles;
  const float factor = a->softcap > 0.0f ? a->scale / a->softcap : a->scale * kLog2E;
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
    const int tile_row = r % chunk->first_tile_rows;
    const int tile_first = r - tile_row;
    const int tile_rows = rows - tile_first < chunk->first_tile_rows ? rows - tile_first : chunk->first_tile_rows;
    const float* q = a->q + row_offset(a, item, first_row + r, a->ldq);
    Operand* packed = chunk->q + tile_first * a->head_dim + 2 * tile_row;
    Operand scaled[kMaxHeadDim];
    for (int d = 0; d < a->head_dim; d += kLanes) store_operands(scaled + d, v_mul(v_load(q + d), v_set1(factor)));
    for (int d = 0; d < a->head_dim; d += 2, packed += 2 * tile_rows) {
      __builtin_memcpy(packed, scaled + d, 2 * sizeof(Operand));
    }
  }
}

// +inf in lanes [lo, hi), -inf in the others: the minimum with it hides what a row does not see.
inline f32v visible_lanes(int lo, int hi) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = i >= lo && i < hi ? kInfinity : -kInfinity;
  return v_load(lanes);
}

// Scores of tokens [lo, hi) of a partition -> weights of [begin, end), multiples of kLanes; the row's max and sum.
inline void weigh_row(const AttentionArgs* a, Chunk* chunk, int r, int lo, int hi, int begin, int end) {
  float* scores = chunk->scores + r * kScoreStep;
  Operand* weights = reinterpret_cast<Operand*>(scores);
  const int first = lo < hi ? lo / kLanes * kLanes : end, last = lo < hi ? (hi + kLanes - 1) / kLanes * kLanes : end;
  f32v most = v_set1(-kInfinity);
  for (int t = first; t < last; t += kLanes) {
    f32v x = v_load(scores + t);
    const bool whole = t >= lo && t + kLanes <= hi;
    if (a->softcap > 0.0f) x = v_mul(v_set1(a->softcap * kLog2E), v_tanh(x));
    if (!whole) x = v_min(x, visible_lanes(lo - t, hi - t));
    if (!whole || a->softcap > 0.0f) v_store(scores + t, x);
    most = v_max(most, x);
  }
  chunk->max[r] = v_hmax(most);
  const f32v max = v_set1(chunk->max[r]);
  f32v total = v_zero();
  for (int t = begin; t < first; t += kLanes) store_operands(weights + t, v_zero());
  for (int t = first; t < last; t += kLanes) {
    const f32v p = v_exp2(v_sub(v_load(scores + t), max));
    total = v_add(total, p);
    store_operands(weights + t, p);
  }
  for (int t = last; t < end; t += kLanes) store_operands(weights + t, v_zero());
  chunk->sum[r] = v_hsum(total);
}

// One product of all rows, row tile by row tile, whose operands of A lie `row_operands` apart from row to row.
inline void multiply_rows(const Chunk* chunk, const Product* products, int row_operands, ProductArgs p) {
  for (int left = chunk->rows; left > 0; left -= chunk->first_tile_rows) {
    const int rows = left < chunk->first_tile_rows ? left : chunk->first_tile_rows;
    products[rows - 1](p);
    p.a += rows * row_operands;
    p.c += rows * p.ldc;
  }
}

// Where the block's K, and V, begin in the cache.
inline int64_t block_offset(const AttentionArgs* a, const AttentionItem* item, int64_t block) {
  const int64_t id = a->block_table[static_cast<int64_t>(item->seq) * a->max_blocks + block];
  return id * a->block_stride + static_cast<int64_t>(item->kv_head) * a->head_dim * a->block_size;
}

// Positions [begin, end) of a chunk in one partition that starts at `first`.
struct Span {
  int64_t first, begin, end;
};

void score_span(const AttentionArgs* a, const AttentionItem* item, Chunk* chunk, const Span& span) {
  for (int64_t block = span.begin / a->block_size; block * a->block_size < span.end; ++block) {
    const int64_t at = block_offset(a, item, block);
    const Run run = {a->k_cache + at, a->head_dim / 2, a->v_cache - a->k_cache};
    multiply_rows(chunk, kScoreProducts, a->head_dim,
                  {chunk->q, &run, 1, a->block_size, chunk->scores + block * a->block_size - span.first, kScoreStep});
  }
}

// acc = weights * V over the token pairs that hold the span. A pair that a bound cuts is copied, its hidden half zero.
void sum_values(const AttentionArgs* a, const AttentionItem* item, Chunk* chunk, const Span& span) {
  const int64_t pair_size = 2 * a->head_dim, blocks_ahead = a->partition / a->block_size;
  Run runs[kMaxRuns];
  uint16_t edges[2][2 * kMaxHeadDim];
  int num_runs = 0, num_edges = 0;
  for (int64_t token = span.begin / 2 * 2, next; token < span.end; token = next) {
    const int64_t block = token / a->block_size, in_block = token % a->block_size / 2 * pair_size;
    const uint16_t* v = a->v_cache + block_offset(a, item, block) + in_block;
    if (token < span.begin || token + 2 > span.end) {
      uint16_t* edge = edges[num_edges++];
      for (int i = 0; i < pair_size; ++i) {
        edge[i] = token + i % 2 < span.begin || token + i % 2 >= span.end ? 0 : v[i];
      }
      runs[num_runs++] = {edge, 1, 0};
      next = token + 2;
      continue;
    }
    next = (block + 1) * a->block_size < span.end ? (block + 1) * a->block_size : span.end / 2 * 2;
    const int64_t later = block + blocks_ahead;  // the same block of the next partition: its K is needed next
    const int64_t ahead =
        later * a->block_size < chunk->end ? a->k_cache + block_offset(a, item, later) + in_block - v : 0;
    runs[num_runs++] = {v, static_cast<int>(next - token) / 2, ahead};
  }
  const Operand* weights = reinterpret_cast<const Operand*>(chunk->scores) + (span.begin - span.first) / 2 * 2;
  multiply_rows(chunk, kValueProducts, kWeightStep,
                {weights, runs, num_runs, a->head_dim, chunk->acc, a->head_dim});
}

// One partition from a fresh state. Rows that see nothing of it end with sum 0.
void attend_partition(const AttentionArgs* a, const AttentionItem* item, Chunk* chunk, int64_t partition) {
  Span span = {partition * a->partition, partition * a->partition, (partition + 1) * a->partition};
  if (span.begin < chunk->begin) span.begin = chunk->begin;
  if (span.end > chunk->end) span.end = chunk->end;
  if (span.begin >= span.end) {
    for (int r = 0; r < chunk->rows; ++r) chunk->sum[r] = 0.0f;
    return;
  }
  score_span(a, item, chunk, span);
  const int size = a->block_size;
  const int begin = static_cast<int>(span.begin - span.first) / size * size;
  const int end = static_cast<int>(span.end - span.first + size - 1) / size * size;
  for (int r = 0; r < chunk->rows; ++r) {
    const int64_t lo = chunk->visible_begin[r] - span.first, hi = chunk->visible_end[r] - span.first;
    const int from = static_cast<int>(lo < begin ? begin : lo), to = static_cast<int>(hi > end ? end : hi);
    weigh_row(a, chunk, r, from, to, begin, end);
  }
  sum_values(a, item, chunk, span);
}

// (max, sum, acc) += (part_max, part_sum, part): the one way in which partitions are combined, in ascending order.
inline void merge_partition(const float* part, float part_max, float part_sum, int head_dim, float* acc, float* max,
                            float* sum) {
  if (part_sum == 0.0f) return;
  if (*sum == 0.0f) {
    __builtin_memcpy(acc, part, sizeof(float) * head_dim);
    *max = part_max;
    *sum = part_sum;
    return;
  }
  const float top = part_max > *max ? part_max : *max;
  const f32v keep = v_exp2(v_set1(*max - top)), add = v_exp2(v_set1(part_max - top));
  for (int d = 0; d < head_dim; d += kLanes) {
    v_store(acc + d, v_fma(v_load(part + d), add, v_mul(v_load(acc + d), keep)));
  }
  *sum = part_sum * v_first(add) + *sum * v_first(keep);
  *max = top;
}

inline void write_row(const float* acc, float sum, int head_dim, float* out) {
  const f32v inverse = v_set1(1.0f / sum);
  for (int d = 0; d < head_dim; d += kLanes) v_store(out + d, v_mul(v_load(acc + d), inverse));
}

inline void write_partial(const AttentionArgs* a, const Chunk* chunk, int r, int64_t partial) {
  const int64_t index = partial * a->partial_rows + chunk->first_row + r;
  a->partial_max[index] = chunk->max[r];
  a->partial_sum[index] = chunk->sum[r];
  __builtin_memcpy(a->partial_acc + index * a->head_dim, chunk->acc + r * a->head_dim, sizeof(float) * a->head_dim);
}

void attention(const AttentionArgs* a, const AttentionItem* item, void* scratch) {
  Chunk* chunk = static_cast<Chunk*>(scratch);
  const int rows = (item->q_end - item->q_begin) * group_size(a);
  const int dim = a->head_dim;
  for (int first = 0; first < rows; first += kChunkRows) {
    begin_chunk(a, item, first, rows - first < kChunkRows ? rows - first : kChunkRows, chunk);
    for (int64_t partition = item->part_begin; partition < item->part_end; ++partition) {
      attend_partition(a, item, chunk, partition);
      for (int r = 0; r < chunk->rows; ++r) {
        if (item->partial >= 0) {
          write_partial(a, chunk, r, item->partial + partition - item->part_begin);
        } else {
          merge_partition(chunk->acc + r * dim, chunk->max[r], chunk->sum[r], dim,
                          chunk->total + r * dim, &chunk->total_max[r], &chunk->total_sum[r]);
        }
      }
    }
    for (int r = 0; r < chunk->rows && item->partial < 0; ++r) {
      write_row(chunk->total + r * dim, chunk->total_sum[r], dim, out_row(a, item, first + r));
    }
  }
}

void attention_merge(const AttentionArgs* a, const AttentionItem* items, int32_t count) {
  const int rows = (items[0].q_end - items[0].q_begin) * group_size(a);
  for (int row = 0; row < rows; ++row) {
    float acc[kMaxHeadDim], max = -kInfinity, sum = 0.0f;
    for (int32_t i = 0; i < count; ++i) {
      for (int64_t part = 0; part < items[i].part_end - items[i].part_begin; ++part) {
        const int64_t index = (items[i].partial + part) * a->partial_rows + row;
        merge_partition(a->partial_acc + index * a->head_dim, a->partial_max[index], a->partial_sum[index], a->head_dim,
                        acc, &max, &sum);
      }
    }
    write_row(acc, sum, a->head_dim, out_row(a, &items[0], row));
  }
}
