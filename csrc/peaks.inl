// What one core can do at most with this instruction set: the yardsticks of `headrace profile`. Included by each ISA
// file. The products run in registers that nothing reads, so they stand in assembly: twelve independent chains.
// Portable C++ (the reference, the emulation) has float products only.

#if defined(HEADRACE_EMULATED_AVX512) || defined(HEADRACE_ISA_REFERENCE)
#define HEADRACE_PORTABLE_PEAKS
#endif

#ifdef HEADRACE_PORTABLE_PEAKS

int64_t peak_products(int32_t kind, int64_t rounds) {
  if (kind != kPeakFp32) return 0;  // built from other operations
  constexpr int kLanes = 48;
  float sums[kLanes] = {};
  float x = 1.0f;
  for (int64_t i = 0; i < rounds; ++i) {
    asm volatile("" : "+m"(x));
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] += x * x;
    asm volatile("" : : "r"(sums) : "memory");
  }
  return rounds * kLanes * 2;
}

#else

#define HEADRACE_12(op) op("0") op("1") op("2") op("3") op("4") op("5") op("6") op("7") op("8") op("9") op("10") op("11")
#define HEADRACE_48(op) HEADRACE_12(op) HEADRACE_12(op) HEADRACE_12(op) HEADRACE_12(op)
#define HEADRACE_ZERO(i) "vpxor %%xmm" i ", %%xmm" i ", %%xmm" i "\n\t"
#define HEADRACE_RUN(op)                                                                                           \
  for (int64_t i = 0; i < rounds; ++i) {                                                                           \
    asm volatile(HEADRACE_12(HEADRACE_ZERO) HEADRACE_ZERO("12") HEADRACE_ZERO("13") HEADRACE_48(op)::              \
                     : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",    \
                       "xmm11", "xmm12", "xmm13");                                                                 \
  }

#ifdef HEADRACE_ISA_AVX512
#define HEADRACE_INT8(i) "vpdpbusd %%zmm12, %%zmm13, %%zmm" i "\n\t"
#define HEADRACE_BF16(i) "vdpbf16ps %%zmm12, %%zmm13, %%zmm" i "\n\t"
#define HEADRACE_FP32(i) "vfmadd231ps %%zmm12, %%zmm13, %%zmm" i "\n\t"
constexpr int kPeakInt8Ops = 128, kPeakFp32Ops = 32;  // of one instruction
#else
#define HEADRACE_INT8(i) "vpmaddubsw %%ymm12, %%ymm13, %%ymm" i "\n\t"
#define HEADRACE_FP32(i) "vfmadd231ps %%ymm12, %%ymm13, %%ymm" i "\n\t"
constexpr int kPeakInt8Ops = 64, kPeakFp32Ops = 16;
#endif

int64_t peak_products(int32_t kind, int64_t rounds) {
  if (kind == kPeakInt8) {
    HEADRACE_RUN(HEADRACE_INT8)
    return rounds * 48 * kPeakInt8Ops;
  }
  if (kind == kPeakFp32) {
    HEADRACE_RUN(HEADRACE_FP32)
    return rounds * 48 * kPeakFp32Ops;
  }
#ifdef HEADRACE_ISA_AVX512
  HEADRACE_RUN(HEADRACE_BF16)
  return rounds * 48 * 64;
#else
  return 0;  // no such instruction
#endif
}

#endif

// Reads with the widest loads the compiler has; `data` is 64-byte aligned, `bytes` a multiple of 1,024. Two streams at
// once: a core keeps more lines in flight for two than for one, by half of the bandwidth.
int64_t peak_read(const uint8_t* data, int64_t bytes) {
  typedef uint64_t Line __attribute__((vector_size(64), may_alias));
  Line a = {}, b = {}, c = {}, d = {};
  for (int64_t at = 0; at < bytes / 2; at += 256) {
    const Line* x = reinterpret_cast<const Line*>(data + at);
    const Line* y = reinterpret_cast<const Line*>(data + bytes / 2 + at);
    a ^= x[0] ^ y[0];
    b ^= x[1] ^ y[1];
    c ^= x[2] ^ y[2];
    d ^= x[3] ^ y[3];
  }
  a ^= b ^ c ^ d;
  asm volatile("" : : "m"(a));
  return bytes;
}
