"""Measures the cost of calls on the host, ours and torch's in turn.

    python -m torch.distributed.run --nproc-per-node N python/tests/gpu/measure_host.py \
        [--rounds 7] [--json FILE] [--device cpu]

Microseconds until a call of 4 KiB of bf16 has returned, in bursts that a stream's queue holds, so that no
call waits for the device; of every rank the median of rounds, of these the slowest. Bursts are of 10 and of
100 calls, and those count in which a call costs less. `async_op=True` is timed with `wait()`, which only
queues, and without. And what entering and leaving `with pool:` costs, when nothing has grown, compared with
torch's own `use_mem_pool`: the least of many rounds. With `--device cpu` the same calls are compared with
gloo, which only shows that the program runs. """

import argparse
import datetime
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

import symmpool
from symmpool import ops  # noqa: F401  # registers torch.ops.symmpool
from symmpool.bench import session, timing

#: Calls that are begun before the device is waited for: what suits one suits another less, so the best
#: counts. torch's own take several places of the queue.
BURSTS = (10, 100)
COUNT = 2048


def contenders(device, world):
    pool = symmpool.Pool(device=device)
    comm = symmpool.communicator(None, str(device))
    few, out = (pool.empty(COUNT, torch.bfloat16).fill_(0) for _ in range(2))
    whole = pool.empty(COUNT * world, torch.bfloat16)
    given, taken = (pool.empty(COUNT * world, torch.bfloat16).fill_(0) for _ in range(2))
    theirs = torch.zeros(COUNT, dtype=torch.bfloat16, device=device)
    peer = "NCCL" if device.type == "cuda" else "gloo"
    calls = {
        "torch.Tensor.add_": lambda: theirs.add_(1),
        "Communicator.all_reduce": lambda: comm.all_reduce(few),
        "symmpool.all_reduce": lambda: symmpool.all_reduce(few),
        "symmpool.all_reduce, out=": lambda: symmpool.all_reduce(few, out=out),
        "symmpool.all_gather_into_tensor": lambda: symmpool.all_gather_into_tensor(whole, few),
        "symmpool.all_to_all_single": lambda: symmpool.all_to_all_single(taken, given),
        "torch.ops.symmpool.all_reduce_": lambda: torch.ops.symmpool.all_reduce_(few, "sum", ""),
        "symmpool.all_reduce, async_op": lambda: symmpool.all_reduce(few, async_op=True),
        "symmpool.all_reduce, async_op, wait()": lambda: symmpool.all_reduce(few, async_op=True).wait(),
        f"dist.all_reduce ({peer})": lambda: dist.all_reduce(theirs),
        f"dist.all_reduce ({peer}), async_op": lambda: dist.all_reduce(theirs, async_op=True),
        f"dist.all_reduce ({peer}), async_op, wait()": lambda: dist.all_reduce(theirs, async_op=True).wait(),
    }
    return pool, comm, calls


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def time_calls(calls, device, rounds):
    """Microseconds a call, of the slowest rank, and the burst in which it was, by name."""
    found = {(name, burst): [] for name in calls for burst in BURSTS}
    for number in range(rounds + 1):
        for name in timing.order(list(calls), number):
            for burst in BURSTS:
                found[name, burst].append(time_burst(calls[name], burst, device))
    figures, bursts = {}, {}
    for name in calls:
        times = {}
        for burst in BURSTS:
            # The first round is where everything is made that is made once.
            worst = torch.tensor([statistics.median(found[name, burst][1:])], dtype=torch.float64)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            times[burst] = round(worst.item(), 3)
        bursts[name] = min(times, key=times.get)
        figures[name] = times[bursts[name]]
    return figures, bursts


def time_burst(call, burst, device):
    """Microseconds of the host a call, in one burst."""
    # Works that nobody waited for are let go of outside of what is timed.
    kept = [call() for _ in range(20)]
    synchronize(device)
    dist.barrier()
    begin = time.perf_counter()
    kept = [call() for _ in range(burst)]
    took = (time.perf_counter() - begin) / burst * 1e6
    synchronize(device)
    for work in kept:
        if work is not None and hasattr(work, "wait"):
            work.wait()
    synchronize(device)
    return took


def time_scopes(pool):
    """Microseconds of a scope in which nothing grew: ours and torch's."""
    mempool = torch.cuda.MemPool()
    scopes = {"with pool": lambda: pool, "torch.cuda.use_mem_pool": lambda: torch.cuda.use_mem_pool(mempool)}
    best = dict.fromkeys(scopes, float("inf"))
    for _ in range(60):
        for name, scope in scopes.items():
            begin = time.perf_counter()
            for _ in range(500):
                with scope():
                    pass
            best[name] = min(best[name], (time.perf_counter() - begin) / 500 * 1e6)
    figures = {}
    for name, took in best.items():
        worst = torch.tensor([took], dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        figures[name] = round(worst.item(), 3)
    return figures


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    on_cuda = options.device == "cuda"
    device = torch.device("cpu")
    if on_cuda:
        if not torch.cuda.is_available():
            sys.exit("skipped: no CUDA device (--device cpu shows that it runs)")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backends = "cuda:nccl,cpu:gloo" if on_cuda else "gloo"
    dist.init_process_group(backends, timeout=datetime.timedelta(seconds=120))
    world = dist.get_world_size()
    pool, comm, calls = contenders(device, world)
    # Nothing is due when scopes are timed, and every kernel has been loaded.
    pool.commit()
    host, bursts = time_calls(calls, device, options.rounds)
    scopes = time_scopes(pool) if on_cuda else {}
    comm.synchronize()
    if dist.get_rank() == 0:
        print(f"{world} ranks on {device.type}, torch {torch.__version__}")
        for name, took in {**host, **scopes}.items():
            print(f"  {took:8.2f} us of the host: {name}")
        if options.json:
            arguments = map(session.without_folders, sys.argv[1:])
            command = ["python", "python/tests/gpu/measure_host.py", *arguments]
            report = session.facts(torch, "host", command, world, on_cuda)
            report |= {"bytes": 2 * COUNT, "host_us": host, "bursts": bursts, "scope_us": scopes}
            with open(options.json, "w") as file:
                file.write(json.dumps(report, indent=1) + "\n")
    calls.clear()
    del comm, pool
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
