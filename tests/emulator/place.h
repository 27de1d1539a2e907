//! What kernels and the code that runs them have in common: a thread's place in its grid, and functions by which a
//! thread yields.

#pragma once

#include <tuple>
#include <utility>

struct alignas(16) uint4 { unsigned x, y, z, w; };

namespace emulated {

struct Dim { unsigned x, y, z; };

// The members of a fiber that kernels read.
struct Place {
    Dim thread, block, block_dim, grid_dim;
};

// A copy of a kernel's arguments, and functions that call it with them and that free them.
struct Call {
    void (*run)(void*);
    void (*drop)(void*);
    void* arguments;
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
// A barrier of a warp. Returns the value of each thread, and sets a bit of `ended` for each that has ended. All threads
// must call it with the same `kind`.
const unsigned long long* emulated_warp(unsigned long long value, char kind, unsigned* ended);
// Sixteen bytes of a line of 128 bytes that eight threads load, or store, with one instruction.
void emulated_load_line(const void* from, uint4* value);
void emulated_store_line(void* to, const uint4* value);
unsigned long long emulated_nanoseconds();
}

template <typename... Parameters>
Call call(void (*kernel)(Parameters...), void** given) {
    using All = std::tuple<void (*)(Parameters...), std::remove_cv_t<Parameters>...>;
    auto copy = [&]<std::size_t... I>(std::index_sequence<I...>) {
        return new All(kernel, *static_cast<std::remove_cv_t<Parameters>*>(given[I])...);
    };
    Call made;
    made.arguments = copy(std::index_sequence_for<Parameters...>());
    made.run = [](void* all) {
        std::apply([](auto entry, auto&... arguments) { entry(arguments...); }, *static_cast<All*>(all));
    };
    made.drop = [](void* all) { delete static_cast<All*>(all); };
    return made;
}

}  // namespace emulated
