// GEMM for AVX2 without VNNI. vpmaddubsw multiplies unsigned weight bytes by signed activations and adds pairs into
// 16 bits, which saturate; how many such pair sums fit one 16-bit lane depends on the bits of the weight:
//   4 bits: 8 * 2 * 15 * 127 = 30,480: a whole group of 32      5 bits: 4 (31,496)      6 bits: 2 (32,004)
// 8-bit weights are two planes of nibbles, low and high, joined as low + 16 * high in 32 bits: exact, at twice the work.
//
// One template covers all: a core computes R rows by P pairs of 8-column vectors over a run of groups, adding to the
// tile in memory (its float sums need no registers, so more rows fit). It knows four sources of a pair of vectors:
//   kBytes   32 columns a k-quad, one byte a value                 pair p: columns 16p.. and 16p + 8..
//   kNibbles a line of the packed kW4 panel                        pair p: columns  8p.. and 16 + 8p..
//   kSplit   a line of the packed 8-bit panel, split in registers  pair p: low and high plane of columns 8p..
//   kPlanes  the same, split beforehand                            likewise
// With few rows the cores read the packed panel (it is memory that counts); with many, nibbles are first spread into a
// slab of bytes that stays in the L1 cache (it is the vector units that count).

enum PairSource { kBytes, kNibbles, kSplit, kPlanes };

constexpr int kSlabGroups = 8;      // groups per pass over the rows, so that the slab stays in L1
constexpr int kSlabRows = 8;        // rows from which spreading into a slab pays
constexpr int kFloatSlab = 128;     // inputs per pass over the rows of a float panel

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

template <PairSource S>
inline void load_pair(const uint8_t* group, int quad, int pair, __m256i* v) {
  const __m256i mask = _mm256_set1_epi8(15);
  if (S == kBytes || S == kPlanes) {
    const uint8_t* at = group + quad * (S == kBytes ? 128 : 256) + pair * 64;
    v[0] = _mm256_load_si256(reinterpret_cast<const __m256i*>(at));
    v[1] = _mm256_load_si256(reinterpret_cast<const __m256i*>(at + 32));
    return;
  }
  const uint8_t* at = group + quad * (S == kNibbles ? 64 : 128) + pair * 32;
  const __m256i both = _mm256_load_si256(reinterpret_cast<const __m256i*>(at));
  v[0] = _mm256_and_si256(both, mask);
  v[1] = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
}

template <bool kScaleF32>
inline __m256 load_scales(const uint8_t* at, int column) {
  if (kScaleF32) return _mm256_load_ps(reinterpret_cast<const float*>(at) + column);
  return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(at + 2 * column)));
}

inline __m256i broadcast_quad(const int8_t* x) {
  int32_t v;
  __builtin_memcpy(&v, x, 4);
  return _mm256_set1_epi32(v);
}

// Adds the pair sums of one k-quad of a row to two accumulators. In assembly because gcc regroups the sums of the
// unrolled steps and spills the products it delays.
inline void add_products(__m256i* acc, const __m256i* v, const int8_t* x) {
  typedef int32_t Quad __attribute__((may_alias, aligned(1)));
  __m256i first, second;
  __asm__(
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
  constexpr bool kJoin = S == kSplit || S == kPlanes;
  const CoreArgs a = args;  // else every store to the tile makes gcc load them again
  const uint8_t* group = a.w;
  const int8_t* x = a.q;
  const Factor* f = a.factors;
  for (int g = 0; g < a.groups; ++g, group += a.group_bytes, x += 4 * kQuads, f += a.ldf) {
    const uint8_t* scales = group + a.scales_at;
    const uint8_t* mins = group + a.mins_at;
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
          load_pair<S>(group, quad, pair + p, v);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const int8_t* at = x + r * a.ldx + 4 * quad;
            if (i == 0) {
              const __m256i row = broadcast_quad(at);
              acc[r][2 * p] = _mm256_maddubs_epi16(v[0], row);
              acc[r][2 * p + 1] = _mm256_maddubs_epi16(v[1], row);
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
        add_group<R, kMin, kScaleF32>(scales, mins, f, 8 * (pair + p), &sums[0][2 * p], 2 * P, a.tile);
      } else {
        const int first = S == kBytes ? 16 * (pair + p) : 8 * (pair + p);
        const int second = S == kBytes ? first + 8 : first + 16;
        add_group<R, kMin, kScaleF32>(scales, mins, f, first, &sums[0][2 * p], 2 * P, a.tile);
        add_group<R, kMin, kScaleF32>(scales, mins, f, second, &sums[0][2 * p + 1], 2 * P, a.tile);
      }
    }
  }
}

// All pairs of R rows.
template <PairSource S, int R, int P, int kQuads, int kFlush, bool kMin, bool kScaleF32>
void all_pairs(const CoreArgs& a) {
  constexpr int kPairs = S == kSplit || S == kPlanes ? 4 : 2;
  for (int pair = 0; pair < kPairs; pair += P) core<S, R, P, kQuads, kFlush, kMin, kScaleF32>(a, pair);
}

