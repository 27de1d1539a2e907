//! Runs the threads of a kernel's blocks.

#pragma once

#include "place.h"

namespace emulated {

struct Shape {
    unsigned blocks, threads;
};

// Runs one block to its end on the calling thread.
void run_block(const Call& call, Shape shape, unsigned block);

}  // namespace emulated
