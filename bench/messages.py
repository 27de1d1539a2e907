"""Measures point-to-point messages and pipelines of torch.distributed on CPU ranks: the backend beside gloo.

    python bench/messages.py 2,4 bench/results/host_messages.json

Contenders take turns in the same processes, several rounds each; a time is the median of its rounds."""

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.pipelining import PipelineStage, schedules

import symmpool.backend

SIZES = (4, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 8388608)
SCHEDULES = (
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble",
)
ROUNDS = 9
MICROBATCHES = 8


def batch(group, right, left, tensors):
    """Every rank sends to the next one and receives from the one before, in one batch."""
    sent, received = tensors
    ops = [dist.P2POp(dist.isend, sent, right, group), dist.P2POp(dist.irecv, received, left, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def ping_pong(group, right, left, tensors):
    """Pairs of ranks send to each other, one after the other."""
    sent, received = tensors
    if dist.get_rank() % 2 == 0:
        dist.send(sent, right, group)
        dist.recv(received, right, group)
    else:
        dist.recv(received, left, group)
        dist.send(sent, left, group)


def rounds(calls, repetitions, settle):
    """Medians of what each call takes in microseconds, on this rank."""
    times = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            call()
            settle()
            begin = time.perf_counter()
            for _ in range(repetitions):
                call()
            times[name].append((time.perf_counter() - begin) / repetitions * 1e6)
    return {name: statistics.median(each) for name, each in times.items()}


def pipeline(name, group):
    """A step of a schedule whose stages do nearly nothing."""
    me, world = dist.get_rank(), dist.get_world_size()
    kind = getattr(schedules, name)
    is_single = issubclass(kind, schedules.PipelineScheduleSingle)
    mine, total = ([me], world) if is_single else ([me, me + world], 2 * world)
    layers = [torch.nn.Linear(4, 4) for _ in mine]
    stages = [
        PipelineStage(layer, at, total, torch.device("cpu"), group=group)
        for layer, at in zip(layers, mine, strict=True)
    ]
    schedule = kind(stages[0] if is_single else stages, MICROBATCHES, torch.nn.functional.mse_loss)
    x, y = torch.ones(MICROBATCHES, 4), torch.zeros(MICROBATCHES, 4)
    given, target = ((x,) if me == 0 else ()), (y if me == world - 1 else None)
    return lambda: schedule.step(*given, target=target)


def measure(rank, world, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("symmpool", store=store, rank=rank, world_size=world)
    groups = {"symmpool": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    right, left, found = (rank + 1) % world, (rank - 1) % world, []

    def settle():
        dist.barrier()

    for call in (batch, ping_pong):
        for size in SIZES:
            tensors = (torch.full((size // 4,), float(rank)), torch.zeros(size // 4))
            repetitions = max(5, min(300, (1 << 24) // size))
            calls = {
                name: functools.partial(call, group, right, left, tensors) for name, group in groups.items()
            }
            times = rounds(calls, repetitions, settle)
            assert tensors[1].eq(left if call is batch else rank ^ 1).all()
            found.append({"what": call.__name__, "ranks": world, "bytes": size, "us": times})
    for name in SCHEDULES:
        calls = {each: pipeline(name, group) for each, group in groups.items()}
        found.append({"what": name, "ranks": world, "us": rounds(calls, 5, settle)})
    served = symmpool.backend.backend_counts()
    assert set(served["send"]) | set(served["recv"]) == {"symmpool"}
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found))
    dist.destroy_process_group()


def facts():
    """Returns facts about the measurement: the machine, the commit, the versions."""
    here = Path(__file__).resolve().parent
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    ).stdout.strip()
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "device": f"{len(os.sched_getaffinity(0))} cores, {names[0] if names else 'unknown'}",
        "load": os.getloadavg()[0],
        "versions": {
            "torch": torch.__version__,
            "symmpool": symmpool.__version__,
            "kernel": os.uname().release,
        },
        "commit": commit,
        "command": ["python", *sys.argv],
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
    }


def main():
    worlds, output = sys.argv[1:]
    report = {**facts(), "results": []}
    for world in map(int, worlds.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.start_processes(measure, (world, folder), world, start_method="spawn")
            report["results"] += json.loads(Path(folder, "found").read_text())
    Path(output).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
