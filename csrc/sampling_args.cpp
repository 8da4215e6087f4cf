#include "sampling_args.h"

#include <algorithm>

namespace headrace {
namespace {

template <typename T>
const T* per_row(nb::handle object, const char* name, int64_t rows) {
  const Array<const T> array = array_of<T>(object, name, 1);
  require(static_cast<int64_t>(array.shape(0)) == rows, std::string(name) + ": not one entry an output row");
  return array.data();
}

// A CSR pair: bounds [R + 1] and token ids inside the vocabulary. Returns the ids and their number.
const int32_t* csr_ids(nb::handle rows, const char* cu_name, const char* ids_name, const int32_t* cu, int64_t num_rows,
                       int64_t vocab, int64_t* count) {
  const Array<const int32_t> ids = array_of<int32_t>(rows, ids_name, 1);
  *count = static_cast<int64_t>(ids.shape(0));
  bool sound = cu[0] == 0 && cu[num_rows] == *count;
  for (int64_t r = 0; r < num_rows; ++r) sound = sound && cu[r] <= cu[r + 1];
  require(sound, std::string(cu_name) + ": not ascending from 0 to the number of ids");
  for (int64_t i = 0; i < *count; ++i) {
    require(ids.data()[i] >= 0 && ids.data()[i] < vocab, std::string(ids_name) + ": outside the vocabulary");
  }
  return ids.data();
}

void set_masks(SampleArgs* a, nb::handle batch, nb::handle mask_bits, int64_t rows, int64_t vocab) {
  Array<const int32_t> bits;
  if (mask_bits.is_none()) {
    bits = array_of<int32_t>(batch, "mask_bits", 2);
  } else {
    require(nb::try_cast(mask_bits, bits, false) && bits.ndim() == 2, "mask_bits: not a C-contiguous int32 matrix");
  }
  a->mask_row = per_row<int32_t>(batch, "mask_row", rows);
  a->mask_bits = bits.data();
  a->mask_words = static_cast<int64_t>(bits.shape(1));
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t index = a->mask_row[r];
    require(index < static_cast<int64_t>(bits.shape(0)), "mask_row: beyond mask_bits");
    require(index < 0 || a->mask_words * 32 >= vocab, "mask_bits: narrower than the vocabulary");
  }
}

}  // namespace

int32_t most_logprobs(nb::handle batch, int64_t rows) {
  const int32_t* wanted = per_row<int32_t>(batch.attr("sampling"), "num_logprobs", rows);
  int32_t most = 0;
  for (int64_t r = 0; r < rows; ++r) most = std::max(most, wanted[r]);
  return most;
}

SampleArgs sample_args(nb::handle batch, nb::handle mask_bits, int64_t rows, int64_t vocab, const SampleOutputs& out) {
  SampleArgs a = {};
  const nb::object s = batch.attr("sampling");
  a.ld = vocab;
  a.vocab = static_cast<int32_t>(vocab);
  a.temperature = per_row<float>(s, "temperature", rows);
  a.top_p = per_row<float>(s, "top_p", rows);
  a.min_p = per_row<float>(s, "min_p", rows);
  a.repetition_penalty = per_row<float>(s, "repetition_penalty", rows);
  a.presence_penalty = per_row<float>(s, "presence_penalty", rows);
  a.frequency_penalty = per_row<float>(s, "frequency_penalty", rows);
  a.top_k = per_row<int32_t>(s, "top_k", rows);
  a.choice = per_row<int32_t>(s, "choice", rows);
  a.position = per_row<int32_t>(s, "position", rows);
  a.num_logprobs = per_row<int32_t>(s, "num_logprobs", rows);
  a.seed = per_row<uint64_t>(s, "seed", rows);
  a.bias_cu = per_row<int32_t>(s, "bias_cu", rows + 1);
  a.penalty_cu = per_row<int32_t>(s, "penalty_cu", rows + 1);
  int64_t biases, penalties;
  a.bias_ids = csr_ids(s, "bias_cu", "bias_ids", a.bias_cu, rows, vocab, &biases);
  a.penalty_ids = csr_ids(s, "penalty_cu", "penalty_ids", a.penalty_cu, rows, vocab, &penalties);
  a.bias_values = per_row<float>(s, "bias_values", biases);
  a.penalty_counts = per_row<int32_t>(s, "penalty_counts", penalties);
  a.flags = per_row<uint8_t>(batch, "output_flags", rows);
  a.target_ids = per_row<int32_t>(batch, "target_ids", rows);
  for (int64_t r = 0; r < rows; ++r) require(a.target_ids[r] < vocab, "target_ids: outside the vocabulary");
  set_masks(&a, batch, mask_bits, rows, vocab);
  a.out_ids = out.ids;
  a.out_logprobs = out.logprobs;
  a.out_top_ids = out.top_ids;
  a.max_logprobs = out.max_logprobs;
  a.out_signals = out.signals;
  a.out_status = out.status;
  return a;
}

}  // namespace headrace
