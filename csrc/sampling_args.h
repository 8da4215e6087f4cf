// SampleArgs from a Batch: the border where its arrays are checked, shared by the tape and the eager entry point.
#pragma once
#include "arrays.h"
#include "kernels.h"

namespace headrace {

// Where one step's rows go. Owned by the caller.
struct SampleOutputs {
  int32_t* ids;        // [R]
  float* logprobs;     // [R][1 + max_logprobs]
  int32_t* top_ids;    // [R][max_logprobs]
  float* signals;      // [R][4]
  uint8_t* status;     // [R]
  int32_t max_logprobs;
};

// K of a Batch: the most alternatives that any row asks for.
int32_t most_logprobs(nb::handle batch, int64_t rows);

// Points into the arrays of `batch`, which must outlive it. logits and scratch are left to the caller. `mask_bits`
// replaces the batch's when it is not None. Raises TypeError or ValueError naming the array.
SampleArgs sample_args(nb::handle batch, nb::handle mask_bits, int64_t rows, int64_t vocab, const SampleOutputs& out);

}  // namespace headrace
