// AVX-512 with VNNI and BF16: 16 lanes, integer products through VPDPBUSD, attention through VDPBF16PS.
// Everything but the table's getter is in an anonymous namespace (see kernels.h).
#include <immintrin.h>

#include "kernels.h"

#define HEADRACE_ISA_AVX512

namespace headrace {
namespace {

#include "isa/vec.h"
#include "pack.inl"
#include "gemm_common.inl"
#include "gemm_avx512.inl"
#include "gate.inl"
#include "ops.inl"
#include "attention.inl"
#include "sample.inl"

const KernelTable kTable = {
    "avx512", packed_layout, pack,      gemm,            norm_quant, norm_rows, head_norm_rope,
    kv_write,    attention,     attention_merge, embed,     softcap,   sample,         gate,
};

}  // namespace

const KernelTable* kernel_table_avx512() { return &kTable; }

}  // namespace headrace
