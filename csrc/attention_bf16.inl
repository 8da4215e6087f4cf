// Attention over a bf16 cache: acc = softmax(q K) V of a chunk and one partition, in bf16 pairs.
//
// V of tokens that no row of the chunk sees is never multiplied: it may be anything. Of those that some rows see the
// weight is zero for the others, and V finite.

// kLanes values as operands of a product. On AVX-512 rounded to bf16.
inline void store_operands(Operand* to, f32v x) {
#if defined(HEADRACE_ISA_AVX512)
  const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(x);
  __builtin_memcpy(to, &rounded, sizeof(rounded));
#else
  v_store(to, x);
#endif
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

inline const uint16_t* bf16_at(const uint8_t* cache, int64_t bytes) {
  return reinterpret_cast<const uint16_t*>(cache + bytes);
}

struct BF16Cache {
  static constexpr int kTile = kQueryTile;

  static void pack_query(const AttentionArgs* a, const float* q, int r, Chunk* chunk) {
    const TileRow tile = tile_row(chunk, r);
    Operand* packed = chunk->q + tile.first * a->head_dim + 2 * tile.row;
    Operand scaled[kMaxHeadDim];
    const f32v factor = v_set1(query_factor(a));
    for (int d = 0; d < a->head_dim; d += kLanes) store_operands(scaled + d, v_mul(v_load(q + d), factor));
    for (int d = 0; d < a->head_dim; d += 2, packed += 2 * tile.rows) {
      __builtin_memcpy(packed, scaled + d, 2 * sizeof(Operand));
    }
  }

  static void score_span(const AttentionArgs* a, const AttentionItem* item, Chunk* chunk, const Span& span) {
    for (int64_t block = span.begin / a->block_size; block * a->block_size < span.end; ++block) {
      const int64_t at = block_offset(a, item, block);
      const Run run = {bf16_at(a->k_cache, at), a->head_dim / 2, (a->v_cache - a->k_cache) / 2};
      multiply_rows(chunk, kScoreProducts, a->head_dim,
                    {chunk->q, &run, 1, a->block_size, chunk->scores + block * a->block_size - span.first, kScoreStep});
    }
  }

  // Scores of tokens [lo, hi) of a partition -> weights of [begin, end), multiples of kLanes; the row's max and sum.
  static void weigh_row(const AttentionArgs* a, Chunk* chunk, int r, int lo, int hi, int begin, int end) {
    float* scores = chunk->scores + r * kScoreStep;
    Operand* weights = reinterpret_cast<Operand*>(scores);
    const Reach reach = finish_scores(a, chunk, r, lo, hi, end);
    const f32v max = v_set1(chunk->max[r]);
    f32v total = v_zero();
    for (int t = begin; t < reach.first; t += kLanes) store_operands(weights + t, v_zero());
    for (int t = reach.first; t < reach.last; t += kLanes) {
      const f32v p = v_exp2(v_sub(v_load(scores + t), max));
      total = v_add(total, p);
      store_operands(weights + t, p);
    }
    for (int t = reach.last; t < end; t += kLanes) store_operands(weights + t, v_zero());
    chunk->sum[r] = v_hsum(total);
  }

  // acc = weights * V over the token pairs that hold the span. A pair that a bound cuts is copied, its hidden half zero.
  static void sum_values(const AttentionArgs* a, const AttentionItem* item, Chunk* chunk, const Span& span) {
    const int64_t pair_size = 2 * a->head_dim, blocks_ahead = a->partition / a->block_size;
    Run runs[kMaxRuns];
    uint16_t edges[2][2 * kMaxHeadDim];
    int num_runs = 0, num_edges = 0;
    for (int64_t token = span.begin / 2 * 2, next; token < span.end; token = next) {
      const int64_t block = token / a->block_size, in_block = token % a->block_size / 2 * pair_size;
      const uint16_t* v = bf16_at(a->v_cache, block_offset(a, item, block)) + in_block;
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
          later * a->block_size < chunk->end ? bf16_at(a->k_cache, block_offset(a, item, later)) + in_block - v : 0;
      runs[num_runs++] = {v, static_cast<int>(next - token) / 2, ahead};
    }
    const Operand* weights = reinterpret_cast<const Operand*>(chunk->scores) + (span.begin - span.first) / 2 * 2;
    multiply_rows(chunk, kValueProducts, kWeightStep,
                  {weights, runs, num_runs, a->head_dim, chunk->acc, a->head_dim});
  }
};
