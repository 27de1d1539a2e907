//! One call of a kernel that is written against the device API, from its handshake to its end.

#pragma once

#include <protocol/lamport_escaped.cuh>
#include <symmpool/copy.cuh>
#include <symmpool/peer_blocks.cuh>

namespace symmpool {

// This rank in its communicator: `rank`, and the order of peers (`after`).
struct DeviceComm : Comm {
    static constexpr u32 world = WORLD;

    // A peer's memory where `window` lies in this rank's: memory of the pool, at the same place on every rank.
    template <typename T>
    __device__ __forceinline__ T* peer_ptr(T* window, u32 peer) const {
        return at_peer(window, peer);
    }
};

// A call: `input`, `output`, `bytes` of a part, and the `root` of a broadcast.
struct DeviceCall : Call {};

static_assert(sizeof(DeviceComm) == sizeof(Comm) && sizeof(DeviceCall) == sizeof(Call), "layouts differ");

// How a rank leaves a call.
enum class End {
    TOGETHER,  // when all peers have come to the end, so that memory that peers access is the program's own again
    ALONE,     // at once: peers reach nothing but this rank's inbox and scratch
};

// A block's share of all the data: bytes from `from` to before `to`, whole lines of 128 bytes but at the end.
struct ByteRange {
    u64 from;
    u64 to;

    __device__ __forceinline__ u64 bytes() const { return to - from; }
};

// One call, from its handshake to its end, which is the end of this object. All threads of all blocks must make it before
// anything else, and must come to its end. It is false in blocks that have nothing to do: these must return.
class Collective {
public:
    // `ll_vectors`, `ll128_lines` and `lamport_vectors` are those of the inboxes that the call uses, from all ranks
    // together.
    __device__ __forceinline__ Collective(const DeviceComm& device_comm, const DeviceCall& device_call,
                                          u64 ll_vectors = 0, End leave = End::TOGETHER, u64 ll128_lines = 0,
                                          u64 lamport_vectors = 0)
        : comm(device_comm), call(device_call), session_(begin(device_comm)), end_(leave),
          works_(!session_.failed && !is_leader_block()), failed_(false) {
        if (session_.failed) {
            return;
        }
        if (is_leader_block()) {
            UsedBytes used = used_flags(worker_blocks());
            used.ll = 32 * ll_vectors;
            used.ll128 = LINE_BYTES * ll128_lines;
            exchange_handshakes<true>(session_, call);
            if (must_expire_flags(session_)) {
                expire_old_flags(session_, used);
                expire_escape_marks(session_, lamport_vectors / WORLD);
            }
            return;
        }
        session_.advance();
    }

    Collective(const Collective&) = delete;
    Collective& operator=(const Collective&) = delete;

    __device__ __forceinline__ ~Collective() {
        if (works_ && end_ == End::TOGETHER && !__syncthreads_or(failed_)) {
            const PeerBlocks own(worker_blocks());
            raise_flags(session_, own, END_KIND, 1);
            await_flags(session_, own, END_KIND, 1, EXIT);
        }
    }

    // Whether this block has work. A block without must return at once.
    __device__ __forceinline__ explicit operator bool() const { return works_; }

    // The number of this block, and how many there are; the same on every rank.
    __device__ __forceinline__ u32 block() const { return worker_block(); }
    __device__ __forceinline__ u32 blocks() const { return worker_blocks(); }

    // This block's share of so many bytes.
    __device__ __forceinline__ ByteRange share(u64 bytes) const {
        const EvenSplit split((bytes + 15) / 16, blocks());
        const u64 from = 16 * split.begin(block()), to = 16 * split.begin(block() + 1);
        return {from < bytes ? from : bytes, to < bytes ? to : bytes};
    }

    // Waits until all peers have made this call, so that their inputs and outputs may be accessed, which hold what their
    // streams wrote before. Called by all threads of a block, which get the same answer: false if a peer does not come,
    // or made another call.
    __device__ __forceinline__ bool await_peers() {
        return good(await_handshakes<true>(session_, call));
    }

    // Copies within this rank, or to or from a peer's memory. Called by all threads of a block, of which each may copy
    // what another one has written.
    __device__ __forceinline__ void copy(void* to, const void* from, u64 bytes) const {
        __syncthreads();
        if (to != from) {
            const Copy all(Transfer{static_cast<const char*>(from), static_cast<char*>(to), bytes});
            all.run(0, all.units());
        }
    }

    // Copies to the window of every rank at the place where `window` lies in this rank's, its own included. What is
    // loaded once is stored for all, so that all links and this rank's memory are busy at the same time. Called by all
    // threads of a block, as `copy`.
    __device__ __forceinline__ void copy_to_all(void* window, const void* from, u64 bytes) const {
        __syncthreads();
        const Copy own(Transfer{static_cast<const char*>(from), static_cast<char*>(window), bytes});
        // In place, only peers lack it.
        const u32 first = window == from ? 1 : 0;
        own.visit(0, own.units(), [&](char* at, uint4 vector) {
#pragma unroll
            for (u32 distance = 1; distance < WORLD; ++distance) {
                store_plain(comm.peer_ptr(at, comm.after(distance)), vector);
            }
            if (first == 0) {
                store_plain(at, vector);
            }
        }, [&](char* at, char byte) {
            for (u32 distance = first; distance < WORLD; ++distance) {
                *comm.peer_ptr(at, comm.after(distance)) = byte;
            }
        });
    }

    // A rank's scratch, undefined when a call begins, and its bytes. The next call has another half of it.
    __device__ __forceinline__ char* scratch(u32 rank) const {
        return comm.of(rank) + comm.plan_scratch + session_.parity() * (comm.plan_scratch_bytes / 2);
    }
    __device__ __forceinline__ u64 scratch_bytes() const { return comm.plan_scratch_bytes / 2; }

    // Notes whether what all threads of a block, or one thread, waited for has arrived, and returns it.
    __device__ __forceinline__ bool good(bool arrived) {
        failed_ = failed_ || !arrived;
        return arrived;
    }
    __device__ __forceinline__ const Session& session() const { return session_; }

    const DeviceComm& comm;
    const DeviceCall& call;

private:
    // The kind of flags that say that a block has come to the end. Channels have the others.
    static constexpr u32 END_KIND = FLAG_KINDS - 1;

    // Begins the kernel before the communicator's state is read, which the stream's earlier calls write.
    static __device__ __forceinline__ const Comm& begin(const DeviceComm& device_comm) {
        begin_kernel(device_comm.early);
        return device_comm;
    }

    Session session_;
    const End end_;
    const bool works_;
    bool failed_;
};

}  // namespace symmpool
