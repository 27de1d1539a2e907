//! A call as one block sees it: the base of `Collective`, which channels and our own kernels use too.

#pragma once

#include <symmpool/device_comm.cuh>
#include <symmpool/impl/ll128.cuh>
#include <symmpool/impl/partition.cuh>
#include <symmpool/impl/peer_blocks.cuh>

namespace symmpool {

class CallBlock {
public:
    CallBlock(const CallBlock&) = delete;
    CallBlock& operator=(const CallBlock&) = delete;

    __device__ __forceinline__ const Session& session() const { return session_; }

    // The indices for which this block works: one, but where its communicator may use only some of the SMs.
    __device__ __forceinline__ PeerBlocks peer_blocks() const { return peer_blocks_; }

    // Returns `arrived`, and notes a false one. Called by one thread for itself.
    __device__ __forceinline__ bool good(bool arrived) {
        failed_ = failed_ || !arrived;
        return arrived;
    }

    // Notes an answer that is the same for all threads of the block.
    __device__ __forceinline__ bool good_for_all(bool arrived) {
        works_ = works_ && arrived;
        return arrived;
    }

protected:
    __device__ __forceinline__ explicit CallBlock(const Comm& comm)
        : session_(start(comm)), grant_(comm), works_(false), failed_(false) {}

    // Begins the call: the leader block does the handshake. `expire_marks` expires the escape marks that the call does not use.
    template <typename ExpireMarks>
    __device__ __forceinline__ void begin(const CallParams& call, u64 ll_vectors, u64 ll128_lines, ExpireMarks expire_marks) {
        if (grant_.is_over() || session_.failed) {
            return;
        }
        if (is_leader_block()) {
            UsedBytes used = used_flags(call.peer_blocks);
            used.ll = 32 * ll_vectors;
            used.ll128 = LINE_BYTES * ll128_lines;
            exchange_handshakes<true>(session_, call);
            if (must_expire_flags(session_)) {
                // A copy, as these functions are not inlined: what they see the address of stays in memory.
                const Session session(session_);
                expire_old_flags(session, used);
                expire_marks(session);
            }
            return;
        }
        works_ = true;
        session_.advance();
        peer_blocks_ = PeerBlocks(call.peer_blocks);
    }

    Session session_;
    const SmGrant grant_;
    PeerBlocks peer_blocks_;
    bool works_;
    bool failed_;

private:
    // Begins the kernel before the communicator's state is read, which the stream's earlier calls write.
    static __device__ __forceinline__ const Comm& start(const Comm& comm) {
        begin_kernel(comm.early);
        return comm;
    }
};

}  // namespace symmpool
