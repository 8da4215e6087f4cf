// AVX2, FMA and F16C (x86-64-v3): 8 lanes, integer products through VPMADDUBSW.
// Everything but the table's getter is in an anonymous namespace (see kernels.h).
#include <immintrin.h>

#include "kernels.h"

#define HEADRACE_ISA_AVX2

namespace headrace {
namespace {

#include "isa/vec.h"
#include "pack.inl"
#include "gemm_common.inl"
#include "gemm_avx2.inl"
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
    "avx2", packed_layout, pack,      gemm,            norm_quant, norm_rows, head_norm_rope,
    kv_write,    attention,     attention_merge, embed,     softcap,   sample,         gate,
    peak_products, peak_read,
};

}  // namespace

const KernelTable* kernel_table_avx2() { return &kTable; }

}  // namespace headrace
