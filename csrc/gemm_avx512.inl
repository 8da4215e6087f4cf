// GEMM for AVX-512 with VNNI and BF16. vpdpbusd multiplies unsigned weight bytes by signed activations and adds four
// products into 32 bits, exactly; a k-quad of 16 columns is one register, and a panel two of them.
//
// The integer cores are inline assembly: gcc 12 copies and spills the accumulators of the intrinsic once there are more
// than about sixteen, at half the speed. Under HEADRACE_EMULATED_AVX512 (tests) they use the intrinsic.
// Float sums of R rows by 32 columns stay in registers over all groups.
//
// bf16 weights are multiplied by activations rounded to bf16, two inputs at a time in the order of vdpbf16ps.

constexpr int kQuantTile = 6;         // rows whose 12 integer and 12 float sums stay in registers beside the weights
constexpr int kQuantTileMin = 5;      // with mins, that take registers too
constexpr int kFloatTile = 12;        // 24 sums: few tiles read a panel again
constexpr int kBF16Slab = 256;        // inputs per pass over the rows of a bf16 panel

inline void dot_quads(__m512i* acc, __m512i weights, const int8_t* x) {
#ifdef HEADRACE_EMULATED_AVX512
  int32_t quad;
  __builtin_memcpy(&quad, x, 4);
  *acc = _mm512_dpbusd_epi32(*acc, weights, _mm512_set1_epi32(quad));
#else
  typedef int32_t Quad __attribute__((may_alias, aligned(1)));
  __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(*acc) : "v"(weights), "m"(*reinterpret_cast<const Quad*>(x)));
#endif
}

template <bool kNibbles>
inline void load_quad(const uint8_t* group, int quad, __m512i* v) {
  const __m512i line = _mm512_load_si512(group + quad * (kNibbles ? 64 : 128));
  if (kNibbles) {
    const __m512i mask = _mm512_set1_epi8(15);
    v[0] = _mm512_and_si512(line, mask);
    v[1] = _mm512_and_si512(_mm512_srli_epi16(line, 4), mask);
  } else {
    v[0] = line;
    v[1] = _mm512_load_si512(group + quad * 128 + 64);
  }
}

template <bool kScaleF32>
inline __m512 load_scales(const uint8_t* at, int column) {
  if (kScaleF32) return _mm512_load_ps(reinterpret_cast<const float*>(at) + column);
  return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(at + 2 * column)));
}

// A tile of the rows of a block: its first row, and which of how many it is.
struct Tile { int row, index, count; };

template <int R>
struct Rows { static constexpr int value = R; };

// Calls run(Rows<rows>, tile): at most kMost rows.
template <int kMost, typename Run>
inline void with_rows(int rows, const Tile& tile, const Run& run) {
  if constexpr (kMost > 1) {
    if (rows < kMost) return with_rows<kMost - 1>(rows, tile, run);
  }
  run(Rows<kMost>(), tile);
}

// Cuts rows into the fewest tiles of at most kMost, of nearly one size: one row costs as much as three.
template <int kMost, typename Run>
inline void for_row_tiles(int rows, const Run& run) {
  const int tiles = (rows + kMost - 1) / kMost;
  for (int i = 0, row = 0; i < tiles; ++i) {
    const int count = (rows - row + tiles - i - 1) / (tiles - i);
    with_rows<kMost>(count, {row, i, tiles}, run);
    row += count;
  }
}

