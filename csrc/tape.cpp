#include "tape.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace headrace {
namespace {

constexpr int32_t kSerialRows = 4;             // up to so many rows, row-wise work is cheaper than a barrier
constexpr int32_t kChunksPerThread = 6;
constexpr int32_t kFineChunksPerThread = 16;   // of GEMMs with so many rows that a hand-over costs nothing
constexpr int64_t kLeastGemmBytes = 8 << 10;  // of weights in a chunk: half a microsecond of memory bandwidth
constexpr int32_t kRowsPerChunk = 96;          // GEMM rows are split only at multiples of its row block
constexpr int64_t kSerialPartials = 256;       // partial rows whose merge is not worth sharing
constexpr size_t kAttentionScratch = 1 << 20;

int32_t divide_up(int64_t a, int64_t b) { return static_cast<int32_t>((a + b - 1) / b); }

int32_t merges_per_chunk(const WorkList& work) {
  return work.num_partials * work.partial_rows <= kSerialPartials ? work.num_merges() : 1;
}

// Fewer panels than these are not worth a hand-over. With many rows a single panel is enough work.
int32_t least_panels(const PackedWeight& w, int32_t rows) {
  return rows < kRowsPerChunk ? divide_up(kLeastGemmBytes, w.panel_bytes) : 1;
}

// Adds the time it lives to `sum`, unless that is null.
class Stopwatch {
 public:
  explicit Stopwatch(int64_t* sum) : sum_(sum), started_(sum != nullptr ? now_ns() : 0) {}
  ~Stopwatch() {
    if (sum_ != nullptr) *sum_ += now_ns() - started_;
  }
  Stopwatch(const Stopwatch&) = delete;

 private:
  int64_t* const sum_;
  const int64_t started_;
};

template <typename T>
T* grown(Memory* memory, int64_t count) {
  if (memory->size() < sizeof(T) * count) *memory = Memory(sizeof(T) * count);
  return memory->as<T>();
}

}  // namespace

Tape::Tape(const KernelTable* kernels, std::shared_ptr<Pool> pool, const TapeSizes& sizes)
    : kernels_(kernels), pool_(std::move(pool)), sizes_(sizes) {
  const size_t bytes = std::max(kAttentionScratch, sizeof(float) * 2 * sizes.vocab);
  for (int worker = 0; worker < pool_->threads(); ++worker) scratch_.emplace_back(bytes);
}

void Tape::label(const std::string& name) {
  label_ = static_cast<int32_t>(std::find(labels_.begin(), labels_.end(), name) - labels_.begin());
  if (label_ == static_cast<int32_t>(labels_.size())) labels_.push_back(name);
}

void Tape::add(Domain domain, const Record& record, bool joins, bool heavy) {
  const int32_t index = static_cast<int32_t>(records_.size());
  const bool row_wise = domain == Domain::kTokens || domain == Domain::kOutputRows;
  const bool same = !phases_.empty() && phases_.back().domain == domain && phases_.back().heavy == heavy;
  if (same && (joins || row_wise)) {
    phases_.back().end = index + 1;
  } else {
    phases_.push_back({domain, index, index + 1, label_, heavy});
  }
  records_.push_back(record);
}

const float* Tape::keep_floats(const float* data, size_t count) {
  auto copy = std::make_shared<std::vector<float>>(data, data + count);
  owners_.push_back(copy);
  return copy->data();
}

void Tape::set_heads(int32_t group, const HeadShape& heads) {
  if (static_cast<size_t>(group) >= heads_.size()) heads_.resize(group + 1, HeadShape{0, 1, 0, 0});
  heads_[group] = heads;
}

void Tape::run(const StepInfo& step) {
  step_ = &step;
  build_work_lists();
  for (std::vector<int64_t>& busy : busy_ns_) busy.assign(records_.size(), 0);
  pool_->run(*this);
  label_ns_.assign(labels_.size(), 0);
  for (size_t i = 0; i < phases_.size(); ++i) label_ns_[phases_[i].label] += pool_->phase_ns()[i];
  step_ = nullptr;
}

void Tape::set_profiling(bool on) {
  busy_ns_.assign(on ? pool_->threads() : 0, std::vector<int64_t>(records_.size()));
}

int64_t* Tape::busy(int32_t record, int worker) { return busy_ns_.empty() ? nullptr : &busy_ns_[worker][record]; }

int32_t Tape::num_rows(const Phase& phase) const {
  return phase.domain == Domain::kOutputRows ? step_->num_rows : step_->num_tokens;
}

int32_t Tape::rows_per_chunk(const Phase& phase) const {
  const int32_t rows = num_rows(phase);
  if (phase.heavy) return 1;
  return rows <= kSerialRows ? rows : divide_up(rows, pool_->threads() == 1 ? 1 : pool_->threads() * kChunksPerThread);
}

