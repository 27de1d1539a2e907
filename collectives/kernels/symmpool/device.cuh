//! The device API: what a kernel of a collective needs. docs/kernels.md teaches it.
//! Defines: WORLD, the number of ranks. Kernels that reduce also have DTYPE and OP, the codes of the call's type and
//! operation (`symmpool/types.cuh`, `symmpool/reduce.cuh`).
//!
//! A kernel has two parameters, `const __grid_constant__ DeviceComm` and `const __grid_constant__ DeviceCall`, and makes
//! a `Collective` of them first. Blocks are numbered without the first one of the grid, which does the handshake.
//! Blocks of equal number on all ranks are peer blocks: signals are between them.
//!
//! Programs can ask for the version of this interface by SYMMPOOL_DEVICE_API. What other headers hold may change.

#pragma once

#define SYMMPOOL_DEVICE_API 1

#include <protocol/ll128.cuh>
#include <symmpool/copy.cuh>
#include <symmpool/peer_blocks.cuh>
#include <symmpool/reduce.cuh>

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

// What a block does of all the data: bytes from `from` to before `to`, whole lines of 128 bytes but at the end.
struct Share {
    u64 from;
    u64 to;

    __device__ __forceinline__ u64 bytes() const { return to - from; }
};

// One call, from its handshake to its end, which is the end of this object. Made by all threads of all blocks, first of
// all; they all come to its end, too. It is false in blocks that have nothing to do.
class Collective {
public:
    // `ll_vectors` and `ll128_lines` are those of the inboxes that the call uses, from all ranks together.
    __device__ __forceinline__ Collective(const DeviceComm& device_comm, const DeviceCall& device_call,
                                          u64 ll_vectors = 0, End leave = End::TOGETHER, u64 ll128_lines = 0)
        : comm(device_comm), call(device_call), session_(begun(device_comm)), end_(leave),
          works_(!session_.failed && !is_leader_block()), failed_(false) {
        if (session_.failed) {
            return;
        }
        if (is_leader_block()) {
            UsedBytes used = used_flags(worker_blocks());
            used.ll = 32 * ll_vectors;
            used.ll128 = LINE_BYTES * ll128_lines;
            run_leader_block<true>(session_, call, used);
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

    // Whether this block has work. A block without returns at once.
    __device__ __forceinline__ explicit operator bool() const { return works_; }

    // The number of this block, and how many there are; the same on every rank.
    __device__ __forceinline__ u32 block() const { return worker_block(); }
    __device__ __forceinline__ u32 blocks() const { return worker_blocks(); }

    // What this block does of so many bytes.
    __device__ __forceinline__ Share share(u64 bytes) const {
        const Split split((bytes + 15) / 16, blocks());
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

    // A rank's scratch, undefined when a call begins, and its bytes. The next call has another half of it.
    __device__ __forceinline__ char* scratch(u32 rank) const {
        return comm.of(rank) + comm.plan_scratch + session_.parity() * (comm.plan_scratch_bytes / 2);
    }
    __device__ __forceinline__ u64 scratch_bytes() const { return comm.plan_scratch_bytes / 2; }

    // Of what all threads of a block, or one thread, waited for.
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

    static __device__ __forceinline__ const Comm& begun(const DeviceComm& device_comm) {
        begin_kernel(device_comm.early);
        return device_comm;
    }

    Session session_;
    const End end_;
    const bool works_;
    bool failed_;
};

// Counted signals between this block and the block of the same number on a peer. In a call there is one object that
// signals for each peer and number, and one that waits. All functions are called by all threads of a block.
class MemoryChannel {
public:
    static constexpr u32 NUMBERS = FLAG_KINDS - 1;  // from 0 to before this

    __device__ __forceinline__ MemoryChannel(Collective& collective, u32 peer, u32 number = 0)
        : collective_(collective), peer_(peer), number_(number), signals_(0), waits_(0) {}

    // Copies to the peer's memory that lies where `window` lies in this rank's.
    __device__ __forceinline__ void put(void* window, const void* from, u64 bytes) const {
        collective_.copy(collective_.comm.peer_ptr(static_cast<char*>(window), peer_), from, bytes);
    }

    // Copies from the peer's memory that lies where `window` lies in this rank's.
    __device__ __forceinline__ void get(void* to, const void* window, u64 bytes) const {
        collective_.copy(to, collective_.comm.peer_ptr(static_cast<const char*>(window), peer_), bytes);
    }

    // Adds one to the count that the peer waits for, behind all that this block has done so far.
    __device__ __forceinline__ void signal() {
        ++signals_;
        __syncthreads();
        if (threadIdx.x == 0) {
            const Session& session = collective_.session();
            store_release(flag_of(session, peer_, number_, session.comm.rank, worker_block()),
                          static_cast<u64>(session.epoch) << 32 | signals_);
        }
    }

    __device__ __forceinline__ void put_with_signal(void* window, const void* from, u64 bytes) {
        put(window, from, bytes);
        signal();
    }

    // Waits for the next signal of the peer: what its block did before is visible then. All threads get the same answer:
    // false if it takes too long, which the host reports with the rank.
    __device__ __forceinline__ bool wait() {
        ++waits_;
        return collective_.good(block_await_flag(collective_.session(), number_, peer_, worker_block(), waits_, DATA));
    }

private:
    Collective& collective_;
    const u32 peer_;
    const u32 number_;
    u32 signals_;
    u32 waits_;
};

// Vectors of 16 bytes that show by themselves that they have arrived: half of what travels is flags. Each thread sends and
// receives for itself. The inbox of a rank has `vectors` of each rank; a call passes WORLD times as many to `Collective`.
class LlChannel {
public:
    // How many vectors of each rank an inbox has room for.
    static __device__ __forceinline__ u64 room(const DeviceComm& comm) { return comm.ll_bytes / 2 / 32 / WORLD; }

    __device__ __forceinline__ LlChannel(Collective& collective, u32 peer, u64 vectors)
        : collective_(collective), peer_(peer), vectors_(vectors) {}

    // Sends a vector, once a call. One that there is no room for is not sent.
    __device__ __forceinline__ void send(u64 at, uint4 vector) const {
        if (at < vectors_ && vectors_ <= room(collective_.comm)) {
            ll_store_vector(place(peer_, collective_.comm.rank, at), vector, collective_.session().epoch);
        }
    }

    // Waits for a vector of the peer; false if it does not arrive in time. A thread that gets that returns.
    __device__ __forceinline__ bool receive(u64 at, uint4& vector) const {
        const Session& session = collective_.session();
        const bool fits = at < vectors_ && vectors_ <= room(collective_.comm);
        const char* from = place(collective_.comm.rank, peer_, fits ? at : 0);
        Watch watch;
        while (true) {
            if (ll_load_vector(from, session.epoch, vector) && fits) {
                return true;
            }
            if (watch.expired(session, peer_, DATA)) {
                return collective_.good(false);
            }
        }
    }

private:
    __device__ __forceinline__ char* place(u32 owner, u32 from, u64 at) const {
        const Comm& comm = collective_.comm;
        const u64 half = collective_.session().parity() * (comm.ll_bytes / 2);
        return comm.of(owner) + comm.ll + half + 32 * (from * vectors_ + at);
    }

    Collective& collective_;
    const u32 peer_;
    const u64 vectors_;
};

// Memory of any alignment and length as the payloads of lines. Eight threads in a row have a piece of a line each: sixteen
// bytes, the last of them eight. Beyond the last line nothing is loaded or stored.
template <typename Byte> struct LineSpan {
    Byte* begin;
    u64 bytes;

    __device__ __forceinline__ u64 lines() const { return lines_of(bytes); }

    __device__ __forceinline__ uint4 load(u64 line) const { return load_piece(at(line), length(line)); }
    __device__ __forceinline__ void store(u64 line, uint4 piece) const { store_piece(at(line), length(line), piece); }

private:
    __device__ __forceinline__ Byte* at(u64 line) const { return begin + line * LINE_PAYLOAD + 16 * line_thread(); }
    __device__ __forceinline__ u32 length(u64 line) const { return piece_bytes(bytes, line, line_thread()); }
};

using SourceLines = LineSpan<const char>;
using TargetLines = LineSpan<char>;

// Divides lines among all blocks: calls `visit(line)` until it returns false. Whole warps come to each call, of which the
// last lines may be past the end.
template <typename Visit> __device__ __forceinline__ void for_each_line(u64 lines, Visit visit) {
    const u64 first = worker_thread() / LINE_THREADS, before = threadIdx.x % 32 / LINE_THREADS;
#pragma unroll 1
    for (u64 line = first; line - before < lines; line += worker_threads() / LINE_THREADS) {
        if (!visit(line)) {
            return;
        }
    }
}

// Lines of 128 bytes that show by themselves that they have arrived: the last eight are flags. Only NVLink keeps lines
// whole, so there is no room on other links. Whole warps send and receive together, four lines at once. The inbox of a
// rank has `lines` of each rank; a call passes WORLD times as many to `Collective`.
class Ll128Channel {
public:
    // How many lines of each rank an inbox has room for: 0 where not all ranks are linked by NVLink.
    static __device__ __forceinline__ u64 room(const DeviceComm& comm) {
        return comm.ll128_bytes / 2 / LINE_BYTES / WORLD;
    }

    __device__ __forceinline__ Ll128Channel(Collective& collective, u32 peer, u64 lines)
        : collective_(collective), peer_(peer), lines_(lines) {}

    // Sends this thread's piece of a line, once a call. A line that there is no room for is not sent.
    __device__ __forceinline__ void send(u64 line, uint4 piece) const {
        if (line < lines_ && lines_ <= room(collective_.comm)) {
            const uint4 vector = with_flags(piece, line_thread(), collective_.session().epoch);
            store_line(place(peer_, collective_.comm.rank, line), vector);
        }
    }

    // Waits for this thread's piece of a line of the peer; lines past the end are not waited for. All threads of a warp get
    // the same answer: false if a line does not arrive in time. Threads that get that return.
    __device__ __forceinline__ bool receive(u64 line, uint4& piece) const {
        const Session& session = collective_.session();
        const bool fits = lines_ <= room(collective_.comm), awaited = line < lines_;
        const char* from = place(collective_.comm.rank, peer_, fits && awaited ? line : 0);
        Watch watch;
        bool missing = true;
        while (missing) {
            missing = awaited && !fits;
            if (awaited && fits) {
                piece = load_line(from);
                missing = !has_flags(piece, line_thread(), session.epoch);
            }
            missing = __any_sync(~0u, missing);
            if (missing && __any_sync(~0u, watch.expired(session, peer_, DATA))) {
                return collective_.good(false);
            }
        }
        return true;
    }

private:
    __device__ __forceinline__ char* place(u32 owner, u32 from, u64 line) const {
        const Comm& comm = collective_.comm;
        const u64 half = collective_.session().parity() * (comm.ll128_bytes / 2);
        return comm.of(owner) + comm.ll128 + half + LINE_BYTES * (from * lines_ + line) + 16 * line_thread();
    }

    Collective& collective_;
    const u32 peer_;
    const u64 lines_;
};

}  // namespace symmpool
