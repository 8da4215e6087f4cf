// AVX-512 with VNNI and BF16: 16 lanes, integer products through VPDPBUSD, attention through VDPBF16PS.
// Everything but the table's getter is in an anonymous namespace (see kernels.h).
#include <immintrin.h>

#include "kernels.h"

#define HEADRACE_ISA_AVX512
#ifdef HEADRACE_EMULATED_AVX512  // the same source in plain C++, for tests (tests/native/emulate_avx512.h)
#define kernel_table_avx512 kernel_table_avx512_emulated
#define HEADRACE_TABLE_NAME "avx512-emulated"
#else
#define HEADRACE_TABLE_NAME "avx512"
#endif

namespace headrace {
namespace {

#include "isa/vec.h"
#include "pack.inl"
#include "gemm_common.inl"
#include "gemm_avx512.inl"
#include "gate.inl"
#include "ops.inl"
#include "kv_write.inl"
#include "attention_product.inl"
#include "attention_int8_product.inl"
#include "attention_chunk.inl"
#include "attention_bf16.inl"
#include "attention_int8.inl"
#include "attention.inl"
#include "sample.inl"
#include "peaks.inl"

const KernelTable kTable = {
    HEADRACE_TABLE_NAME, packed_layout, pack,      gemm,            norm_quant, norm_rows, head_norm_rope,
    kv_write,    attention,     attention_merge, embed,     softcap,   sample,         gate,
    peak_products, peak_read,
};

}  // namespace

const KernelTable* kernel_table_avx512() { return &kTable; }

}  // namespace headrace
