// Gated activation of two separate GEMM outputs: for layers whose gate and up rows are stored in different formats and
// so cannot share panels. The same functions as the fused epilogue.

void gate(const float* gate, const float* up, float* out, int64_t count, int32_t epilogue) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const bool whole = count - i >= kLanes;
    const f32v x = whole ? v_load(gate + i) : v_load_first(gate + i, count - i, 0.0f);
    const f32v y = whole ? v_load(up + i) : v_load_first(up + i, count - i, 0.0f);
    const f32v gated = v_mul(epilogue == kGeGLU ? gelu_tanh(x) : silu(x), y);
    if (whole) v_store(out + i, gated);
    else v_store_first(out + i, gated, count - i);
  }
}
