"""Wrong sums without an error, and right sums: NCCL's symmetric windows under torch's allocator.

    torchrun --nproc-per-node 4 bench/programs/wrong_sums.py [--rounds 4] [--programs 1000] [--json FILE]

This is the program of pytorch#178138. Tensors are made in a torch.cuda.MemPool whose segments are registered
with NCCL as symmetric windows, then filled, and summed by `torch.distributed.all_reduce`. It runs twice:

- with an allocator that gets each segment from ncclMemAlloc, wherever the driver finds room, and
  registers it at once. Among free blocks of one size torch takes the one with the lowest address. If ranks
  have different holes in their address spaces, that is a different window on each rank;
- with a pool of symmpool, whose segments lie at equal offsets of one range.

`--programs N` also runs N random programs of allocations, sizes, streams and frees. All run in the same
processes, because starting processes and registering windows takes long, and torch keeps the segments.
`--seconds S` ends them after that time; the output says how many programs ran.
"""

import argparse
import ctypes
import json
import os
import random
import sys
import time

import torch
import torch.distributed as dist

import symmpool
from symmpool.bench import session
from symmpool.memory.nccl import communicator

MIB = 1 << 20


class Naive:
    """Calls ncclMemAlloc and ncclCommWindowRegister for every segment."""

    name = "ncclMemAlloc, registered at allocation"

    def __init__(self, device):
        self.nccl = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        self.comm = ctypes.c_void_p(communicator(None, str(device)))
        alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        # torch keeps only their addresses, so the objects are kept here.
        self.functions = alloc(self.alloc), free(lambda *_: None)
        self.windows = 0
        addresses = [ctypes.cast(f, ctypes.c_void_p).value for f in self.functions]
        self.allocator = torch._C._cuda_customAllocator(*addresses)
        self.pool = torch.cuda.MemPool(self.allocator)

    def alloc(self, size, _device, _stream):
        pointer, window = ctypes.c_void_p(), ctypes.c_void_p()
        if self.nccl.ncclMemAlloc(ctypes.byref(pointer), ctypes.c_size_t(size)):
            return None
        size = ctypes.c_size_t(size)
        window_of = ctypes.byref(window)
        if self.nccl.ncclCommWindowRegister(self.comm, pointer, size, window_of, 1):
            return None
        self.windows += 1
        return pointer.value

    def count_windows(self):
        return self.windows

    def scope(self):
        return torch.cuda.use_mem_pool(self.pool)


class Ours:
    """The way of symmpool: the allocator is the pool."""

    name = "symmpool"

    def __init__(self, device):
        self.pool = symmpool.Pool(
            symmpool.Group.from_env(timeout=120), str(device), window_policy="per-segment"
        )
        self.pool.register_nccl()

    def count_windows(self):
        return self.pool.stats()["windows"]

    def scope(self):
        return self.pool


def make_holes(rank, nccl):
    """Takes address space and leaves holes in it, at different places on each rank."""
    blocks = []
    for _ in range(64):
        pointer = ctypes.c_void_p()
        nccl.ncclMemAlloc(ctypes.byref(pointer), ctypes.c_size_t(12 * MIB))
        blocks.append(pointer)
    for block in random.Random(rank).sample(blocks, 32):
        nccl.ncclMemFree(block)


def wrong(tensors, rank, world, salt):
    """Fills the tensors, sums them over the ranks, and returns how many are wrong on this rank."""
    for number, tensor in enumerate(tensors):
        tensor.fill_((rank + 1) * (number + 1 + salt))
    torch.cuda.synchronize()
    dist.barrier()
    for tensor in tensors:
        dist.all_reduce(tensor)
    # They are counted on the device, so that the host waits once and not for every tensor.
    found = torch.zeros((), dtype=torch.int64, device="cuda")
    for number, tensor in enumerate(tensors):
        expected = world * (world + 1) // 2 * (number + 1 + salt)
        found += (tensor != expected).any()
    return int(found)


def rounds(allocator, rank, world, count):
    """The plain program: ten tensors of one size a round. Returns how many were wrong in each round."""
    found = []
    for number in range(count):
        with allocator.scope():
            tensors = [torch.empty(3 * MIB, device="cuda") for _ in range(10)]
        found.append(wrong(tensors, rank, world, number))
        # Each rank frees them in its own order; afterwards the caches are equal except for addresses.
        random.Random(rank + number).shuffle(tensors)
        while tensors:
            tensors.pop()
    return found


