// The tape: a model lowered to a flat array of records, walked by a pool of workers once per step.
//
// Records are grouped into phases, the unit of order (pool.h). The pieces of a phase (rows, panels, attention items)
// are handed out in chunks. Consecutive row-wise records share a phase, since each touches its own row only. A phase
// with little work in this step is a single chunk, which whoever finished the phase before runs without a hand-over.
//
//   x -> [norm + quantise] -> qkv GEMM -> [rope, KV write] -> attention -> (merge) -> [quantise] -> output GEMM += x
//         row-wise                         row-wise           items                   row-wise
//
// All pointers are fixed when the tape is built; only StepInfo changes, so one tape serves every batch. It knows no
// Python and no model.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "tensors.h"
#include "worklist.h"

namespace headrace {

// What one step brings. Pointers outlive the step.
struct StepInfo {
  struct Group {
    const int32_t* block_table;  // [S][max_blocks]
    const int32_t* slots;        // [T]
    int32_t max_blocks;
  };
  int32_t num_tokens = 0, num_seqs = 0, num_rows = 0, num_embeds = 0;
  const int32_t* input_ids = nullptr;     // [T]
  const int32_t* positions = nullptr;     // [T]
  const int32_t* cu_seqlens_q = nullptr;  // [S + 1]
  const int32_t* seq_lens = nullptr;      // [S]
  const int32_t* output_rows = nullptr;   // [R]
  const int32_t* embed_rows = nullptr;    // [num_embeds] tokens whose embedding is given
  const float* embeds = nullptr;          // [num_embeds][hidden]
  std::vector<Group> groups;
  SampleArgs sample = {};                 // all but logits and scratch
  uint8_t* finite = nullptr;              // [T] out: 1 where the last hidden state is finite
};

enum class Domain { kTokens, kOutputRows, kPanels, kItems, kMerges };

enum class Kind {
  kEmbed, kAngles, kNormQuant, kNormRows, kHeadNormRope, kKVWrite, kGate, kCheckFinite, kSelect, kSoftcap, kSample,
  kGemm, kAttention, kMerge,
};

struct EmbedOp { SourceRows table; float scale; float* out; int64_t ldo; };
struct AnglesOp { const float* inv_freq; int32_t half; float scale; float* out; };  // out [T][half][2]: cos, sin
struct NormRowsOp {
  const float* x;
  int64_t ldx;
  const float* gain;
  float eps;
  int32_t k;
  float* out;
  int64_t ldo;
  bool add;
};
struct RopeOp {
  float* x;
  int64_t ldx;
  int32_t heads, head_dim;
  const float* gain;
  float eps;
  int32_t rotary;
  const float* angles;
};
struct KVWriteOp { KVWriteArgs args; int32_t group; };
struct GateOp { float* gate; const float* up; int64_t ld, width; int32_t epilogue; };
struct RowsOp { float* x; int64_t ld, width; float cap; float* out; int64_t ldo; };  // check, select, softcap, sample
struct GemmOp { GemmArgs args; bool output_rows; };
struct AttentionOp { AttentionArgs args; int32_t group; };

struct Record {
  Kind kind;
  union {
    EmbedOp embed;
    AnglesOp angles;
    NormArgs norm_quant;
    NormRowsOp norm_rows;
    RopeOp rope;
    KVWriteOp kv_write;
    GateOp gate;
    RowsOp rows;
    GemmOp gemm;
    AttentionOp attention;
  };
};

struct Phase {
  Domain domain;
  int32_t begin, end;  // records
  int32_t label;       // of `labels`: what its time is counted as
  bool heavy;          // rows so dear that two of them are worth sharing
};

// What a record is and does, for people and for `headrace profile`. Counts are of one row (a token or an output row).
struct RecordInfo {
  const char* kind;
  std::string label;
  int32_t phase;
  bool output_rows;
  int32_t group;          // of the KV cache; -1: none
  int32_t n, k;           // outputs and inputs of a row
  int64_t weight_bytes;   // read once a step
  int64_t row_bytes;      // of activations read and written
  int64_t row_ops;        // multiply-adds count two; attention: per attended position
  std::string weight;     // how a GEMM's weight is stored: "w4g32" (bits, inputs per scale), "bf16" ...; else empty
};

struct TapeSizes { int32_t vocab, hidden, max_tokens, max_rows; };

class Tape : public Program {
 public:
  // Room for `max_tokens` tokens and `max_rows` output rows a step is in the buffers that the records point to.
  Tape(const KernelTable* kernels, std::shared_ptr<Pool> pool, const TapeSizes& sizes);

