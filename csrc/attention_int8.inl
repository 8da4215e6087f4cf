// Attention over an int8 cache: acc = softmax(q K) V of a chunk and one partition, in whole numbers.
//
// A token's K of a head is bytes times one scale, of the head turned by a Hadamard matrix (kv_write.inl): q is turned
// the same way, which leaves their products as they were. q is rounded to 8 bits with one scale: with 16 a prompt's
// attention took a sixth longer, for a fiftieth of the error (docs/log.md). A score is the exact sum of whole products,
// times both scales.
//
// A weight times the scale of its token's V is rounded to 16 bits, with one scale for the row's partition, the largest.
// A token that a row does not see has the whole weight 0, so its bytes may be anything, and its scale is not looked at.
// A whole number cannot say NaN, so scales do: a K or V that was not finite has the scale NaN.

constexpr int kQueryMax = 127;

// Whole numbers of up to `most`, for what is not beyond `largest`.
struct Rounding {
  float scale;   // of the whole numbers; NaN when `largest` is not finite
  float factor;  // into them; 0 where they are all to be 0
};

inline Rounding rounding_of(i32v largest, int most) {
  const int32_t top = v_hmax_i32(largest);
  float amax;
  __builtin_memcpy(&amax, &top, 4);
  const bool finite = amax < kInfinity;
  return {finite ? amax / most : __builtin_nanf(""), finite && amax > 1e-30f ? most / amax : 0.0f};
}

inline i32v rounded(f32v x, const Rounding& by) {
  if (by.factor == 0.0f) return v_bits(v_zero());
  return v_add_i32(v_bits(v_fma(x, v_set1(by.factor), v_set1(kRoundingShift))), v_set1_i32(-0x4b400000));
}

// One product of all rows, row tile by row tile, whose words of A lie `row_bytes` apart from row to row.
inline void multiply_byte_rows(const Chunk* chunk, const ByteProduct* products, int row_bytes, ByteProductArgs p) {
  for (int left = chunk->rows; left > 0; left -= chunk->first_tile_rows) {
    const int rows = left < chunk->first_tile_rows ? left : chunk->first_tile_rows;
    products[rows - 1](p);
    p.a += rows * row_bytes;
    p.c += rows * p.ldc;
    p.row_scale += rows;
    p.row_sum += rows;
  }
}

// The scales of the block's tokens, behind the bytes of its K or V.
inline const float* token_scales(const AttentionArgs* a, const uint8_t* part) {
  return reinterpret_cast<const float*>(part + static_cast<int64_t>(a->head_dim) * a->block_size);
}

inline void fetch_scales(const AttentionArgs* a, const uint8_t* part) {
  for (int t = 0; t < a->block_size; t += 16) __builtin_prefetch(token_scales(a, part) + t, 0, 2);
}

struct Int8Cache {
  static constexpr int kTile = kByteTile;

  static void pack_query(const AttentionArgs* a, const float* q, int r, Chunk* chunk) {
    float turned[kMaxHeadDim];
    __builtin_memcpy(turned, q, sizeof(float) * a->head_dim);
    hadamard(turned, a->head_dim);
    i32v largest = v_bits(v_zero()), sum = v_bits(v_zero());  // as integers, so that a NaN is larger than any number
    for (int d = 0; d < a->head_dim; d += kLanes) largest = v_max_i32(largest, v_bits(v_abs(v_load(turned + d))));
    const Rounding by = rounding_of(largest, kQueryMax);
    uint8_t words[2 * kMaxHeadDim];
    for (int d = 0; d < a->head_dim; d += kLanes) {
      const i32v x = v_shift_left<8>(rounded(v_load(turned + d), by));
      sum = v_add_i32(sum, x);
      store_words(words + 2 * d, x);
    }
    chunk->q_scale[r] = by.scale * query_factor(a) / 256.0f;
    chunk->q_sum[r] = v_hsum_i32(sum);
    const TileRow tile = tile_row(chunk, r);
    uint8_t* packed = reinterpret_cast<uint8_t*>(chunk->q) + 2 * tile.first * a->head_dim + kWordBytes * tile.row;
    for (int d = 0; d < a->head_dim; d += 4, packed += kWordBytes * tile.rows) {
      __builtin_memcpy(packed, words + 2 * d, kWordBytes);
    }
  }

