//! The end of a product of few rows where kernels of other communicators may need SMs (`fused/matmul_small_m.cu`): a launch behind
//! the one that has made and sent this rank's product waits for those of its peers, and adds all up. Its blocks may all run at the
//! same time whatever else does. Defines: WORLD, THREADS, DTYPE (BF16 or F16), OP, PROTOCOL (LAMPORT), BLOCKS (1).

#include <fused/small_m_sums.cuh>

using namespace symmpool;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_matmul_small_m_received(const __grid_constant__ Comm comm, const __grid_constant__ CallParams call) {
    begin_kernel(comm.early);
    Session session(comm);
    const SmGrant grant(comm);
    if (grant.is_over()) {
        return;
    }
    // The session is that of the launch before, which has gone on to the next one.
    session.epoch = load_relaxed(comm.local()).x;
    session.lamport_turn = session.lamport_turn == 0 ? 2 : session.lamport_turn - 1;
    const u64 each = call.bytes / 16;
    const Inbox inbox(session, INBOX_SLOTS * each);
    for (u64 at = blockIdx.x * THREADS + threadIdx.x; at < each && !session.failed; at += grid_blocks() * THREADS) {
        if (!add_ranks(session, inbox, call, at, each)) {
            return;
        }
    }
}