  // Building. `label` names what the following phases are counted as.
  void label(const std::string& name);
  void add(Domain domain, const Record& record, bool joins = false, bool heavy = false);
  void keep(std::shared_ptr<void> owner) { owners_.push_back(std::move(owner)); }
  const float* keep_floats(const float* data, size_t count);
  void set_heads(int32_t group, const HeadShape& heads);

  void run(const StepInfo& step);

  // With profiling every record's time is kept, summed over the workers; a clock is read twice per record and chunk.
  void set_profiling(bool on);
  bool profiling() const { return !busy_ns_.empty(); }
  std::vector<int64_t> record_ns() const;                                     // of the last step; empty without
  const std::vector<int64_t>& phase_ns() const { return pool_->phase_ns(); }  // of the last run of the pool
  RecordInfo describe(int32_t record) const;

  const KernelTable* kernels() const { return kernels_; }
  int32_t vocab() const { return sizes_.vocab; }
  int32_t hidden() const { return sizes_.hidden; }
  int32_t max_tokens() const { return sizes_.max_tokens; }
  int32_t max_rows() const { return sizes_.max_rows; }
  size_t num_groups() const { return heads_.size(); }
  size_t num_records() const { return records_.size(); }
  const std::vector<std::string>& labels() const { return labels_; }
  const std::vector<int64_t>& label_ns() const { return label_ns_; }  // of the last step
  const HeadShape& heads(int32_t group) const { return heads_[group]; }

 private:
  // How a GEMM is cut: across its panels, each thread first a long stream, then short ones that even out; and, where
  // panels are few for the threads, across its rows.
  struct GemmChunks {
    int32_t threads, first, rest;  // panels of the first chunk of each thread, and of those after
    int32_t rows, across, count;   // rows of a chunk; chunks side by side; chunks in all
  };

  int32_t num_phases() const override { return static_cast<int32_t>(phases_.size()); }
  int32_t num_chunks(int32_t phase) const override;
  void run_chunk(int32_t phase, int32_t chunk, int worker) override;

  int32_t num_rows(const Phase& phase) const;
  int32_t rows_per_chunk(const Phase& phase) const;
  GemmChunks gemm_chunks(const GemmOp& gemm) const;
  void run_gemm(const Phase& phase, int32_t chunk, int worker);
  int64_t* busy(int32_t record, int worker);
  void run_attention(const Record& record, int32_t chunk, int worker) const;
  void run_row_record(const Record& record, int32_t begin, int32_t end, int worker) const;
  void run_plain_record(const Record& record, int32_t begin, int32_t end, int worker) const;
  void embed(const EmbedOp& op, int32_t begin, int32_t end) const;
  void angles(const AnglesOp& op, int32_t begin, int32_t end) const;
  AttentionArgs attention_args(const AttentionOp& op) const;
  void build_work_lists();

  const KernelTable* kernels_;
  std::shared_ptr<Pool> pool_;
  const TapeSizes sizes_;
  std::vector<Record> records_;
  std::vector<Phase> phases_;
  std::vector<std::string> labels_;
  int32_t label_ = 0;                     // of phases to come
  std::vector<HeadShape> heads_;          // per KV group
  std::vector<WorkList> work_;            // per KV group, of this step
  std::vector<std::shared_ptr<void>> owners_;
  std::vector<Memory> scratch_;           // one per worker
  Memory partial_acc_, partial_max_, partial_sum_;
  const StepInfo* step_ = nullptr;
  std::vector<int64_t> label_ns_;
  std::vector<std::vector<int64_t>> busy_ns_;  // [worker][record], when profiling
};

}  // namespace headrace