// R rows by 32 columns over a whole panel. With one or two rows the sums of even and odd quads are kept apart, to hide
// the latency of vpdpbusd.
template <bool kNibbles, int R, int kQuads, bool kMin, bool kScaleF32>
__attribute__((noinline)) void core(const PackedWeight* w, const uint8_t* group, const RowBlock* b, const Tile& t,
                                    float* tile) {
  constexpr int kWays = R <= 2 ? 2 : 1;
  constexpr int kScalesAt = kQuads * (kNibbles ? 64 : 128);
  constexpr int kScaleBytes = kPanel * (kScaleF32 ? 4 : 2);
  constexpr int kGroupBytes = kScalesAt + kScaleBytes * (1 + kMin);
  // One tile asks for what it needs itself soon; several share in asking for the next panel, so that memory works
  // during all of them. Ready values are left to the hardware, which does them better.
  const int64_t ahead = t.count > 1 ? w->panel_bytes : kPrefetchAhead;
  int turn = t.index;
  const int groups = w->k / (4 * kQuads), row = t.row;
  const int8_t* x = b->q + row * b->ldx;
  const int64_t ldx = b->ldx, rows = b->rows;
  const Factor* f = b->factors + row;
  __m512 y[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) y[r][0] = y[r][1] = _mm512_setzero_ps();
  for (int g = 0; g < groups; ++g, group += kGroupBytes, x += 4 * kQuads, f += rows) {
    if (kNibbles && turn-- == 0) {
      prefetch_stream(group + ahead, kGroupBytes);
      turn = t.count - 1;
    }
    __m512i acc[R][2][kWays];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      acc[r][0][0] = acc[r][1][0] = kMin ? _mm512_setzero_si512() : _mm512_set1_epi32(f[r].zero_term);
      if (kWays == 2) acc[r][0][kWays - 1] = acc[r][1][kWays - 1] = _mm512_setzero_si512();
    }
#pragma GCC unroll 8
    for (int quad = 0; quad < kQuads; ++quad) {
      __m512i v[2];
      load_quad<kNibbles>(group, quad, v);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        dot_quads(&acc[r][0][quad % kWays], v[0], x + r * ldx + 4 * quad);
        dot_quads(&acc[r][1][quad % kWays], v[1], x + r * ldx + 4 * quad);
      }
    }
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
      const __m512 w_scale = load_scales<kScaleF32>(group + kScalesAt, 16 * c);
      __m512 w_min;
      if (kMin) w_min = load_scales<kScaleF32>(group + kScalesAt + kScaleBytes, 16 * c);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const __m512i sum = kWays == 2 ? _mm512_add_epi32(acc[r][c][0], acc[r][c][kWays - 1]) : acc[r][c][0];
        const __m512 factor = _mm512_mul_ps(w_scale, _mm512_set1_ps(f[r].scale));
        y[r][c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), factor, y[r][c]);
        if (kMin) y[r][c] = _mm512_fmadd_ps(w_min, _mm512_set1_ps(f[r].min_term), y[r][c]);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    _mm512_store_ps(tile + (row + r) * kPanel, y[r][0]);
    _mm512_store_ps(tile + (row + r) * kPanel + 16, y[r][1]);
  }
}

template <bool kNibbles, int kQuads, bool kMin, bool kScaleF32>
void quantised_panel(const PackedWeight* w, const uint8_t* panel, const RowBlock* b, float* tile) {
  for_row_tiles<kMin ? kQuantTileMin : kQuantTile>(b->rows, [&](auto rows, const Tile& t) {
    core<kNibbles, decltype(rows)::value, kQuads, kMin, kScaleF32>(w, panel, b, t, tile);
  });
}

