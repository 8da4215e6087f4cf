// GEMM for AVX2 without VNNI. vpmaddubsw multiplies unsigned weight bytes by signed activations and adds pairs into
// 16 bits, which saturate; how many such pair sums fit one 16-bit lane depends on the bits of the weight:
//   4 bits: 8 * 2 * 15 * 127 = 30,480: a whole group of 32      5 bits: 4 (31,496)      6 bits: 2 (32,004)
// 8-bit weights are two planes of nibbles, low and high, joined as low + 16 * high in 32 bits: exact, at twice the work.
//
// One template covers all: a core computes R rows by P pairs of 8-column vectors over a run of groups, adding to the
// tile in memory (its float sums need no registers, so more rows fit). It knows three sources of a pair of vectors:
//   kBytes   32 columns a k-quad, one byte a value               pair p: columns 16p.. and 16p + 8..
//   kNibbles a line of the packed kW4 panel                      pair p: columns  8p.. and 16 + 8p..
//   kSplit   a line of the packed 8-bit panel                    pair p: low and high plane of columns 8p..
// With few rows the cores read the packed panel (it is memory that counts). With many, nibbles are first spread into a
// slab of bytes that stays in the L1 cache (it is the vector units that count; planes would gain nothing).

enum PairSource { kBytes, kNibbles, kSplit };

constexpr int kRowTile = 4;         // three where 16-bit sums are flushed inside a group: those need registers, too
constexpr int kSlabGroups = 8;      // groups per pass over the rows, so that they stay in L1
constexpr int kSlabRows = 16;       // rows from which spreading into a slab pays
constexpr int kFloatSlab = 128;     // inputs per pass over the rows of a float panel: even

// A core's operands: a run of groups of one panel, and the first row of its tile.
struct CoreArgs {
  const uint8_t* w;
  int64_t group_bytes, scales_at, mins_at;
  int groups;
  const int8_t* q;
  int64_t ldx;
  const Factor* factors;
  int64_t ldf;
  float* tile;
};

// Where pair `pair` of k-quad `quad` lies in a group's quants.
template <PairSource S>
constexpr int pair_offset(int quad, int pair) {
  return quad * (S == kNibbles ? 64 : 128) + pair * (S == kBytes ? 64 : 32);
}

template <PairSource S>
inline void load_pair(const uint8_t* at, __m256i* v) {
  const __m256i mask = _mm256_set1_epi8(15);
  const __m256i first = _mm256_load_si256(reinterpret_cast<const __m256i*>(at));
  if (S == kBytes) {
    v[0] = first;
    v[1] = _mm256_load_si256(reinterpret_cast<const __m256i*>(at + 32));
  } else {
    v[0] = _mm256_and_si256(first, mask);
    v[1] = _mm256_and_si256(_mm256_srli_epi16(first, 4), mask);
  }
}

template <bool kScaleF32>
inline __m256 load_scales(const uint8_t* at, int column) {
  if (kScaleF32) return _mm256_load_ps(reinterpret_cast<const float*>(at) + column);
  return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(at + 2 * column)));
}

// The pair sums of one k-quad of a row, put into two accumulators or added to them. In assembly because gcc regroups
// the sums of the unrolled steps and spills the products it delays.
typedef int32_t Quad __attribute__((may_alias, aligned(1)));

inline void put_products(__m256i* acc, const __m256i* v, const int8_t* x) {
  __asm__ volatile(
      "vpbroadcastd %[x], %[second]\n\t"
      "vpmaddubsw %[second], %[v0], %[first]\n\t"
      "vpmaddubsw %[second], %[v1], %[second]"
      : [first] "=&x"(acc[0]), [second] "=&x"(acc[1])
      : [v0] "x"(v[0]), [v1] "x"(v[1]), [x] "m"(*reinterpret_cast<const Quad*>(x)));
}

inline void add_products(__m256i* acc, const __m256i* v, const int8_t* x) {
  __m256i first, second;
  __asm__ volatile(
      "vpbroadcastd %[x], %[second]\n\t"
      "vpmaddubsw %[second], %[v0], %[first]\n\t"
      "vpmaddubsw %[second], %[v1], %[second]\n\t"
      "vpaddw %[first], %[acc0], %[acc0]\n\t"
      "vpaddw %[second], %[acc1], %[acc1]"
      : [acc0] "+x"(acc[0]), [acc1] "+x"(acc[1]), [first] "=&x"(first), [second] "=&x"(second)
      : [v0] "x"(v[0]), [v1] "x"(v[1]), [x] "m"(*reinterpret_cast<const Quad*>(x)));
}

