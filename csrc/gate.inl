// Gated activation of two separate GEMM outputs: for layers whose gate and up rows are stored in different formats and
// so cannot share panels. The same functions as the fused epilogue.

void gate(const float* gate, const float* up, float* out, int64_t count, int32_t epilogue) {
  if (epilogue == kGeGLU) {
    for (int64_t i = 0; i < count; ++i) out[i] = gelu_tanh(gate[i]) * up[i];
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = silu(gate[i]) * up[i];
  }
}
