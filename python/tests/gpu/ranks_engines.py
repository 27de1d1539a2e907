"""Calls of serving engines with their adapters, between ranks.

    python -m torch.distributed.run --nproc-per-node N python/tests/gpu/ranks_engines.py

Ranks may share a GPU (SYMMPOOL_SHARED_DEVICE=1), but NCCL, whose memory the scopes are about, takes none
of such: then there are `CustomAllreduce` and what stands in for NCCL alone.
"""

import datetime
import os
import sys

import engine_parts
import ranks_start
import torch
import torch.distributed as dist

from symmpool.engines import CustomAllreduce, sglang, vllm
from symmpool.engines.nccl_communicator import derived

SIZES = [1, 1000, 4096, 100_000, 1 << 20]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def data(count, dtype, device, seed):
    """Small whole numbers: sums are exact in every type."""
    torch.manual_seed(1000 * seed + dist.get_rank())
    return torch.randint(-3, 4, (count,), device=device).to(dtype)


def summed(x):
    """Returns the sum over ranks by torch, through the CPU's group."""
    wide = x.double().cpu()
    dist.all_reduce(wide)
    return wide.to(device=x.device, dtype=x.dtype)


def custom_all_reduce(device, rank, world):
    """Sums, gathers and parts of sums, eager and in a graph; how many were wrong."""
    ours = CustomAllreduce(dist.group.WORLD, device, max_size=2 << 20)
    wrong = int(ours.disabled)
    for seed, (count, dtype) in enumerate((count, dtype) for count in SIZES for dtype in DTYPES):
        x = data(count * world, dtype, device, seed)
        kept = x.clone()
        total = summed(x)
        should = count * world * x.element_size() <= 2 << 20
        wrong += ours.should_custom_ar(x) is not should
        out = ours.all_reduce(x)
        wrong += not torch.equal(out, total) or not torch.equal(x, kept)
        sum_of_ours = ours.custom_all_reduce(x)
        wrong += (sum_of_ours is None) is should or not (sum_of_ours is None or torch.equal(out, total))
        part = ours.custom_reduce_scatter(x)
        own = total.chunk(world)[rank]
        wrong += not (part is None or torch.equal(part, own))
        whole = ours.custom_all_gather(own.contiguous())
        wrong += not (whole is None or torch.equal(whole, total))
    source = torch.empty(1 << 16, dtype=torch.bfloat16, device=device)
    graph = torch.cuda.CUDAGraph()
    with ours.capture(), torch.cuda.graph(graph):
        x = source + 1
        y = ours.custom_all_reduce(x)
        z = ours.custom_all_reduce(y * 2)
    for value in range(20):
        source.fill_(value + rank)
        graph.replay()
        once = world * (value + 1) + sum(range(world))
        wrong += not bool((z == 2 * world * once).all())
    torch.cuda.synchronize()
    ours.close()
    return wrong


class Nccl:
    """Stand-in for the engines' `PyNcclCommunicator`, which needs a GPU for each rank."""

    def __init__(self, group, device):
        self.is_nccls = True