// The float chain of one group for R rows of 8 columns; `scales` and `mins` point at the panel's first column.
template <int R, bool kMin, bool kScaleF32>
inline void add_group(const uint8_t* scales, const uint8_t* mins, const Factor* f, int column, const __m256i* sums,
                      int stride, float* tile) {
  const __m256 w_scale = load_scales<kScaleF32>(scales, column);
  __m256 w_min;
  if (kMin) w_min = load_scales<kScaleF32>(mins, column);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    float* y = tile + r * kPanel + column;
    __asm__("" : "+r"(y));  // else gcc keeps sums of small tiles in registers that the products need
    __m256i sum = sums[r * stride];
    if (!kMin) sum = _mm256_add_epi32(sum, _mm256_set1_epi32(f[r].zero_term));
    const __m256 scale = _mm256_mul_ps(w_scale, _mm256_set1_ps(f[r].scale));
    __m256 total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, _mm256_load_ps(y));
    if (kMin) total = _mm256_fmadd_ps(w_min, _mm256_set1_ps(f[r].min_term), total);
    _mm256_store_ps(y, total);
  }
}

// R rows x P pairs from `pair` on. kQuads k-quads a group, of which kFlush at a time are summed in 16 bits.
template <PairSource S, int R, int P, int kQuads, int kFlush, bool kMin, bool kScaleF32>
__attribute__((noinline)) void core(const CoreArgs& args, int pair) {
  constexpr bool kJoin = S == kSplit;
  const CoreArgs a = args;  // else every store to the tile makes gcc load them again
  constexpr int kColumns = S == kBytes ? 16 : 8;  // from one pair to the next
  const uint8_t* group = a.w + pair_offset<S>(0, pair);
  const uint8_t* scales = a.w + a.scales_at + pair * kColumns * (kScaleF32 ? 4 : 2);
  const uint8_t* mins = scales + a.mins_at - a.scales_at;
  float* tile = a.tile + pair * kColumns;
  const int8_t* x = a.q;
  const Factor* f = a.factors;
  for (int g = 0; g < a.groups; ++g, group += a.group_bytes, x += 4 * kQuads, f += a.ldf) {
    if (S != kBytes && pair == 0) prefetch_stream(group + kPrefetchAhead, a.group_bytes);
    __m256i sums[R][2 * P];
#pragma GCC unroll 4
    for (int part = 0; part < kQuads / kFlush; ++part) {
      __m256i acc[R][2 * P];
#pragma GCC unroll 8
      for (int i = 0; i < kFlush; ++i) {
        const int quad = part * kFlush + i;
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
          __m256i v[2];
          load_pair<S>(group + pair_offset<S>(quad, p), v);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const int8_t* at = x + r * a.ldx + 4 * quad;
            if (i == 0) {
              put_products(&acc[r][2 * p], v, at);
            } else {
              add_products(&acc[r][2 * p], v, at);
            }
          }
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < 2 * P; ++c) {
          const __m256i weight = _mm256_set1_epi16(kJoin && c % 2 == 1 ? 16 : 1);
          const __m256i wide = _mm256_madd_epi16(acc[r][c], weight);
          sums[r][c] = part == 0 ? wide : _mm256_add_epi32(sums[r][c], wide);
        }
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      if (kJoin) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sums[r][2 * p] = _mm256_add_epi32(sums[r][2 * p], sums[r][2 * p + 1]);
        add_group<R, kMin, kScaleF32>(scales, mins, f, kColumns * p, &sums[0][2 * p], 2 * P, tile);
      } else {
        const int second = kColumns * p + (S == kBytes ? 8 : 16);
        add_group<R, kMin, kScaleF32>(scales, mins, f, kColumns * p, &sums[0][2 * p], 2 * P, tile);
        add_group<R, kMin, kScaleF32>(scales, mins, f, second, &sums[0][2 * p + 1], 2 * P, tile);
      }
    }
    scales += a.group_bytes;
    mins += a.group_bytes;
  }
}

// All pairs of R rows: at once for one row, which makes the panel one stream, else one after the other.
template <PairSource S, int R, int kQuads, int kFlush, bool kMin, bool kScaleF32>
inline void all_pairs(const CoreArgs& a) {
  constexpr int kPairs = S == kSplit ? 4 : 2;
  constexpr int kStep = R == 1 ? kPairs : 1;
  for (int pair = 0; pair < kPairs; pair += kStep) core<S, R, kStep, kQuads, kFlush, kMin, kScaleF32>(a, pair);
}

