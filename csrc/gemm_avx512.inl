// GEMM for AVX-512 with VNNI and BF16. vpdpbusd multiplies unsigned weight bytes by signed activations and adds four
// products into 32 bits, exactly; a k-quad of 16 columns is one register, and a panel two of them.
//
// The integer cores are inline assembly: gcc 12 copies and spills the accumulators of the intrinsic once there are more
// than about sixteen, at half the speed. Under HEADRACE_EMULATED_AVX512 (tests) they use the intrinsic.
// Float sums of R rows by 32 columns stay in registers over all groups.
//
// bf16 weights are multiplied by activations rounded to bf16, two inputs at a time in the order of vdpbf16ps.

constexpr int kRowTile = 4;           // 8 integer and 8 float accumulators: enough to hide latencies, and no spills
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

// R rows by 32 columns over a whole panel. With one or two rows the sums of even and odd quads are kept apart, to hide
// the latency of vpdpbusd.
template <bool kNibbles, int R, int kQuads, bool kMin, bool kScaleF32>
__attribute__((noinline)) void core(const uint8_t* group, int groups, const RowBlock* b, int row, float* tile) {
  constexpr int kWays = R <= 2 ? 2 : 1;
  constexpr int kScalesAt = kQuads * (kNibbles ? 64 : 128);
  constexpr int kScaleBytes = kPanel * (kScaleF32 ? 4 : 2);
  const int8_t* x = b->q + row * b->ldx;
  const int64_t ldx = b->ldx, rows = b->rows;
  const Factor* f = b->factors + row;
  __m512 y[R][2];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) y[r][0] = y[r][1] = _mm512_setzero_ps();
  for (int g = 0; g < groups; ++g, group += kScalesAt + kScaleBytes * (1 + kMin), x += 4 * kQuads, f += rows) {
    if (kNibbles && row == 0) prefetch_stream(group + kPrefetchAhead, kScalesAt + kScaleBytes * (1 + kMin));
    __m512i acc[R][2][kWays];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      acc[r][0][0] = acc[r][1][0] = kMin ? _mm512_setzero_si512() : _mm512_set1_epi32(f[r].zero_term);
      if (kWays == 2) acc[r][0][kWays - 1] = acc[r][1][kWays - 1] = _mm512_setzero_si512();
    }
#pragma GCC unroll 8
    for (int quad = 0; quad < kQuads; ++quad) {
      __m512i v[2];
      load_quad<kNibbles>(group, quad, v);
#pragma GCC unroll 6
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
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const __m512i sum = kWays == 2 ? _mm512_add_epi32(acc[r][c][0], acc[r][c][kWays - 1]) : acc[r][c][0];
        const __m512 factor = _mm512_mul_ps(w_scale, _mm512_set1_ps(f[r].scale));
        y[r][c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), factor, y[r][c]);
        if (kMin) y[r][c] = _mm512_fmadd_ps(w_min, _mm512_set1_ps(f[r].min_term), y[r][c]);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    _mm512_store_ps(tile + (row + r) * kPanel, y[r][0]);
    _mm512_store_ps(tile + (row + r) * kPanel + 16, y[r][1]);
  }
}

template <bool kNibbles, int kQuads, bool kMin, bool kScaleF32>
void quantised_panel(const PackedWeight* w, const uint8_t* panel, const RowBlock* b, float* tile) {
  const int groups = w->k / (4 * kQuads);
  for (int row = 0; row < b->rows; row += kRowTile) {
    switch (b->rows - row) {
      case 1: core<kNibbles, 1, kQuads, kMin, kScaleF32>(panel, groups, b, row, tile); break;
      case 2: core<kNibbles, 2, kQuads, kMin, kScaleF32>(panel, groups, b, row, tile); break;
      case 3: core<kNibbles, 3, kQuads, kMin, kScaleF32>(panel, groups, b, row, tile); break;
        default: core<kNibbles, kRowTile, kQuads, kMin, kScaleF32>(panel, groups, b, row, tile);
    }
  }
}

// f32 and f16 panels: R rows by 32 columns, one fused multiply-add per input.
template <bool kHalf, int R>
__attribute__((noinline)) void float_core(const uint8_t* panel, int64_t k, const float* x, int64_t ldx, float* tile) {
  __m512 y[R][2];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) y[r][0] = y[r][1] = _mm512_setzero_ps();
  for (int64_t i = 0; i < k; ++i, panel += kPanel * (kHalf ? 2 : 4)) {
    const __m512 v[2] = {load_scales<!kHalf>(panel, 0), load_scales<!kHalf>(panel, 16)};
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m512 row = _mm512_set1_ps(x[r * ldx + i]);
      y[r][0] = _mm512_fmadd_ps(row, v[0], y[r][0]);
      y[r][1] = _mm512_fmadd_ps(row, v[1], y[r][1]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    _mm512_store_ps(tile + r * kPanel, y[r][0]);
    _mm512_store_ps(tile + r * kPanel + 16, y[r][1]);
  }
}

template <bool kHalf>
void float_panel(const PackedWeight* w, const uint8_t* panel, const RowBlock* b, float* tile) {
  for (int row = 0; row < b->rows; row += kRowTile) {
    const float* x = b->x + row * b->ldx;
    float* y = tile + row * kPanel;
    switch (b->rows - row) {
      case 1: float_core<kHalf, 1>(panel, w->k, x, b->ldx, y); break;
      case 2: float_core<kHalf, 2>(panel, w->k, x, b->ldx, y); break;
      case 3: float_core<kHalf, 3>(panel, w->k, x, b->ldx, y); break;
      default: float_core<kHalf, kRowTile>(panel, w->k, x, b->ldx, y);
    }
  }
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
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    y[r][0] = _mm512_load_ps(tile + r * kPanel);
    y[r][1] = _mm512_load_ps(tile + r * kPanel + 16);
  }
  for (int i = 0; i < pairs; ++i, panel += 2 * 2 * kPanel) {
    const __m512bh v[2] = {load_bf16(panel), load_bf16(panel + 64)};
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m512bh row = broadcast_bf16_pair(x + r * kBF16Slab + 2 * i);
      y[r][0] = _mm512_dpbf16_ps(y[r][0], row, v[0]);
      y[r][1] = _mm512_dpbf16_ps(y[r][1], row, v[1]);
    }
  }
#pragma GCC unroll 6
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
    for (int row = 0; row < b->rows; row += kRowTile) {
      switch (b->rows - row) {
        case 1: bf16_core<1>(at, pairs, x + row * kBF16Slab, tile + row * kPanel); break;
        case 2: bf16_core<2>(at, pairs, x + row * kBF16Slab, tile + row * kPanel); break;
        case 3: bf16_core<3>(at, pairs, x + row * kBF16Slab, tile + row * kPanel); break;
            default: bf16_core<kRowTile>(at, pairs, x + row * kBF16Slab, tile + row * kPanel);
      }
    }
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
