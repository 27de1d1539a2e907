//! Memory that kernels may not access. Kernels are compiled so that they call these functions before each access to memory,
//! those of the compiler's address sanitizer, of which nothing else is here.

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>

#include "place.h"

namespace {

struct Range {
    std::atomic<uint64_t> begin{0}, end{0};
};

// Tests change them while no kernel runs.
constexpr int MAX_RANGES = 64;
Range guarded[MAX_RANGES];
std::atomic<int> count{0};
// All of them together, for a fast answer to most accesses.
Range all;

[[noreturn]] __attribute__((noinline)) void refuse(uint64_t at, size_t bytes, const Range& range) {
    const emulated::Place& place = *emulated::emulated_place;
    fprintf(stderr,
            "emulated device: block %u of %u, thread %u of %u: accesses %zu bytes, %llu bytes within guarded memory\n",
            place.block.x, place.grid_dim.x, place.thread.x, place.block_dim.x, bytes,
            static_cast<unsigned long long>(at - range.begin));
    abort();
}

__attribute__((noinline)) void look_closer(uint64_t at, size_t bytes) {
    for (int nth = 0; nth < count; ++nth) {
        if (at < guarded[nth].end && at + bytes > guarded[nth].begin) {
            refuse(at, bytes, guarded[nth]);
        }
    }
}

inline void look(uint64_t at, size_t bytes) {
    if (at < all.end.load(std::memory_order_relaxed) && at + bytes > all.begin.load(std::memory_order_relaxed)) {
        look_closer(at, bytes);
    }
}

}  // namespace

extern "C" {

// For tests: kernels may not access these bytes from now on; no bytes end all such guards. Returns how many there are, or
// -1 if there can be no more.
int emulatedGuard(uint64_t begin, uint64_t bytes) {
    if (bytes == 0) {
        all.begin = all.end = 0;
        return count = 0;
    }
    if (count == MAX_RANGES) {
        return -1;
    }
    const uint64_t end = begin + bytes;
    guarded[count].begin = begin, guarded[count].end = end;
    const bool first = count == 0;
    all.begin = first || begin < all.begin ? begin : all.begin.load();
    all.end = first || end > all.end ? end : all.end.load();
    return ++count;
}

#define LOOKS(bytes)                                                         \
    void __asan_load##bytes##_noabort(uint64_t at) { return look(at, bytes); } \
    void __asan_store##bytes##_noabort(uint64_t at) { return look(at, bytes); }
LOOKS(1)
LOOKS(2)
LOOKS(4)
LOOKS(8)
LOOKS(16)
void __asan_loadN_noabort(uint64_t at, size_t bytes) { look(at, bytes); }
void __asan_storeN_noabort(uint64_t at, size_t bytes) { look(at, bytes); }
void __asan_handle_no_return() {}

void emulated::emulated_copy(void* to, const void* from, unsigned bytes) {
    look(reinterpret_cast<uint64_t>(from), bytes);
    look(reinterpret_cast<uint64_t>(to), bytes);
    memcpy(to, from, bytes);
}

}
