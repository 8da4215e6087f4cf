// The kernel library's one interface: plain structs, and a table of functions per instruction set.
//
// Every ISA translation unit exports exactly one symbol, kernel_table_<isa>(); everything else in it is in an anonymous
// namespace, so that the linker can never keep an AVX-512 copy of a shared inline function (ODR). This header therefore
// holds only plain data and no inline functions with code.
//
// Rules that every implementation keeps (they make a request's tokens independent of its neighbours; docs/kernels.md):
//  1. A GEMM output element is one float chain over groups in ascending k, the same for every number of rows.
//     Integer sums inside a group are exact in any order.
//  2. Attention works in KV partitions at absolute multiples of kPartition positions, each from a fresh
//     (max, sum, acc), merged in ascending order, whatever thread or chunk computes them.
//  3. A token that a row does not see is an exact no-op for it. K and V are read back from the cache even inside their
//     own chunk. V of positions >= the sequence's length is never read as a number (it may be NaN from a former owner).
//  4. Softmax, top-p and logprob sums run over fixed column blocks in index order; argmax ties go to the lowest id.
#pragma once
#include <cstddef>
#include <cstdint>

namespace headrace {

// Raised by whoever changes what pack() writes, for any format or instruction set: packed weights that another version
// left on disk are not read (tests/native/test_pack_version.py).
constexpr int kPackVersion = 1;
constexpr int kPanel = 32;        // output columns per packed panel
constexpr int kQuantGroup = 32;   // inputs per activation scale
constexpr int kPartition = 256;   // KV positions per attention partition
constexpr int kSamplingBlock = 1024;

enum WeightFormat : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2, kW8 = 3, kW4 = 4 };

// Rows of a weight matrix as the checkpoint stores them. `type` is GGUF's number of the block format
// (F32 0, F16 1, Q4_0 2, Q4_1 3, Q5_0 6, Q5_1 7, Q8_0 8, Q4_K 12, Q5_K 13, Q6_K 14, BF16 30).
struct SourceRows {
  const uint8_t* data;  // n rows of row_bytes
  int64_t row_bytes;
  int32_t type;
  int32_t n, k;
};

// A linear layer's weights in panels of kPanel output columns, in the layout its ISA wants. Column n of the matrix is
// lane n % kPanel of panel n / kPanel; missing columns and inputs are zero. Owned by the caller of pack().
struct PackedWeight {
  uint8_t* data;        // 64-byte aligned, num_panels * panel_bytes
  int64_t panel_bytes;
  int32_t format;       // WeightFormat
  int32_t n, k;
  int32_t num_panels;
  int32_t group;        // inputs per scale: 16 or 32 (kW8), 32 (kW4); 0 for float formats
  int32_t has_min;
  int32_t scale_f32;    // scales and mins stored as f32; else f16 (only where exact)
  int32_t bits;         // kW8/kW4: bits of a stored unsigned value (4, 5, 6 or 8); without a min its zero is 1 << (bits - 1)
  int32_t interleave;   // 1: columns are gate/up pairs, 16 of each per panel
};

// Activations of `rows` rows, as GEMM reads them. Which part is filled depends on the weight format:
// kW8/kW4 read q, scale, sum; float formats read f32 (row-major, ld = k_pad). k_pad is k rounded up to kQuantGroup.
struct Activations {
  int32_t rows, k, k_pad;
  float* f32;      // [rows][k_pad]
  int8_t* q;       // [rows][k_pad]            value = q * scale, |q| <= 127
  float* scale;    // [rows][k_pad / 32]
  int16_t* sum;    // [rows][k_pad / 16]       sum of q over each 16 inputs (pairs give the group of 32)
};

// What happens to a finished output tile while it is in cache.
enum EpilogueKind : int32_t {
  kStore = 0,     // out[row][col] = y (+ bias[col])
  kAddTo = 1,     // out[row][col] += y (+ bias[col])   (residual)
  kSwiGLU = 2,    // interleaved panels: out[row][16 * panel + j] = silu(y[j]) * y[16 + j]
  kGeGLU = 3,     // the same with gelu_tanh
};

struct GemmArgs {
  const PackedWeight* w;
  const Activations* a;
  float* out;            // row-major
  int64_t ldo;
  const float* bias;     // [n] or null
  int32_t epilogue;      // EpilogueKind
};

// What a block of the cache holds per layer and KV head, K and then V. int8: value = (byte - 128) * scale of its token,
// K turned by a Hadamard matrix that q is turned by too; a token that was not finite has the scale NaN.
enum KVFormat : int32_t {
  kKVBF16 = 0,    // K [head_dim / 2][block_size][2], V [block_size / 2][head_dim][2] bf16
  kKVInt8 = 1,    // K [head_dim / 4][block_size][4], V [block_size / 4][head_dim][4] bytes, each before [block_size] f32
};

// One unit of attention: some query tokens of one sequence against one KV head's query heads, over KV partitions
// [part_begin, part_end). When that is all of its partitions the result goes to `out`, else to the partial buffers.
struct AttentionItem {
  int32_t seq, kv_head;
  int32_t q_begin, q_end;          // token indices of the step
  int32_t part_begin, part_end;    // KV partitions
  int32_t partial;                 // index of its first partial, or -1: write to out
};

