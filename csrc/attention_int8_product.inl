// The products of attention over int8 caches: C[rows][n] = A[rows][k] B[k / 4][n][4] in whole numbers, exact in any order.
//
// B is the cache's bytes, each 128 above its value; A is 16 bits, of which q fills the upper 8 only. AVX-512 multiplies
// A in planes of a byte, a = 256 * high + low, of q the high one; the others as int16: the sums are the same.
// A word of A is the eight bytes of four consecutive operands of a row.

#if defined(HEADRACE_ISA_AVX512)
constexpr int kByteTile = 6;     // rows per product
constexpr int kByteVectors = 4;  // most vectors of columns at once
constexpr int kByteSums = 12;    // rows times vectors whose two sums stay in registers
#elif defined(HEADRACE_ISA_AVX2)
constexpr int kByteTile = 2;
#else
constexpr int kByteTile = 1;
#endif
constexpr int kWordBytes = 8;
constexpr int kOperandMax = 32512;  // 127 * 256: the high plane stays within a signed byte
constexpr int kByteZero = 128;      // the byte that means zero

// kLanes whole numbers within kOperandMax as operands.
inline void store_words(uint8_t* to, i32v x) {
#if defined(HEADRACE_ISA_AVX512)
  const __m128i low = _mm512_cvtepi32_epi8(x);
  const __m128i high = _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8));
  const __m128i first = _mm_unpacklo_epi32(high, low), second = _mm_unpackhi_epi32(high, low);
  __builtin_memcpy(to, &first, 16);
  __builtin_memcpy(to + 16, &second, 16);
#elif defined(HEADRACE_ISA_AVX2)
  const __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  __builtin_memcpy(to, &narrow, 16);
#else
  for (int i = 0; i < kLanes; ++i) {
    const int16_t operand = static_cast<int16_t>(x[i]);
    __builtin_memcpy(to + 2 * i, &operand, 2);
  }
#endif
}

// Consecutive quads of B. `ahead` leads from `b` to what is needed next, to be fetched meanwhile; 0: nothing.
struct ByteRun {
  const uint8_t* b;
  int quads;
  int64_t ahead;
};

// A's word i of row r is at a[r * kRowStep + i * kWordStep]; B's quads are those of the runs. What is stored is the sum
// of products times row_scale[r], and times column_scale[column] where that is given.
struct ByteProductArgs {
  const uint8_t* a;
  const ByteRun* runs;
  int num_runs, columns;
  const float* row_scale;
  const int32_t* row_sum;  // of the row's operands: what the 128 in every byte of B has to give back
  const float* column_scale;
  float* c;
  int64_t ldc;
};

// The sums of one row and kLanes columns, without what the 128s added, as floats in their place.
inline void store_sums(const ByteProductArgs& p, int row, int column, i32v sums) {
  f32v x = v_mul(v_to_floats(sums), v_set1(p.row_scale[row]));
  if (p.column_scale != nullptr) x = v_mul(x, v_load(p.column_scale + column));
  v_store(p.c + row * p.ldc + column, x);
}

// Products of R rows and some columns. `kLow`: whether A has a low plane.
#if defined(HEADRACE_ISA_AVX512)
inline void add_quads(__m512i* sum, __m512i bytes, __m512i row) {
#ifdef HEADRACE_EMULATED_AVX512
  *sum = _mm512_dpbusd_epi32(*sum, bytes, row);
#else  // gcc 12 copies and spills the sums of the intrinsic (gemm_avx512.inl)
  __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(bytes), "v"(row));
#endif
}

inline __m512i broadcast_quad(const uint8_t* a) {
  int32_t quad;
  __builtin_memcpy(&quad, a, 4);
  return _mm512_set1_epi32(quad);
}

template <int R, int V, bool kLow>
struct ByteSums {
  static constexpr int kColumns = V * kLanes;
  __m512i high[R][V], low[R][V];

  void clear() {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) high[r][v] = low[r][v] = _mm512_setzero_si512();
    }
  }
  template <int kRowStep>
  void add(const uint8_t* a, const uint8_t* b) {
    __m512i bytes[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) bytes[v] = _mm512_loadu_si512(b + 64 * v);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m512i h = broadcast_quad(a + r * kRowStep);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) add_quads(&high[r][v], bytes[v], h);
      if constexpr (kLow) {
        const __m512i l = broadcast_quad(a + r * kRowStep + 4);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) add_quads(&low[r][v], bytes[v], l);
      }
    }
  }
  void store(const ByteProductArgs& p, int column) const {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const i32v less = v_set1_i32(-kByteZero * p.row_sum[r]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        store_sums(p, r, column + v * kLanes, v_add_i32(v_add_i32(v_shift_left<8>(high[r][v]), low[r][v]), less));
      }
    }
  }
};
#elif defined(HEADRACE_ISA_AVX2)
// A register holds two sums each of four columns.
template <int R, int V, bool kLow>
struct ByteSums {
  static constexpr int kColumns = 16;
  __m256i sums[R][4];

