//! Kernels that programs bring with them.

#pragma once

#include "threads.h"

namespace emulated {

// Copies a kernel's arguments.
using Packer = Call (*)(void** given);

// A kernel of a module that is PTX, or null.
Packer program_kernel(const char* name);

}  // namespace emulated