template <PairSource S, int kQuads, int kFlush, bool kMin, bool kScaleF32>
void all_rows(CoreArgs a, int rows) {
  constexpr int kTile = kFlush < kQuads ? kRowTile - 1 : kRowTile;
  for (; rows > 0; rows -= kTile) {
    switch (rows) {
      case 1: all_pairs<S, 1, kQuads, kFlush, kMin, kScaleF32>(a); break;
      case 2: all_pairs<S, 2, kQuads, kFlush, kMin, kScaleF32>(a); break;
      case 3: all_pairs<S, 3, kQuads, kFlush, kMin, kScaleF32>(a); break;
      default: all_pairs<S, kTile, kQuads, kFlush, kMin, kScaleF32>(a);
    }
    a.q += kTile * a.ldx;
    a.factors += kTile;
    a.tile += kTile * kPanel;
  }
}

inline void set_layout(CoreArgs* a, int64_t quant_bytes, bool scale_f32, bool has_min) {
  const int64_t scale_bytes = kPanel * (scale_f32 ? 4 : 2);
  a->scales_at = quant_bytes;
  a->mins_at = quant_bytes + scale_bytes;
  a->group_bytes = quant_bytes + scale_bytes * (has_min ? 2 : 1);
}

// The operands of at most `most` groups from `first` on, in the packed panel.
inline CoreArgs panel_args(const PackedWeight* w, const uint8_t* panel, const RowBlock* b, int first, int most,
                           float* tile) {
  CoreArgs a = {};
  set_layout(&a, static_cast<int64_t>(w->group) * kPanel / (w->format == kW4 ? 2 : 1), w->scale_f32, w->has_min);
  a.w = panel + first * a.group_bytes;
  a.groups = w->k / w->group - first < most ? w->k / w->group - first : most;
  a.q = b->q + first * w->group;
  a.ldx = b->ldx;
  a.factors = b->factors + first * b->rows;
  a.ldf = b->rows;
  a.tile = tile;
  return a;
}

template <PairSource S, int kQuads, int kFlush, bool kMin, bool kScaleF32>
void panel_in_place(const PackedWeight* w, const uint8_t* panel, const RowBlock* b, float* tile) {
  const int groups = w->k / w->group;
  const int step = b->rows == 1 ? groups : kSlabGroups;
  for (int first = 0; first < groups; first += step) {
    all_rows<S, kQuads, kFlush, kMin, kScaleF32>(panel_args(w, panel, b, first, step, tile), b->rows);
  }
}

// Spreads groups of a kW4 panel into bytes, with scales and mins as f32.
template <bool kMin, bool kScaleF32>
void fill_slab(const CoreArgs& from, uint8_t* slab, const CoreArgs& to) {
  const uint8_t* group = from.w;
  for (int g = 0; g < from.groups; ++g, group += from.group_bytes, slab += to.group_bytes) {
    for (int quad = 0; quad < 8; ++quad) {
      for (int pair = 0; pair < 2; ++pair) {
        __m256i v[2];
        load_pair<kNibbles>(group + pair_offset<kNibbles>(quad, pair), v);
        uint8_t* at = slab + quad * 128 + pair * 32;
        _mm256_store_si256(reinterpret_cast<__m256i*>(at), v[0]);
        _mm256_store_si256(reinterpret_cast<__m256i*>(at + 64), v[1]);
      }
    }
    for (int c = 0; c < kPanel; c += 8) {
      const __m256 scales = load_scales<kScaleF32>(group + from.scales_at, c);
      _mm256_store_ps(reinterpret_cast<float*>(slab + to.scales_at) + c, scales);
      if (!kMin) continue;
      const __m256 mins = load_scales<kScaleF32>(group + from.mins_at, c);
      _mm256_store_ps(reinterpret_cast<float*>(slab + to.mins_at) + c, mins);
    }
  }
}

template <bool kMin, bool kScaleF32>
void w4_panel(const PackedWeight* w, const uint8_t* panel, const RowBlock* b, float* tile) {
  if (b->rows < kSlabRows) return panel_in_place<kNibbles, 8, 8, kMin, kScaleF32>(w, panel, b, tile);
  alignas(64) uint8_t slab[kSlabGroups * (1024 + 256)];
  for (int first = 0; first < w->k / w->group; first += kSlabGroups) {
    CoreArgs a = panel_args(w, panel, b, first, kSlabGroups, tile);
    const CoreArgs packed = a;
    set_layout(&a, 1024, true, kMin);
    a.w = slab;
    fill_slab<kMin, kScaleF32>(packed, slab, a);
    all_rows<kBytes, 8, 8, kMin, true>(a, b->rows);
  }
}

