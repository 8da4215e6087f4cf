// Attention over the paged KV cache: softmax(q k / sqrt(d)) v, computed online, tile by tile.
//
// A row is one query head of one query token. The rows that share a KV head are computed together, so each block of K
// and V is read once for all of them. A tile is one block of the cache; a partition is 256 positions (kPartition):
//
//   positions   0 ........ 255 | 256 ....... 511 | 512 ...            partitions, each from a fresh (max, sum, acc)
//               [blk][blk]...  | [blk][blk]...   |                    tiles, in ascending order inside a partition
//
// Both products are C[rows][n] (+)= A[rows][k] B[k / 2][n][2]: scores = q K with n = tokens, k = head_dim, and
// acc += p V with n = head_dim, k = tokens. Every element of C is one chain in ascending k, so how rows are grouped
// cannot change a bit. A tile in which a row sees nothing leaves the row's max and sum alone and adds zero times a
// finite V to its acc. V of tokens that no row of the tile sees is never multiplied: it may be anything.
//
// Scores are in units of log2, so that a weight is 2^(score - max): scale and log2(e) are folded into q, or, with a
// softcap, log2(e) into the cap.

constexpr int kMaxBlock = 32;      // tokens per block
constexpr int kChunkRows = 24;     // rows whose state stays in the L1 cache
constexpr float kLog2E = 1.44269504f;

#if defined(HEADRACE_ISA_AVX512)
constexpr int kQueryTile = 12;     // rows per product
constexpr int kAccumulators = 24;
typedef uint16_t Operand;          // A as bf16
inline Operand to_operand(float x) { return to_bf16(x); }
#else
#if defined(HEADRACE_ISA_AVX2)
constexpr int kQueryTile = 6;
constexpr int kAccumulators = 12;
#else
constexpr int kQueryTile = 2;
constexpr int kAccumulators = 8;
#endif
typedef float Operand;
inline Operand to_operand(float x) { return x; }
#endif
constexpr int kFewRows = 4;        // with so few rows a product waits for memory, and fetches ahead
constexpr int kNarrow = 16 / kLanes;  // vectors of 16 columns, the granule of block_size and head_dim

// One product's operands. A's pair i of row r is at a[r * kRowStep + i * kPairStep].
struct ProductArgs {
  const Operand* a;
  const uint16_t* b;
  int pairs, columns;
  float* c;
  int64_t ldc;
  bool accumulate;
  int64_t ahead;       // from b to the same operand of the next tile, to be fetched meanwhile; 0: none
};

// Columns [column, column + V * kLanes) of R rows.
template <int R, int V, int kRowStep, int kPairStep>
inline void product_columns(const ProductArgs& p, int column) {
  f32v sums[R][V];
  float* c = p.c + column;
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sums[r][v] = p.accumulate ? v_load(c + r * p.ldc + v * kLanes) : v_zero();
  }
  const Operand* a = p.a;
  const uint16_t* b = p.b + 2 * column;
  for (int i = 0; i < p.pairs; ++i, a += kPairStep, b += 2 * p.columns) {
    if (R <= kFewRows) {
#pragma GCC unroll 4
      for (int line = 0; line < V * kLanes / 16; ++line) __builtin_prefetch(b + p.ahead + 32 * line);
    }
#if defined(HEADRACE_ISA_AVX512)
    __m512bh columns[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) columns[v] = (__m512bh)_mm512_loadu_si512(b + 2 * v * kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      __builtin_memcpy(&pair, a + r * kRowStep, 4);
      const __m512bh row = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], row, columns[v]);
    }
#else
    // Whichever of the two operands has fewer registers stays in them; the other passes through one.
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      if (V <= 2) {
        f32v columns[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          const uint16_t* at = b + 2 * v * kLanes;
          columns[v] = half == 0 ? v_bf16_first(at) : v_bf16_second(at);
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          const f32v row = v_set1(a[r * kRowStep + half]);
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) v_add_product(&sums[r][v], row, columns[v]);
        }
      } else {
        f32v rows[R];
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) rows[r] = v_set1(a[r * kRowStep + half]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          const uint16_t* at = b + 2 * v * kLanes;
          const f32v column_v = half == 0 ? v_bf16_first(at) : v_bf16_second(at);
#pragma GCC unroll 12
          for (int r = 0; r < R; ++r) v_add_product(&sums[r][v], rows[r], column_v);
        }
      }
    }
#endif
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) v_store(c + r * p.ldc + v * kLanes, sums[r][v]);
  }
}

