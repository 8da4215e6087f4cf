// Vectors of the native width, for the kernels that are not GEMM. Included once inside the anonymous namespace of each
// instruction set's translation unit, after that unit has defined one of
//   HEADRACE_ISA_AVX512    16 lanes; attention multiplies bf16 pairs
//   HEADRACE_ISA_AVX2       8 lanes
//   HEADRACE_ISA_REFERENCE  4 lanes of GCC's vector extension, for any CPU
//
// v_max returns its second operand when either is NaN, on every instruction set, so a NaN score never wins a maximum;
// it comes through the exponential instead. Nothing here knows a kernel.

#if defined(HEADRACE_ISA_AVX512)

// gcc 12's own headers leave the unused operand of unmasked forms uninitialised, on purpose.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

constexpr int kLanes = 16;
typedef __m512 f32v;
typedef __m512i i32v;

inline f32v v_zero() { return _mm512_setzero_ps(); }
inline f32v v_set1(float x) { return _mm512_set1_ps(x); }
inline f32v v_load(const float* p) { return _mm512_loadu_ps(p); }
inline void v_store(float* p, f32v a) { _mm512_storeu_ps(p, a); }
inline f32v v_add(f32v a, f32v b) { return _mm512_add_ps(a, b); }
inline f32v v_sub(f32v a, f32v b) { return _mm512_sub_ps(a, b); }
inline f32v v_mul(f32v a, f32v b) { return _mm512_mul_ps(a, b); }
inline f32v v_div(f32v a, f32v b) { return _mm512_div_ps(a, b); }
inline f32v v_fma(f32v a, f32v b, f32v c) { return _mm512_fmadd_ps(a, b, c); }
inline f32v v_max(f32v a, f32v b) { return _mm512_max_ps(a, b); }
inline f32v v_min(f32v a, f32v b) { return _mm512_min_ps(a, b); }
inline f32v v_abs(f32v a) { return _mm512_abs_ps(a); }
inline i32v v_bits(f32v a) { return _mm512_castps_si512(a); }
inline f32v v_floats(i32v a) { return _mm512_castsi512_ps(a); }
inline f32v v_to_floats(i32v a) { return _mm512_cvtepi32_ps(a); }
inline i32v v_add_i32(i32v a, i32v b) { return _mm512_add_epi32(a, b); }
inline i32v v_and_i32(i32v a, i32v b) { return _mm512_and_si512(a, b); }
inline i32v v_max_i32(i32v a, i32v b) { return _mm512_max_epi32(a, b); }
template <int N> inline i32v v_shift_left(i32v a) { return _mm512_slli_epi32(a, N); }
// Lanes of `a` where x < y; zero elsewhere.
inline f32v v_zero_unless_less(f32v x, f32v y, f32v a) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), a);
}
// Lanes of `a` but zero where x < y; a NaN in x or y keeps the lane.
inline f32v v_zero_if_less(f32v x, f32v y, f32v a) {
  return _mm512_mask_mov_ps(a, _mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), _mm512_setzero_ps());
}
inline bool v_all_less(f32v x, f32v y) { return _mm512_cmp_ps_mask(x, y, _CMP_LT_OQ) == 0xffff; }
inline bool v_any_less(f32v x, f32v y) { return _mm512_cmp_ps_mask(x, y, _CMP_LT_OQ) != 0; }

#elif defined(HEADRACE_ISA_AVX2)

constexpr int kLanes = 8;
typedef __m256 f32v;
typedef __m256i i32v;

inline f32v v_zero() { return _mm256_setzero_ps(); }
inline f32v v_set1(float x) { return _mm256_set1_ps(x); }
inline f32v v_load(const float* p) { return _mm256_loadu_ps(p); }
inline void v_store(float* p, f32v a) { _mm256_storeu_ps(p, a); }
inline f32v v_add(f32v a, f32v b) { return _mm256_add_ps(a, b); }
inline f32v v_sub(f32v a, f32v b) { return _mm256_sub_ps(a, b); }
inline f32v v_mul(f32v a, f32v b) { return _mm256_mul_ps(a, b); }
inline f32v v_div(f32v a, f32v b) { return _mm256_div_ps(a, b); }
inline f32v v_fma(f32v a, f32v b, f32v c) { return _mm256_fmadd_ps(a, b, c); }
inline f32v v_max(f32v a, f32v b) { return _mm256_max_ps(a, b); }
inline f32v v_min(f32v a, f32v b) { return _mm256_min_ps(a, b); }
inline f32v v_abs(f32v a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline i32v v_bits(f32v a) { return _mm256_castps_si256(a); }
inline f32v v_floats(i32v a) { return _mm256_castsi256_ps(a); }
inline f32v v_to_floats(i32v a) { return _mm256_cvtepi32_ps(a); }
inline i32v v_add_i32(i32v a, i32v b) { return _mm256_add_epi32(a, b); }
inline i32v v_and_i32(i32v a, i32v b) { return _mm256_and_si256(a, b); }
inline i32v v_max_i32(i32v a, i32v b) { return _mm256_max_epi32(a, b); }
template <int N> inline i32v v_shift_left(i32v a) { return _mm256_slli_epi32(a, N); }
inline f32v v_zero_unless_less(f32v x, f32v y, f32v a) { return _mm256_and_ps(_mm256_cmp_ps(x, y, _CMP_LT_OQ), a); }
inline f32v v_zero_if_less(f32v x, f32v y, f32v a) { return _mm256_andnot_ps(_mm256_cmp_ps(x, y, _CMP_LT_OQ), a); }
inline bool v_all_less(f32v x, f32v y) { return _mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_LT_OQ)) == 0xff; }
inline bool v_any_less(f32v x, f32v y) { return _mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_LT_OQ)) != 0; }
#elif defined(HEADRACE_ISA_REFERENCE)

