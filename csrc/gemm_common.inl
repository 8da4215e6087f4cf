// What the GEMMs of all instruction sets share: blocks of rows, per-group terms, and epilogues.
//
// A GEMM walks blocks of rows; inside one, panels; a panel kernel fills a tile [rows][kPanel] of f32 that starts at
// zero, and the epilogue takes the tile to the output while it is in cache. For quantised weights a panel kernel adds,
// for each group in ascending k and with s = the activations' scale of that group, exactly this float chain:
//   without min   y = fma(float(sum(q * x) - zero * sum(x)), w_scale * s, y)
//   with min      y = fma(w_min, s * sum(x), fma(float(sum(q * x)), w_scale * s, y))
// The sums are exact integers, so how they are made is free; the chain is not (rule 1 of kernels.h).

constexpr int kRowBlock = 96;        // most rows per block
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

// y * sigmoid(y). The exponent is held where e^x would overflow; a NaN stays one.
inline f32v silu(f32v y) {
  const f32v e = v_exp(v_min(v_set1(87.0f), v_sub(v_zero(), y)));
  return v_div(y, v_add(v_set1(1.0f), e));
}

// The tanh form of GELU, as y * sigmoid(2 u) with u = sqrt(2 / pi) (y + 0.044715 y^3).
inline f32v gelu_tanh(f32v y) {
  const f32v cube = v_mul(v_mul(y, y), v_mul(y, v_set1(0.044715f)));
  const f32v e = v_exp(v_min(v_set1(87.0f), v_mul(v_add(y, cube), v_set1(-2.0f * 0.7978845608f))));
  return v_div(y, v_add(v_set1(1.0f), e));
}

template <bool kGelu>
inline void finish_gated_row(const float* y, float* out, int count) {
  for (int j = 0; j < kPanel / 2; j += kLanes) {
    const f32v gate = v_load(y + j);
    const f32v gated = v_mul(kGelu ? gelu_tanh(gate) : silu(gate), v_load(y + kPanel / 2 + j));
    if (count - j >= kLanes) v_store(out + j, gated);
    else if (count > j) v_store_first(out + j, gated, count - j);
  }
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