def program(allocator, rank, world, seed, any_size, side):
    """Runs a random program, and returns how many sums were wrong.

    With `any_size` torch cuts tensors out of segments. Where ranks cut differently, one of them needs a
    segment that the others do not need; an allocator that registers it at once, which is collective,
    would wait forever. Otherwise every tensor is large enough to get a segment of its own.
    """
    same, own = random.Random(seed), random.Random(seed * 1000 + rank)
    streams = [torch.cuda.current_stream(), side]
    held, found = [], 0
    for step in range(same.randrange(2, 6)):
        stream = same.choice(streams)
        with torch.cuda.stream(stream), allocator.scope():
            for _ in range(same.randrange(1, 8)):
                most = same.choice([4096, 256 << 10, 4 * MIB, 24 * MIB])
                size = same.randrange(4, most) if any_size else same.randrange(11 * MIB, 12 * MIB)
                count = size // 4
                held.append(torch.empty(count, device="cuda"))
        torch.cuda.synchronize()
        found += wrong(held, rank, world, step)
        keep = [same.random() < 0.5 for _ in held]
        gone = [tensor for tensor, kept in zip(held, keep, strict=True) if not kept]
        held = [tensor for tensor, kept in zip(held, keep, strict=True) if kept]
        torch.cuda.synchronize()
        own.shuffle(gone)
        while gone:
            gone.pop()
    return found


def totals(*values):
    """The sums over the ranks, computed in memory that is no window."""
    sums = torch.tensor(values, dtype=torch.int64, device="cuda")
    dist.all_reduce(sums)
    return sums.tolist()


def programs(allocator, rank, world, count, seconds, any_size):
    """Runs `count` random programs, or as many as rank 0 begins within `seconds`, and returns a report."""
    side = torch.cuda.Stream()
    began = last = time.perf_counter()
    ran = wrong_programs = wrong_sums = 0
    for seed in range(count):
        found = program(allocator, rank, world, seed, any_size, side)
        now = time.perf_counter()
        # All ranks go on or none does: a rank that is alone in a sum would wait forever.
        late = rank == 0 and seconds is not None and now - began > seconds
        found, late = totals(found, late)
        ran, wrong_sums, wrong_programs = ran + 1, wrong_sums + found, wrong_programs + (found > 0)
        if rank == 0 and now - last > 10:
            last = now
            print(f"  {ran} of {count} programs after {now - began:.0f} s", file=sys.stderr, flush=True)
        if late:
            break
    return {
        "with": allocator.name,
        "sizes": "any" if any_size else "11 to 12 MiB",
        "programs": ran,
        "wrong_programs": wrong_programs,
        "wrong_sums": wrong_sums,
        "windows_of_rank_0": allocator.count_windows(),
        "seconds": round(time.perf_counter() - began, 2),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=0, help="random programs (default none)")
    parser.add_argument("--seconds", type=float, help="for all random programs together, about")
    parser.add_argument("--rounds", type=int, default=4, help="of the plain program (default 4)")
    parser.add_argument("--json", metavar="FILE", help="write what was found")
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ or not torch.cuda.is_available():
        sys.exit("this runs under torchrun, with a GPU for each rank")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()
    ours = Ours(device)
    naive = Naive(device)
    make_holes(rank, naive.nccl)
    if rank == 0:
        version = ".".join(map(str, torch.cuda.nccl.version()))
        print(f"{world} ranks, torch {torch.__version__}, NCCL {version}")
        print("sums that are wrong, of", 10 * world, "a round:")
    results = {}
    for allocator in (naive, ours):
        results[allocator] = [totals(found)[0] for found in rounds(allocator, rank, world, options.rounds)]
        if rank == 0:
            print(f"  {allocator.name:40}", *(f"{n:4}" for n in results[allocator]))
    right, random_programs = not any(results[ours]), []
    if options.programs:
        end = None if options.seconds is None else time.perf_counter() + options.seconds
        for left, (allocator, any_size) in zip(
            (3, 2, 1), ((naive, False), (ours, False), (ours, True)), strict=True
        ):
            seconds = None if end is None else (end - time.perf_counter()) / left
            found = programs(allocator, rank, world, options.programs, seconds, any_size)
            random_programs.append(found)
            if rank == 0:
                print(
                    "{programs} random programs with tensors of {sizes}, {with}: {wrong_sums} wrong sums in "
                    "{wrong_programs} programs, {windows_of_rank_0} windows, {seconds:.1f} s".format(
                        **found | {"sizes": f"{found['sizes']} size" if any_size else found["sizes"]}
                    ),
                    flush=True,
                )
            right = right and (allocator is naive or found["wrong_sums"] == 0)
    if rank == 0 and options.json:
        arguments = map(session.without_folders, sys.argv[1:])
        command = ["python", "bench/programs/wrong_sums.py", *arguments]
        report = session.facts(torch, "wrong_sums", command, world) | {
            "sums_a_round": 10 * world,
            "wrong_sums_by_round": {each.name: counts for each, counts in results.items()},
            "random_programs": random_programs,
        }
        with open(options.json, "w") as file:
            file.write(json.dumps(report, indent=1) + "\n")
    # The segments are freed by functions of Python, which must still exist then.
    naive.pool = None
    ours.pool.unregister_nccl()
    dist.barrier()
    dist.destroy_process_group()
    assert right, "a sum over symmpool's windows was wrong"


if __name__ == "__main__":
    main()
