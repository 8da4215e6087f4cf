// Row-wise operations between the GEMMs: norms, activation quantisation, rotary embedding, softcap.
//
// Every result depends on its own row only: sums run over fixed lanes in a fixed order, whatever rows a call covers.
// A value that is not finite makes the scale of its group NaN, so it reaches the logits and fails its own request.

constexpr int kSumVectors = 4;      // independent partial sums of one row
constexpr int kMaxHeadDim = 256;

// Sum of squares: lane i of partial sum j takes elements i + kLanes * (j + kSumVectors * n).
inline float sum_of_squares(const float* x, int64_t k) {
  f32v sums[kSumVectors];
  for (int j = 0; j < kSumVectors; ++j) sums[j] = v_zero();
  for (int64_t i = 0; i < k; i += kSumVectors * kLanes) {
#pragma GCC unroll 4
    for (int j = 0; j < kSumVectors; ++j) {
      const int64_t at = i + j * kLanes;
      const f32v v = at + kLanes <= k ? v_load(x + at) : v_load_first(x + at, k - at, 0.0f);
      sums[j] = v_fma(v, v, sums[j]);
    }
  }
  return v_hsum(v_add(v_add(sums[0], sums[1]), v_add(sums[2], sums[3])));
}

inline float inverse_rms(const float* x, int64_t k, float eps) {
  return 1.0f / __builtin_sqrtf(sum_of_squares(x, k) / static_cast<float>(k) + eps);
}

constexpr int kGroupVectors = kQuantGroup / kLanes;

// One group of kQuantGroup values: q = round(y * 127 / amax), value = q * amax / 127.
inline void quantise_group(const f32v* y, int8_t* q, float* scale, int16_t* sums) {
  i32v largest = v_bits(v_zero());  // as integers, so that a NaN is larger than any number
  for (int i = 0; i < kGroupVectors; ++i) largest = v_max_i32(largest, v_bits(v_abs(y[i])));
  const int32_t top = v_hmax_i32(largest);
  float amax;
  __builtin_memcpy(&amax, &top, 4);
  const bool finite = amax < kInfinity;
  *scale = finite ? amax / 127.0f : __builtin_nanf("");
  // Below 1e-30 the quotient would overflow; such a group is zero beside anything it is added to.
  const bool zero = !finite || amax <= 1e-30f;
  const f32v factor = v_set1(zero ? 0.0f : 127.0f / amax), shift = v_set1(kRoundingShift);
  const i32v bias = v_set1_i32(-static_cast<int32_t>(0x4b400000));  // less the bits of the shift: the integer
  i32v rounded[kGroupVectors], halves[2] = {v_bits(v_zero()), v_bits(v_zero())};
  for (int i = 0; i < kGroupVectors; ++i) {
    const f32v scaled = zero ? v_zero() : v_mul(y[i], factor);
    rounded[i] = v_add_i32(v_bits(v_add(scaled, shift)), bias);
    halves[i / (kGroupVectors / 2)] = v_add_i32(halves[i / (kGroupVectors / 2)], rounded[i]);
  }
  v_store_32_i8(q, rounded);
  for (int half = 0; half < 2; ++half) sums[half] = static_cast<int16_t>(v_hsum_i32(halves[half]));
}

// y = x * inverse * gain, or x without gain, for `count` inputs of a group; zeros after them.
inline void scale_group(const float* x, const float* gain, float inverse, int64_t count, f32v* y) {
  const f32v factor = v_set1(inverse);
  for (int i = 0; i < kGroupVectors; ++i, x += kLanes, gain += gain == nullptr ? 0 : kLanes, count -= kLanes) {
    y[i] = count >= kLanes ? v_load(x) : v_load_first(x, count, 0.0f);
    if (gain == nullptr) continue;
    y[i] = v_mul(v_mul(y[i], factor), count >= kLanes ? v_load(gain) : v_load_first(gain, count, 0.0f));
  }
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
      f32v y[kGroupVectors];
      scale_group(x + begin, n->gain == nullptr ? nullptr : n->gain + begin, inverse, count, y);
      float* f32 = a->f32 + row * a->k_pad + begin;
      for (int i = 0; i < kGroupVectors && n->want_f32; ++i) v_store(f32 + i * kLanes, y[i]);
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

void softcap(float* x, int64_t count, float cap) {
  const f32v scale = v_set1(cap);
  for (int64_t i = 0; i < count; i += kLanes) {
    const bool whole = count - i >= kLanes;
    const f32v v = whole ? v_load(x + i) : v_load_first(x + i, count - i, 0.0f);
    const f32v capped = v_mul(scale, v_tanh(v_div(v, scale)));
    if (whole) {
      v_store(x + i, capped);
    } else {
      v_store_first(x + i, capped, count - i);
    }
  }
}