def nccl_communicator(device, rank, world):
    """Calls that engines make of NCCL, eager, on another stream and in a graph; how many were wrong."""
    nccl = derived(Nccl, False, lambda: False)(dist.group.WORLD, device)
    if hasattr(nccl, "is_nccls"):
        return 1
    sizes = [1 + 3 * each for each in range(world)]
    rows, begin = sum(sizes), sum(sizes[:rank])
    after, before = (rank + 1) % world, (rank - 1) % world

    def calls(x, columns):
        """The results of all calls on a rank's rows, by name."""
        found = {"all_reduce": nccl.all_reduce(x)}
        found["all_gather"] = x.new_empty((world * rows, columns))
        nccl.all_gather(found["all_gather"], x)
        found["all_gatherv"] = x.new_empty((rows, columns))
        nccl.all_gatherv(found["all_gatherv"], x[: sizes[rank]], sizes)
        found["reduce_scatterv"] = x.new_empty((sizes[rank], columns))
        nccl.reduce_scatterv(found["reduce_scatterv"], x, sizes)
        found["reduce"] = torch.zeros_like(x)
        nccl.reduce(found["reduce"], x, root=world - 1)
        found["broadcast"] = x.clone()
        nccl.broadcast(found["broadcast"], 1)
        found["scatter"] = x.new_empty((sizes[rank], columns))
        nccl.scatter(found["scatter"], x, sizes, root=0)
        # All send first, more than there is room for.
        found["ring"] = torch.empty_like(x)
        nccl.group_start()
        nccl.send(x, after)
        nccl.recv(found["ring"], before)
        nccl.group_end()
        return found

    def wanted(x):
        every = [torch.empty_like(x, device="cpu") for _ in range(world)]
        dist.all_gather(every, x.cpu())
        every = [each.to(x.device) for each in every]
        total, own = sum(every), slice(begin, begin + sizes[rank])
        return {
            "all_reduce": total,
            "all_gather": torch.cat(every),
            "all_gatherv": torch.cat([each[:size] for each, size in zip(every, sizes, strict=True)]),
            "reduce_scatterv": total[own],
            "reduce": total if rank == world - 1 else torch.zeros_like(x),
            "broadcast": every[1],
            "scatter": every[0][own],
            "ring": every[before],
        }

    def compared(found, right):
        names = [name for name in right if not torch.equal(found[name], right[name])]
        if names:
            print(f"rank {rank}: wrong: {', '.join(names)}", flush=True)
        return len(names)

    wrong, side = 0, torch.cuda.Stream()
    for columns in (8, 4096, 1 << 20):
        x = data(rows * columns, torch.float32, device, columns).reshape(rows, columns)
        wrong += compared(calls(x, columns), wanted(x))
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found = calls(x, columns)
        torch.cuda.current_stream().wait_stream(side)
        wrong += compared(found, wanted(x))
    source = torch.zeros(rows, 4096, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = calls(source, 4096)
    for turn in range(5):
        source.copy_(data(rows * 4096, torch.float32, device, turn).reshape(rows, 4096))
        graph.replay()
        wrong += compared(found, wanted(source))
    torch.cuda.synchronize()
    del graph
    nccl.destroy()
    return wrong


def scopes(device, rank, world):
    """Tensors made in both engines' scopes, on ranks whose address spaces differ, reduced by NCCL; how
    many sums were wrong, or tensors at another place."""
    comm = engine_parts.pynccl(dist.group.WORLD, str(device))
    holes = [torch.empty((3 + 5 * rank) << 20, dtype=torch.uint8, device=device) for _ in range(1 + rank)]
    wrong = 0
    for seed in range(6):
        contexts = [
            vllm.nccl_symm_mem_context(comm),
            sglang.use_symmetric_memory(engine_parts.coordinator(comm)),
        ]
        for context in contexts:
            with context:
                made = [data((1 + seed) << 20, torch.float32, device, 7 * seed + n) for n in range(3)]
            holes.append(torch.empty((1 + rank) << 20, dtype=torch.uint8, device=device))
            wanted = [summed(each) for each in made]
            for each, total in zip(made, wanted, strict=True):
                dist.all_reduce(each)
                wrong += not torch.equal(each, total)
            inside = vllm.is_symmetric_memory_tensor, sglang.is_tensor_in_symmetric_mempool
            wrong += not all(any(holds(each) for holds in inside) for each in made)
    for state in [*vllm._pools.values(), *sglang._pools.values()]:
        windows = [None] * world
        dist.all_gather_object(windows, state.pool.stats()["windows"])
        wrong += windows != [windows[0]] * world or not windows[0]
    return wrong


def main():
    device = ranks_start.device_of("cuda")
    if device is None or int(os.environ["WORLD_SIZE"]) < 2:
        sys.exit("this needs two ranks, and a GPU for each (or SYMMPOOL_SHARED_DEVICE=1)")
    dist.init_process_group(f"cuda:{ranks_start.PEER},cpu:gloo", timeout=datetime.timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    engine_parts.switch_on(os.environ)
    found = {"CustomAllreduce": custom_all_reduce(device, rank, world)}
    found["PyNcclCommunicator"] = nccl_communicator(device, rank, world)
    if not ranks_start.SHARED:
        found["scopes of vLLM and SGLang, sums by NCCL"] = scopes(device, rank, world)
    everywhere = [None] * world
    dist.all_gather_object(everywhere, found)
    if rank == 0:
        for name in found:
            wrong = [each[name] for each in everywhere]
            print(f"{'WRONG' if any(wrong) else 'ok   '} {name}{f': {wrong}' if any(wrong) else ''}")
        print(f"engines' adapters on {world} ranks")
    torch.cuda.synchronize()
    dist.barrier()
    for pools in (vllm._pools, sglang._pools, sglang._buffers):
        pools.clear()
    dist.destroy_process_group()
    if any(count for each in everywhere for count in each.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
