// The products of attention: C[rows][n] = A[rows][k] B[k / 2][n][2], every element one chain in ascending k.
//
// B is bf16 as the KV cache holds it, in runs of consecutive pairs that may lie anywhere; A is bf16 on AVX-512, else
// f32.

#if defined(HEADRACE_ISA_AVX512)
constexpr int kQueryTile = 12;     // rows per product
constexpr int kAccumulators = 24;
typedef uint16_t Operand;          // A as bf16
#else
#if defined(HEADRACE_ISA_AVX2)
constexpr int kQueryTile = 6;
constexpr int kAccumulators = 12;
#else
constexpr int kQueryTile = 2;
constexpr int kAccumulators = 8;
#endif
typedef float Operand;
#endif
constexpr int kFewRows = 4;        // with so few rows a product waits for memory, and fetches ahead
constexpr int kNarrow = 16 / kLanes;  // vectors of 16 columns, the granule of block_size and head_dim
constexpr int kScoreStep = kPartition + 16;  // floats from a row of scores to the next: apart in the L1 cache's sets
constexpr int kWeightStep = kScoreStep * sizeof(float) / sizeof(Operand);  // weights take the place of scores
constexpr int kMaxRuns = kPartition / 16 + 2;  // blocks of a partition, and two edges

// Consecutive pairs of B. `ahead` leads from `b` to what is needed next, to be fetched meanwhile; 0: nothing.
struct Run {
  const uint16_t* b;
  int pairs;
  int64_t ahead;
};

// One product's operands. A's pair i of row r is at a[r * kRowStep + i * kPairStep]; B's pairs are those of the runs.
struct ProductArgs {
  const Operand* a;
  const Run* runs;
  int num_runs, columns;
  float* c;
  int64_t ldc;
};

// Columns [column, column + V * kLanes) of R rows.
template <int R, int V, int kRowStep, int kPairStep>
inline void product_columns(const ProductArgs& p, int column) {
  f32v sums[R][V];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sums[r][v] = v_zero();
  }
  const Operand* a = p.a;
  const Run* run = p.runs;
  const uint16_t* b = run->b + 2 * column;
  for (int left = run->pairs;; a += kPairStep, b += 2 * p.columns, --left) {
    if (left == 0) {
      if (++run == p.runs + p.num_runs) break;
      left = run->pairs;
      b = run->b + 2 * column;
    }
    if (R <= kFewRows) {  // into the L2 cache: into the L1 cache gained nothing (docs/log.md)
#pragma GCC unroll 4
      for (int line = 0; line < V * kLanes / 16; ++line) __builtin_prefetch(b + run->ahead + 32 * line, 0, 2);
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
    for (int v = 0; v < V; ++v) v_store(p.c + column + r * p.ldc + v * kLanes, sums[r][v]);
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

// A of a score product is packed [pair][row][2] for its row tile; A of a value product is [row][kWeightStep].
template <int R>
void score_product(const ProductArgs& p) { product_rows<R, 2, 2 * R>(p); }
template <int R>
void value_product(const ProductArgs& p) { product_rows<R, kWeightStep, 2>(p); }

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
