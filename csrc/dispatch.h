// Which instruction sets this machine can run, and their kernel tables.
#pragma once
#include <initializer_list>
#include <vector>

#include "kernels.h"

namespace headrace {

// Best first. "reference" is always the last.
std::vector<const KernelTable*> available_kernels();

}  // namespace headrace
