// What the files of the Python module share.
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "arrays.h"
#include "tensors.h"

namespace headrace {

class Tape;

// The table of an instruction set, or the best for "auto". Raises ValueError where this machine cannot run it.
const KernelTable* find_kernels(const std::string& isa);

SourceRows source_rows(const Array<const uint8_t>& rows, int32_t type, int32_t k);

// Room for the packed form of n rows of k inputs, or of n gate and n up rows interleaved. Raises ValueError.
std::shared_ptr<Weight> new_weight(const KernelTable* kernels, Arena& arena, int32_t type, int32_t n, int32_t k,
                                   bool interleave);

nb::tuple run_step(Tape& tape, const std::vector<std::shared_ptr<KVCache>>& caches, nb::handle batch,
                   const Array<const int32_t>& previous_rows, nb::handle mask_bits);

void bind_eager(nb::module_& m);
void bind_profile(nb::module_& m);
void bind_tape(nb::module_& m);
void bind_weights(nb::module_& m);

}  // namespace headrace