int32_t Tape::num_chunks(int32_t index) const {
  const Phase& phase = phases_[index];
  const Record& first = records_[phase.begin];
  int32_t count = 0;
  switch (phase.domain) {
    case Domain::kPanels:
      for (int32_t i = phase.begin; i < phase.end; ++i) count += gemm_chunks(records_[i].gemm).count;
      return count;
    case Domain::kItems: return static_cast<int32_t>(work_[first.attention.group].items.size());
    case Domain::kMerges: {
      const WorkList& work = work_[first.attention.group];
      return work.num_merges() == 0 ? 0 : divide_up(work.num_merges(), merges_per_chunk(work));
    }
    default: return num_rows(phase) == 0 ? 0 : divide_up(num_rows(phase), rows_per_chunk(phase));
  }
}

void Tape::run_chunk(int32_t index, int32_t chunk, int worker) {
  const Phase& phase = phases_[index];
  switch (phase.domain) {
    case Domain::kPanels: return run_gemm(phase, chunk, worker);
    case Domain::kItems:
    case Domain::kMerges: {
      const Stopwatch stopwatch(busy(phase.begin, worker));
      return run_attention(records_[phase.begin], chunk, worker);
    }
    default: break;
  }
  const int32_t size = rows_per_chunk(phase), begin = chunk * size, end = std::min(begin + size, num_rows(phase));
  for (int32_t i = phase.begin; i < phase.end; ++i) {
    const Stopwatch stopwatch(busy(i, worker));
    run_row_record(records_[i], begin, end, worker);
  }
}

void Tape::run_row_record(const Record& record, int32_t begin, int32_t end, int worker) const {
  switch (record.kind) {
    case Kind::kEmbed: return embed(record.embed, begin, end);
    case Kind::kAngles: return angles(record.angles, begin, end);
    case Kind::kNormQuant: return kernels_->norm_quant(&record.norm_quant, begin, end);
    case Kind::kNormRows: {
      const NormRowsOp& op = record.norm_rows;
      return kernels_->norm_rows(op.x, op.ldx, op.gain, op.eps, op.k, op.out, op.ldo, begin, end, op.add);
    }
    case Kind::kHeadNormRope: {
      const RopeOp& op = record.rope;
      return kernels_->head_norm_rope(op.x, op.ldx, op.heads, op.head_dim, op.gain, op.eps, op.rotary, op.angles, begin,
                                      end);
    }
    case Kind::kKVWrite: {
      KVWriteArgs args = record.kv_write.args;
      args.slots = step_->groups[record.kv_write.group].slots;
      return kernels_->kv_write(&args, begin, end);
    }
    case Kind::kGate: {
      const GateOp& op = record.gate;
      for (int64_t at = begin * op.ld; at < end * op.ld; at += op.ld) {
        kernels_->gate(op.gate + at, op.up + at, op.gate + at, op.width, op.epilogue);
      }
      return;
    }
    default: return run_plain_record(record, begin, end, worker);
  }
}

// Row-wise work that needs no kernel of its own.
void Tape::run_plain_record(const Record& record, int32_t begin, int32_t end, int worker) const {
  const RowsOp& op = record.rows;
  for (int32_t row = begin; row < end; ++row) {
    float* x = op.x + row * op.ld;
    if (record.kind == Kind::kSelect) {
      std::memcpy(op.out + row * op.ldo, op.x + step_->output_rows[row] * op.ld, sizeof(float) * op.width);
    } else if (record.kind == Kind::kCheckFinite) {
      float zero = 0.0f;  // 0 * x is 0 for every number, NaN for what is none
      for (int64_t i = 0; i < op.width; ++i) zero += 0.0f * x[i];
      step_->finite[row] = zero == 0.0f;
    } else if (record.kind == Kind::kSoftcap) {
      kernels_->softcap(x, op.width, op.cap);
    } else {
      SampleArgs args = step_->sample;
      args.logits = op.x;
      args.ld = op.ld;
      args.scratch = scratch_[worker].as<float>();  // stride 0: every row of this worker uses the same
      kernels_->sample(&args, row);
    }
  }
}

void Tape::embed(const EmbedOp& op, int32_t begin, int32_t end) const {
  kernels_->embed(&op.table, step_->input_ids, op.scale, op.out, op.ldo, begin, end);
  for (int32_t i = 0; i < step_->num_embeds; ++i) {
    const int32_t row = step_->embed_rows[i];
    if (row < begin || row >= end) continue;
    std::memcpy(op.out + row * op.ldo, step_->embeds + static_cast<int64_t>(i) * op.table.k,
                sizeof(float) * op.table.k);
  }
}

