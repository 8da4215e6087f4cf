// K and V of the step's tokens into the cache, rounded to bf16 here: attention reads them back even inside their chunk.
//
//   K [head_dim / 2][block_size][2]    V [block_size / 2][head_dim][2]
//
// Both are words of four bytes, the pairs that attention multiplies: two inputs of a token in K, an input of two tokens
// in V. Tokens that share the words of V are written together where the call has them all.

typedef uint16_t KVRow[kMaxHeadDim];

constexpr int kWordTokens = 2;  // whose values share a word of V

inline void narrow_row(const float* x, int head_dim, uint16_t* out) {
  for (int i = 0; i < head_dim; ++i) out[i] = to_bf16(x[i]);
}

inline void write_key(const uint16_t* row, int head_dim, int block_size, int64_t offset, uint16_t* k_part) {
  uint16_t* out = k_part + offset * 2;
  for (int i = 0; i < head_dim; i += 2) __builtin_memcpy(out + i * block_size, row + i, 4);
}

inline void write_values(const KVRow* rows, int count, int head_dim, int64_t offset, uint16_t* v_part) {
  uint16_t* out = v_part + offset / kWordTokens * head_dim * kWordTokens + offset % kWordTokens;
  if (count == kWordTokens) {
    for (int i = 0; i < head_dim; ++i) {
      const uint32_t word = rows[0][i] | static_cast<uint32_t>(rows[1][i]) << 16;
      __builtin_memcpy(out + 2 * i, &word, 4);
    }
    return;
  }
  for (int i = 0; i < head_dim; ++i) out[kWordTokens * i] = rows[0][i];
}

// Tokens from `token` on that fill words of V: kWordTokens, or 1.
inline int tokens_together(const KVWriteArgs* a, int64_t token, int64_t end) {
  if (a->slots[token] % kWordTokens != 0 || end - token < kWordTokens) return 1;
  for (int i = 1; i < kWordTokens; ++i) {
    if (a->slots[token + i] != a->slots[token] + i) return 1;
  }
  return kWordTokens;
}

void kv_write(const KVWriteArgs* a, int32_t token_begin, int32_t token_end) {
  const int64_t head_part = static_cast<int64_t>(a->head_dim) * a->block_size;
  for (int64_t token = token_begin, count; token < token_end; token += count) {
    count = tokens_together(a, token, token_end);
    const int64_t block = a->slots[token] / a->block_size, offset = a->slots[token] % a->block_size;
    for (int64_t h = 0; h < a->num_kv_heads; ++h) {
      const int64_t at = block * a->block_stride + h * head_part;
      KVRow key, values[kWordTokens];
      for (int i = 0; i < count; ++i) {
        narrow_row(a->k + (token + i) * a->ldk + h * a->head_dim, a->head_dim, key);
        write_key(key, a->head_dim, a->block_size, offset + i, a->k_cache + at);
        narrow_row(a->v + (token + i) * a->ldv + h * a->head_dim, a->head_dim, values[i]);
      }
      write_values(values, static_cast<int>(count), a->head_dim, offset, a->v_cache + at);
    }
  }
}