// Float panels: R rows by C vectors of 8 columns over a run of inputs, sums in registers between two visits of the tile.
template <int kFormat, bool kOdd>
inline __m256 load_column(const uint8_t* input, int column) {
  if (kFormat == kF32) return _mm256_load_ps(reinterpret_cast<const float*>(input) + column);
  if (kFormat == kF16) return load_scales<false>(input, column);
  const __m256i pair = _mm256_load_si256(reinterpret_cast<const __m256i*>(input + 4 * column));
  const __m256i odd = _mm256_and_si256(pair, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
  return _mm256_castsi256_ps(kOdd ? odd : _mm256_slli_epi32(pair, 16));
}

// One input of every row. A bf16 panel holds inputs in pairs, so `input` stays at the pair for the odd one.
template <int kFormat, bool kOdd, int R, int C>
inline void float_step(const uint8_t* input, const float* x, int64_t ldx, int column, __m256 (*y)[C]) {
  __m256 v[C];
#pragma GCC unroll 4
  for (int c = 0; c < C; ++c) v[c] = load_column<kFormat, kOdd>(input, column + 8 * c);
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    const __m256 row = _mm256_set1_ps(x[r * ldx]);
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) y[r][c] = _mm256_fmadd_ps(row, v[c], y[r][c]);
  }
}

template <int kFormat, int R, int C>
__attribute__((noinline)) void float_core(const uint8_t* input, int64_t count, const float* x, int64_t ldx, int column,
                                          float* tile) {
  constexpr int kInputBytes = kPanel * (kFormat == kF32 ? 4 : 2);
  __m256 y[R][C];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) y[r][c] = _mm256_load_ps(tile + r * kPanel + column + 8 * c);
  }
  for (; count > 1; count -= 2, x += 2, input += 2 * kInputBytes) {
    float_step<kFormat, false, R, C>(input, x, ldx, column, y);
    float_step<kFormat, true, R, C>(input + (kFormat == kBF16 ? 0 : kInputBytes), x + 1, ldx, column, y);
  }
  if (count > 0) float_step<kFormat, false, R, C>(input, x, ldx, column, y);
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) _mm256_store_ps(tile + r * kPanel + column + 8 * c, y[r][c]);
  }
}

template <int kFormat, int R>
inline void float_rows(const uint8_t* input, int64_t count, const float* x, int64_t ldx, float* tile) {
  constexpr int kVectors = R == 1 ? 4 : 2;  // one row takes the panel as one stream
  for (int column = 0; column < kPanel; column += 8 * kVectors) {
    float_core<kFormat, R, kVectors>(input, count, x, ldx, column, tile);
  }
}

template <int kFormat>
void float_panel(const PackedWeight* w, const uint8_t* panel, const RowBlock* b, float* tile) {
  const int64_t step = b->rows == 1 ? w->k : kFloatSlab;
  for (int64_t begin = 0; begin < w->k; begin += step, panel += step * kPanel * (kFormat == kF32 ? 4 : 2)) {
    const int64_t count = w->k - begin < step ? w->k - begin : step;
    for (int r = 0; r < b->rows; r += kRowTile) {
      const float* x = b->x + r * b->ldx + begin;
      float* y = tile + r * kPanel;
      switch (b->rows - r) {
        case 1: float_rows<kFormat, 1>(panel, count, x, b->ldx, y); break;
        case 2: float_rows<kFormat, 2>(panel, count, x, b->ldx, y); break;
        case 3: float_rows<kFormat, 3>(panel, count, x, b->ldx, y); break;
        default: float_rows<kFormat, kRowTile>(panel, count, x, b->ldx, y);
      }
    }
  }
}

PanelKernel panel_kernel(const PackedWeight* w) {
  switch (w->format) {
    case kF32: return float_panel<kF32>;
    case kF16: return float_panel<kF16>;
    case kBF16: return float_panel<kBF16>;
    case kW4:
      if (!w->has_min) return w4_panel<false, false>;
      return w->scale_f32 ? w4_panel<true, true> : w4_panel<true, false>;
    default: break;
  }
  if (w->bits == 8) return panel_in_place<kSplit, 8, 8, false, false>;
  if (w->bits == 6) return panel_in_place<kBytes, 4, 2, false, true>;
  if (!w->has_min) return panel_in_place<kBytes, 8, 4, false, false>;
  return w->scale_f32 ? panel_in_place<kBytes, 8, 4, true, true> : panel_in_place<kBytes, 8, 4, true, false>;
}

void gemm(const GemmArgs* g, int32_t panel_begin, int32_t panel_end, int32_t row_begin, int32_t row_end) {
  run_gemm(g, panel_kernel(g->w), panel_begin, panel_end, row_begin, row_end);
}