  static void score_span(const AttentionArgs* a, const AttentionItem* item, Chunk* chunk, const Span& span) {
    const uint8_t* q = reinterpret_cast<const uint8_t*>(chunk->q);
    for (int64_t block = span.begin / a->block_size; block * a->block_size < span.end; ++block) {
      const int64_t at = block_offset(a, item, block), first = block * a->block_size - span.first;
      const uint8_t *k = a->k_cache + at, *v = a->v_cache + at;
      const ByteRun run = {k, a->head_dim / 4, v - k};
      fetch_scales(a, v);
      multiply_byte_rows(chunk, kByteScores, 2 * a->head_dim,
                         {q, &run, 1, a->block_size, chunk->q_scale, chunk->q_sum, token_scales(a, k),
                          chunk->scores + first, kScoreStep});
      __builtin_memcpy(chunk->value_scale + first, token_scales(a, v), sizeof(float) * a->block_size);
    }
  }

  // Scores of tokens [lo, hi) of a partition -> weights of [begin, end), multiples of kLanes; the row's max and sum.
  static void weigh_row(const AttentionArgs* a, Chunk* chunk, int r, int lo, int hi, int begin, int end) {
    float* scores = chunk->scores + r * kScoreStep;
    uint8_t* words = reinterpret_cast<uint8_t*>(scores);
    const Reach reach = finish_scores(a, chunk, r, lo, hi, end);
    const f32v max = v_set1(chunk->max[r]), least = v_set1(1.17549435e-38f);
    f32v total = v_zero();
    i32v largest = v_bits(v_zero()), sum = v_bits(v_zero());
    for (int t = reach.first; t < reach.last; t += kLanes) {
      const f32v p = v_exp2(v_sub(v_load(scores + t), max));
      total = v_add(total, p);
      const f32v weight = v_zero_if_less(p, least, v_mul(p, v_load(chunk->value_scale + t)));
      v_store(scores + t, weight);
      largest = v_max_i32(largest, v_bits(v_abs(weight)));
    }
    const Rounding by = rounding_of(largest, kOperandMax);
    for (int t = begin; t < reach.first; t += kLanes) store_words(words + 2 * t, v_bits(v_zero()));
    for (int t = reach.first; t < reach.last; t += kLanes) {
      const i32v x = rounded(v_load(scores + t), by);
      sum = v_add_i32(sum, x);
      store_words(words + 2 * t, x);
    }
    for (int t = reach.last; t < end; t += kLanes) store_words(words + 2 * t, v_bits(v_zero()));
    chunk->sum[r] = v_hsum(total);
    chunk->weight_scale[r] = by.scale;
    chunk->weight_sum[r] = v_hsum_i32(sum);
  }

  // acc = weights * V over the token quads that hold the span.
  static void sum_values(const AttentionArgs* a, const AttentionItem* item, Chunk* chunk, const Span& span) {
    const int64_t size = a->block_size, blocks_ahead = a->partition / size, first = span.begin / 4 * 4;
    ByteRun runs[kMaxRuns];
    int num_runs = 0;
    for (int64_t token = first; token < span.end; token = (token / size + 1) * size) {
      const int64_t block = token / size, in_block = token % size * a->head_dim;
      const int64_t end = (block + 1) * size < span.end ? (block + 1) * size : span.end;
      const uint8_t* v = a->v_cache + block_offset(a, item, block) + in_block;
      const int64_t later = block + blocks_ahead;  // the same block of the next partition: its K is needed next
      int64_t ahead = 0;
      if (later * size < chunk->end) {
        const uint8_t* k = a->k_cache + block_offset(a, item, later);
        ahead = k + in_block - v;
        fetch_scales(a, k);
      }
      runs[num_runs++] = {v, static_cast<int>((end - token + 3) / 4), ahead};
    }
    const uint8_t* words = reinterpret_cast<const uint8_t*>(chunk->scores) + 2 * (first - span.first);
    multiply_byte_rows(chunk, kByteValues, kScoreStep * sizeof(float),
                       {words, runs, num_runs, a->head_dim, chunk->weight_scale, chunk->weight_sum, nullptr,
                        chunk->acc, a->head_dim});
  }
};
