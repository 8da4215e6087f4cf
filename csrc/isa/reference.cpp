// Plain C++ for any CPU: the statement of what the others compute, and the kernels of last resort.
// Everything but the table's getter is in an anonymous namespace (see kernels.h).
#include "kernels.h"

#define HEADRACE_ISA_REFERENCE

namespace headrace {
namespace {

#include "isa/vec.h"
#include "pack.inl"
#include "gemm_common.inl"
#include "gemm_reference.inl"
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
    "reference", packed_layout, pack,      gemm,            norm_quant, norm_rows, head_norm_rope,
    kv_write,    attention,     attention_merge, embed,     softcap,   sample,         gate,
    peak_products, peak_read,
};

}  // namespace

const KernelTable* kernel_table_reference() { return &kTable; }

}  // namespace headrace
