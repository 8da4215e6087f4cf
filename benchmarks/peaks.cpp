// What this core can do at most, as the yardstick of benchmarks/kernels.py and attention.py: multiply-adds of bytes and
// of bf16 and f32 in registers, and reading memory. Compiled by them into a shared library; every function returns a
// count of operations or bytes done.
#include <immintrin.h>

#include <cstdint>

#define EIGHT_TIMES(op) op("0") op("1") op("2") op("3") op("4") op("5") op("6") op("7")
#define MADDUBS(i) "vpmaddubsw %%ymm8, %%ymm9, %%ymm" i "\n\t"
#define DPBUSD(i) "vpdpbusd %%zmm8, %%zmm9, %%zmm" i "\n\t"
#define DPBF16(i) "vdpbf16ps %%zmm8, %%zmm9, %%zmm" i "\n\t"
#define FMA(i) "vfmadd231ps %%ymm8, %%ymm9, %%ymm" i "\n\t"
#define LOW_REGISTERS "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7"

// Eight independent instructions a round, each of so many multiply-adds, which count as two operations.
#define PEAK(name, instruction, multiply_adds)                                                                 \
  extern "C" int64_t name(int64_t rounds) {                                                                    \
    for (int64_t i = 0; i < rounds; ++i) __asm__ volatile(EIGHT_TIMES(instruction)::: LOW_REGISTERS);          \
    return rounds * 8 * 2 * multiply_adds;                                                                     \
  }

PEAK(run_maddubs, MADDUBS, 32)  // bytes
PEAK(run_dpbusd, DPBUSD, 64)    // bytes; only where there is AVX-512 with VNNI
PEAK(run_dpbf16, DPBF16, 32)    // bf16; only where there is AVX-512 with BF16
PEAK(run_fma, FMA, 8)           // f32

extern "C" int has_vnni() { return __builtin_cpu_supports("avx512vnni"); }

extern "C" __attribute__((target("avx2"))) int64_t read_memory(const uint8_t* data, int64_t bytes) {
  __m256i sums[8] = {};
  for (int64_t i = 0; i + 256 <= bytes; i += 256) {
    for (int j = 0; j < 8; ++j) {
      sums[j] = _mm256_xor_si256(sums[j], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + i + 32 * j)));
    }
  }
  for (int j = 0; j < 8; ++j) __asm__ volatile("" ::"x"(sums[j]));
  return bytes;
}
