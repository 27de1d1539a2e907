//! How a product of few rows is added up over all ranks: vectors of this rank's lie in the call's output, and those of its peers
//! come to the inbox. Defines: those of `symmpool/impl/inbox.cuh`, and OP.

#pragma once

#include <symmpool/impl/inbox.cuh>
#include <symmpool/reduce.cuh>

namespace symmpool {

__device__ __forceinline__ uint4* output_at(const CallParams& call, u64 at) {
    return reinterpret_cast<uint4*>(call.output) + at;
}

// Adds the peers' vectors to one of this rank's, which the sum replaces. False if a peer's does not arrive.
__device__ __forceinline__ bool add_ranks(const Session& session, const Inbox& inbox, const CallParams& call, u64 at, u64 each) {
    uint4 all[WORLD];
    const uint4 own = load_plain(output_at(call, at));
    if constexpr (WORLD == 1) {
        all[0] = own;
    } else if (!await_all(session, inbox, at, each, own, all)) {
        return false;
    }
    store_plain(output_at(call, at), Reduce<DTYPE, OP>::all(all));
    return true;
}

}  // namespace symmpool