inline CoreArgs core_args(const RowBlock* b, int row, int first_group, int group_inputs, float* tile) {
  CoreArgs a = {};
  a.q = b->q + row * b->ldx + first_group * group_inputs;
  a.ldx = b->ldx;
  a.factors = b->factors + first_group * b->rows + row;
  a.ldf = b->rows;
  a.tile = tile + row * kPanel;
  return a;
}

// Calls `Core<R>` for every tile of at most kMost rows of the block.
template <template <int> class Core, int kMost>
inline void for_row_tiles(const RowBlock* b, CoreArgs a) {
  for (int left = b->rows; left > 0;) {
    int rows = left < kMost ? left : kMost;
    switch (rows) {
      case 1: Core<1>::run(a); break;
      case 2: Core<2>::run(a); break;
      case 3: Core<3>::run(a); break;
      case 4: Core<kMost < 4 ? 1 : 4>::run(a); break;
      case 5: Core<kMost < 5 ? 1 : 5>::run(a); break;
      default: Core<kMost < 6 ? 1 : 6>::run(a); rows = kMost;
    }
    left -= rows;
    a.q += rows * a.ldx;
    a.factors += rows;
    a.tile += rows * kPanel;
  }
}

// The cores of one weight format: in place (few rows) and over the slab (many rows).
template <bool kMin, bool kScaleF32>
struct W4 {
  template <int R> struct InPlace {
    static void run(const CoreArgs& a) { all_pairs<kNibbles, R, R < 3 ? 2 : 1, 8, 8, kMin, kScaleF32>(a); }
  };
  template <int R> struct Slab {
    static void run(const CoreArgs& a) { all_pairs<kBytes, R, 1, 8, 8, kMin, true>(a); }
  };
};

template <bool kMin, bool kScaleF32>
struct W5 {
  template <int R> struct InPlace {
    static void run(const CoreArgs& a) { all_pairs<kBytes, R, R == 1 ? 2 : 1, 8, 4, kMin, kScaleF32>(a); }
  };
};

struct W6 {
  template <int R> struct InPlace {
    static void run(const CoreArgs& a) { all_pairs<kBytes, R, R == 1 ? 2 : 1, 4, 2, false, true>(a); }
  };
};

struct W8 {
  template <int R> struct InPlace {
    static void run(const CoreArgs& a) { all_pairs<kSplit, R, R == 1 ? 4 : R == 2 ? 2 : 1, 8, 8, false, false>(a); }
  };
  template <int R> struct Slab {
    static void run(const CoreArgs& a) { all_pairs<kPlanes, R, 1, 8, 8, false, true>(a); }
  };
};

// Spreads groups of the packed panel into the slab: bytes (kW4) or planes (8-bit), then scales and mins as f32.
void fill_slab(const PackedWeight* w, const CoreArgs& from, uint8_t* slab, const CoreArgs& to) {
  const __m256i mask = _mm256_set1_epi8(15);
  const bool nibbles = w->format == kW4;
  const uint8_t* group = from.w;
  for (int g = 0; g < from.groups; ++g, group += from.group_bytes, slab += to.group_bytes) {
    for (int64_t at = 0; at < from.scales_at; at += 32) {
      const __m256i both = _mm256_load_si256(reinterpret_cast<const __m256i*>(group + at));
      uint8_t* out = slab + (nibbles ? at / 64 * 128 + at % 64 : 2 * at);
      _mm256_store_si256(reinterpret_cast<__m256i*>(out), _mm256_and_si256(both, mask));
      _mm256_store_si256(reinterpret_cast<__m256i*>(out + (nibbles ? 64 : 32)),
                         _mm256_and_si256(_mm256_srli_epi16(both, 4), mask));
    }
    for (int c = 0; c < kPanel; c += 8) {
      float* scales = reinterpret_cast<float*>(slab + to.scales_at) + c;
      float* mins = reinterpret_cast<float*>(slab + to.mins_at) + c;
      const uint8_t* s = group + from.scales_at;
      const uint8_t* m = group + from.mins_at;
      _mm256_store_ps(scales, w->scale_f32 ? load_scales<true>(s, c) : load_scales<false>(s, c));
      if (w->has_min) _mm256_store_ps(mins, w->scale_f32 ? load_scales<true>(m, c) : load_scales<false>(m, c));
    }
  }
}

inline void set_layout(CoreArgs* a, int64_t quant_bytes, bool scale_f32, bool has_min) {
  const int64_t scale_bytes = kPanel * (scale_f32 ? 4 : 2);
  a->scales_at = quant_bytes;
  a->mins_at = quant_bytes + scale_bytes;
  a->group_bytes = quant_bytes + scale_bytes * (has_min ? 2 : 1);
}

inline CoreArgs panel_args(const PackedWeight* w, const uint8_t* panel, const RowBlock* b, int first, int most,
                           float* tile) {
  CoreArgs a = core_args(b, 0, first, w->group, tile);
  set_layout(&a, static_cast<int64_t>(w->group) * kPanel / (w->format == kW4 ? 2 : 1), w->scale_f32, w->has_min);
  a.w = panel + first * a.group_bytes;
  a.groups = w->k / w->group - first < most ? w->k / w->group - first : most;
  return a;
}

