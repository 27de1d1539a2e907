"""Everything that follows torch's signatures, with one GPU for each rank, compared with NCCL.

    python -m torch.distributed.run --nproc-per-node N python/tests/gpu/ranks_torch.py [json FILE]

Checks module-level calls, calls that are not waited for, graphs, sub-groups, the handle, operators,
the backend and data-parallel training against NCCL or against what must come out. Rank 0 prints a line
a check, and fails if one did. `measure_host.py` measures what a call costs the host.
"""

import datetime
import json
import os
import sys
import time

import ranks_start
import torch
import torch.distributed as dist

import symmpool
from symmpool import backend, ops
from symmpool.communicators import cache
from symmpool.torch_backend import allocation

found = {}


def check(name, right, why=""):
    """Notes whether something was right on every rank. `why` says what a rank found instead."""
    observed = [None] * dist.get_world_size()
    dist.all_gather_object(observed, None if right else str(why))
    found[name] = all(each is None for each in observed)
    if dist.get_rank() == 0:
        print(f"{'ok   ' if found[name] else 'WRONG'} {name}", flush=True)
        for rank, each in enumerate(observed):
            if each is not None:
                print(f"      rank {rank}: {each or 'wrong'}", flush=True)


def begin(name):
    device = ranks_start.device_of("cuda")
    if device is None or int(os.environ["WORLD_SIZE"]) < 2:
        sys.exit("this needs two ranks, and a GPU for each (or SYMMPOOL_SHARED_DEVICE=1)")
    dist.init_process_group(name, timeout=datetime.timedelta(seconds=120))
    return device, dist.get_rank(), dist.get_world_size()


def data(count, dtype, device, seed):
    """Small whole numbers: sums are exact in every type."""
    torch.manual_seed(1000 * seed + dist.get_rank())
    return torch.randint(-3, 4, (count,), device=device).to(dtype)


