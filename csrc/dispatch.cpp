// CPUID says what the processor knows, XCR0 what the operating system saves: both must agree before a table is offered.
#include "dispatch.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace headrace {
namespace {

#if defined(__x86_64__)

struct Registers {
  uint32_t eax, ebx, ecx, edx;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r = {};
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

bool bits(uint32_t value, std::initializer_list<int> wanted) {
  for (int bit : wanted) {
    if ((value >> bit & 1) == 0) return false;
  }
  return true;
}

// XCR0: the register files that the operating system saves at a context switch.
uint32_t saved_registers() {
  if (!bits(cpuid(1, 0).ecx, {27})) return 0;  // OSXSAVE
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

// What -march=x86-64-v3 may use.
bool has_avx2() {
  const Registers basic = cpuid(1, 0), extended = cpuid(7, 0);
  return bits(saved_registers(), {1, 2})                    // SSE, AVX state
         && bits(basic.ecx, {12, 22, 23, 28, 29})           // FMA, MOVBE, POPCNT, AVX, F16C
         && bits(extended.ebx, {3, 5, 8})                   // BMI1, AVX2, BMI2
         && bits(cpuid(0x80000001, 0).ecx, {5});            // LZCNT
}

// What -march=x86-64-v4 -mavx512vnni -mavx512bf16 may use.
bool has_avx512() {
  const Registers extended = cpuid(7, 0);
  return has_avx2() && bits(saved_registers(), {5, 6, 7})   // opmask, upper halves, upper registers
         && bits(extended.ebx, {16, 17, 28, 30, 31})        // F, DQ, CD, BW, VL
         && bits(extended.ecx, {11})                        // VNNI
         && bits(cpuid(7, 1).eax, {5});                     // BF16
}

#endif

}  // namespace

std::vector<const KernelTable*> available_kernels() {
  std::vector<const KernelTable*> tables;
#if defined(__x86_64__)
  if (has_avx512()) tables.push_back(kernel_table_avx512());
  if (has_avx2()) tables.push_back(kernel_table_avx2());
#endif
  tables.push_back(kernel_table_reference());
#if defined(HEADRACE_EMULATE_AVX512)
  tables.push_back(kernel_table_avx512_emulated());
#endif
  return tables;
}

}  // namespace headrace
