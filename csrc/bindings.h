// What the files of the Python module share.
#pragma once
#include <memory>
#include <optional>

#include "arrays.h"
#include "tensors.h"

namespace headrace {

SourceRows source_rows(const Array<const uint8_t>& rows, int32_t type, int32_t k);

// Room for the packed form of `source`, or of gate and up rows interleaved. Raises ValueError.
std::shared_ptr<Weight> new_weight(const KernelTable* kernels, const SourceRows& source, const SourceRows* up);

void bind_eager(nb::module_& m);

}  // namespace headrace
