"""An all-reduce in Triton on the memory of a pool.

    torchrun --nproc-per-node 2 examples/triton_all_reduce.py

`symmpool.rendezvous` gives a kernel every rank's address of a tensor and of a signal pad, whose words are
zero at first. Each program of the grid sums one part of all ranks' tensors. Before it reads, it signals the
programs of equal number on the other ranks that this rank's part is ready, and waits for their
signals. After it has read it does so again, so that no rank overwrites what another still reads. A word
goes from 0 to 1 when it is signalled and back to 0 when the signal is taken, so the same pad serves every
launch. Waits are bounded: if a rank does not come, the sum is wrong, which the program reports; it does not
hang.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import symmpool

COUNT = 1 << 20
BLOCK = 2048
#: Programs of the grid. All of them have to run at the same time.
PROGRAMS = 64
#: How often a wait reads a word before it gives up, after some seconds.
TRIES = 1 << 22


@triton.jit
def meet(pads, base, rank, WORLD: tl.constexpr, TRIES: tl.constexpr):
    """A barrier of this program and those of equal number on the other ranks."""
    number = tl.program_id(0)
    for peer in tl.static_range(WORLD):
        # The word of (phase, program, rank) in the peer's pad.
        pad = tl.load(pads + peer).to(tl.pointer_type(tl.int32))
        word = pad + base + number * WORLD + rank
        old = tl.atomic_cas(word, 0, 1, sem="release", scope="sys")
        tries = 0
        while (old != 0) & (tries < TRIES):
            old = tl.atomic_cas(word, 0, 1, sem="release", scope="sys")
            tries += 1
    own = tl.load(pads + rank).to(tl.pointer_type(tl.int32))
    for peer in tl.static_range(WORLD):
        word = own + base + number * WORLD + peer
        old = tl.atomic_cas(word, 1, 0, sem="acquire", scope="sys")
        tries = 0
        while (old != 1) & (tries < TRIES):
            old = tl.atomic_cas(word, 1, 0, sem="acquire", scope="sys")
            tries += 1
    tl.debug_barrier()


@triton.jit
def sum_of_all(
    buffers,
    pads,
    out,
    count,
    rank,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TRIES: tl.constexpr,
):
    # Threads of this program have written nothing yet; what came before on the stream is done.
    meet(pads, 0, rank, WORLD, TRIES)
    start = tl.program_id(0) * BLOCK
    while start < count:
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        # In rank order on every rank, so that all have the same bits.
        for peer in tl.static_range(WORLD):
            theirs = tl.load(buffers + peer).to(tl.pointer_type(tl.bfloat16))
            theirs = tl.multiple_of(theirs, 16)
            total += tl.load(theirs + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(tl.bfloat16), mask=inside)
        start += PROGRAMS * BLOCK
    tl.debug_barrier()
    meet(pads, PROGRAMS * WORLD, rank, WORLD, TRIES)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    if "LOCAL_RANK" not in os.environ or not torch.cuda.is_available():
        sys.exit("this runs under torchrun, with a GPU for each rank")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cuda:nccl,cpu:gloo", device_id=device)
    rank, world = dist.get_rank(), dist.get_world_size()
    pool = symmpool.Pool(device=device)
    x = pool.empty(COUNT, torch.bfloat16)
    out = torch.empty_like(x)
    handle = symmpool.rendezvous(x, signal_pad_size=4 * 2 * PROGRAMS * world)
    # The addresses are in tensors, so that Triton sees that each has 64 bits.
    buffers = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    pads = torch.tensor(handle.signal_pad_ptrs, dtype=torch.int64, device=device)

    wrong = 0
    for step in range(20):
        torch.manual_seed(step)
        parts = torch.randn(world, COUNT, device=device).bfloat16()
        x.copy_(parts[rank])
        sum_of_all[(PROGRAMS,)](buffers, pads, out, COUNT, rank, world, BLOCK, PROGRAMS, TRIES, num_warps=8)
        expected = sum((part.float() for part in parts), torch.zeros(COUNT, device=device))
        wrong += int((out != expected.bfloat16()).sum())
    print(f"rank {rank}: {wrong} of {20 * COUNT} elements are wrong")
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
