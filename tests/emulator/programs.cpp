//! Kernels that programs have as PTX. PTX is not read here: these are the same kernels in C++, found by name
//! (`tools.rs` of `cuda_collectives`).

#include "programs.h"

#include <string.h>

#include "device.h"

using u64 = unsigned long long;

namespace {

void differences(const unsigned char* a, const unsigned char* b, u64 bytes, u64* found, u64 name) {
    u64 count = 0;
    const u64 step = u64{gridDim.x} * blockDim.x;
    for (u64 at = u64{blockIdx.x} * blockDim.x + threadIdx.x; at < bytes; at += step) {
        count += a[at] != b[at];
    }
    if (count != 0) {
        atomicAdd(found, count);
        atomicMin(found + 1, name);
    }
}

void pause(u64 nanoseconds) {
    for (const u64 end = emulated::emulated_nanoseconds() + nanoseconds; emulated::emulated_nanoseconds() < end;) {
        emulated::emulated_look();
    }
}

}  // namespace

namespace emulated {

Packer program_kernel(const char* name) {
    if (strcmp(name, "differences") == 0) {
        return [](void** given) { return call(&differences, given); };
    }
    if (strcmp(name, "pause") == 0) {
        return [](void** given) { return call(&pause, given); };
    }
    return nullptr;
}

}  // namespace emulated