// Few rows: once over the whole panel if one tile takes all rows, else in runs of groups that stay in L1.
template <class Format>
void panel_in_place(const PackedWeight* w, const uint8_t* panel, const RowBlock* b, float* tile) {
  const int groups = w->k / w->group;
  const int step = b->rows <= 3 ? groups : kSlabGroups;
  for (int first = 0; first < groups; first += step) {
    for_row_tiles<Format::template InPlace, 3>(b, panel_args(w, panel, b, first, step, tile));
  }
}

template <class Format>
void panel_by_slab(const PackedWeight* w, const uint8_t* panel, const RowBlock* b, float* tile) {
  if (b->rows < kSlabRows) return panel_in_place<Format>(w, panel, b, tile);
  alignas(64) uint8_t slab[kSlabGroups * (1024 + 256)];  // bytes with mins; half as many groups of planes fit as well
  const int step = w->format == kW4 ? kSlabGroups : kSlabGroups / 2;
  for (int first = 0; first < w->k / w->group; first += step) {
    CoreArgs a = panel_args(w, panel, b, first, step, tile);
    const CoreArgs from = a;
    set_layout(&a, w->format == kW4 ? 1024 : 2048, true, w->has_min);
    fill_slab(w, from, slab, a);
    a.w = slab;
    for_row_tiles<Format::template Slab, 6>(b, a);
  }
}

// Float panels: R rows by 32 columns over a run of inputs, sums in registers between two visits of the tile.
template <int kFormat>
inline void load_columns(const uint8_t* panel, int64_t i, __m256* v) {
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    if (kFormat == kF32) {
      v[c] = _mm256_load_ps(reinterpret_cast<const float*>(panel) + i * kPanel + 8 * c);
    } else if (kFormat == kF16) {
      v[c] = _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(panel + (i * kPanel + 8 * c) * 2)));
    } else {
      const __m256i pair = _mm256_load_si256(reinterpret_cast<const __m256i*>(panel + (i / 2 * kPanel + 8 * c) * 4));
      const __m256i odd = _mm256_and_si256(pair, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
      v[c] = _mm256_castsi256_ps(i % 2 == 0 ? _mm256_slli_epi32(pair, 16) : odd);
    }
  }
}

template <int kFormat, int R>
__attribute__((noinline)) void float_core(const uint8_t* panel, int64_t begin, int64_t end, const float* x,
                                          int64_t ldx, float* tile) {
  __m256 y[R][4], v[4];
#pragma GCC unroll 3
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) y[r][c] = _mm256_load_ps(tile + r * kPanel + 8 * c);
  }
#define HEADRACE_FLOAT_STEP(i)                                                                      \
  load_columns<kFormat>(panel, i, v);                                                               \
  _Pragma("GCC unroll 3") for (int r = 0; r < R; ++r) {                                             \
    const __m256 row = _mm256_set1_ps(x[r * ldx + (i)]);                                            \
    _Pragma("GCC unroll 4") for (int c = 0; c < 4; ++c) y[r][c] = _mm256_fmadd_ps(row, v[c], y[r][c]); \
  }
  int64_t i = begin;  // even
  for (; i + 1 < end; i += 2) {
    HEADRACE_FLOAT_STEP(i)
    HEADRACE_FLOAT_STEP(i + 1)
  }
  if (i < end) {
    HEADRACE_FLOAT_STEP(i)
  }
#undef HEADRACE_FLOAT_STEP
#pragma GCC unroll 3
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) _mm256_store_ps(tile + r * kPanel + 8 * c, y[r][c]);
  }
}

template <int kFormat>
void float_panel(const PackedWeight* w, const uint8_t* panel, const RowBlock* b, float* tile) {
  const int64_t step = b->rows <= 3 ? w->k : kFloatSlab;
  for (int64_t begin = 0; begin < w->k; begin += step) {
    const int64_t end = w->k - begin < step ? w->k : begin + step;
    for (int r = 0; r < b->rows; r += 3) {
      const float* x = b->x + r * b->ldx;
      float* y = tile + r * kPanel;
      switch (b->rows - r) {
        case 1: float_core<kFormat, 1>(panel, begin, end, x, b->ldx, y); break;
        case 2: float_core<kFormat, 2>(panel, begin, end, x, b->ldx, y); break;
        default: float_core<kFormat, 3>(panel, begin, end, x, b->ldx, y);
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
      if (!w->has_min) return panel_by_slab<W4<false, false>>;
      return w->scale_f32 ? panel_by_slab<W4<true, true>> : panel_by_slab<W4<true, false>>;
    default: break;
  }
  if (w->bits == 8) return panel_by_slab<W8>;
  if (w->bits == 6) return panel_in_place<W6>;
  if (!w->has_min) return panel_in_place<W5<false, false>>;
  return w->scale_f32 ? panel_in_place<W5<true, true>> : panel_in_place<W5<true, false>>;
}

void gemm(const GemmArgs* g, int32_t panel_begin, int32_t panel_end, int32_t row_begin, int32_t row_end) {
  run_gemm(g, panel_kernel(g->w), panel_begin, panel_end, row_begin, row_end);
}
