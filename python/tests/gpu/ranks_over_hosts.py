"""Collectives on GPUs whose ranks pretend to be on several hosts, compared with what follows from all inputs.

    python -m torch.distributed.run --nproc-per-node N python/tests/gpu/ranks_over_hosts.py --hosts a,a,b,b

The module's calls on torch's tensors and on those of a pool, on several streams, then the backend's with a
model that DistributedDataParallel trains. Exits with 1 if anything was wrong.
"""

import argparse
import os
import sys

RANK = int(os.environ["RANK"])
command = argparse.ArgumentParser(description=__doc__)
command.add_argument("--hosts", required=True, help="the host of each rank, with commas between them")
command.add_argument("--calls", type=int, default=60, help="random calls (default 60)")
options = command.parse_args()
os.environ["SYMMPOOL_HOST_ID"] = options.hosts.split(",")[RANK]
os.environ["SYMMPOOL_BACKEND_OVER_HOSTS"] = "1"

import random  # noqa: E402  # the variables are read when symmpool is first used

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import symmpool  # noqa: E402

failures = []


def check(name, found, wanted):
    if not torch.equal(found, wanted):
        failures.append(name)
        at = int((found != wanted).flatten().nonzero()[0])
        was, is_to_be = found.flatten()[at].item(), wanted.flatten()[at].item()
        print(f"WRONG rank {RANK}: {name}: element {at} is {was}, not {is_to_be}", flush=True)


def inputs(seed, count, dtype, device):
    """Whole numbers for each rank, whose sums every type has exactly."""
    made = torch.Generator().manual_seed(seed)
    shape = (dist.get_world_size(), count)
    return torch.randint(0, 8, shape, generator=made).to(dtype).to(device)


def call(chosen, pool, device):
    """A random call of the module, the same on all ranks."""
    world = dist.get_world_size()
    name = chosen.choice(["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "max"])
    count = chosen.choice([1, 5, 1000, 4096, 70_001, 700_000])
    dtype = chosen.choice([torch.float32, torch.bfloat16, torch.int64, torch.float16])
    seed, root = chosen.randrange(1 << 30), chosen.randrange(world)
    in_pool, stream = chosen.random() < 0.5, chosen.choice(STREAMS)
    long = name in ("reduce_scatter", "all_to_all")
    each = inputs(seed, count * (world if long else 1), dtype, device)
    make = (
        (lambda *shape: pool.empty(shape, dtype=dtype))
        if in_pool
        else (lambda *shape: torch.empty(shape, dtype=dtype, device=device))
    )
    x = make(each.shape[1])
    if in_pool:
        pool.commit()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x.copy_(each[RANK])
        if name in ("all_reduce", "max"):
            op = "max" if name == "max" else "sum"
            symmpool.all_reduce(x, op=op)
            wanted = each.amax(0) if name == "max" else each.double().sum(0).to(dtype)
            found = x
        elif name == "reduce_scatter":
            found = torch.empty(count, dtype=dtype, device=device)
            symmpool.reduce_scatter_tensor(found, x)
            wanted = each.double().sum(0).to(dtype)[RANK * count :][:count]
        elif name == "all_gather":
            found = torch.empty(count * world, dtype=dtype, device=device)
            symmpool.all_gather_into_tensor(found, x)
            wanted = each.flatten()
        elif name == "broadcast":
            symmpool.broadcast(x, root)
            found, wanted = x, each[root]
        else:
            found = torch.empty_like(each[0])
            symmpool.all_to_all_single(found, x)
            wanted = each.view(world, world, count)[:, RANK].flatten()
        check(f"{name} of {count} {dtype}, {'pool' if in_pool else 'torch'}", found, wanted)
    torch.cuda.current_stream().wait_stream(stream)


def uneven(chosen, device):
    """An all-to-all whose parts differ."""
    world = dist.get_world_size()
    sizes = [[chosen.choice([0, 1, 300, 5000]) for _ in range(world)] for _ in range(world)]
    each = [
        torch.arange(sum(row), device=device, dtype=torch.float32) + 10_000 * at
        for at, row in enumerate(sizes)
    ]
    send, receive = sizes[RANK], [row[RANK] for row in sizes]
    found = torch.empty(sum(receive), device=device)
    symmpool.all_to_all_single(found, each[RANK], receive, send)
    parts = [x[sum(row[:RANK]) :][: row[RANK]] for x, row in zip(each, sizes)]
    check("uneven all_to_all_single", found, torch.cat(parts))


def training(device):
    """Two steps of a model, whose gradients are averages over all ranks."""
    torch.manual_seed(7)
    model = torch.nn.Linear(512, 256, bias=False, device=device)
    alone = torch.nn.Linear(512, 256, bias=False, device=device)
    alone.load_state_dict(model.state_dict())
    spread = torch.nn.parallel.DistributedDataParallel(model)
    batches = torch.randn(dist.get_world_size(), 16, 512, generator=torch.Generator().manual_seed(3)).to(
        device
    )
    spread(batches[RANK]).square().mean().backward()
    alone(batches.flatten(0, 1)).square().mean().backward()
    if not torch.allclose(model.weight.grad, alone.weight.grad, rtol=1e-4, atol=1e-6):
        failures.append("training")
        print(f"WRONG rank {RANK}: gradients of DistributedDataParallel", flush=True)


device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
torch.cuda.set_device(device)
dist.init_process_group("cuda:symmpool,cpu:gloo")
STREAMS = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
pool = symmpool.Pool(dist.group.WORLD, str(device))
assert len(pool.hosts) == len(set(options.hosts.split(","))), pool.hosts
chosen = random.Random(11)
for _ in range(options.calls):
    call(chosen, pool, device)
for _ in range(5):
    uneven(chosen, device)
training(device)
counts = torch.tensor(len(failures), device=device)
dist.all_reduce(counts)
if RANK == 0:
    print(f"{options.calls} calls over hosts {options.hosts}, {counts.item()} wrong", flush=True)
dist.destroy_process_group()
sys.exit(bool(failures))
