"""Times all_reduce and all_to_all_single of torch.distributed's gloo; the counterpart of `ours.rs`.

Arguments: target milliseconds for each case, then cases like all_reduce:1024. Those of all_to_all_v
have what each rank sends to each, row by row: all_to_all_v/one-hot:1024:256,0,256,0.
Rank 0 prints "result <op> <bytes> <microseconds> <wrong elements>".
"""

import datetime
import math
import os
import sys
import time
from functools import partial

import numpy
import torch
import torch.distributed as dist


def values(seed, rank, first, count):
    u32 = numpy.uint32
    x = numpy.arange(first, first + count, dtype=u32) * u32(2654435761)
    x += u32((rank * 2246822519 + seed * 3266489917) & 0xFFFFFFFF)
    x = ((x ^ (x >> u32(15))) * u32(2246822519)) >> u32(23)
    return torch.from_numpy(x.astype(numpy.float32) - 256)


def slowest(mine):
    all_ranks = torch.tensor([mine], dtype=torch.float64)
    dist.all_reduce(all_ranks, op=dist.ReduceOp.MAX)
    return all_ranks.item()


def repeat(call, calls):
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return slowest((time.perf_counter() - start) / calls)


def main():
    if "BENCH_BIND" in os.environ:
        os.sched_setaffinity(0, {int(os.environ["LOCAL_RANK"])})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    target = float(sys.argv[1]) / 1e3
    for case in sys.argv[2:]:
        op, size, *numbers = case.split(":")
        count = int(size) // 4
        part = count // world
        given = values(int(size), rank, 0, count)
        if op == "all_reduce":
            # gloo's all_reduce is always in place. It is checked after the first call, as later calls
            # change the values.
            out = given.clone()
            call = partial(dist.all_reduce, out)
            expected = sum(values(int(size), r, 0, count) for r in range(world))
        elif numbers:
            flat = [int(number) for number in numbers[0].split(",")]
            rows = [flat[r * world : (r + 1) * world] for r in range(world)]
            send, receive = rows[rank], [row[rank] for row in rows]
            given = values(int(size), rank, 0, sum(send))
            out = torch.zeros(sum(receive))
            call = partial(dist.all_to_all_single, out, given, receive, send)
            begins = [sum(row[:rank]) for row in rows]
            expected = torch.cat([values(int(size), r, begins[r], receive[r]) for r in range(world)])
        else:
            out = torch.zeros(count)
            call = partial(dist.all_to_all_single, out, given)
            expected = torch.cat([values(int(size), r, rank * part, part) for r in range(world)])
        call()
        wrong = int((out[: len(expected)] != expected).sum())
        # Values other than zero would grow with every call, and some CPUs are slower where sums overflow.
        out.zero_()
        calls = 3
        while (more := target / ((each := repeat(call, calls)) * calls)) > 2 and calls < 4e6:
            calls = math.ceil(min(4e6, calls * min(10, more)))
        us = each * 1e6
        total = torch.tensor([wrong])
        dist.all_reduce(total)
        if rank == 0:
            print(f"result {op} {size} {us:.4f} {total.item()}", flush=True)
    dist.destroy_process_group()


main()
