// Row-wise operations between the GEMMs: norms, activation quantisation, rotary embedding, KV writes, softcap.
//
// Every result depends on its own row only: sums run over fixed lanes in a fixed order, whatever rows a call covers.
// A value that is not finite makes the scale of its group NaN, so it reaches the logits and fails its own request.

constexpr int kSumVectors = 4;      // independent partial sums of one row
constexpr int kMaxHeadDim = 256;

// Sum of squares: lane i of partial sum j takes elements i + kLanes * (j + kSumVectors * n).
inline float sum_of_squares(const float* x, int64_t k) {
  f32v sums[kSumVectors];
  for (int j = 0; j < kSumVectors; ++j) sums[j] = v_zero();
  int64_t i = 0;
  for (; i + kSumVectors * kLanes <= k; i += kSumVectors * kLanes) {
    for (int j = 0; j < kSumVectors; ++j) {
      const f32v v = v_load(x + i + j * kLanes);
      sums[j] = v_fma(v, v, sums[j]);
    }
  }
  for (int j = 0; i < k; i += kLanes, ++j) {
    const f32v v = k - i < kLanes ? v_load_first(x + i, k - i, 0.0f) : v_load(x + i);
    sums[j] = v_fma(v, v, sums[j]);
  }
  return v_hsum(v_add(v_add(sums[0], sums[1]), v_add(sums[2], sums[3])));
}

inline float inverse_rms(const float* x, int64_t k, float eps) {
  return 1.0f / __builtin_sqrtf(sum_of_squares(x, k) / static_cast<float>(k) + eps);
}

// One group of kQuantGroup values: q = round(x * 127 / amax), value = q * amax / 127.
inline void quantise_group(const float* x, int8_t* q, float* scale, int16_t* sums) {
  i32v largest = v_bits(v_zero());  // as integers, so that a NaN is larger than any number
  for (int i = 0; i < kQuantGroup; i += kLanes) largest = v_max_i32(largest, v_bits(v_abs(v_load(x + i))));
  int32_t lanes[kLanes], top = 0;
  __builtin_memcpy(lanes, &largest, sizeof(lanes));
  for (int i = 0; i < kLanes; ++i) top = lanes[i] > top ? lanes[i] : top;
  float amax;
  __builtin_memcpy(&amax, &top, 4);
  *scale = amax < kInfinity ? amax / 127.0f : __builtin_nanf("");
  // Below 1e-30 the quotient would overflow; such a group is zero beside anything it is added to.
  const float inverse = amax < kInfinity && amax > 1e-30f ? 127.0f / amax : 0.0f;
  const f32v factor = v_set1(inverse), shift = v_set1(kRoundingShift);
  int32_t rounded[kQuantGroup];
  for (int i = 0; i < kQuantGroup; i += kLanes) {
    const f32v v = inverse == 0.0f ? v_zero() : v_mul(v_load(x + i), factor);
    const i32v bits = v_bits(v_add(v, shift));  // the integer is in the low bits; an int8 keeps exactly those
    __builtin_memcpy(rounded + i, &bits, sizeof(bits));
  }
  for (int i = 0; i < kQuantGroup; ++i) q[i] = static_cast<int8_t>(rounded[i] & 0xff);
  for (int half = 0; half < 2; ++half) {
    int sum = 0;
    for (int i = 0; i < kQuantGroup / 2; ++i) sum += q[half * kQuantGroup / 2 + i];
    sums[half] = static_cast<int16_t>(sum);
  }
}

// y[i] = x[i] * inverse * gain[i], or x[i] without gain, for up to kQuantGroup inputs; zeros after `count`.
inline void scale_group(const float* x, const float* gain, float inverse, int64_t count, float* y) {
  if (count == kQuantGroup) {
    for (int i = 0; i < kQuantGroup; ++i) y[i] = gain == nullptr ? x[i] : x[i] * inverse * gain[i];
    return;
  }
  for (int i = 0; i < kQuantGroup; ++i) y[i] = i >= count ? 0.0f : gain == nullptr ? x[i] : x[i] * inverse * gain[i];
}