struct AttentionArgs {
  const float* q; int64_t ldq; // [T][num_heads * head_dim] in rows of ldq, rope applied, not scaled
  float* out;                  // [T][num_heads * head_dim]
  const uint8_t* k_cache;      // of this layer, in the form of kv_format
  const uint8_t* v_cache;
  int64_t block_stride;        // bytes from a block to the next
  int64_t head_stride;         // bytes from the K, or V, of a KV head to the next's, in a block
  int32_t kv_format;           // KVFormat
  const int32_t* block_table;  // [S][max_blocks]
  const int32_t* cu_seqlens_q; // [S + 1]
  const int32_t* seq_lens;     // [S]
  int32_t max_blocks, block_size;   // block_size 16 or 32
  int32_t num_heads, num_kv_heads, head_dim;
  float scale;
  int32_t window;              // 0: none; else query p sees keys in (p - window, p]
  float softcap;               // 0: none
  float* partial_acc;          // [partials][rows of the item][head_dim]
  float* partial_max;          // [partials][rows]
  float* partial_sum;
  int64_t partial_rows;        // row capacity of one partial
  int32_t partition;           // KV positions per partition: kPartition, except in the test that shows that it matters
};

struct NormArgs {
  const float* x; int64_t ldx;    // [rows][k]
  const float* gain;              // [k]; null: no norm, quantise only
  float eps;
  Activations* a;
  int32_t want_f32, want_q;
};

struct KVWriteArgs {
  const float* k; const float* v; // [T][ld] of this layer, rope applied
  int64_t ldk, ldv;
  uint8_t* k_cache; uint8_t* v_cache; int64_t block_stride, head_stride;   // as in AttentionArgs
  int32_t kv_format;
  const int32_t* slots;           // [T]
  int32_t num_kv_heads, head_dim, block_size;
};

struct SampleArgs {
  const float* logits; int64_t ld;   // [R][V] as computed; not modified
  int32_t vocab;
  const float *temperature, *top_p, *min_p, *repetition_penalty, *presence_penalty, *frequency_penalty;
  const int32_t *top_k, *choice, *position, *num_logprobs;
  const uint64_t* seed;
  const int32_t *bias_cu, *bias_ids; const float* bias_values;
  const int32_t *penalty_cu, *penalty_ids, *penalty_counts;
  const int32_t* mask_row; const int32_t* mask_bits; int64_t mask_words;
  const uint8_t* flags; const int32_t* target_ids;
  int32_t* out_ids;                  // [R]
  float* out_logprobs; int32_t* out_top_ids; int32_t max_logprobs;   // [R][1 + K], [R][K]
  float* out_signals;                // [R][4]
  uint8_t* out_status;               // [R]
  float* scratch; int64_t scratch_stride;   // per row: at least 2 * vocab floats
};

enum PeakKind : int32_t { kPeakInt8 = 0, kPeakBf16 = 1, kPeakFp32 = 2 };

struct KernelTable {
  const char* name;
  // pack: fills w (w->data already allocated with packed_bytes); packed_bytes decides format, group and sizes.
  int64_t (*packed_layout)(int32_t source_type, int32_t n, int32_t k, PackedWeight* w);   // returns bytes, or -1
  void (*pack)(const SourceRows* src, const SourceRows* up_or_null, PackedWeight* w, int32_t panel_begin, int32_t panel_end);
  void (*gemm)(const GemmArgs* g, int32_t panel_begin, int32_t panel_end, int32_t row_begin, int32_t row_end);
  void (*norm_quant)(const NormArgs* n, int32_t row_begin, int32_t row_end);
  void (*norm_rows)(const float* x, int64_t ldx, const float* gain, float eps, int32_t k, float* out, int64_t ldo,
                    int32_t row_begin, int32_t row_end, int32_t add_to_out);              // plain norm; out may be x
  void (*head_norm_rope)(float* x, int64_t ldx, int32_t heads, int32_t head_dim, const float* gain_or_null, float eps,
                         int32_t rotary_dim, const float* cos_sin, int32_t row_begin, int32_t row_end);
                         // cos_sin: [row][rotary_dim/2][2], row-indexed by token of the step
  void (*kv_write)(const KVWriteArgs* a, int32_t token_begin, int32_t token_end);
  void (*attention)(const AttentionArgs* a, const AttentionItem* item, void* scratch);    // scratch: 1 MiB per thread
  void (*attention_merge)(const AttentionArgs* a, const AttentionItem* items, int32_t count);  // items of one group, ascending
  void (*embed)(const SourceRows* table, const int32_t* ids, float scale, float* out, int64_t ldo, int32_t begin, int32_t end);
  void (*softcap)(float* x, int64_t count, float cap);
  void (*sample)(const SampleArgs* a, int32_t row);
  void (*gate)(const float* gate, const float* up, float* out, int64_t count, int32_t epilogue);  // out may be gate
  int64_t (*peak_products)(int32_t kind, int64_t rounds);         // operations done (two a product); 0: no instruction
  int64_t (*peak_read)(const uint8_t* data, int64_t bytes);       // aligned to 64, a multiple of 1,024; bytes read
};

const KernelTable* kernel_table_reference();
const KernelTable* kernel_table_avx2();
const KernelTable* kernel_table_avx512();
const KernelTable* kernel_table_avx512_emulated();  // only in builds for tests (HEADRACE_EMULATE_AVX512)

}  // namespace headrace
