"""How long until new memory can be reached by peers: ours beside torch's own ways, in one run.

    python -m torch.distributed.run --nproc-per-node 4 python/tests/gpu/measure_windows.py \
        [--rounds 15] [--json FILE] [--device cpu]

Every rank makes 64 MiB that no peer knows, all meet, and what makes it reachable is timed: the commit
of a pool, `rendezvous` of torch's symmetric memory, `register_mem_pool` of its NCCL backend. So are
all of it from allocating on, a commit of 64 new blocks at once, and one of nothing, which is what
the store alone takes. Milliseconds of the slowest rank, the median of all rounds and the least. Where
phases of a commit go is told by `cargo run --release -p symmpool-allocator --example bench_commit`.
"""

import argparse
import datetime
import json
import os
import statistics
import sys
import time
from functools import partial

import torch
import torch.distributed as dist

import symmpool
from symmpool.bench import session

MIB = 1 << 20
SIZE = 64 * MIB


class Clock:
    """Times of one kind, each that of the slowest rank."""

    def __init__(self, device):
        self.device, self.times = device, {}

    def time(self, name, action):
        """Begins together, after all that was begun on devices; returns what `action` does."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        # Between hosts, as what is timed is the host's work.
        dist.all_reduce(torch.zeros(1))
        begin = time.perf_counter()
        done = action()
        took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        self.times.setdefault(name, []).append(took.item() * 1e3)
        return done


def ours(clock, rounds):
    pool = symmpool.Pool(device=clock.device)
    # Its control memory stays mapped, as in any program that communicates.
    comm = symmpool.Communicator(pool)
    kept = []
    for _ in range(rounds):
        kept.append(pool.empty(SIZE, torch.uint8))
        report = clock.time("ours: commit of 64 MiB", pool.commit)
        assert report["windows_added"] > 0 and pool.is_window(kept[-1])
        clock.time("ours: commit of nothing", pool.commit)
    if clock.device.type == "cuda":
        for _ in range(rounds):

            def scope():
                with pool:
                    return torch.empty(SIZE, dtype=torch.uint8, device=clock.device)

            kept.append(clock.time("ours: with pool: torch.empty of 64 MiB", scope))
            assert pool.is_window(kept[-1])
    del kept, comm, pool
    for _ in range(min(rounds, 5)):
        pool = symmpool.Pool(device=clock.device)
        comm = symmpool.Communicator(pool)
        kept = [pool.empty(8 * MIB, torch.uint8) for _ in range(64)]
        report = clock.time("ours: commit of 64 blocks of 8 MiB", pool.commit)
        # A lane's segments take several such blocks, more as it grows.
        assert 0 < report["windows_added"] <= 20, report
        del kept, comm, pool


def torch_symmetric(clock, rounds):
    import torch.distributed._symmetric_memory as symm_mem

    kept = []
    for _ in range(rounds):

        def make():
            tensor = symm_mem.empty(SIZE, dtype=torch.uint8, device=clock.device)
            symm_mem.rendezvous(tensor, dist.group.WORLD)
            return tensor

        tensor = symm_mem.empty(SIZE, dtype=torch.uint8, device=clock.device)
        kept.append(tensor)
        name = "torch symm_mem: rendezvous of 64 MiB"
        clock.time(name, lambda: symm_mem.rendezvous(kept[-1], dist.group.WORLD))
        kept.append(clock.time("torch symm_mem: empty and rendezvous", make))


def nccl_windows(clock, rounds):
    backend = dist.group.WORLD._get_backend(clock.device)
    for _ in range(min(rounds, 5)):
        pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            tensor = torch.empty(SIZE, dtype=torch.uint8, device=clock.device)
        name = "NCCL: register_mem_pool of 64 MiB"
        clock.time(name, partial(backend.register_mem_pool, pool, symm=True))
        torch.cuda.synchronize()
        backend.deregister_mem_pool(pool)
        del tensor, pool


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    device = torch.device("cpu")
    if options.device == "cuda":
        if not torch.cuda.is_available():
            sys.exit("skipped: no CUDA device (--device cpu measures ours alone)")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backends = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    dist.init_process_group(backends, timeout=datetime.timedelta(seconds=120))
    clock, missing = Clock(device), {}
    measured = [ours]
    if device.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=device))
        measured += [torch_symmetric, nccl_windows]
    for what in measured:
        try:
            what(clock, options.rounds)
        except Exception as error:
            if what is ours:
                raise
            missing[what.__name__] = f"{type(error).__name__}: {error}"
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks on {device.type}, torch {torch.__version__}")
        for name, times in clock.times.items():
            print(f"  {name:42}{statistics.median(times):9.3f} ms (least {min(times):.3f})")
        for name, why in missing.items():
            print(f"  {name} could not be measured: {why}")
        if options.json:
            arguments = map(session.without_folders, sys.argv[1:])
            command = ["python", "python/tests/gpu/measure_windows.py", *arguments]
            world, on_cuda = dist.get_world_size(), device.type == "cuda"
            report = session.facts(torch, "windows", command, world, on_cuda)
            report |= {"missing": missing, "milliseconds": clock.times}
            with open(options.json, "w") as file:
                file.write(json.dumps(report, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
