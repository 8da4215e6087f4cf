// One step: a Batch in, the arrays of a StepResult out. Every index of the batch is checked before a kernel follows it.
#include <algorithm>
#include <vector>

#include "bindings.h"
#include "sampling_args.h"
#include "tape.h"

namespace headrace {
namespace {

constexpr uint8_t kSampleFlag = 1, kUnknownFlags = 8 | 16;  // OutputFlag: SAMPLE; HIDDEN, VERIFY
constexpr uint8_t kNonFinite = 1;                           // RowStatus

template <typename T>
const T* vector_of(nb::handle batch, const char* name, int64_t count) {
  const Array<const T> array = array_of<T>(batch, name, 1);
  require(static_cast<int64_t>(array.shape(0)) == count, std::string(name) + ": wrong length");
  return array.data();
}

void read_sequences(StepInfo* step, nb::handle batch) {
  const Array<const int32_t> positions = array_of<int32_t>(batch, "positions", 2);
  require(positions.shape(0) == 1, "positions: this backend knows one component");
  step->num_tokens = static_cast<int32_t>(positions.shape(1));
  step->positions = positions.data();
  const Array<const int32_t> seq_lens = array_of<int32_t>(batch, "seq_lens", 1);
  step->num_seqs = static_cast<int32_t>(seq_lens.shape(0));
  step->seq_lens = seq_lens.data();
  step->cu_seqlens_q = vector_of<int32_t>(batch, "cu_seqlens_q", step->num_seqs + 1);
  require(step->num_tokens > 0 && step->cu_seqlens_q[0] == 0 && step->cu_seqlens_q[step->num_seqs] == step->num_tokens,
          "cu_seqlens_q: does not cover the tokens");
  for (int32_t s = 0; s < step->num_seqs; ++s) {
    const int32_t begin = step->cu_seqlens_q[s], end = step->cu_seqlens_q[s + 1];
    require(begin < end && end <= step->num_tokens, "cu_seqlens_q: not ascending");
    require(step->seq_lens[s] >= end - begin, "seq_lens: below the tokens of this step");
    for (int32_t t = begin; t < end; ++t) {
      require(step->positions[t] == step->seq_lens[s] - end + t, "positions: not the last ones of their sequence");
    }
  }
}

// Blocks that a query of this step sees must be in the pool; others may be -1 or stale.
void check_tables(const StepInfo& step, const StepInfo::Group& group, const KVCache& cache, int32_t window) {
  for (int32_t s = 0; s < step.num_seqs; ++s) {
    const int32_t begin = step.cu_seqlens_q[s], end = step.cu_seqlens_q[s + 1];
    const int32_t first = step.seq_lens[s] - (end - begin);
    const int32_t oldest = window > 0 && first >= window ? first - window + 1 : 0;
    const int32_t* table = group.block_table + static_cast<int64_t>(s) * group.max_blocks;
    require((step.seq_lens[s] - 1) / cache.block_size < group.max_blocks, "block_tables: too narrow");
    for (int32_t b = oldest / cache.block_size; b <= (step.seq_lens[s] - 1) / cache.block_size; ++b) {
      require(table[b] >= 0 && table[b] < cache.blocks, "block_tables: a block that a token sees is outside the pool");
    }
    for (int32_t t = begin; t < end; ++t) {
      const int32_t position = step.positions[t];
      require(group.slots[t] == table[position / cache.block_size] * cache.block_size + position % cache.block_size,
              "slot_mapping: unlike the block table");
    }
  }
}

void read_groups(StepInfo* step, nb::handle batch, const Tape& tape,
                 const std::vector<std::shared_ptr<KVCache>>& caches) {
  const nb::object tables = batch.attr("block_tables"), slots = batch.attr("slot_mapping");
  require(nb::len(tables) == caches.size() && nb::len(slots) == caches.size(), "block_tables, slot_mapping: groups");
  for (size_t g = 0; g < caches.size(); ++g) {
    Array<const int32_t> table, slot;
    const bool typed = nb::try_cast(tables[g], table, false) && nb::try_cast(slots[g], slot, false);
    require(typed && table.ndim() == 2 && static_cast<int32_t>(table.shape(0)) == step->num_seqs,
            "block_tables: not int32 [S, B]");
    require(slot.ndim() == 1 && static_cast<int32_t>(slot.shape(0)) == step->num_tokens, "slot_mapping: not int32 [T]");
    step->groups.push_back({table.data(), slot.data(), static_cast<int32_t>(table.shape(1))});
    check_tables(*step, step->groups[g], *caches[g], tape.heads(static_cast<int32_t>(g)).window);
  }
}

// The ids of the step; those that the step before chose come from its rows.
void read_ids(StepInfo* step, nb::handle batch, const Array<const int32_t>& previous_rows, int32_t vocab,
              std::vector<int32_t>* ids) {
  const int32_t* given = vector_of<int32_t>(batch, "input_ids", step->num_tokens);
  const int32_t* source = vector_of<int32_t>(batch, "token_source", step->num_tokens);
  ids->assign(given, given + step->num_tokens);
  for (int32_t t = 0; t < step->num_tokens; ++t) {
    if (source[t] >= 0) {
      require(source[t] < static_cast<int32_t>(previous_rows.size()),
              "token_source: beyond the rows of the step before");
      (*ids)[t] = previous_rows.data()[source[t]];
    }
    require((*ids)[t] >= 0 && (*ids)[t] < vocab, "input_ids: outside the vocabulary");
  }
  step->input_ids = ids->data();
}

// Contents that a Batch can have and this backend cannot serve.
void refuse_unknown(const StepInfo& step, nb::handle batch) {
  const int32_t* adapters = vector_of<int32_t>(batch, "adapter_ids", step.num_seqs);
  const int32_t* drafts = vector_of<int32_t>(batch, "num_draft_tokens", step.num_seqs);
  for (int32_t s = 0; s < step.num_seqs; ++s) {
    require(adapters[s] == 0, "adapter_ids: this backend has no adapters");
    require(drafts[s] == 0, "num_draft_tokens: this backend verifies no drafts");
  }
  for (int32_t r = 0; r < step.num_rows; ++r) {
    require((step.sample.flags[r] & kUnknownFlags) == 0, "output_flags: this backend gives no hidden states");
  }
}

void read_inputs(StepInfo* step, nb::handle batch, const Tape& tape) {
  const Array<const int32_t> rows = array_of<int32_t>(batch, "output_rows", 1);
  step->num_rows = static_cast<int32_t>(rows.shape(0));
  step->output_rows = rows.data();
  for (int32_t r = 0; r < step->num_rows; ++r) {
    require(rows.data()[r] > (r == 0 ? -1 : rows.data()[r - 1]), "output_rows: not ascending");
    require(rows.data()[r] < step->num_tokens, "output_rows: beyond the tokens");
  }
  const Array<const int32_t> embed_rows = array_of<int32_t>(batch, "embed_rows", 1);
  const Array<const float> embeds = array_of<float>(batch, "embeds", 2);
  step->num_embeds = static_cast<int32_t>(embed_rows.shape(0));
  step->embed_rows = embed_rows.data();
  step->embeds = embeds.data();
  const bool wide = step->num_embeds == 0 || (static_cast<int32_t>(embeds.shape(0)) == step->num_embeds &&
                                              static_cast<int32_t>(embeds.shape(1)) == tape.hidden());
  require(wide, "embeds: not one row of the hidden size for each of embed_rows");
}

// What each sequence gets of its rows: tokens chosen, in CSR form, and one status.
struct PerSequence {
  std::vector<int32_t> tokens;
  int32_t* cu_tokens;    // [S + 1]
  int32_t* num_accepted; // [S] drafts accepted: all tokens but the last
  uint8_t* status;       // [S]
};

void gather(const StepInfo& step, PerSequence* out) {
  int32_t row = 0;
  for (int32_t s = 0; s < step.num_seqs; ++s) {
    // A prompt's middle chunk has no row to show it, but what is not finite must not enter the prefix index.
    for (int32_t t = step.cu_seqlens_q[s]; t < step.cu_seqlens_q[s + 1]; ++t) {
      if (step.finite[t] == 0) out->status[s] |= kNonFinite;
    }
    for (; row < step.num_rows && step.output_rows[row] < step.cu_seqlens_q[s + 1]; ++row) {
      out->status[s] |= step.sample.out_status[row];
      const bool chosen = (step.sample.flags[row] & kSampleFlag) != 0 && step.sample.out_status[row] == 0;
      if (chosen) out->tokens.push_back(step.sample.out_ids[row]);
      else step.sample.out_ids[row] = -1;
    }
    const int32_t count = static_cast<int32_t>(out->tokens.size());
    out->cu_tokens[s + 1] = count;
    out->num_accepted[s] = std::max(0, count - out->cu_tokens[s] - 1);
  }
}

}  // namespace

nb::tuple run_step(Tape& tape, const std::vector<std::shared_ptr<KVCache>>& caches, nb::handle batch,
                   const Array<const int32_t>& previous_rows, nb::handle mask_bits) {
  StepInfo step;
  std::vector<int32_t> input_ids;
  require(caches.size() == tape.num_groups(), "caches: not one for each KV group of the tape");
  read_sequences(&step, batch);
  read_ids(&step, batch, previous_rows, tape.vocab(), &input_ids);
  read_inputs(&step, batch, tape);
  read_groups(&step, batch, tape, caches);
  require(step.num_tokens <= tape.max_tokens() && step.num_rows <= tape.max_rows(), "the step is larger than the tape");
  SampleOutputs out = {};
  out.max_logprobs = most_logprobs(batch, step.num_rows);
  const size_t rows = step.num_rows, seqs = step.num_seqs, k = out.max_logprobs;
  nb::object ids = new_array<int32_t>({rows}, &out.ids), logprobs = new_array<float>({rows, 1 + k}, &out.logprobs);
  nb::object top_ids = new_array<int32_t>({rows, k}, &out.top_ids), signals = new_array<float>({rows, 4}, &out.signals);
  std::vector<uint8_t> row_status(rows), finite(step.num_tokens);
  out.status = row_status.data();
  step.finite = finite.data();
  step.sample = sample_args(batch, mask_bits, static_cast<int64_t>(rows), tape.vocab(), out);
  refuse_unknown(step, batch);
  PerSequence sequences = {};
  nb::object cu_tokens = new_array<int32_t>({seqs + 1}, &sequences.cu_tokens);
  nb::object num_accepted = new_array<int32_t>({seqs}, &sequences.num_accepted);
  nb::object status = new_array<uint8_t>({seqs}, &sequences.status);
  {
    nb::gil_scoped_release released;
    tape.run(step);
    gather(step, &sequences);
  }
  int32_t* tokens;
  nb::object token_ids = new_array<int32_t>({sequences.tokens.size()}, &tokens);
  std::copy(sequences.tokens.begin(), sequences.tokens.end(), tokens);
  int64_t* ns;
  nb::object phase_ns = new_array<int64_t>({tape.labels().size()}, &ns);
  std::copy(tape.label_ns().begin(), tape.label_ns().end(), ns);
  return nb::make_tuple(ids, token_ids, cu_tokens, num_accepted, logprobs, top_ids, signals, status, phase_ns);
}

}  // namespace headrace
