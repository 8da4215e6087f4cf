// What the GEMMs of all instruction sets share: blocks of rows, per-group terms, and epilogues.
//
// A GEMM walks blocks of rows; inside one, panels; a panel kernel fills a tile [rows][kPanel] of f32 that starts at
// zero, and the epilogue takes the tile to the output while it is in cache. For quantised weights a panel kernel adds,
// for each group in ascending k and with s = the activations' scale of that group, exactly this float chain:
//   without min   y = fma(float(sum(q * x) - zero * sum(x)), w_scale * s, y)
//   with min      y = fma(w_min, s * sum(x), fma(float(sum(q * x)), w_scale * s, y))
// The sums are exact integers, so how they are made is free; the chain is not (rule 1 of kernels.h).

constexpr int kRowBlock = 96;        // most rows per block: a multiple of every kernel's row tile
constexpr int kMaxFactors = 8192;    // groups times rows of one block
constexpr int kPrefetchAhead = 2048; // bytes of weights
constexpr int kBlockBytes = 1 << 18; // activations of a block of rows that should stay in the L2 cache

// What one row contributes to the float chain of one group, beside the integer sum.
struct Factor {
  float scale;  // s
  union {
    float min_term;     // s * sum(x), for weights with a min
    int32_t zero_term;  // -zero * sum(x), for those without
  };
};

// Up to kRowBlock rows of activations as a panel kernel reads them.
struct RowBlock {
  int rows;
  const int8_t* q;       // [rows][ldx]
  const float* x;        // [rows][ldx]
  int64_t ldx;
  const Factor* factors; // [weight groups][rows]: the rows of a tile lie side by side
};

typedef void (*PanelKernel)(const PackedWeight* w, const uint8_t* panel, const RowBlock* rows, float* tile);

// Asks for `bytes` of a weight stream before they are needed. Worth a fifth to two fifths where weights are unpacked on
// the way (measured on Zen 3); streams of ready values are left to the hardware, which does them better.
inline void prefetch_stream(const uint8_t* at, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i);
}

inline int rows_per_block(const PackedWeight* w) {
  const int64_t row_bytes = static_cast<int64_t>(w->k) * (w->group == 0 ? 4 : 1);
  int64_t rows = kBlockBytes / row_bytes;
  if (rows > kRowBlock) rows = kRowBlock;
  if (w->group != 0 && rows > kMaxFactors / (w->k / w->group)) rows = kMaxFactors / (w->k / w->group);
  if (rows >= 12) return static_cast<int>(rows / 12 * 12);
  return rows < 1 ? 1 : static_cast<int>(rows);
}

RowBlock row_block(const GemmArgs* g, int row, int rows, Factor* factors) {
  const PackedWeight* w = g->w;
  const Activations* a = g->a;
  RowBlock b = {};
  b.rows = rows;
  b.ldx = a->k_pad;
  if (w->group == 0) {
    b.x = a->f32 + row * b.ldx;
    return b;
  }
  b.q = a->q + row * b.ldx;
  b.factors = factors;
  const int zero = 1 << (w->bits - 1);
  for (int r = 0; r < rows; ++r) {
    const int16_t* sum = a->sum + (row + r) * (a->k_pad / 16);
    const float* scale = a->scale + (row + r) * (a->k_pad / kQuantGroup);
    Factor* f = factors + r;
    for (int i = 0; i < w->k / w->group; ++i, f += rows) {
      const int total = w->group == 16 ? sum[i] : sum[2 * i] + sum[2 * i + 1];
      f->scale = scale[i * w->group / kQuantGroup];
      if (w->has_min) {
        f->min_term = f->scale * static_cast<float>(total);
      } else {
        f->zero_term = -zero * total;
      }
    }
  }
  return b;
}

// exp by Cody-Waite reduction and the Taylor series to degree 7 (relative error below 2e-7). No branches, so the
// compiler vectorises the epilogue loops; a NaN stays NaN.
inline float exp_clamped(float x) {
  x = x > 88.0f ? 88.0f : x;
  x = x < -87.0f ? -87.0f : x;
  const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the low bits become the rounded integer
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  uint32_t bits;
  __builtin_memcpy(&bits, &shifted, 4);
  bits = (bits << 23) + 0x3f800000u;
  float power;
  __builtin_memcpy(&power, &bits, 4);
  return p * power;
}

inline float silu(float y) { return y / (1.0f + exp_clamped(-y)); }

// The tanh form of GELU, as y * sigmoid(2 u).
inline float gelu_tanh(float y) {
  const float u = 0.7978845608f * (y + 0.044715f * y * y * y);
  return y / (1.0f + exp_clamped(-2.0f * u));
}

template <bool kGelu>
inline void finish_gated_row(const float* y, float* out, int count) {
  float gated[kPanel / 2];
  for (int j = 0; j < kPanel / 2; ++j) gated[j] = (kGelu ? gelu_tanh(y[j]) : silu(y[j])) * y[kPanel / 2 + j];
  for (int j = 0; j < count; ++j) out[j] = gated[j];
}

inline void finish_row(int epilogue, const float* y, float* out, int count) {
  if (count == kPanel) {
    if (epilogue == kAddTo) {
      for (int j = 0; j < kPanel; ++j) out[j] += y[j];
    } else {
      for (int j = 0; j < kPanel; ++j) out[j] = y[j];
    }
    return;
  }
  for (int j = 0; j < count; ++j) out[j] = epilogue == kAddTo ? out[j] + y[j] : y[j];
}

void finish_tile(const GemmArgs* g, int panel, int row, int rows, float* tile) {
  const bool gated = g->epilogue == kSwiGLU || g->epilogue == kGeGLU;
  const int width = gated ? kPanel / 2 : kPanel;
  const int left = (gated ? g->w->n / 2 : g->w->n) - panel * width;
  const int count = left < width ? left : width;
  const int columns = g->w->n - panel * kPanel < kPanel ? g->w->n - panel * kPanel : kPanel;
  float* out = g->out + row * g->ldo + panel * width;
  for (int r = 0; r < rows; ++r, tile += kPanel, out += g->ldo) {
    if (g->bias != nullptr) {
      for (int j = 0; j < columns; ++j) tile[j] += g->bias[panel * kPanel + j];
    }
    if (g->epilogue == kSwiGLU) {
      finish_gated_row<false>(tile, out, count);
    } else if (g->epilogue == kGeGLU) {
      finish_gated_row<true>(tile, out, count);
    } else {
      finish_row(g->epilogue, tile, out, count);
    }
  }
}

void run_gemm(const GemmArgs* g, PanelKernel kernel, int panel_begin, int panel_end, int row_begin, int row_end) {
  alignas(64) float tile[kRowBlock * kPanel];
  alignas(64) Factor factors[kMaxFactors];
  const int block = rows_per_block(g->w);
  for (int row = row_begin; row < row_end; row += block) {
    const int rows = row_end - row < block ? row_end - row : block;
    const RowBlock b = row_block(g, row, rows, factors);
    for (int panel = panel_begin; panel < panel_end; ++panel) {
      __builtin_memset(tile, 0, sizeof(float) * kPanel * rows);
      kernel(g->w, g->w->data + panel * g->w->panel_bytes, &b, tile);
      finish_tile(g, panel, row, rows, tile);
    }
  }
}