// All columns of R rows, in the widest steps that the registers hold.
template <int R, int kRowStep, int kPairStep>
__attribute__((noinline)) void product_rows(const ProductArgs& p) {
  int column = 0;
  if (R * 4 * kNarrow <= kAccumulators) {
    for (; column + 64 <= p.columns; column += 64) product_columns<R, 4 * kNarrow, kRowStep, kPairStep>(p, column);
  }
  if (R * 2 * kNarrow <= kAccumulators) {
    for (; column + 32 <= p.columns; column += 32) product_columns<R, 2 * kNarrow, kRowStep, kPairStep>(p, column);
  }
  for (; column < p.columns; column += 16) product_columns<R, kNarrow, kRowStep, kPairStep>(p, column);
}

// A of a score product is packed [pair][row][2] for its row tile; A of a value product is [row][kMaxBlock].
template <int R>
void score_product(const ProductArgs& p) { product_rows<R, 2, 2 * R>(p); }
template <int R>
void value_product(const ProductArgs& p) { product_rows<R, kMaxBlock, 2>(p); }

typedef void (*Product)(const ProductArgs& p);
#if defined(HEADRACE_ISA_AVX512)
const Product kScoreProducts[kQueryTile] = {
    score_product<1>, score_product<2>, score_product<3>, score_product<4>,  score_product<5>,  score_product<6>,
    score_product<7>, score_product<8>, score_product<9>, score_product<10>, score_product<11>, score_product<12>};
const Product kValueProducts[kQueryTile] = {
    value_product<1>, value_product<2>, value_product<3>, value_product<4>,  value_product<5>,  value_product<6>,
    value_product<7>, value_product<8>, value_product<9>, value_product<10>, value_product<11>, value_product<12>};
#elif defined(HEADRACE_ISA_AVX2)
const Product kScoreProducts[kQueryTile] = {score_product<1>, score_product<2>, score_product<3>,
                                            score_product<4>, score_product<5>, score_product<6>};
const Product kValueProducts[kQueryTile] = {value_product<1>, value_product<2>, value_product<3>,
                                            value_product<4>, value_product<5>, value_product<6>};
#else
const Product kScoreProducts[kQueryTile] = {score_product<1>, score_product<2>};
const Product kValueProducts[kQueryTile] = {value_product<1>, value_product<2>};
#endif

// Some rows of one item, and their state. Row r of the chunk is query head (first_row + r) % group of query token
// (first_row + r) / group of the item.
struct Chunk {
  int first_row, rows;
  int first_tile_rows;                     // rows of every row tile but perhaps the last
  int64_t visible_begin[kChunkRows];       // positions a row sees: [begin, end)
  int64_t visible_end[kChunkRows];
  int64_t begin, end;                      // their union
  float max[kChunkRows];                   // of the partition so far
  float sum[kChunkRows * kLanes];
  float total_max[kChunkRows];             // of the partitions merged so far
  float total_sum[kChunkRows];
  Operand q[kChunkRows * kMaxHeadDim];
  float scores[kChunkRows * kMaxBlock];
  Operand weights[kChunkRows * kMaxBlock];
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
    for (int d = 0; d < a->head_dim; d += 2, packed += 2 * tile_rows) {
      packed[0] = to_operand(q[d] * factor);
      packed[1] = to_operand(q[d + 1] * factor);
    }
  }
}

inline void store_weights(Operand* weights, int t, f32v p) {
#if defined(HEADRACE_ISA_AVX512)
  const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(p);
  __builtin_memcpy(weights + t, &rounded, sizeof(rounded));
#else
  v_store(weights + t, p);
#endif
}

// Scores of tokens [lo, hi) of a tile -> weights of the whole tile, and the row's max, sum and acc rescaled to them.
inline void weigh_row(const AttentionArgs* a, Chunk* chunk, int r, int lo, int hi) {
  const int tokens = a->block_size;
  float* scores = chunk->scores + r * kMaxBlock;
  Operand* weights = chunk->weights + r * kMaxBlock;
  if (lo >= hi) {
    for (int t = 0; t < tokens; ++t) weights[t] = 0;
    return;
  }
  if (a->softcap > 0.0f) {
    const f32v cap = v_set1(a->softcap * kLog2E);
    for (int t = 0; t < tokens; t += kLanes) v_store(scores + t, v_mul(cap, v_tanh(v_load(scores + t))));
  }
  for (int t = 0; t < lo; ++t) scores[t] = -kInfinity;
  for (int t = hi; t < tokens; ++t) scores[t] = -kInfinity;
  f32v most = v_load(scores);
  for (int t = kLanes; t < tokens; t += kLanes) most = v_max(most, v_load(scores + t));
  const float old_max = chunk->max[r], tile_max = v_hmax(most);
  float* sum = chunk->sum + r * kLanes;
  if (tile_max > old_max) {
    chunk->max[r] = tile_max;
    if (old_max > -kInfinity) {
      const f32v factor = v_exp2(v_set1(old_max - tile_max));
      float* acc = chunk->acc + r * a->head_dim;
      for (int d = 0; d < a->head_dim; d += kLanes) v_store(acc + d, v_mul(v_load(acc + d), factor));
      v_store(sum, v_mul(v_load(sum), factor));
    }
  }
  const f32v max = v_set1(chunk->max[r]);
  f32v total = v_load(sum);
  for (int t = 0; t < tokens; t += kLanes) {
    const f32v p = v_exp2(v_sub(v_load(scores + t), max));
    total = v_add(total, p);
    store_weights(weights, t, p);
  }
  v_store(sum, total);
}

