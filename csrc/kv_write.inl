// K and V of the step's tokens into the cache, rounded here, once: attention reads them back even inside their chunk.
//
//   bf16  K [head_dim / 2][block_size][2]    V [block_size / 2][head_dim][2]
//   int8  K [head_dim / 4][block_size][4]    V [block_size / 4][head_dim][4], each before its scales [block_size]
//
// Both are words of four bytes, which attention multiplies: inputs of a token in K, an input of several tokens in V.
// Tokens that share the words of V are written together where the call has them all.
//
// int8 has one scale per token and head. A few inputs of K are far larger than the others, the same ones in every token,
// and would set the scale alone; so K is first turned by a Hadamard matrix, which spreads them evenly (docs/log.md).

template <int N>
inline f32v butterflies(f32v x) {
  float signs[kLanes];
  for (int i = 0; i < kLanes; ++i) signs[i] = i & N ? -1.0f : 1.0f;
  return v_fma(x, v_load(signs), v_swap<N>(x));
}

// x times a Hadamard matrix of +1 and -1, of the largest power of two that divides head_dim, again and again.
inline void hadamard(float* x, int head_dim) {
  const int size = head_dim & -head_dim;
  for (int i = 0; i < head_dim; i += kLanes) {
    f32v y = butterflies<2>(butterflies<1>(v_load(x + i)));
    if constexpr (kLanes > 4) y = butterflies<4>(y);
    if constexpr (kLanes > 8) y = butterflies<8>(y);
    v_store(x + i, y);
  }
  for (int half = kLanes; half < size; half *= 2) {
    for (int i = 0; i < head_dim; i += kLanes) {
      if (i & half) continue;
      const f32v low = v_load(x + i), high = v_load(x + i + half);
      v_store(x + i, v_add(low, high));
      v_store(x + i + half, v_sub(low, high));
    }
  }
}

inline void narrow(const float* x, int head_dim, uint16_t* out) {
  for (int i = 0; i < head_dim; ++i) out[i] = to_bf16(x[i]);
}

// Bytes of round(x * 127 / amax) + 128, into room for kMaxHeadDim; returns the scale amax / 127, NaN where x is not finite.
inline float narrow(const float* x, int head_dim, uint8_t* out) {
  i32v largest = v_bits(v_zero());  // as integers, so that a NaN is larger than any number
  for (int i = 0; i < head_dim; i += kLanes) largest = v_max_i32(largest, v_bits(v_abs(v_load(x + i))));
  const int32_t top = v_hmax_i32(largest);
  float amax;
  __builtin_memcpy(&amax, &top, 4);
  const bool finite = amax < kInfinity;
  if (!finite || amax <= 1e-30f) {  // below, the quotient would overflow
    __builtin_memset(out, 128, kMaxHeadDim);
    return finite ? 0.0f : __builtin_nanf("");
  }
  const float factor = 127.0f / amax;
  for (int i = 0; i < head_dim; ++i) {
    out[i] = static_cast<uint8_t>(float_bits(x[i] * factor + (kRoundingShift + 128.0f)));  // the integer's low byte
  }
  return amax / 127.0f;
}

// Where one token's K and V of a head go.
struct KVPlace {
  uint8_t *k, *v;  // of the block and head
  int64_t offset;  // of the token in the block
};

inline void write_key(const uint8_t* row, int row_bytes, int block_size, const KVPlace& to) {
  for (int i = 0; i < row_bytes; i += 4) __builtin_memcpy(to.k + i * block_size + to.offset * 4, row + i, 4);
}

template <typename Value>
inline void write_values(const Value (*rows)[kMaxHeadDim], int count, int head_dim, const KVPlace& to) {
  constexpr int kTokens = 4 / sizeof(Value);
  Value* out = reinterpret_cast<Value*>(to.v) + to.offset / kTokens * head_dim * kTokens + to.offset % kTokens;
  if (count == 1) {
    for (int i = 0; i < head_dim; ++i) out[kTokens * i] = rows[0][i];
    return;
  }
  for (int i = 0; i < head_dim; ++i) {
    uint32_t word = 0;
    for (int t = 0; t < kTokens; ++t) word |= static_cast<uint32_t>(rows[t][i]) << (32 / kTokens * t);
    __builtin_memcpy(out + kTokens * i, &word, 4);
  }
}

// Tokens from `token` on that fill words of V: `most`, or 1.
inline int tokens_together(const KVWriteArgs* a, int64_t token, int64_t end, int most) {
  if (a->slots[token] % most != 0 || end - token < most) return 1;
  for (int i = 1; i < most; ++i) {
    if (a->slots[token + i] != a->slots[token] + i) return 1;
  }
  return most;
}

inline void narrow_token(const KVWriteArgs* a, const float* k, const float* v, uint16_t* k_row, uint16_t* v_row,
                         const KVPlace&) {
  narrow(k, a->head_dim, k_row);
  narrow(v, a->head_dim, v_row);
}

inline void narrow_token(const KVWriteArgs* a, const float* k, const float* v, uint8_t* k_row, uint8_t* v_row,
                         const KVPlace& to) {
  float turned[kMaxHeadDim];
  __builtin_memcpy(turned, k, sizeof(float) * a->head_dim);
  hadamard(turned, a->head_dim);
  // The matrix is not normalised: what it and q's add is taken out here, an exact power of two.
  const float scales[2] = {narrow(turned, a->head_dim, k_row) / static_cast<float>(a->head_dim & -a->head_dim),
                           narrow(v, a->head_dim, v_row)};
  const int64_t at = static_cast<int64_t>(a->head_dim) * a->block_size + to.offset * sizeof(float);
  __builtin_memcpy(to.k + at, &scales[0], sizeof(float));
  __builtin_memcpy(to.v + at, &scales[1], sizeof(float));
}

template <typename Value>
void write_tokens(const KVWriteArgs* a, int64_t begin, int64_t end) {
  constexpr int kTokens = 4 / sizeof(Value);
  for (int64_t token = begin, count; token < end; token += count) {
    count = tokens_together(a, token, end, kTokens);
    const int64_t block = a->slots[token] / a->block_size, offset = a->slots[token] % a->block_size;
    for (int64_t h = 0; h < a->num_kv_heads; ++h) {
      const int64_t at = block * a->block_stride + h * a->head_stride;
      Value key[kMaxHeadDim], values[kTokens][kMaxHeadDim];
      for (int i = 0; i < count; ++i) {
        const KVPlace to = {a->k_cache + at, a->v_cache + at, offset + i};
        const int64_t in = h * a->head_dim;
        narrow_token(a, a->k + (token + i) * a->ldk + in, a->v + (token + i) * a->ldv + in, key, values[i], to);
        write_key(reinterpret_cast<const uint8_t*>(key), a->head_dim * sizeof(Value), a->block_size, to);
      }
      const KVPlace to = {a->k_cache + at, a->v_cache + at, offset};
      write_values(values, static_cast<int>(count), a->head_dim, to);
    }
  }
}

void kv_write(const KVWriteArgs* a, int32_t token_begin, int32_t token_end) {
  if (a->kv_format == kKVInt8) return write_tokens<uint8_t>(a, token_begin, token_end);
  write_tokens<uint16_t>(a, token_begin, token_end);
}
