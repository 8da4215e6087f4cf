// Which instruction sets this machine can run, and their kernel tables.
#pragma once
#include <initializer_list>
#include <vector>

#include "kernels.h"

namespace headrace {

// Best first, so that the first is the one to use. "reference" comes last, but for emulations in builds for tests.
std::vector<const KernelTable*> available_kernels();

}  // namespace headrace