constexpr int kLanes = 4;
typedef float f32v __attribute__((vector_size(16)));
typedef int32_t i32v __attribute__((vector_size(16)));

inline f32v v_set1(float x) { return f32v{x, x, x, x}; }
inline f32v v_zero() { return v_set1(0.0f); }
inline f32v v_load(const float* p) {
  f32v a;
  __builtin_memcpy(&a, p, 16);
  return a;
}
inline void v_store(float* p, f32v a) { __builtin_memcpy(p, &a, 16); }
inline f32v v_add(f32v a, f32v b) { return a + b; }
inline f32v v_sub(f32v a, f32v b) { return a - b; }
inline f32v v_mul(f32v a, f32v b) { return a * b; }
inline f32v v_div(f32v a, f32v b) { return a / b; }
inline f32v v_fma(f32v a, f32v b, f32v c) { return a * b + c; }
inline i32v v_bits(f32v a) { return reinterpret_cast<i32v>(a); }
inline f32v v_floats(i32v a) { return reinterpret_cast<f32v>(a); }
inline f32v v_select(i32v mask, f32v a, f32v b) { return v_floats((v_bits(a) & mask) | (v_bits(b) & ~mask)); }
inline f32v v_max(f32v a, f32v b) { return v_select(a > b, a, b); }
inline f32v v_min(f32v a, f32v b) { return v_select(a < b, a, b); }
inline f32v v_abs(f32v a) { return v_floats(v_bits(a) & 0x7fffffff); }
inline f32v v_to_floats(i32v a) { return __builtin_convertvector(a, f32v); }
inline i32v v_add_i32(i32v a, i32v b) { return a + b; }
inline i32v v_and_i32(i32v a, i32v b) { return a & b; }
inline i32v v_max_i32(i32v a, i32v b) {
  const i32v mask = a > b;
  return (a & mask) | (b & ~mask);
}
template <int N> inline i32v v_shift_left(i32v a) { return a << N; }
inline f32v v_zero_unless_less(f32v x, f32v y, f32v a) { return v_floats(v_bits(a) & (x < y)); }
inline f32v v_zero_if_less(f32v x, f32v y, f32v a) { return v_floats(v_bits(a) & ~(x < y)); }
inline bool v_any_less(f32v x, f32v y) {
  const i32v mask = x < y;
  return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
}
inline bool v_all_less(f32v x, f32v y) {
  const i32v mask = x < y;
  return (mask[0] & mask[1] & mask[2] & mask[3]) != 0;
}
inline float v_hsum(f32v a) { return (a[0] + a[2]) + (a[1] + a[3]); }
inline float v_hmax(f32v a) {
  const f32v s = v_max(a, f32v{a[2], a[3], a[2], a[3]});
  return s[0] > s[1] ? s[0] : s[1];
}

#else
#error "define HEADRACE_ISA_AVX512, HEADRACE_ISA_AVX2 or HEADRACE_ISA_REFERENCE before vec.h"
#endif