void Tape::angles(const AnglesOp& op, int32_t begin, int32_t end) const {
  for (int64_t row = begin; row < end; ++row) {
    float* out = op.out + row * op.half * 2;
    for (int32_t i = 0; i < op.half; ++i) {
      // The angle is a float product in every implementation that models were trained with; what follows is exact.
      const double angle = op.inv_freq[i] * static_cast<float>(step_->positions[row]);
      out[2 * i] = static_cast<float>(std::cos(angle)) * op.scale;
      out[2 * i + 1] = static_cast<float>(std::sin(angle)) * op.scale;
    }
  }
}

Tape::GemmChunks Tape::gemm_chunks(const GemmOp& gemm) const {
  const PackedWeight& w = *gemm.args.w;
  const int32_t rows = gemm.output_rows ? step_->num_rows : step_->num_tokens, threads = pool_->threads();
  if (threads == 1 || rows == 0) return {1, w.num_panels, 1, rows, 1, rows == 0 ? 0 : 1};
  GemmChunks chunks = {threads, w.num_panels * 3 / (4 * threads), 1, rows, 0, 0};  // long streams: three quarters
  const int32_t left = w.num_panels - threads * chunks.first;
  const int32_t pieces = threads * (rows < kRowsPerChunk ? kChunksPerThread : kFineChunksPerThread);
  chunks.rest = std::max(divide_up(left, pieces), least_panels(w, rows));
  chunks.across = (chunks.first > 0 ? threads : 0) + divide_up(left, chunks.rest);
  const int32_t wanted = threads * kChunksPerThread;
  if (chunks.across < wanted && rows > kRowsPerChunk) {
    const int32_t parts = divide_up(wanted, chunks.across);
    chunks.rows = divide_up(divide_up(rows, parts), kRowsPerChunk) * kRowsPerChunk;
  }
  chunks.count = chunks.across * divide_up(rows, chunks.rows);
  return chunks;
}

void Tape::run_gemm(const Phase& phase, int32_t chunk, int worker) {
  int32_t i = phase.begin;
  GemmChunks chunks = gemm_chunks(records_[i].gemm);
  for (; chunk >= chunks.count; chunks = gemm_chunks(records_[++i].gemm)) chunk -= chunks.count;
  const Stopwatch stopwatch(busy(i, worker));
  const GemmOp& op = records_[i].gemm;
  const int32_t row = chunk / chunks.across * chunks.rows, place = chunk % chunks.across;
  const int32_t leaders = chunks.first > 0 ? chunks.threads : 0;
  const bool leads = place < leaders;
  const int32_t panel = leads ? place * chunks.first : leaders * chunks.first + (place - leaders) * chunks.rest;
  kernels_->gemm(&op.args, panel, std::min(panel + (leads ? chunks.first : chunks.rest), op.args.w->num_panels), row,
                 std::min(row + chunks.rows, op.output_rows ? step_->num_rows : step_->num_tokens));
}

void Tape::run_attention(const Record& record, int32_t chunk, int worker) const {
  const AttentionArgs args = attention_args(record.attention);
  const WorkList& work = work_[record.attention.group];
  if (record.kind == Kind::kAttention) return kernels_->attention(&args, &work.items[chunk], scratch_[worker].data());
  const int32_t size = merges_per_chunk(work), end = std::min((chunk + 1) * size, work.num_merges());
  for (int32_t i = chunk * size; i < end; ++i) {
    kernels_->attention_merge(&args, &work.items[work.merges[i]], work.merges[i + 1] - work.merges[i]);
  }
}

AttentionArgs Tape::attention_args(const AttentionOp& op) const {
  AttentionArgs args = op.args;
  const StepInfo::Group& group = step_->groups[op.group];
  args.block_table = group.block_table;
  args.max_blocks = group.max_blocks;
  args.cu_seqlens_q = step_->cu_seqlens_q;
  args.seq_lens = step_->seq_lens;
  args.partial_acc = partial_acc_.as<float>();
  args.partial_max = partial_max_.as<float>();
  args.partial_sum = partial_sum_.as<float>();
  args.partial_rows = work_[op.group].partial_rows;
  return args;
}

void Tape::build_work_lists() {
  work_.resize(heads_.size());
  int64_t rows = 0, elements = 0;
  for (size_t group = 0; group < heads_.size(); ++group) {
    work_[group].build(heads_[group], step_->num_seqs, step_->cu_seqlens_q, step_->seq_lens, pool_->threads());
    const int64_t partial_rows = work_[group].num_partials * work_[group].partial_rows;
    rows = std::max(rows, partial_rows);
    elements = std::max(elements, partial_rows * heads_[group].head_dim);
  }
  grown<float>(&partial_acc_, elements);
  grown<float>(&partial_max_, rows);
  grown<float>(&partial_sum_, rows);
}

}  // namespace headrace
