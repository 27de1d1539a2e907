//! Ways to send data to a peer within a call: counted signals, and the LL, LL128 and Lamport protocols.

#pragma once

#include <protocol/ll128.cuh>
#include <symmpool/collective.cuh>

namespace symmpool {
// Counted signals between this block and the block of the same number on a peer. In a call you must not make more than one
// object that signals for a peer and number, nor more than one that waits. All threads of a block must call each function.
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

    // Sends a vector; you must send each once a call at most. One that there is no room for is not sent.
    __device__ __forceinline__ void send(u64 at, uint4 vector) const {
        if (at < vectors_ && vectors_ <= room(collective_.comm)) {
            ll_store_vector(place(peer_, collective_.comm.rank, at), vector, collective_.session().epoch);
        }
    }

    // Waits for a vector of the peer; false if it does not arrive in time: the thread must return.
    __device__ __forceinline__ bool receive(u64 at, uint4& vector) const {
        const Session& session = collective_.session();
        const bool fits = at < vectors_ && vectors_ <= room(collective_.comm);
        // The place of a vector that does not fit lies outside of the inbox, and may be no memory.
        const char* from = place(collective_.comm.rank, peer_, at);
        Watch watch;
        while (true) {
            if (fits && ll_load_vector(from, session.epoch, vector)) {
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

    // Sends this thread's piece of a line, once a call at most. A line that there is no room for is not sent.
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
        const char* from = place(collective_.comm.rank, peer_, line);
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

// Divides vectors among all blocks: calls `visit(at)` until it returns false. Whole warps come to each call, of which the
// last vectors may be past the end.
template <typename Visit> __device__ __forceinline__ void for_each_vector(u64 vectors, Visit visit) {
    const u32 before = threadIdx.x % 32;
#pragma unroll 1
    for (u64 at = worker_thread(); at - before < vectors; at += worker_threads()) {
        if (!visit(at)) {
            return;
        }
    }
}

// Divides vectors among all blocks, and sends a thread's next vector before this one is received, so that the link has
// work while threads wait: calls `send(at)`, and `receive(at)` until it returns false.
template <typename Send, typename Receive>
__device__ __forceinline__ void for_each_vector(u64 vectors, Send send, Receive receive) {
    const u32 before = threadIdx.x % 32;
    const u64 step = worker_threads();
    u64 at = worker_thread();
    if (at - before < vectors) {
        send(at);
    }
#pragma unroll 1
    for (; at - before < vectors; at += step) {
        if (at + step - before < vectors) {
            send(at + step);
        }
        if (!receive(at)) {
            return;
        }
    }
}

// Vectors of 16 bytes, of any bits, that show without flags that they have arrived (Lamport): the inbox holds a pattern
// where nothing has arrived, and who receives a vector puts it back. So each vector that is sent is received in the same
// call; what is left would be taken for a vector of a later one. Whole warps send and receive together, 32 vectors in a
// row of which the first is a multiple of 32. The inbox of a rank has `vectors` of each rank; a call passes WORLD times as
// many to `Collective`.
class LamportChannel {
public:
    // How many vectors of each rank an inbox has room for.
    static __device__ __forceinline__ u64 room(const DeviceComm& comm) { return EscapedSlot::length(comm); }

    LamportChannel() = default;
    // `peer` is another rank.
    __device__ __forceinline__ LamportChannel(Collective& collective, u32 peer, u64 vectors)
        : collective_(&collective), peer_(peer), vectors_(vectors),
          fits_(vectors <= room(collective.comm) && peer != collective.comm.rank),
          remote_(collective.session(), peer, collective.comm.rank),
          local_(collective.session(), collective.comm.rank, peer) {}

    // Sends a vector of each thread, once a call at most. Those past the end, or that there is no room for, are not sent.
    __device__ __forceinline__ void send(u64 at, uint4 vector) const {
        remote_.send(collective_->session().epoch, static_cast<u32>(at), vector, fits_ && at < vectors_);
    }

    // Waits for this thread's vector of the peer; those past the end are not waited for. All threads of a warp get the same
    // answer: false if a vector does not arrive in time. These threads must return.
    __device__ __forceinline__ bool receive(u64 at, uint4& vector) const {
        const Session& session = collective_->session();
        if (!fits_) {
            return collective_->good(await_timeout(session, peer_, at < vectors_));
        }
        const u32 places[1] = {static_cast<u32>(at)};
        const bool awaited[1] = {at < vectors_};
        uint4 found[1] = {make_uint4(0, 0, 0, 0)};
        const bool there = local_.receive(session, peer_, places, awaited, found);
        vector = found[0];
        return collective_->good(there);
    }

private:
    // Waits until the timeout for a vector that there is no room for; true if no thread of the warp waits.
    static __device__ __noinline__ bool await_timeout(const Session& session, u32 peer, bool awaited) {
        Watch watch;
        while (__any_sync(~0u, awaited)) {
            if (__any_sync(~0u, watch.expired(session, peer, DATA))) {
                return false;
            }
        }
        return true;
    }

    Collective* collective_;
    u32 peer_;
    u64 vectors_;
    bool fits_;
    EscapedSlot remote_;  // in the peer's inbox, for what this rank sends
    EscapedSlot local_;   // in this rank's inbox, for what the peer sends
};

// The channels to all peers by their distance, from 1: that of `comm.after(1)` first. They are made before a loop, so that
// a vector takes half the instructions: a channel that is made within a loop computes its addresses for each anew.
class LamportChannels {
public:
    __device__ __forceinline__ LamportChannels(Collective& collective, u64 vectors) {
#pragma unroll
        for (u32 distance = 1; distance < WORLD; ++distance) {
            channels_[distance - 1] = LamportChannel(collective, collective.comm.after(distance), vectors);
        }
    }

    __device__ __forceinline__ const LamportChannel& operator[](u32 distance) const { return channels_[distance - 1]; }

private:
    LamportChannel channels_[WORLD > 1 ? WORLD - 1 : 1];
};

}  // namespace symmpool
