//! What kernels and those who run them both know: where a thread is, and how one gives way.

#pragma once

#include <tuple>
#include <utility>

struct alignas(16) uint4 { unsigned x, y, z, w; };

namespace emulated {

struct Dim { unsigned x, y, z; };

// The part of a fiber that kernels read.
struct Place {
    Dim thread, block, block_dim, grid_dim;
};

// A kernel's arguments, copied, and how to call it with them.
struct Call {
    void (*run)(void*);
    void (*drop)(void*);
    void* arguments;
};

extern "C" {
extern __thread Place* emulated_place;
// Lets others go on, which this thread may be waiting for.
void emulated_look();
// Lets others go on now and then: between two accesses, and before one that others may wait for.
void emulated_between();
void emulated_act();
// Until all threads of the block have come that have not ended; whether one passed something.
int emulated_block(int predicate);
// The same of a warp; what each of its threads passed, of those that have not ended. `kind` tells calls apart.
const unsigned long long* emulated_warp(unsigned long long value, char kind, unsigned* ended);
// Sixteen bytes of a line of 128 that eight threads load, or store, with one instruction.
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
