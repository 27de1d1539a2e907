"""Measures what a new group's first call takes on CPU ranks: a group is made and has an all_reduce, on the
backend and on gloo.

    python bench/first_calls.py 2,4 bench/results/host_first_calls.json

Contenders take turns in the same processes, several rounds each; a time is the median of its rounds."""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from messages import facts

import symmpool.backend

CONTENDERS = ("symmpool", "gloo")
ROUNDS = 20


def group_of_all(kind, world):
    return [dist.new_group(range(world), backend=kind)]


def mesh(kind, world):
    """The two groups of this rank in a mesh of two rows, as `init_device_mesh` makes them."""
    columns = world // 2
    rows = [list(range(row * columns, (row + 1) * columns)) for row in range(2)]
    across = [[column, column + columns] for column in range(columns)]
    return [dist.new_subgroups_by_enumeration(parts, backend=kind)[0] for parts in (rows, across)]


def measure(rank, world, port, folder):
    torch.set_num_threads(1)
    dist.init_process_group("symmpool", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    x, found, kept = torch.zeros(4), [], []
    dist.all_reduce(x)
    for what in (group_of_all, mesh) if world > 2 else (group_of_all,):
        times = {kind: [] for kind in CONTENDERS}
        for _ in range(ROUNDS):
            for kind in CONTENDERS:
                dist.barrier()
                begin = time.perf_counter()
                groups = what(kind, world)
                for group in groups:
                    dist.all_reduce(x, group=group)
                times[kind].append((time.perf_counter() - begin) * 1e3)
                # To end a group takes time of the next one.
                kept += groups
        medians = {kind: statistics.median(each) for kind, each in times.items()}
        found.append({"what": what.__name__, "ranks": world, "ms": medians})
    assert "gloo" not in symmpool.backend.backend_counts().get("allreduce", {})
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main():
    worlds, output = sys.argv[1:]
    # With `chrt --rr 10` before the command other programs' load does not count.
    has_priority = os.sched_getscheduler(0) != os.SCHED_OTHER
    report = {**facts(), "has_priority": has_priority, "results": []}
    for world in map(int, worlds.split(",")):
        free = dist.TCPStore("127.0.0.1", 0, 1, True)
        port = free.port
        del free
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.start_processes(measure, (world, port, folder), world, start_method="spawn")
            report["results"] += json.loads(Path(folder, "found").read_text())
    Path(output).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
