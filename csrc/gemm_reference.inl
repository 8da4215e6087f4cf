// GEMM in plain C++, for any CPU: the readable statement of what the others compute.

inline float panel_scale(const PackedWeight* w, const uint8_t* at, int lane) {
  if (w->scale_f32) return bits_to_float(load_u32(at + 4 * lane));
  return half_to_float(load_u16(at + 2 * lane));
}

inline void reference_group_sums(const PackedWeight* w, const uint8_t* quants, const int8_t* x, int32_t* sums) {
  for (int lane = 0; lane < kPanel; ++lane) sums[lane] = 0;
  for (int i = 0; i < w->group; ++i) {
    for (int lane = 0; lane < kPanel; ++lane) {
      int q;
      if (w->format == kW8) {
        q = quants[i / 4 * 128 + lane * 4 + i % 4];
      } else {
        q = quants[i / 4 * 64 + lane % 16 * 4 + i % 4] >> (lane < 16 ? 0 : 4) & 15;
      }
      sums[lane] += q * x[i];
    }
  }
}

void reference_quantised_panel(const PackedWeight* w, const uint8_t* panel, const RowBlock* b, float* tile) {
  const int groups = w->k / w->group;
  const int64_t group_bytes = w->panel_bytes / groups;
  const int64_t scales_at = static_cast<int64_t>(w->group) * kPanel / (w->format == kW4 ? 2 : 1);
  const int64_t mins_at = scales_at + kPanel * (w->scale_f32 ? 4 : 2);
  for (int g = 0; g < groups; ++g, panel += group_bytes) {
    float scales[kPanel], mins[kPanel] = {};
    for (int lane = 0; lane < kPanel; ++lane) {
      scales[lane] = panel_scale(w, panel + scales_at, lane);
      if (w->has_min) mins[lane] = panel_scale(w, panel + mins_at, lane);
    }
    for (int r = 0; r < b->rows; ++r) {
      int32_t sums[kPanel];
      reference_group_sums(w, panel, b->q + r * b->ldx + g * w->group, sums);
      const Factor& f = b->factors[g * b->rows + r];
      float* y = tile + r * kPanel;
      for (int lane = 0; lane < kPanel; ++lane) {
        const int32_t sum = w->has_min ? sums[lane] : sums[lane] + f.zero_term;
        y[lane] += static_cast<float>(sum) * (scales[lane] * f.scale);
        if (w->has_min) y[lane] += mins[lane] * f.min_term;
      }
    }
  }
}

inline float panel_float(const PackedWeight* w, const uint8_t* panel, int64_t i, int lane) {
  if (w->format == kF32) return bits_to_float(load_u32(panel + (i * kPanel + lane) * 4));
  if (w->format == kF16) return half_to_float(load_u16(panel + (i * kPanel + lane) * 2));
  return bfloat_to_float(load_u16(panel + ((i / 2 * kPanel + lane) * 2 + i % 2) * 2));
}

void reference_float_panel(const PackedWeight* w, const uint8_t* panel, const RowBlock* b, float* tile) {
  for (int64_t i = 0; i < w->k; ++i) {
    float column[kPanel];
    for (int lane = 0; lane < kPanel; ++lane) column[lane] = panel_float(w, panel, i, lane);
    for (int r = 0; r < b->rows; ++r) {
      const float x = b->x[r * b->ldx + i];
      for (int lane = 0; lane < kPanel; ++lane) tile[r * kPanel + lane] += x * column[lane];
    }
  }
}

void gemm(const GemmArgs* g, int32_t panel_begin, int32_t panel_end, int32_t row_begin, int32_t row_end) {
  run_gemm(g, g->w->group == 0 ? reference_float_panel : reference_quantised_panel, panel_begin, panel_end, row_begin,
           row_end);
}
