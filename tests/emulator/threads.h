//! Runs the threads of a kernel's blocks.

#pragma once

#include "place.h"

namespace emulated {

struct Shape {
    unsigned blocks, threads;
};

// Runs the blocks of a cluster to their end on the calling thread, from this block on: as many as the kernel says, most often one.
void run_cluster(const Call& call, Shape shape, unsigned first);

}  // namespace emulated