def calls(device, rank, world):
    pool = symmpool.Pool(device=device)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for count in (16, 5000 * world, (1 << 20) * world):
            for kind in ("window", "plain"):
                make = pool.empty if kind == "window" else torch.empty
                place = {} if kind == "window" else {"device": device}
                x = make(count, dtype=dtype, **place).copy_(data(count, dtype, device, count))
                theirs, right = x.clone(), True
                dist.all_reduce(theirs)
                out = make(count, dtype=dtype, **place)
                symmpool.all_reduce(x, dist.ReduceOp.SUM, out=out)
                right &= bool((out == theirs).all())
                if count % world == 0:
                    part = make(count // world, dtype=dtype, **place)
                    symmpool.reduce_scatter_tensor(part, x)
                    right &= bool((part == theirs.chunk(world)[rank]).all())
                    whole = make(count, dtype=dtype, **place)
                    symmpool.all_gather_into_tensor(whole, part)
                    right &= bool((whole == theirs).all())
                symmpool.broadcast(x, world - 1)
                theirs.copy_(x)
                dist.broadcast(theirs, world - 1)
                right &= bool((x == theirs).all())
                check(f"calls, {dtype}, {count} elements, {kind}", right)
    return pool


def all_to_all(device, rank, world):
    rows = torch.full((rank * world, 8), float(rank), device=device)
    out = torch.empty(sum(range(world)), 8, device=device)
    symmpool.all_to_all_single(out, rows, list(range(world)), [rank] * world)
    expected = [float(r) for r in range(world) for _ in range(r)]
    right = out[:, 3].tolist() == expected
    even, theirs = torch.empty(world * 999, device=device), torch.empty(world * 999, device=device)
    x = data(world * 999, torch.float32, device, 5)
    symmpool.all_to_all_single(even, x, async_op=True).wait()
    dist.all_to_all_single(theirs, x)
    check("all_to_all_single, uneven and even", right and bool((even == theirs).all()))


def not_waited_for(pool, device, rank, world):
    right, work = True, []
    for step in range(200):
        x = pool.empty(4096, torch.float32).fill_(step) if step % 2 else None
        x = torch.full((4096,), float(step), device=device) if x is None else x
        work.append((step, x, symmpool.all_reduce(x, async_op=True)))
        if step % 7 == 0:
            y = torch.ones(100, device=device)
            symmpool.all_reduce(y)
            right &= bool((y == world).all())
    for step, x, each in work:
        each.wait()
        right &= bool((x == step * world).all())
    check("calls that are not waited for", right)


def moved_types(device, rank, world):
    """Elements that only travel, against the same bytes by NCCL; and what tells them apart."""
    pool = symmpool.Pool(device=device)
    names = "bool int16 uint16 uint64 complex64 complex128 float8_e4m3fnuz float4_e2m1fn_x2"
    wrong = []
    for dtype in [getattr(torch, name) for name in names.split() if hasattr(torch, name)]:
        for count in (3, 4096, 1 << 20):
            bits = torch.randint(0, 2, (count * world * dtype.itemsize,), device=device)
            bits = (bits + rank * 2 * (dtype != torch.bool)).to(torch.uint8)
            swapped, whole = torch.empty_like(bits), bits.new_empty(bits.numel() * world)
            dist.all_to_all_single(swapped, bits)
            dist.all_gather_into_tensor(whole, bits)
            for make in (pool.empty, torch.empty):
                place = {} if make == pool.empty else {"device": device}
                x = make(bits.shape, dtype=torch.uint8, **place).copy_(bits).view(dtype)
                out = make(bits.shape, dtype=torch.uint8, **place).view(dtype)
                symmpool.all_to_all_single(out, x)
                right = torch.equal(out.view(torch.uint8), swapped)
                every = make(whole.shape, dtype=torch.uint8, **place).view(dtype)
                symmpool.all_gather_into_tensor(every, x)
                right &= torch.equal(every.view(torch.uint8), whole)
                symmpool.broadcast(x, world - 1)
                right &= torch.equal(x.view(torch.uint8), whole[-bits.numel() :])
                if not right:
                    wrong.append((dtype, count, make.__name__))
    check("types that only travel", not wrong, wrong)
    observed = []
    for first, second in [(torch.int16, torch.bfloat16), (torch.bool, torch.uint8)]:
        comm = symmpool.Communicator(pool, timeout=20)
        dtype = second if rank else first
        try:
            comm.broadcast(torch.zeros(100, dtype=dtype, device=device), 0)
            comm.synchronize()
        except symmpool.DivergedError as error:
            observed.append(str(error))
        dist.barrier()
    right = len(observed) == 2 and all(name in observed[0] for name in ("100 i16", "100 bf16"))
    check("types that differ are named", right and "100 bool" in observed[1], observed)


def graphs(pool, device, rank, world):
    x = pool.empty(1 << 16, torch.float32).fill_(1.0)
    for _ in range(2):
        symmpool.all_reduce(x, "avg")
        symmpool.all_reduce(x, "avg", async_op=True).wait()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(float(rank))
        symmpool.all_reduce(x, "avg", async_op=True)
        symmpool.all_reduce(x, "max")
    x.fill_(1.0)
    for _ in range(50):
        graph.replay()
    torch.cuda.synchronize()
    check("graphs, replayed", bool((x - (1 + 50 * (world - 1) / 2)).abs().max() < 1e-3))


def groups(device, rank, world):
    half = [dist.new_group(range(world // 2)), dist.new_group(range(world // 2, world))]
    mine = half[rank >= world // 2]
    x = torch.ones(1000, device=device)
    symmpool.all_reduce(x, group=mine)
    second = symmpool.Pool(device=device)
    y = second.empty(1000, torch.float32).fill_(1.0)
    symmpool.all_reduce(y)
    right = bool((x == dist.get_world_size(mine)).all()) and bool((y == world).all())
    check("sub-groups, and a second pool", right)


def handle(pool, device, rank, world):
    x = pool.empty((world, 64), torch.float32).fill_(-1.0)
    torch.cuda.synchronize()
    found_handle = symmpool.rendezvous(x)
    for peer in range(world):
        found_handle.get_buffer(peer, (world, 64), torch.float32)[rank].fill_(rank)
    found_handle.barrier()
    rows = x[:, 5].tolist()
    check("the handle: peers' buffers, and its barrier", rows == list(range(world)), rows)
    wrong = []
    for step in range(20):
        for channel in range(4):
            place = 1 + channel
            for peer in range(world):
                there = found_handle.get_buffer(peer, (world, 64), torch.float32)
                there[rank, place].fill_(step)
            found_handle.barrier(channel, timeout_ms=10_000)
            column = x[:, place].tolist()
            if column != [float(step)] * world:
                wrong.append((step, channel, column))
            # Nobody writes the next step before all have read this one.
            found_handle.barrier(channel, timeout_ms=10_000)
    check("the handle: barriers of channels", not wrong, f"(step, channel, rows): {wrong[:3]}")
    after, before = (rank + 1) % world, (rank - 1) % world
    wrong = []
    for step in range(100):
        found_handle.get_remote_tensor(after, (1,), torch.float32).fill_(step)
        found_handle.put_signal(after, 5)
        found_handle.wait_signal(before, 5, timeout_ms=10_000)
        seen = x[0, 0].item()
        if seen != step:
            wrong.append((step, seen))
        # It has been read: the rank before may write the next.
        found_handle.put_signal(before, 6)
        found_handle.wait_signal(after, 6, timeout_ms=10_000)
    torch.cuda.synchronize()
    check("the handle: signals", not wrong, f"(step, seen): {wrong[:3]}")


def operators(device, rank, world):
    def loss(x):
        a = ops.all_reduce(x, "avg")
        b = ops.all_gather_tensor(a * x)
        return (ops.reduce_scatter_tensor(b * (rank + 1)) ** 2).sum()

    grads = []
    for run in (loss, torch.compile(loss, fullgraph=True)):
        x = (torch.arange(8.0, device=device).reshape(4, 2) + rank).requires_grad_()
        run(x).backward()
        grads.append(x.grad)
    check("operators, compiled by inductor", torch.allclose(*grads))


def losses_of(model, width, device, rank, steps):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(steps):
        torch.manual_seed(1000 * step + rank)
        loss = model(torch.randn(32, width, device=device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(device, rank, world):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256) for _ in range(8)]
    model = torch.nn.Sequential(*[m for each in layers for m in (each, torch.nn.GELU())]).to(device)
    parallel = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device.index])
    return losses_of(parallel, 256, device, rank, 10)


def sharded(device, rank, world, in_windows=False):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)]).to(device)
    mesh = init_device_mesh("cuda", (world,))
    for each in (*model, model):
        fully_shard(each, mesh=mesh)
    for each in model.modules() if in_windows else []:
        if isinstance(each, FSDPModule):
            each.set_allocate_memory_from_process_group_for_comm(True)
    return losses_of(model, 512, device, rank, 6)