inline void multiply_rows(const Chunk* chunk, const Product* products, bool scores, ProductArgs p) {
  const int64_t row_operands = scores ? 2 * p.pairs : kMaxBlock;
  for (int left = chunk->rows; left > 0; left -= chunk->first_tile_rows) {
    const int rows = left < chunk->first_tile_rows ? left : chunk->first_tile_rows;
    products[rows - 1](p);
    p.a += rows * row_operands;
    p.c += rows * p.ldc;
  }
}

// acc += weights * V over the token pairs that hold [lo, hi). A pair that a bound cuts is copied, its hidden half zero.
void add_values(const AttentionArgs* a, Chunk* chunk, const uint16_t* v, int lo, int hi, int64_t ahead) {
  const int64_t pair_size = 2 * a->head_dim;
  ProductArgs p = {chunk->weights, v, 0, a->head_dim, chunk->acc, a->head_dim, true, ahead};
  uint16_t edge[2 * kMaxHeadDim];
  for (int pair = lo / 2, end = (hi + 1) / 2; pair < end; pair += p.pairs) {
    const bool cut = 2 * pair < lo || 2 * pair + 2 > hi;
    p.a = chunk->weights + 2 * pair;
    p.b = cut ? edge : v + pair * pair_size;
    p.ahead = cut ? 0 : ahead;
    p.pairs = cut ? 1 : hi / 2 - pair;
    for (int i = 0; cut && i < pair_size; ++i) {
      const int token = 2 * pair + i % 2;
      edge[i] = token < lo || token >= hi ? 0 : v[pair * pair_size + i];
    }
    multiply_rows(chunk, kValueProducts, false, p);
  }
}

// Where the tile's K, and V, begin in the cache.
inline int64_t tile_offset(const AttentionArgs* a, const AttentionItem* item, int64_t tile) {
  const int64_t block = a->block_table[static_cast<int64_t>(item->seq) * a->max_blocks + tile];
  return block * a->block_stride + static_cast<int64_t>(item->kv_head) * a->head_dim * a->block_size;
}

void attend_tile(const AttentionArgs* a, const AttentionItem* item, Chunk* chunk, int64_t tile) {
  const int tokens = a->block_size;
  const int64_t at = tile_offset(a, item, tile);
  const int64_t ahead = (tile + 1) * tokens < chunk->end ? tile_offset(a, item, tile + 1) - at : 0;
  multiply_rows(chunk, kScoreProducts, true,
                {chunk->q, a->k_cache + at, a->head_dim / 2, tokens, chunk->scores, kMaxBlock, false, ahead});
  const int64_t first = tile * tokens;
  for (int r = 0; r < chunk->rows; ++r) {
    const int64_t lo = chunk->visible_begin[r] - first, hi = chunk->visible_end[r] - first;
    weigh_row(a, chunk, r, static_cast<int>(lo < 0 ? 0 : lo), static_cast<int>(hi > tokens ? tokens : hi));
  }
  const int64_t lo = chunk->begin - first, hi = chunk->end - first;
  add_values(a, chunk, a->v_cache + at, static_cast<int>(lo < 0 ? 0 : lo), static_cast<int>(hi > tokens ? tokens : hi),
             ahead);
}

// One partition from a fresh state. Rows that see nothing of it end with sum 0.
void attend_partition(const AttentionArgs* a, const AttentionItem* item, Chunk* chunk, int64_t partition) {
  for (int r = 0; r < chunk->rows; ++r) chunk->max[r] = -kInfinity;
  __builtin_memset(chunk->sum, 0, sizeof(float) * chunk->rows * kLanes);
  __builtin_memset(chunk->acc, 0, sizeof(float) * chunk->rows * a->head_dim);
  int64_t begin = partition * a->partition, end = begin + a->partition;
  if (begin < chunk->begin) begin = chunk->begin;
  if (end > chunk->end) end = chunk->end;
  for (int64_t tile = begin / a->block_size; tile * a->block_size < end; ++tile) attend_tile(a, item, chunk, tile);
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
  a->partial_sum[index] = v_hsum(v_load(chunk->sum + r * kLanes));
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
          merge_partition(chunk->acc + r * dim, chunk->max[r], v_hsum(v_load(chunk->sum + r * kLanes)), dim,
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
