// AVX-512 intrinsics in plain C++, so that the AVX-512 kernels are tested on machines that cannot run them.
//
// Compile csrc/isa/avx512.cpp with `-include emulate_avx512.h -DHEADRACE_EMULATED_AVX512` and flags without AVX-512:
// the macros at the end rename the intrinsics, and the kernels' few inline-assembly cores call dpbusd through their
// intrinsic under that define. Only what the kernels use is here; add a line when they use more. Everything is exact
// except the sum order inside _mm512_dpbf16_ps and the reductions, which follow the instruction's pseudocode and a
// plain left-to-right loop.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#pragma GCC diagnostic ignored "-Wpsabi"

namespace {
namespace emulated {

typedef __m512 F;
typedef __m512i I;
typedef __m512bh BH;
typedef __m256bh BH256;

#define EMU_EACH for (int i = 0; i < 16; ++i)
#define EMU_F(name, params, lane) inline F name params { F r = {}; EMU_EACH r[i] = (lane); return r; }
#define EMU_I(name, params, lane) inline I name params { __v16si r = {}; EMU_EACH r[i] = (int)(lane); return (I)r; }
#define EMU_M(name, params, lane) inline __mmask16 name params { int r = 0; EMU_EACH r |= (lane) ? 1 << i : 0; return (__mmask16)r; }

inline int s32(I a, int i) { return ((__v16si)a)[i]; }
inline uint32_t u32(I a, int i) { return (uint32_t)((__v16si)a)[i]; }
inline float as_float(uint32_t b) { float f; std::memcpy(&f, &b, 4); return f; }
inline uint32_t as_bits(float f) { uint32_t b; std::memcpy(&b, &f, 4); return b; }
template <class T> inline T peek(const void* p, int i) { T r; std::memcpy(&r, (const char*)p + i * sizeof(T), sizeof(T)); return r; }
template <class T> inline void poke(void* p, int i, T v) { std::memcpy((char*)p + i * sizeof(T), &v, sizeof(T)); }
inline bool on(__mmask16 m, int i) { return m >> i & 1; }
inline uint16_t bf16(float f) {
  uint32_t b = as_bits(f);
  if ((b & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(b >> 16 | 64);
  if ((b & 0x7f800000u) == 0) return (uint16_t)(b >> 16 & 0x8000u);  // denormals flush
  return (uint16_t)((b + 0x7fffu + (b >> 16 & 1)) >> 16);
}
inline float pair_dot(float acc, uint32_t a, uint32_t b) {
  acc = std::fma(as_float(a & 0xffff0000u), as_float(b & 0xffff0000u), acc);
  return std::fma(as_float(a << 16), as_float(b << 16), acc);
}
inline int quad_dot(uint32_t u, uint32_t s) {
  int sum = 0;
  for (int j = 0; j < 4; ++j) sum += (int)(u >> 8 * j & 255) * (int)(int8_t)(s >> 8 * j & 255);
  return sum;
}
inline bool compare(float a, float b, int op) {
  switch (op) {
    case _CMP_EQ_OQ: return a == b;
    case _CMP_LT_OQ: case _CMP_LT_OS: return a < b;
    case _CMP_LE_OQ: case _CMP_LE_OS: return a <= b;
    case _CMP_GT_OQ: case _CMP_GT_OS: return a > b;
    case _CMP_GE_OQ: case _CMP_GE_OS: return a >= b;
    case _CMP_NEQ_UQ: return !(a == b);
    case _CMP_UNORD_Q: return a != a || b != b;
    case _CMP_ORD_Q: return a == a && b == b;
    default: __builtin_trap();
  }
}

// Loads, stores, moves.
EMU_F(setzero_ps, (), 0.0f)
EMU_F(set1_ps, (float a), a)
EMU_I(setzero_si512, (), 0)
EMU_I(set1_epi32, (int a), a)
EMU_I(set1_epi16, (short a), (uint32_t)(uint16_t)a * 0x10001u)
EMU_I(set1_epi8, (char a), (uint32_t)(uint8_t)a * 0x1010101u)
EMU_I(setr_epi32, (int a, int b, int c, int d, int e, int f, int g, int h, int j, int k, int l, int m, int n, int o, int p, int q),
      ((const int[16]){a, b, c, d, e, f, g, h, j, k, l, m, n, o, p, q})[i])
inline F loadu_ps(const void* p) { F r; std::memcpy(&r, p, 64); return r; }
inline I loadu_si512(const void* p) { I r; std::memcpy(&r, p, 64); return r; }
inline void storeu_ps(void* p, F a) { std::memcpy(p, &a, 64); }
inline void storeu_si512(void* p, I a) { std::memcpy(p, &a, 64); }
inline F mask_loadu_ps(F s, __mmask16 m, const void* p) { EMU_EACH if (on(m, i)) s[i] = peek<float>(p, i); return s; }
inline F maskz_loadu_ps(__mmask16 m, const void* p) { return mask_loadu_ps(setzero_ps(), m, p); }
inline void mask_storeu_ps(void* p, __mmask16 m, F a) { EMU_EACH if (on(m, i)) poke<float>(p, i, a[i]); }
EMU_I(maskz_loadu_epi32, (__mmask16 m, const void* p), on(m, i) ? peek<int>(p, i) : 0)
inline void mask_storeu_epi32(void* p, __mmask16 m, I a) { EMU_EACH if (on(m, i)) poke<int>(p, i, s32(a, i)); }
inline I maskz_loadu_epi16(__mmask32 m, const void* p) {
  I r = {}; for (int i = 0; i < 32; ++i) if (m >> i & 1) poke<int16_t>(&r, i, peek<int16_t>(p, i)); return r;
}
inline I maskz_loadu_epi8(__mmask64 m, const void* p) {
  I r = {}; for (int i = 0; i < 64; ++i) if (m >> i & 1) poke<int8_t>(&r, i, peek<int8_t>(p, i)); return r;
}
inline void mask_compressstoreu_ps(void* p, __mmask16 m, F a) { int n = 0; EMU_EACH if (on(m, i)) poke<float>(p, n++, a[i]); }
inline void mask_compressstoreu_epi32(void* p, __mmask16 m, I a) { int n = 0; EMU_EACH if (on(m, i)) poke<int>(p, n++, s32(a, i)); }
inline I castps_si512(F a) { return (I)a; }
inline F castsi512_ps(I a) { return (F)a; }
inline __m256 castps512_ps256(F a) { __m256 r; std::memcpy(&r, &a, 32); return r; }
inline __m256i castsi512_si256(I a) { __m256i r; std::memcpy(&r, &a, 32); return r; }
inline F castps256_ps512(__m256 a) { F r = {}; std::memcpy(&r, &a, 32); return r; }
inline I castsi256_si512(__m256i a) { I r = {}; std::memcpy(&r, &a, 32); return r; }
inline __m256 extractf32x8_ps(F a, int h) { __m256 r; std::memcpy(&r, (const char*)&a + 32 * h, 32); return r; }
inline __m256i extracti64x4_epi64(I a, int h) { __m256i r; std::memcpy(&r, (const char*)&a + 32 * h, 32); return r; }
inline F insertf32x8(F a, __m256 b, int h) { std::memcpy((char*)&a + 32 * h, &b, 32); return a; }
inline I inserti64x4(I a, __m256i b, int h) { std::memcpy((char*)&a + 32 * h, &b, 32); return a; }
EMU_F(permutexvar_ps, (I x, F a), a[s32(x, i) & 15])
EMU_I(permutexvar_epi32, (I x, I a), s32(a, s32(x, i) & 15))
EMU_F(mask_blend_ps, (__mmask16 m, F a, F b), on(m, i) ? b[i] : a[i])
EMU_I(mask_blend_epi32, (__mmask16 m, I a, I b), on(m, i) ? s32(b, i) : s32(a, i))
EMU_F(mask_mov_ps, (F s, __mmask16 m, F a), on(m, i) ? a[i] : s[i])
EMU_F(maskz_mov_ps, (__mmask16 m, F a), on(m, i) ? a[i] : 0.0f)
EMU_I(maskz_mov_epi32, (__mmask16 m, I a), on(m, i) ? s32(a, i) : 0)

// Float arithmetic. max/min give the second operand when either is NaN, as the instructions do.
EMU_F(add_ps, (F a, F b), a[i] + b[i])
EMU_F(sub_ps, (F a, F b), a[i] - b[i])
EMU_F(mul_ps, (F a, F b), a[i] * b[i])
EMU_F(div_ps, (F a, F b), a[i] / b[i])
EMU_F(max_ps, (F a, F b), a[i] > b[i] ? a[i] : b[i])
EMU_F(min_ps, (F a, F b), a[i] < b[i] ? a[i] : b[i])
EMU_F(sqrt_ps, (F a), std::sqrt(a[i]))
EMU_F(abs_ps, (F a), std::fabs(a[i]))
EMU_F(fmadd_ps, (F a, F b, F c), std::fma(a[i], b[i], c[i]))
EMU_F(fmsub_ps, (F a, F b, F c), std::fma(a[i], b[i], -c[i]))
EMU_F(fnmadd_ps, (F a, F b, F c), std::fma(-a[i], b[i], c[i]))
EMU_F(mask_add_ps, (F s, __mmask16 m, F a, F b), on(m, i) ? a[i] + b[i] : s[i])
EMU_F(mask_max_ps, (F s, __mmask16 m, F a, F b), on(m, i) ? (a[i] > b[i] ? a[i] : b[i]) : s[i])
EMU_F(mask_fmadd_ps, (F a, __mmask16 m, F b, F c), on(m, i) ? std::fma(a[i], b[i], c[i]) : a[i])
EMU_F(scalef_ps, (F a, F b), std::isnan(b[i]) ? b[i] : std::ldexp(a[i], (int)std::fmax(std::fmin(std::floor(b[i]), 1000.0f), -1000.0f)))
EMU_F(roundscale_ps, (F a, int), std::nearbyint(a[i]))
EMU_F(and_ps, (F a, F b), as_float(as_bits(a[i]) & as_bits(b[i])))
EMU_F(or_ps, (F a, F b), as_float(as_bits(a[i]) | as_bits(b[i])))
EMU_F(xor_ps, (F a, F b), as_float(as_bits(a[i]) ^ as_bits(b[i])))
EMU_F(andnot_ps, (F a, F b), as_float(~as_bits(a[i]) & as_bits(b[i])))
EMU_M(cmp_ps_mask, (F a, F b, int op), compare(a[i], b[i], op))
EMU_M(mask_cmp_ps_mask, (__mmask16 m, F a, F b, int op), on(m, i) && compare(a[i], b[i], op))
inline float reduce_add_ps(F a) { float r = a[0]; for (int i = 1; i < 16; ++i) r += a[i]; return r; }
inline float reduce_max_ps(F a) { float r = a[0]; for (int i = 1; i < 16; ++i) r = a[i] > r ? a[i] : r; return r; }
inline float reduce_min_ps(F a) { float r = a[0]; for (int i = 1; i < 16; ++i) r = a[i] < r ? a[i] : r; return r; }

// Integers.
EMU_I(add_epi32, (I a, I b), u32(a, i) + u32(b, i))
EMU_I(sub_epi32, (I a, I b), u32(a, i) - u32(b, i))
EMU_I(mullo_epi32, (I a, I b), u32(a, i) * u32(b, i))
EMU_I(max_epi32, (I a, I b), s32(a, i) > s32(b, i) ? s32(a, i) : s32(b, i))
EMU_I(min_epi32, (I a, I b), s32(a, i) < s32(b, i) ? s32(a, i) : s32(b, i))
EMU_I(and_si512, (I a, I b), u32(a, i) & u32(b, i))
EMU_I(or_si512, (I a, I b), u32(a, i) | u32(b, i))
EMU_I(xor_si512, (I a, I b), u32(a, i) ^ u32(b, i))
EMU_I(andnot_si512, (I a, I b), ~u32(a, i) & u32(b, i))
EMU_I(slli_epi32, (I a, int n), n > 31 ? 0 : u32(a, i) << n)
EMU_I(srli_epi32, (I a, int n), n > 31 ? 0 : u32(a, i) >> n)
EMU_I(srai_epi32, (I a, int n), s32(a, i) >> (n > 31 ? 31 : n))
EMU_I(srli_epi16, (I a, int n), (u32(a, i) >> 16 >> n) << 16 | (u32(a, i) & 0xffffu) >> n)
EMU_I(slli_epi16, (I a, int n), (u32(a, i) >> 16 << n) << 16 | (u32(a, i) << n & 0xffffu))
EMU_M(cmpeq_epi32_mask, (I a, I b), s32(a, i) == s32(b, i))
EMU_M(cmplt_epi32_mask, (I a, I b), s32(a, i) < s32(b, i))
EMU_M(cmpgt_epi32_mask, (I a, I b), s32(a, i) > s32(b, i))
EMU_M(cmple_epi32_mask, (I a, I b), s32(a, i) <= s32(b, i))
EMU_M(cmpge_epi32_mask, (I a, I b), s32(a, i) >= s32(b, i))
inline int reduce_add_epi32(I a) { uint32_t r = 0; EMU_EACH r += u32(a, i); return (int)r; }
inline int reduce_min_epi32(I a) { int r = s32(a, 0); EMU_EACH r = s32(a, i) < r ? s32(a, i) : r; return r; }
inline int reduce_max_epi32(I a) { int r = s32(a, 0); EMU_EACH r = s32(a, i) > r ? s32(a, i) : r; return r; }
EMU_I(dpbusd_epi32, (I c, I a, I b), s32(c, i) + quad_dot(u32(a, i), u32(b, i)))
inline I unpacklo_epi16(I a, I b) {
  I r; for (int i = 0; i < 16; ++i) { int s = i / 4 * 8 + i % 4; poke<int16_t>(&r, 2 * i, peek<int16_t>(&a, s)); poke<int16_t>(&r, 2 * i + 1, peek<int16_t>(&b, s)); } return r;
}
inline I unpackhi_epi16(I a, I b) {
  I r; for (int i = 0; i < 16; ++i) { int s = i / 4 * 8 + 4 + i % 4; poke<int16_t>(&r, 2 * i, peek<int16_t>(&a, s)); poke<int16_t>(&r, 2 * i + 1, peek<int16_t>(&b, s)); } return r;
}

// Conversions.
EMU_F(cvtepi32_ps, (I a), (float)s32(a, i))
EMU_I(cvtps_epi32, (F a), std::fabs(a[i]) < 2147483648.0f ? (int)std::nearbyint(a[i]) : INT32_MIN)
EMU_I(cvttps_epi32, (F a), std::fabs(a[i]) < 2147483648.0f ? (int)a[i] : INT32_MIN)
EMU_I(cvtepu16_epi32, (__m256i a), peek<uint16_t>(&a, i))
EMU_I(cvtepi16_epi32, (__m256i a), peek<int16_t>(&a, i))
EMU_I(cvtepu8_epi32, (__m128i a), peek<uint8_t>(&a, i))
EMU_I(cvtepi8_epi32, (__m128i a), peek<int8_t>(&a, i))
EMU_F(cvtph_ps, (__m256i a), _cvtsh_ss(peek<uint16_t>(&a, i)))
inline __m256i cvtps_ph(F a, int) { __m256i r; EMU_EACH poke<uint16_t>(&r, i, _cvtss_sh(a[i], 0)); return r; }
inline __m256i cvtepi32_epi16(I a) { __m256i r; EMU_EACH poke<int16_t>(&r, i, (int16_t)s32(a, i)); return r; }
inline __m128i cvtepi32_epi8(I a) { __m128i r; EMU_EACH poke<int8_t>(&r, i, (int8_t)s32(a, i)); return r; }
inline __m128i cvtsepi32_epi8(I a) {
  __m128i r; EMU_EACH poke<int8_t>(&r, i, (int8_t)(s32(a, i) > 127 ? 127 : s32(a, i) < -128 ? -128 : s32(a, i))); return r;
}

// bfloat16: the first argument of cvtne2ps fills the upper half.
inline BH cvtne2ps_pbh(F hi, F lo) { BH r; EMU_EACH { poke<uint16_t>(&r, i, bf16(lo[i])); poke<uint16_t>(&r, 16 + i, bf16(hi[i])); } return r; }
inline BH256 cvtneps_pbh(F a) { BH256 r; EMU_EACH poke<uint16_t>(&r, i, bf16(a[i])); return r; }
inline F dpbf16_ps(F c, BH a, BH b) {
  EMU_EACH c[i] = pair_dot(c[i], u32((I)a, i), u32((I)b, i));
  return c;
}

#undef EMU_EACH
#undef EMU_F
#undef EMU_I
#undef EMU_M
}  // namespace emulated
}  // namespace

#define _mm512_setzero_ps emulated::setzero_ps
#define _mm512_set1_ps emulated::set1_ps
#define _mm512_setzero_si512 emulated::setzero_si512
#define _mm512_set1_epi32 emulated::set1_epi32
#define _mm512_set1_epi16 emulated::set1_epi16
#define _mm512_set1_epi8 emulated::set1_epi8
#undef _mm512_setr_epi32
#define _mm512_setr_epi32 emulated::setr_epi32
#define _mm512_loadu_ps emulated::loadu_ps
#define _mm512_loadu_si512 emulated::loadu_si512
#define _mm512_storeu_ps emulated::storeu_ps
#define _mm512_storeu_si512 emulated::storeu_si512
#define _mm512_mask_loadu_ps emulated::mask_loadu_ps
#define _mm512_maskz_loadu_ps emulated::maskz_loadu_ps
#define _mm512_mask_storeu_ps emulated::mask_storeu_ps
#define _mm512_maskz_loadu_epi32 emulated::maskz_loadu_epi32
#define _mm512_mask_storeu_epi32 emulated::mask_storeu_epi32
#define _mm512_maskz_loadu_epi16 emulated::maskz_loadu_epi16
#define _mm512_maskz_loadu_epi8 emulated::maskz_loadu_epi8
#define _mm512_mask_compressstoreu_ps emulated::mask_compressstoreu_ps
#define _mm512_mask_compressstoreu_epi32 emulated::mask_compressstoreu_epi32
#define _mm512_castps_si512 emulated::castps_si512
#define _mm512_castsi512_ps emulated::castsi512_ps
#define _mm512_castps512_ps256 emulated::castps512_ps256
#define _mm512_castsi512_si256 emulated::castsi512_si256
#define _mm512_castps256_ps512 emulated::castps256_ps512
#define _mm512_castsi256_si512 emulated::castsi256_si512
#define _mm512_extractf32x8_ps emulated::extractf32x8_ps
#define _mm512_extracti64x4_epi64 emulated::extracti64x4_epi64
#define _mm512_insertf32x8 emulated::insertf32x8
#define _mm512_inserti64x4 emulated::inserti64x4
#define _mm512_permutexvar_ps emulated::permutexvar_ps
#define _mm512_permutexvar_epi32 emulated::permutexvar_epi32
#define _mm512_mask_blend_ps emulated::mask_blend_ps
#define _mm512_mask_blend_epi32 emulated::mask_blend_epi32
#define _mm512_mask_mov_ps emulated::mask_mov_ps
#define _mm512_maskz_mov_ps emulated::maskz_mov_ps
#define _mm512_maskz_mov_epi32 emulated::maskz_mov_epi32
#define _mm512_add_ps emulated::add_ps
#define _mm512_sub_ps emulated::sub_ps
#define _mm512_mul_ps emulated::mul_ps
#define _mm512_div_ps emulated::div_ps
#define _mm512_max_ps emulated::max_ps
#define _mm512_min_ps emulated::min_ps
#define _mm512_sqrt_ps emulated::sqrt_ps
#define _mm512_abs_ps emulated::abs_ps
#define _mm512_fmadd_ps emulated::fmadd_ps
#define _mm512_fmsub_ps emulated::fmsub_ps
#define _mm512_fnmadd_ps emulated::fnmadd_ps
#define _mm512_mask_add_ps emulated::mask_add_ps
#define _mm512_mask_max_ps emulated::mask_max_ps
#define _mm512_mask_fmadd_ps emulated::mask_fmadd_ps
#define _mm512_scalef_ps emulated::scalef_ps
#define _mm512_roundscale_ps emulated::roundscale_ps
#define _mm512_and_ps emulated::and_ps
#define _mm512_or_ps emulated::or_ps
#define _mm512_xor_ps emulated::xor_ps
#define _mm512_andnot_ps emulated::andnot_ps
#define _mm512_cmp_ps_mask emulated::cmp_ps_mask
#define _mm512_mask_cmp_ps_mask emulated::mask_cmp_ps_mask
#define _mm512_reduce_add_ps emulated::reduce_add_ps
#define _mm512_reduce_max_ps emulated::reduce_max_ps
#define _mm512_reduce_min_ps emulated::reduce_min_ps
#define _mm512_add_epi32 emulated::add_epi32
#define _mm512_sub_epi32 emulated::sub_epi32
#define _mm512_mullo_epi32 emulated::mullo_epi32
#define _mm512_max_epi32 emulated::max_epi32
#define _mm512_min_epi32 emulated::min_epi32
#define _mm512_and_si512 emulated::and_si512
#define _mm512_or_si512 emulated::or_si512
#define _mm512_xor_si512 emulated::xor_si512
#define _mm512_andnot_si512 emulated::andnot_si512
#define _mm512_slli_epi32 emulated::slli_epi32
#define _mm512_srli_epi32 emulated::srli_epi32
#define _mm512_srai_epi32 emulated::srai_epi32
#define _mm512_srli_epi16 emulated::srli_epi16
#define _mm512_slli_epi16 emulated::slli_epi16
#define _mm512_cmpeq_epi32_mask emulated::cmpeq_epi32_mask
#define _mm512_cmplt_epi32_mask emulated::cmplt_epi32_mask
#define _mm512_cmpgt_epi32_mask emulated::cmpgt_epi32_mask
#define _mm512_cmple_epi32_mask emulated::cmple_epi32_mask
#define _mm512_cmpge_epi32_mask emulated::cmpge_epi32_mask
#define _mm512_reduce_add_epi32 emulated::reduce_add_epi32
#define _mm512_reduce_min_epi32 emulated::reduce_min_epi32
#define _mm512_reduce_max_epi32 emulated::reduce_max_epi32
#define _mm512_dpbusd_epi32 emulated::dpbusd_epi32
#define _mm512_unpacklo_epi16 emulated::unpacklo_epi16
#define _mm512_unpackhi_epi16 emulated::unpackhi_epi16
#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#define _mm512_cvtps_epi32 emulated::cvtps_epi32
#define _mm512_cvttps_epi32 emulated::cvttps_epi32
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#define _mm512_cvtepi16_epi32 emulated::cvtepi16_epi32
#define _mm512_cvtepu8_epi32 emulated::cvtepu8_epi32
#define _mm512_cvtepi8_epi32 emulated::cvtepi8_epi32
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_cvtps_ph emulated::cvtps_ph
#define _mm512_cvtepi32_epi16 emulated::cvtepi32_epi16
#define _mm512_cvtepi32_epi8 emulated::cvtepi32_epi8
#define _mm512_cvtsepi32_epi8 emulated::cvtsepi32_epi8
#define _mm512_cvtne2ps_pbh emulated::cvtne2ps_pbh
#define _mm512_cvtneps_pbh emulated::cvtneps_pbh
#define _mm512_dpbf16_ps emulated::dpbf16_ps
#define _mm512_load_ps emulated::loadu_ps
#define _mm512_load_si512 emulated::loadu_si512
#define _mm512_store_ps emulated::storeu_ps
#define _mm512_store_si512 emulated::storeu_si512
#define _mm512_loadu_epi32 emulated::loadu_si512
#define _mm512_storeu_epi32 emulated::storeu_si512