def near(some, others):
    return all(abs(a - b) <= 1e-3 * abs(b) for a, b in zip(some, others, strict=True))


def sharded_by_ours(device, rank, world, right):
    """FSDP over the backend, with buffers of torch's and in windows."""
    check("FSDP, as with NCCL", near(sharded(device, rank, world), right))
    given, make = [], allocation.window
    allocation.window = lambda *arguments: given.append(make(*arguments)) or given[-1]
    losses = sharded(device, rank, world, in_windows=True)
    allocation.window = make
    reserved = cache.pool_of(None, device.index).stats()["reserved"] >> 20
    check("FSDP in windows", near(losses, right) and given and None not in given, f"{reserved} MiB")


def strided(device, rank, world):
    """Checks results of the backend that are copied to where they belong on the stream of the call."""
    total, wrong = world * (world + 1) / 2, set()
    for _ in range(50):
        x = torch.full((300, 200), rank + 1.0, device=device).t()
        dist.all_reduce(x, async_op=True)  # whose Work is dropped
        torch.cuda.synchronize()
        wrong |= set() if bool((x == total).all()) else {"dropped"}
        x = torch.full((300, 200), rank + 1.0, device=device).t()
        dist.all_reduce(x, async_op=True).wait()
        wrong |= set() if bool((x + 0 == total).all()) else {"waited for"}
        out = torch.zeros(4, 3 * world, device=device).t()
        dist.all_gather_into_tensor(out, torch.full((3, 4), float(rank), device=device))
        each = torch.arange(world, device=device).repeat_interleave(3)
        wrong |= set() if bool((out == each[:, None]).all()) else {"gathered"}
    check("strided results, not waited for", not wrong, wrong)