// f32 and f16 panels: R rows by 32 columns, one fused multiply-add per input.
template <bool kHalf, int R>
__attribute__((noinline)) void float_core(const uint8_t* panel, int64_t k, const float* x, int64_t ldx, float* tile) {
  __m512 y[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) y[r][0] = y[r][1] = _mm512_setzero_ps();
  for (int64_t i = 0; i < k; ++i, panel += kPanel * (kHalf ? 2 : 4)) {
    const __m512 v[2] = {load_scales<!kHalf>(panel, 0), load_scales<!kHalf>(panel, 16)};
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const __m512 row = _mm512_set1_ps(x[r * ldx + i]);
      y[r][0] = _mm512_fmadd_ps(row, v[0], y[r][0]);
      y[r][1] = _mm512_fmadd_ps(row, v[1], y[r][1]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    _mm512_store_ps(tile + r * kPanel, y[r][0]);
    _mm512_store_ps(tile + r * kPanel + 16, y[r][1]);
  }
}

template <bool kHalf>
void float_panel(const PackedWeight* w, const uint8_t* panel, const RowBlock* b, float* tile) {
  for_row_tiles<kFloatTile>(b->rows, [&](auto rows, const Tile& t) {
    float_core<kHalf, decltype(rows)::value>(panel, w->k, b->x + t.row * b->ldx, b->ldx, tile + t.row * kPanel);
  });
}

inline __m512bh load_bf16(const uint8_t* at) { return (__m512bh)_mm512_load_si512(at); }

inline __m512bh broadcast_bf16_pair(const uint16_t* x) {
  int32_t pair;
  __builtin_memcpy(&pair, x, 4);
  return (__m512bh)_mm512_set1_epi32(pair);
}

// bf16 panels: x holds rows of kBF16Slab rounded activations; sums go on from the tile.
template <int R>
__attribute__((noinline)) void bf16_core(const uint8_t* panel, int pairs, const uint16_t* x, float* tile) {
  __m512 y[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    y[r][0] = _mm512_load_ps(tile + r * kPanel);
    y[r][1] = _mm512_load_ps(tile + r * kPanel + 16);
  }
  for (int i = 0; i < pairs; ++i, panel += 2 * 2 * kPanel) {
    const __m512bh v[2] = {load_bf16(panel), load_bf16(panel + 64)};
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const __m512bh row = broadcast_bf16_pair(x + r * kBF16Slab + 2 * i);
      y[r][0] = _mm512_dpbf16_ps(y[r][0], row, v[0]);
      y[r][1] = _mm512_dpbf16_ps(y[r][1], row, v[1]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    _mm512_store_ps(tile + r * kPanel, y[r][0]);
    _mm512_store_ps(tile + r * kPanel + 16, y[r][1]);
  }
}

// Rounds inputs [begin, begin + count) of every row; the second of a last odd pair becomes zero.
void round_to_bf16(const RowBlock* b, int64_t begin, int64_t count, uint16_t* out) {
  for (int r = 0; r < b->rows; ++r, out += kBF16Slab) {
    const float* x = b->x + r * b->ldx + begin;
    for (int64_t i = 0; i < count; i += 16) {
      const __mmask16 mask = static_cast<__mmask16>(count - i < 16 ? (1 << (count - i)) - 1 : 0xffff);
      const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, x + i));
      _mm256_store_si256(reinterpret_cast<__m256i*>(out + i), rounded);
    }
  }
}

void bf16_panel(const PackedWeight* w, const uint8_t* panel, const RowBlock* b, float* tile) {
  alignas(64) uint16_t x[kRowBlock * kBF16Slab];
  for (int64_t begin = 0; begin < w->k; begin += kBF16Slab) {
    const int64_t count = w->k - begin < kBF16Slab ? w->k - begin : kBF16Slab;
    const int pairs = static_cast<int>((count + 1) / 2);
    const uint8_t* at = panel + begin * 2 * kPanel;
    round_to_bf16(b, begin, count, x);
    for_row_tiles<kFloatTile>(b->rows, [&](auto rows, const Tile& t) {
      bf16_core<decltype(rows)::value>(at, pairs, x + t.row * kBF16Slab, tile + t.row * kPanel);
    });
  }
}

PanelKernel panel_kernel(const PackedWeight* w) {
  switch (w->format) {
    case kF32: return float_panel<false>;
    case kF16: return float_panel<true>;
    case kBF16: return bf16_panel;
    case kW4:
      if (!w->has_min) return quantised_panel<true, 8, false, false>;
      return w->scale_f32 ? quantised_panel<true, 8, true, true> : quantised_panel<true, 8, true, false>;
    default: break;
  }
  if (w->group == 16) return quantised_panel<false, 4, false, true>;
  if (!w->has_min) return quantised_panel<false, 8, false, false>;
  return w->scale_f32 ? quantised_panel<false, 8, true, true> : quantised_panel<false, 8, true, false>;
}

void gemm(const GemmArgs* g, int32_t panel_begin, int32_t panel_end, int32_t row_begin, int32_t row_end) {
  run_gemm(g, panel_kernel(g->w), panel_begin, panel_end, row_begin, row_end);
}
