//! Declarations that kernels share with the code that runs them: a thread's place in its grid, and functions by which
//! a thread yields.

#pragma once

// Every kernel is compiled with these files, so they include none of the C++ library's, which take longer to read than
// most kernels.

struct alignas(16) uint4 { unsigned x, y, z, w; };

namespace emulated {

struct Dim { unsigned x, y, z; };

// The members of a fiber that kernels read.
struct Place {
    Dim thread, block, block_dim, grid_dim;
};

// A copy of a kernel's arguments, functions that call it with them and that free them, and the blocks of a cluster.
struct Call {
    void (*run)(void*);
    void (*drop)(void*);
    void* arguments;
    unsigned cluster;
};

extern "C" {
extern __thread Place* emulated_place;
// Called by a thread that polls: lets other threads run, for which it may be waiting.
void emulated_look();
// Let other threads run now and then: between the two halves of an access, and before a store that others may wait for.
void emulated_between();
void emulated_act();
// A barrier of the block's threads that have not ended. Returns whether any passed a predicate that is not 0.
int emulated_block(int predicate);
// A barrier of some warps, of so many threads in all. Its numbers begin with 1.
int emulated_group(unsigned number, unsigned threads, int predicate);
// A barrier of all threads of the cluster's blocks that have not ended.
void emulated_cluster();
// Ends the process if this block of the cluster has ended, and its shared memory with it.
void emulated_neighbour(unsigned block);
// A barrier of a warp. Returns the value of each thread, and sets a bit of `ended` for each that has ended. All threads
// must call it with the same `kind`.
const unsigned long long* emulated_warp(unsigned long long value, char kind, unsigned* ended);
// Sixteen bytes of a line of 128 bytes that eight threads load, or store, with one instruction.
void emulated_load_line(const void* from, uint4* value);
void emulated_store_line(void* to, const uint4* value);
// Copies bytes, and ends the process where they are guarded.
void emulated_copy(void* to, const void* from, unsigned bytes);
unsigned long long emulated_nanoseconds();
}

// Copies of a kernel's arguments: what `std::tuple` is elsewhere.
template <typename... Parameters>
struct Arguments {
    explicit Arguments(void**) {}
    template <typename Kernel, typename... Before>
    void pass(Kernel kernel, Before&... before) {
        kernel(before...);
    }
};
template <typename First, typename... Rest>
struct Arguments<First, Rest...> {
    Arguments<Rest...> rest;
    First first;
    explicit Arguments(void** given) : rest(given + 1), first(*static_cast<First*>(*given)) {}
    template <typename Kernel, typename... Before>
    void pass(Kernel kernel, Before&... before) {
        rest.pass(kernel, before..., first);
    }
};

template <typename... Parameters>
Call call(void (*kernel)(Parameters...), void** given, unsigned cluster = 1) {
    struct All {
        void (*kernel)(Parameters...);
        Arguments<Parameters...> arguments;
    };
    Call made;
    made.arguments = new All{kernel, Arguments<Parameters...>(given)};
    made.run = [](void* all) { static_cast<All*>(all)->arguments.pass(static_cast<All*>(all)->kernel); };
    made.drop = [](void* all) { delete static_cast<All*>(all); };
    made.cluster = cluster;
    return made;
}

}  // namespace emulated