void norm_quant(const NormArgs* n, int32_t row_begin, int32_t row_end) {
  const Activations* a = n->a;
  const int64_t groups = a->k_pad / kQuantGroup;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* x = n->x + row * n->ldx;
    const float inverse = n->gain == nullptr ? 1.0f : inverse_rms(x, a->k, n->eps);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = g * kQuantGroup;
      const int64_t count = a->k - begin < kQuantGroup ? a->k - begin : kQuantGroup;
      alignas(64) float y[kQuantGroup];
      scale_group(x + begin, n->gain == nullptr ? nullptr : n->gain + begin, inverse, count, y);
      if (n->want_f32) __builtin_memcpy(a->f32 + row * a->k_pad + begin, y, sizeof(y));
      if (n->want_q) {
        quantise_group(y, a->q + row * a->k_pad + begin, a->scale + row * groups + g, a->sum + (row * groups + g) * 2);
      }
    }
  }
}

void norm_rows(const float* x, int64_t ldx, const float* gain, float eps, int32_t k, float* out, int64_t ldo,
               int32_t row_begin, int32_t row_end, int32_t add_to_out) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* in = x + row * ldx;
    float* y = out + row * ldo;
    const float inverse = inverse_rms(in, k, eps);
    if (add_to_out) {
      for (int32_t i = 0; i < k; ++i) y[i] += in[i] * inverse * gain[i];
    } else {
      for (int32_t i = 0; i < k; ++i) y[i] = in[i] * inverse * gain[i];
    }
  }
}

// Rotates (x[i], x[i + half]) by the angle whose cosine and sine are given, for i < half.
inline void rotate_head(float* __restrict x, const float* __restrict cosine, const float* __restrict sine, int half) {
  for (int i = 0; i < half; ++i) {
    const float low = x[i], high = x[i + half];
    x[i] = low * cosine[i] - high * sine[i];
    x[i + half] = high * cosine[i] + low * sine[i];
  }
}

void head_norm_rope(float* x, int64_t ldx, int32_t heads, int32_t head_dim, const float* gain_or_null, float eps,
                    int32_t rotary_dim, const float* cos_sin, int32_t row_begin, int32_t row_end) {
  const int half = rotary_dim / 2;
  for (int64_t row = row_begin; row < row_end; ++row) {
    float cosine[kMaxHeadDim / 2], sine[kMaxHeadDim / 2];
    const float* table = cos_sin + row * rotary_dim;
    for (int i = 0; i < half; ++i) {
      cosine[i] = table[2 * i];
      sine[i] = table[2 * i + 1];
    }
    for (int32_t h = 0; h < heads; ++h) {
      float* head = x + row * ldx + h * head_dim;
      if (gain_or_null != nullptr) {
        const float inverse = inverse_rms(head, head_dim, eps);
        for (int32_t i = 0; i < head_dim; ++i) head[i] = head[i] * inverse * gain_or_null[i];
      }
      rotate_head(head, cosine, sine, half);
    }
  }
}

// K goes to [head_dim / 2][block_size][2], V to [block_size / 2][head_dim][2]: the pairs that attention multiplies.
void kv_write(const KVWriteArgs* a, int32_t token_begin, int32_t token_end) {
  const int64_t head_block = static_cast<int64_t>(a->head_dim) * a->block_size;
  for (int64_t token = token_begin; token < token_end; ++token) {
    const int64_t block = a->slots[token] / a->block_size, offset = a->slots[token] % a->block_size;
    for (int64_t h = 0; h < a->num_kv_heads; ++h) {
      uint16_t k[kMaxHeadDim], v[kMaxHeadDim];
      const float* k_in = a->k + token * a->ldk + h * a->head_dim;
      const float* v_in = a->v + token * a->ldv + h * a->head_dim;
      for (int i = 0; i < a->head_dim; ++i) k[i] = to_bf16(k_in[i]);
      for (int i = 0; i < a->head_dim; ++i) v[i] = to_bf16(v_in[i]);
      uint16_t* k_out = a->k_cache + block * a->block_stride + h * head_block + offset * 2;
      uint16_t* v_out = a->v_cache + block * a->block_stride + h * head_block + offset / 2 * a->head_dim * 2 + offset % 2;
      for (int i = 0; i < a->head_dim; i += 2) __builtin_memcpy(k_out + i * a->block_size, k + i, 4);
      for (int i = 0; i < a->head_dim; ++i) v_out[2 * i] = v[i];
    }
  }
}

void softcap(float* x, int64_t count, float cap) {
  const f32v scale = v_set1(cap);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) v_store(x + i, v_mul(scale, v_tanh(v_div(v_load(x + i), scale))));
  if (i < count) v_store_first(x + i, v_mul(scale, v_tanh(v_div(v_load_first(x + i, count - i, 0.0f), scale))), count - i);
}