def messages(device, rank, world):
    """Checks ranks of the backend that all send first, more than NCCL holds on its way, and then receive."""
    after, before = (rank + 1) % world, (rank - 1) % world
    right, bytes_ = True, 64 << 20
    for _ in range(3):
        sent = torch.full((2, bytes_ // 4), float(rank), device=device)
        came = torch.empty_like(sent)
        sends = [dist.P2POp(dist.isend, sent[0], after), dist.P2POp(dist.isend, sent[1], before)]
        receives = [dist.P2POp(dist.irecv, came[0], before), dist.P2POp(dist.irecv, came[1], after)]
        # Two ranks have one neighbour: what it sends first comes first.
        for work in dist.batch_isend_irecv(sends + receives):
            work.wait()
        right &= bool((came[0] == before).all() and (came[1] == after).all())
    check("messages both ways at once", right)
    # Behind what the stream does, in order, to every rank, and those that wait where they are called.
    peers = [peer for peer in range(world) if peer != rank]
    x, came = torch.zeros(1 << 20, device=device), torch.zeros(world, 4, 1 << 20, device=device)
    works = []
    for turn in range(4):
        x = x * 1 + turn + rank
        works += [dist.isend(x, peer) for peer in peers]
    works += [dist.irecv(came[peer, turn], peer) for peer in peers for turn in range(4)]
    for work in works:
        work.wait()
    for peer in peers:
        expected = [sum(range(turn + 1)) + (turn + 1) * peer for turn in range(4)]
        right &= came[peer, :, 0].tolist() == came[peer, :, -1].tolist() == expected
    for source in range(world - 1):
        if rank == source:
            dist.send(x, rank + 1)
        elif rank == source + 1:
            dist.recv(came[0, 0], source)
            right &= came[0, 0, 0].item() == 6 + 4 * source
    check("messages to every rank, and blocking ones", right)
    # Over channels that are not open yet, ranks that all receive first, and batches that torch makes.
    fresh, right = dist.new_group(range(world)), True
    for _ in range(2):
        to, out = torch.empty(8, device=device), torch.full((8,), float(rank), device=device)
        with dist.distributed_c10d._coalescing_manager(fresh, device, async_ops=True) as manager:
            receive = dist.irecv(to, before, group=fresh)
            dist.isend(out, after, group=fresh)
        manager.wait()
        right &= bool((to == before).all()) and receive.result()[0] is to
        right &= bool((receive.get_future().wait()[0] == before).all())
    dist.destroy_process_group(fresh)
    check("messages that all receive first, in batches", right)


def odd_messages(device, rank, world):
    """Checks a message of the backend that its receiver does not expect, or that its sender refuses: it fails
    on both, and ends the waits of ranks that have no part in it."""
    x = torch.ones(1000, device=device)
    for kind in ("type", "length", "refused"):
        group = dist.new_group(timeout=datetime.timedelta(seconds=60))
        dist.all_reduce(x.clone(), group=group)
        torch.cuda.synchronize()
        began, why, errors = time.monotonic(), "", (symmpool.DivergedError, symmpool.InvalidArgumentError)
        try:
            if rank == 0 and kind == "refused":
                comm = symmpool.communicator(group, str(device))
                comm.send(x[::2], 1)
            elif rank == 0:
                dist.send(x, 1, group=group)
            elif rank == 1:
                there = x.int() if kind == "type" else torch.ones(1001, device=device)
                dist.recv(there, 0, group=group)
            # The sender may be past its message: its next call has the error, as has a collective of others.
            for _ in range(100):
                dist.all_reduce(x.clone(), group=group)
                symmpool.communicator(group, str(device)).synchronize()
                time.sleep(0.01)
        except errors as error:
            why = str(error)
        took = time.monotonic() - began
        wanted = "declined" if kind == "refused" else "which expects"
        own = kind == "refused" and rank == 0
        right = took < 20 and (why if own else wanted in why)
        check(f"a message that does not fit: {kind}", right, f"after {took:.1f} s: {why}")
        dist.destroy_process_group(group)


def at_once(device, rank, world):
    """Checks groups of the backend whose calls, or messages, ranks begin in other orders, at sizes at which
    one kernel could take all of a device."""
    seconds = datetime.timedelta(seconds=20)
    pair = [dist.new_group(timeout=seconds) for _ in range(2)]
    data = [torch.ones(4 << 20, device=device) for _ in pair]
    came = torch.zeros(4 << 20, device=device)
    sender, receiver = (-1, -1) if ranks_start.SHARED else (0, 1)
    # First calls are made in one order.
    for group, x in zip(pair, data, strict=True):
        dist.all_reduce(x, dist.ReduceOp.AVG, group)
    if rank == sender:
        dist.send(data[1], 1, group=pair[0])
    elif rank == receiver:
        dist.recv(came, 0, group=pair[0])
    for turn in range(4):
        both = list(zip(pair, data, strict=True))
        works = []
        for group, x in both if rank % 2 else reversed(both):
            works.append(dist.all_reduce(x, dist.ReduceOp.AVG, group, async_op=True))
            time.sleep(0.02 if turn else 0.2)
        for work in works:
            work.wait()
    torch.cuda.synchronize()
    if rank == receiver:
        dist.recv(came, 0, group=pair[0])
    work = dist.all_reduce(data[0], dist.ReduceOp.AVG, pair[0], async_op=True)
    if rank == sender:
        time.sleep(0.2)
        dist.send(data[1], 1, group=pair[0])
    work.wait()
    torch.cuda.synchronize()
    why = ""
    for group in pair:
        try:
            symmpool.communicator(group, str(device)).synchronize()
        except symmpool.Error as error:
            why = str(error)
    right = not why and all(bool((x == 1).all()) for x in data)
    check("groups at once, in other orders", right and (rank != receiver or bool((came == 1).all())), why)


def lists(device, rank, world):
    """Checks calls of the backend whose parts are tensors of their own."""
    backend.backend_counts(reset=True)
    right = True
    for sizes in ([70_000] * world, [1000 * each for each in range(world)]):
        came = [torch.empty(size, 2, device=device)[:, 0] for size in sizes]
        dist.all_gather(came, torch.full((sizes[rank],), float(rank), device=device), async_op=True)
        torch.cuda.synchronize()
        right &= all(bool((part == nth).all()) for nth, part in enumerate(came))
        parts = [torch.full((size,), rank + 10 * nth, device=device) for nth, size in enumerate(sizes)]
        out = torch.zeros(sizes[rank], dtype=torch.int64, device=device)
        dist.reduce_scatter(out, parts)
        right &= bool((out == world * (world - 1) // 2 + 10 * rank * world).all())
    counts = backend.backend_counts()
    right &= all(set(each) == {"symmpool"} for each in counts.values())
    check("gathers and scatters over lists", right, counts)


def functional(device, rank, world):
    """Checks the functional collectives that DTensor and others call, which the backend serves."""
    from torch.distributed import _functional_collectives as funcol

    backend.backend_counts(reset=True)
    group, total = dist.group.WORLD, world * (world + 1) // 2
    x = torch.full((world, 1000), rank + 1.0, device=device)
    right = bool((funcol.all_reduce(x, "sum", group) == total).all())
    right &= bool((funcol.reduce_scatter_tensor(x, "sum", 0, group) == total).all())
    gathered = funcol.all_gather_tensor(x, 0, group).view(world, -1)[:, 0]
    right &= gathered.tolist() == [rank + 1.0 for rank in range(world)]
    right &= all(bool((y == total).all()) for y in funcol.all_reduce_coalesced([x, x], "sum", group))
    counts = backend.backend_counts()
    right &= all(set(each) == {"symmpool"} for each in counts.values())
    check("functional collectives, by ours", right, counts)


def main():
    device, rank, world = begin(f"cuda:{ranks_start.PEER},cpu:gloo")
    pool = calls(device, rank, world)
    all_to_all(device, rank, world)
    moved_types(device, rank, world)
    not_waited_for(pool, device, rank, world)
    graphs(pool, device, rank, world)
    groups(device, rank, world)
    handle(pool, device, rank, world)
    operators(device, rank, world)
    with_nccl, sharded_by_nccl = train(device, rank, world), sharded(device, rank, world)
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()
    del pool

    device, rank, world = begin("cuda:symmpool,cpu:gloo")
    x = torch.full((5000,), float(rank), device=device)
    dist.all_reduce(x)
    right = bool((x == sum(range(world))).all()) and backend.last_backend() == "symmpool"
    any_rank = torch.tensor([rank == world - 1], device=device)
    dist.all_reduce(any_rank, dist.ReduceOp.MAX)
    right &= any_rank.item() is True and backend.last_backend() == "symmpool"
    # A call that ours leaves to NCCL, where there is NCCL.
    y = torch.full((5000,), float(rank), device=device)
    dist.reduce(y, 0)
    right &= rank != 0 or bool((y == sum(range(world))).all())
    right &= backend.last_backend() == ("symmpool" if ranks_start.SHARED else ranks_start.PEER)
    parts = [torch.empty(3, device=device) for _ in range(world)]
    dist.all_gather(parts, torch.full((3,), float(rank), device=device))
    right &= [part[0].item() for part in parts] == list(range(world))
    objects = [None] * world
    dist.all_gather_object(objects, rank)
    right &= objects == list(range(world))
    dist.barrier()
    check("the backend, and NCCL as its fallback", right)
    strided(device, rank, world)
    if not ranks_start.SHARED:
        messages(device, rank, world)
    odd_messages(device, rank, world)
    at_once(device, rank, world)
    lists(device, rank, world)
    functional(device, rank, world)
    sharded_by_ours(device, rank, world, sharded_by_nccl)
    with_ours = train(device, rank, world)
    counts = backend.backend_counts()
    check(
        "data-parallel training, as with NCCL",
        near(with_ours, with_nccl) and "symmpool" in counts["all_reduce"],
    )
    if rank == 0:
        print(f"      calls of the backend: {counts}")
        if sys.argv[1:2] == ["json"]:
            with open(sys.argv[2], "w") as file:
                json.dump({"world": world, "checks": found}, file, indent=2)
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()
    wrong = [name for name, right in found.items() if not right]
    if wrong:
        sys.exit(f"wrong: {wrong}")


if __name__ == "__main__":
    main()