#if defined(HEADRACE_ISA_AVX512) || defined(HEADRACE_ISA_AVX2)
inline __m128 v_upper(__m128 a) { return _mm_movehl_ps(a, a); }
inline __m128 v_half_sum(__m256 a) { return _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)); }
inline __m128 v_half_max(__m256 a) { return _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)); }
#if defined(HEADRACE_ISA_AVX512)
inline __m256 v_half(f32v a, bool upper) { return upper ? _mm512_extractf32x8_ps(a, 1) : _mm512_castps512_ps256(a); }
inline __m128 v_quarter_sum(f32v a) { return v_half_sum(_mm256_add_ps(v_half(a, false), v_half(a, true))); }
inline __m128 v_quarter_max(f32v a) { return v_half_max(_mm256_max_ps(v_half(a, false), v_half(a, true))); }
#else
inline __m128 v_quarter_sum(f32v a) { return v_half_sum(a); }
inline __m128 v_quarter_max(f32v a) { return v_half_max(a); }
#endif
// Halves onto halves until one lane is left: the same tree everywhere.
inline float v_hsum(f32v a) {
  __m128 s = v_quarter_sum(a);
  s = _mm_add_ps(s, v_upper(s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float v_hmax(f32v a) {
  __m128 s = v_quarter_max(a);
  s = _mm_max_ps(s, v_upper(s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
#endif

constexpr float kInfinity = __builtin_inff();

// Lane i takes lane i ^ N.
template <int N> inline f32v v_swap(f32v a) {
  typedef int32_t Lanes __attribute__((vector_size(kLanes * 4)));
  Lanes from;
  for (int i = 0; i < kLanes; ++i) from[i] = i ^ N;
  return __builtin_shuffle(a, from);
}

// Largest, and sum, of the lanes of integers.
#if defined(HEADRACE_ISA_REFERENCE)
inline int32_t v_hmax_i32(i32v a) {
  const i32v s = v_max_i32(a, i32v{a[2], a[3], a[2], a[3]});
  return s[0] > s[1] ? s[0] : s[1];
}
inline int32_t v_hsum_i32(i32v a) { return a[0] + a[1] + a[2] + a[3]; }
#else
#if defined(HEADRACE_ISA_AVX512)
inline __m256i v_half_i32(i32v a, bool upper) {
  return upper ? _mm512_extracti64x4_epi64(a, 1) : _mm512_castsi512_si256(a);
}
inline __m256i v_fold_max_i32(i32v a) { return _mm256_max_epi32(v_half_i32(a, false), v_half_i32(a, true)); }
inline __m256i v_fold_sum_i32(i32v a) { return _mm256_add_epi32(v_half_i32(a, false), v_half_i32(a, true)); }
#else
inline __m256i v_fold_max_i32(i32v a) { return a; }
inline __m256i v_fold_sum_i32(i32v a) { return a; }
#endif
inline int32_t v_hmax_i32(i32v a) {
  const __m256i h = v_fold_max_i32(a);
  __m128i s = _mm_max_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
inline int32_t v_hsum_i32(i32v a) {
  const __m256i h = v_fold_sum_i32(a);
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
#endif

// 32 integers within int8, in order, as bytes.
inline void v_store_32_i8(int8_t* p, const i32v* v) {
#if defined(HEADRACE_ISA_AVX512)
  const __m128i low = _mm512_cvtepi32_epi8(v[0]), high = _mm512_cvtepi32_epi8(v[1]);
  __builtin_memcpy(p, &low, 16);
  __builtin_memcpy(p + 16, &high, 16);
#elif defined(HEADRACE_ISA_AVX2)
  const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
  const __m256i ordered = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  __builtin_memcpy(p, &ordered, 32);
#else
  for (int i = 0; i < 32; ++i) p[i] = static_cast<int8_t>(v[i / kLanes][i % kLanes]);
#endif
}

inline float v_first(f32v a) {
  float x;
  __builtin_memcpy(&x, &a, 4);
  return x;
}

// The first n < kLanes floats; `fill` in the other lanes.
inline f32v v_load_first(const float* p, int64_t n, float fill) {
  float lanes[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) lanes[i] = i < n ? p[i] : fill;
  return v_load(lanes);
}

inline void v_store_first(float* p, f32v a, int64_t n) {
  float lanes[kLanes];
  v_store(lanes, a);
  for (int64_t i = 0; i < n; ++i) p[i] = lanes[i];
}

inline i32v v_set1_i32(int32_t x) {
  float f;
  __builtin_memcpy(&f, &x, 4);
  return v_bits(v_set1(f));
}

// 2^(n + f) for |f| <= 1/2 and n + 1.5 * 2^23 in `shifted`, whose low bits are the integer n. The polynomial is the
// minimax one of degree 5 with p(0) = 1, so that 2^0 is exactly 1; relative error below 2e-7.
inline f32v v_scale_exp2(f32v f, f32v shifted) {
  f32v p = v_set1(0x1.5bba14p-10f);
  p = v_fma(p, f, v_set1(0x1.3cea88p-7f));
  p = v_fma(p, f, v_set1(0x1.c6b752p-5f));
  p = v_fma(p, f, v_set1(0x1.ebf9bcp-3f));
  p = v_fma(p, f, v_set1(0x1.62e42ap-1f));
  p = v_fma(p, f, v_set1(1.0f));
  return v_floats(v_add_i32(v_bits(p), v_shift_left<23>(v_bits(shifted))));
}

constexpr float kRoundingShift = 12582912.0f;  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits

// 2^x for x <= 126. Zero below -126, hence for -inf; NaN for NaN.
inline f32v v_exp2(f32v x) {
  const f32v shifted = v_add(x, v_set1(kRoundingShift));
  const f32v f = v_sub(x, v_sub(shifted, v_set1(kRoundingShift)));
  return v_zero_if_less(x, v_set1(-126.0f), v_scale_exp2(f, shifted));
}

// e^x for x <= 87, with the same ends. Reduces by ln 2 in two parts (Cody and Waite).
inline f32v v_exp(f32v x) {
  const f32v shifted = v_fma(x, v_set1(1.44269504f), v_set1(kRoundingShift));
  const f32v n = v_sub(shifted, v_set1(kRoundingShift));
  const f32v r = v_fma(n, v_set1(2.12194440e-4f), v_fma(n, v_set1(-0.693359375f), x));
  return v_zero_if_less(x, v_set1(-87.0f), v_scale_exp2(v_mul(r, v_set1(1.44269504f)), shifted));
}

// tanh(x) = 1 - 2 / (e^2x + 1), with |x| held below 10, where tanh is 1 in float. NaN for NaN.
inline f32v v_tanh(f32v x) {
  const f32v held = v_max(v_set1(-10.0f), v_min(v_set1(10.0f), x));
  const f32v e = v_exp(v_add(held, held));
  return v_sub(v_set1(1.0f), v_div(v_set1(2.0f), v_add(e, v_set1(1.0f))));
}

inline uint32_t float_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}

// bfloat16, round to nearest even; a NaN stays one.
inline uint16_t to_bf16(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 64u : rounded);
}

// sum = fma(a, b, sum), in place. On AVX2 as assembly: of unrolled intrinsics gcc 12 reorders the steps and picks forms
// that overwrite a factor, until it runs out of registers and spills sums.
inline void v_add_product(f32v* sum, f32v a, f32v b) {
#if defined(HEADRACE_ISA_AVX2)
  __asm__ volatile("vfmadd231ps %2, %1, %0" : "+x"(*sum) : "x"(a), "x"(b));
#else
  *sum = v_fma(a, b, *sum);
#endif
}

// kLanes pairs of bf16: the first, or the second, of each pair as f32.
inline f32v v_bf16_first(const uint16_t* p) {
  i32v pairs;
  __builtin_memcpy(&pairs, p, sizeof(pairs));
  return v_floats(v_shift_left<16>(pairs));
}

inline f32v v_bf16_second(const uint16_t* p) {
  i32v pairs;
  __builtin_memcpy(&pairs, p, sizeof(pairs));
  return v_floats(v_and_i32(pairs, v_set1_i32(static_cast<int32_t>(0xffff0000u))));
}

// Sums of f32 lanes in double. Lane i of the sum takes lane i of every addend, in order; the lanes are added ascending.
struct f64sum {
#if defined(HEADRACE_ISA_REFERENCE)
  double lanes[kLanes];
#else
  __m256d lanes[kLanes / 4];
#endif
};

inline void v_accumulate(f64sum* sum, f32v a) {
#if defined(HEADRACE_ISA_AVX512)
  const __m256 low = _mm512_castps512_ps256(a), high = _mm512_extractf32x8_ps(a, 1);
  sum->lanes[0] = _mm256_add_pd(sum->lanes[0], _mm256_cvtps_pd(_mm256_castps256_ps128(low)));
  sum->lanes[1] = _mm256_add_pd(sum->lanes[1], _mm256_cvtps_pd(_mm256_extractf128_ps(low, 1)));
  sum->lanes[2] = _mm256_add_pd(sum->lanes[2], _mm256_cvtps_pd(_mm256_castps256_ps128(high)));
  sum->lanes[3] = _mm256_add_pd(sum->lanes[3], _mm256_cvtps_pd(_mm256_extractf128_ps(high, 1)));
#elif defined(HEADRACE_ISA_AVX2)
  sum->lanes[0] = _mm256_add_pd(sum->lanes[0], _mm256_cvtps_pd(_mm256_castps256_ps128(a)));
  sum->lanes[1] = _mm256_add_pd(sum->lanes[1], _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1)));
#else
  for (int i = 0; i < kLanes; ++i) sum->lanes[i] += static_cast<double>(a[i]);
#endif
}

inline double v_total(const f64sum* sum) {
  double lanes[kLanes], total = 0.0;
  __builtin_memcpy(lanes, sum->lanes, sizeof(lanes));
  for (int i = 0; i < kLanes; ++i) total += lanes[i];
  return total;
}
