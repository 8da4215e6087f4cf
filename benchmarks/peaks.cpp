// What this core can do at most, as the yardstick of benchmarks/kernels.py and attention.py: multiply-adds of bytes and
// of bf16 and f32 in registers, and reading memory. Compiled by them into a shared library; every function returns a
// count of operations or bytes done.
#include <immintrin.h>

#include <cstdint>

#define EIGHT_TIMES(op) op("0") op("1") op("2") op("3") op("4") op("5") op("6") op("7")
#define MADDUBS(i) "vpmaddubsw %%ymm8, %%ymm9, %%ymm" i "\n\t"
#define DPBUSD(i) "vpdpbusd %%zmm8, %%zmm9, %%zmm" i "\n\t"
#define LOW_REGISTERS "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7"

// 32 multiply-adds of bytes an instruction.
extern "C" int64_t run_maddubs(int64_t rounds) {
  for (int64_t i = 0; i < rounds; ++i) __asm__ volatile(EIGHT_TIMES(MADDUBS)::: LOW_REGISTERS);
  return rounds * 8 * 64;
}

// 64 multiply-adds of bytes an instruction. Only where there is AVX-512 with VNNI.
extern "C" int64_t run_dpbusd(int64_t rounds) {
  for (int64_t i = 0; i < rounds; ++i) __asm__ volatile(EIGHT_TIMES(DPBUSD)::: LOW_REGISTERS);
  return rounds * 8 * 128;
}

#define DPBF16(i) "vdpbf16ps %%zmm8, %%zmm9, %%zmm" i "\n\t"
#define FMA(i) "vfmadd231ps %%ymm8, %%ymm9, %%ymm" i "\n\t"

// 32 multiply-adds of bf16 an instruction. Only where there is AVX-512 with BF16.
extern "C" int64_t run_dpbf16(int64_t rounds) {
  for (int64_t i = 0; i < rounds; ++i) __asm__ volatile(EIGHT_TIMES(DPBF16)::: LOW_REGISTERS);
  return rounds * 8 * 64;
}

// 8 multiply-adds of f32 an instruction.
extern "C" int64_t run_fma(int64_t rounds) {
  for (int64_t i = 0; i < rounds; ++i) __asm__ volatile(EIGHT_TIMES(FMA)::: LOW_REGISTERS);
  return rounds * 8 * 16;
}

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
