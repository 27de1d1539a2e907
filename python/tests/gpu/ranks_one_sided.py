"""Copies and signals between two ranks, by kernels and by engines that take no SMs.

    torchrun --nproc-per-node 2 python/tests/gpu/ranks_one_sided.py [--device cpu]

Each rank gives the next one a tensor and takes it back, eagerly, on a stream of its own beside products of
matrices, and in a graph that is replayed; every element is compared. Exits with 1 if anything was wrong.
"""

import sys

import ranks_start
import torch
import torch.distributed as dist

import symmpool

SIZES = (1, 1000, 1 << 20, (16 << 20) + 3)
ENGINES = (("kernel", "kernel"), ("copy", "memory"))


class Ring:
    """The ranks in a circle, with a tensor each that its neighbours read and write."""

    def __init__(self, comm, pool, count, engines):
        self.comm, self.copies, self.signals = comm, *engines
        self.following, self.before = (comm.rank + 1) % comm.world, (comm.rank - 1) % comm.world
        self.inbox = pool.zeros(count, dtype=torch.int32)
        device = self.inbox.device
        if device.type == "cuda":
            # A neighbour writes here after the commit, and the zeros must not come later than that.
            torch.cuda.synchronize()
        pool.commit()
        self.mine = torch.arange(count, dtype=torch.int32, device=device) + 1000 * comm.rank
        self.sent, self.back = (torch.zeros(count, dtype=torch.int32, device=device) for _ in range(2))
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)

    def pass_on(self):
        """Sends other numbers each time, and counts elements that did not arrive or did not come back."""
        self.mine.add_(7)
        self.sent.copy_(self.mine)
        self.comm.put(self.inbox, self.sent, self.following, engine=self.copies)
        self.comm.signal(self.following, 1, engine=self.signals)
        self.comm.wait(self.before, 1, engine=self.signals)
        expected = self.mine + 1000 * (self.before - self.comm.rank)
        self.wrong.add_((self.inbox != expected).sum())
        self.comm.signal(self.before, 2, engine=self.signals)
        self.comm.wait(self.following, 2, engine=self.signals)
        self.comm.get(self.back, self.inbox, self.following, engine=self.copies)
        self.wrong.add_((self.back != self.mine).sum())
        # The next one's inbox has been read, so it may be written again.
        self.comm.signal(self.following, 3, engine=self.signals)
        self.comm.wait(self.before, 3, engine=self.signals)


def rounds(ring, device, times):
    """Passes tensors on in every way, and returns how many elements were wrong."""
    for _ in range(times):
        ring.pass_on()
    if device.type == "cuda":
        left = torch.randn(2048, 2048, device=device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(times):
                ring.pass_on()
        for _ in range(10):
            left @ left
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            ring.pass_on()
            ring.pass_on()
        for _ in range(times):
            graph.replay()
        torch.cuda.synchronize()
    ring.comm.synchronize()
    return int(ring.wrong)


def main():
    options = ranks_start.parser(__doc__, 10, "times that tensors are passed on").parse_args()
    device = ranks_start.device_of(options.device)
    if device is None:
        return 0
    dist.init_process_group("gloo" if device.type == "cpu" else ranks_start.PEER)
    pool = symmpool.Pool(device=str(device))
    comm = symmpool.Communicator(pool)
    found = {}
    for count in SIZES:
        for engines in ENGINES:
            found[count, engines] = rounds(Ring(comm, pool, count, engines), device, options.count)
    wrong = {what: number for what, number in found.items() if number}
    for (count, engines), number in wrong.items():
        print(f"rank {comm.rank}: {count} elements by {' and '.join(engines)}: {number} wrong", flush=True)
    # A signal that does not come names its rank. This is last, as it fails a communicator on a device.
    try:
        comm.wait((comm.rank + 1) % comm.world, 9, timeout=0.5, engine="memory")
        comm.synchronize()
        named = False
    except symmpool.TimeoutError as error:
        named = error.ranks == ((comm.rank + 1) % comm.world,)
    if not named:
        print(f"rank {comm.rank}: a wait without a signal did not end as it should", flush=True)
    print(f"rank {comm.rank}: {len(found)} rings, {len(wrong)} wrong", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 1 if wrong or not named else 0


if __name__ == "__main__":
    sys.exit(main())