  void clear() {
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) sums[r][v] = _mm256_setzero_si256();
    }
  }
  template <int kRowStep>
  void add(const uint8_t* a, const uint8_t* b) {
    __m256i rows[R];
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
      int64_t word;
      __builtin_memcpy(&word, a + r * kRowStep, 8);
      rows[r] = _mm256_set1_epi64x(word);
    }
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b + 16 * v)));
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) sums[r][v] = _mm256_add_epi32(sums[r][v], _mm256_madd_epi16(bytes, rows[r]));
    }
  }
  void store(const ByteProductArgs& p, int column) const {
    for (int r = 0; r < R; ++r) {
      const i32v less = v_set1_i32(-kByteZero * p.row_sum[r]);
      for (int v = 0; v < 4; v += 2) {
        const __m256i pairs = _mm256_hadd_epi32(sums[r][v], sums[r][v + 1]);
        store_sums(p, r, column + 4 * v, v_add_i32(_mm256_permute4x64_epi64(pairs, 0xd8), less));
      }
    }
  }
};
#else
template <int R, int V, bool kLow>
struct ByteSums {
  static constexpr int kColumns = 16;
  int32_t sums[R][16];

  void clear() { __builtin_memset(sums, 0, sizeof(sums)); }
  template <int kRowStep>
  void add(const uint8_t* a, const uint8_t* b) {
    for (int r = 0; r < R; ++r) {
      int16_t word[4];
      __builtin_memcpy(word, a + r * kRowStep, sizeof(word));
      for (int c = 0; c < 16; ++c) {
        for (int j = 0; j < 4; ++j) sums[r][c] += word[j] * b[4 * c + j];
      }
    }
  }
  void store(const ByteProductArgs& p, int column) const {
    for (int r = 0; r < R; ++r) {
      for (int c = 0; c < 16; c += kLanes) {
        i32v lanes;
        __builtin_memcpy(&lanes, &sums[r][c], sizeof(lanes));
        store_sums(p, r, column + c, v_add_i32(lanes, v_set1_i32(-kByteZero * p.row_sum[r])));
      }
    }
  }
};
#endif

template <int R, int V, bool kLow, int kRowStep, int kWordStep>
inline void byte_columns(const ByteProductArgs& p, int column) {
  ByteSums<R, V, kLow> sums;
  sums.clear();
  const uint8_t* a = p.a;
  const ByteRun* run = p.runs;
  const uint8_t* b = run->b + 4 * column;
  for (int left = run->quads;; a += kWordStep, b += 4 * p.columns, --left) {
    if (left == 0) {
      if (++run == p.runs + p.num_runs) break;
      left = run->quads;
      b = run->b + 4 * column;
    }
    if (R <= kFewRows) {
#pragma GCC unroll 4
      for (int line = 0; line < ByteSums<R, V, kLow>::kColumns / 16; ++line) {
        __builtin_prefetch(b + run->ahead + 64 * line, 0, 2);
      }
    }
    sums.template add<kRowStep>(a, b);
  }
  sums.store(p, column);
}

// All columns of R rows, in the widest steps that the registers hold.
template <int R, bool kLow, int kRowStep, int kWordStep>
__attribute__((noinline)) void byte_rows(const ByteProductArgs& p) {
  int column = 0;
#if defined(HEADRACE_ISA_AVX512)
  constexpr int kWide = kByteSums / R < kByteVectors ? kByteSums / R : kByteVectors;
  if constexpr (kWide >= 4) {
    for (; column + 64 <= p.columns; column += 64) byte_columns<R, 4, kLow, kRowStep, kWordStep>(p, column);
  }
  if constexpr (kWide >= 2) {
    for (; column + 32 <= p.columns; column += 32) byte_columns<R, 2, kLow, kRowStep, kWordStep>(p, column);
  }
#endif
  for (; column < p.columns; column += 16) byte_columns<R, 1, kLow, kRowStep, kWordStep>(p, column);
}

// A of a score product is packed [quad][row] for its row tile; A of a value product takes the place of the scores.
template <int R>
void byte_scores(const ByteProductArgs& p) { byte_rows<R, false, kWordBytes, kWordBytes * R>(p); }
template <int R>
void byte_values(const ByteProductArgs& p) { byte_rows<R, true, kScoreStep * sizeof(float), kWordBytes>(p); }

typedef void (*ByteProduct)(const ByteProductArgs& p);
#if defined(HEADRACE_ISA_AVX512)
const ByteProduct kByteScores[kByteTile] = {byte_scores<1>, byte_scores<2>, byte_scores<3>,
                                            byte_scores<4>, byte_scores<5>, byte_scores<6>};
const ByteProduct kByteValues[kByteTile] = {byte_values<1>, byte_values<2>, byte_values<3>,
                                            byte_values<4>, byte_values<5>, byte_values<6>};
#elif defined(HEADRACE_ISA_AVX2)
const ByteProduct kByteScores[kByteTile] = {byte_scores<1>, byte_scores<2>};
const ByteProduct kByteValues[kByteTile] = {byte_values<1>, byte_values<2>};
#else
const ByteProduct kByteScores[kByteTile] = {byte_scores<1>};
const ByteProduct kByteValues[kByteTile] = {byte_values<1>};
#endif
