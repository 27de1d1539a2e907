"""How long until new memory can be reached by peers: symmpool's and torch's own ways, in one run.

    python -m torch.distributed.run --nproc-per-node 4 python/tests/gpu/measure_windows.py \
        [--rounds 15] [--json FILE] [--device cpu]

Every rank makes 64 MiB that no peer knows, all meet, and what makes it reachable is timed: the commit
of a pool, `rendezvous` of torch's symmetric memory, `register_mem_pool` of its NCCL backend. So are
all of it from allocating on, a commit of 64 new blocks at once, and one of nothing, which is what
the store alone takes. Everybody takes turns, another first in each round, and lets go of a round's memory
before the next one's turn, so all have equally many windows besides the new one. Milliseconds of the
slowest rank, the median of all rounds and the least; a first round, in which what is made once is made, does
not count. The phases of a commit are measured by
`cargo run --release -p symmpool-bench --bin bench_commit`.
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
from symmpool.bench import session, timing

MIB = 1 << 20
SIZE = 64 * MIB


class Clock:
    """Times of one kind, each that of the slowest rank."""

    def __init__(self, device):
        self.device, self.times = device, {}
        #: Whether what is timed counts.
        self.counts = False

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
        if self.counts:
            self.times.setdefault(name, []).append(took.item() * 1e3)
        return done


class Ours:
    """Commits of a pool."""

    def __init__(self, clock):
        self.clock = clock

    def turn(self):
        self.few()
        self.many()

    def few(self):
        clock, pool = self.clock, symmpool.Pool(device=self.clock.device)
        # Its control memory stays mapped, as in any program that communicates.
        comm = symmpool.Communicator(pool)
        kept = [pool.empty(SIZE, torch.uint8)]
        report = clock.time("ours: commit of 64 MiB", pool.commit)
        assert report["windows_added"] > 0 and pool.is_window(kept[-1])
        clock.time("ours: commit of nothing", pool.commit)
        if clock.device.type == "cuda":

            def scope():
                with pool:
                    return torch.empty(SIZE, dtype=torch.uint8, device=clock.device)

            kept.append(clock.time("ours: with pool: torch.empty of 64 MiB", scope))
            assert pool.is_window(kept[-1])
        # The next turn's pool has new memory.
        del kept, comm, pool

    def many(self):
        pool = symmpool.Pool(device=self.clock.device)
        comm = symmpool.Communicator(pool)
        kept = [pool.empty(8 * MIB, torch.uint8) for _ in range(64)]
        report = self.clock.time("ours: commit of 64 blocks of 8 MiB", pool.commit)
        # A lane's segments take several such blocks, more as it grows.
        assert 0 < report["windows_added"] <= 20, report
        del kept, comm, pool


class TorchSymmetric:
    """torch's symmetric memory, by `rendezvous`."""

    def __init__(self, clock):
        import torch.distributed._symmetric_memory as symm_mem

        self.clock, self.symm_mem = clock, symm_mem

    def empty(self):
        return self.symm_mem.empty(SIZE, dtype=torch.uint8, device=self.clock.device)

    def turn(self):
        tensor = self.empty()
        name = "torch symm_mem: rendezvous of 64 MiB"
        self.clock.time(name, lambda: self.symm_mem.rendezvous(tensor, dist.group.WORLD))
        del tensor

        def make():
            tensor = self.empty()
            return tensor, self.symm_mem.rendezvous(tensor, dist.group.WORLD)

        self.clock.time("torch symm_mem: empty and rendezvous", make)


class NcclWindows:
    """NCCL's windows, by torch's backend."""

    def __init__(self, clock):
        self.clock, self.backend = clock, dist.group.WORLD._get_backend(clock.device)
        # A communicator is made by its first collective.
        dist.all_reduce(torch.zeros(1, device=clock.device))

    def turn(self):
        pool = torch.cuda.MemPool(self.backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            tensor = torch.empty(SIZE, dtype=torch.uint8, device=self.clock.device)
        name = "NCCL: register_mem_pool of 64 MiB"
        self.clock.time(name, partial(self.backend.register_mem_pool, pool, symm=True))
        torch.cuda.synchronize()
        self.backend.deregister_mem_pool(pool)
        del tensor, pool


def take_turns(clock, contenders, rounds):
    """All rounds of everybody; returns why some could not be measured, by name. Ours must be."""
    missing, running = {}, {}
    # The first round is where everything is made that is made once.
    for number in range(rounds + 1):
        clock.counts = number > 0
        for which in timing.order(list(contenders), number):
            if which.__name__ in missing:
                continue
            try:
                if which not in running:
                    running[which] = which(clock)
                running[which].turn()
            except Exception as error:
                if which is Ours:
                    raise
                missing[which.__name__] = f"{type(error).__name__}: {error}"
    return missing


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
    clock, contenders = Clock(device), [Ours]
    if device.type == "cuda":
        contenders += [TorchSymmetric, NcclWindows]
    missing = take_turns(clock, contenders, options.rounds)
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
