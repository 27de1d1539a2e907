//! Kernels that programs have as PTX.

#pragma once

#include "threads.h"

namespace emulated {

// Makes a call with a copy of the given arguments.
using Packer = Call (*)(void** given);

// The kernel of this name, or null if there is none.
Packer program_kernel(const char* name);

}  // namespace emulated
