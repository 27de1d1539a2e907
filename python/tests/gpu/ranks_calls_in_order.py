"""Calls of a group that go by way of copies come behind those that were begun before, on the side stream too.

    python -m torch.distributed.run --nproc-per-node N python/tests/gpu/ranks_calls_in_order.py

Every call reads what one with `async_op=True` writes that nobody waited for, while one rank in turn is held
up: strided tensors, lists, complex numbers, sums of inputs times a factor, by the backend and by module-level
calls, synchronous or not, also captured in a graph. Torch's `wait_tensor` waits for eager calls. What one
rank refuses, or finds no memory for, is an error on every rank. Messages of views are what they show. Exits
with 1 if anything was wrong.
"""

import datetime
import os
import sys

import ranks_start
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import symmpool
from symmpool.collectives import plans

#: Clock cycles for which a stream is held up, about 0.05 s.
PAUSE = 75_000_000

failures = []


def check(name, right, found=None):
    if not right:
        failures.append(name)
        print(f"WRONG rank {dist.get_rank()}: {name}: {found}", flush=True)


class Writer:
    """A tensor that a call under way fills with sums, on the rank that is late last of all."""

    def __init__(self, module, device, late):
        self.module, self.device, self.late = module, device, late
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.total = self.world * (self.world + 1) / 2

    def __call__(self, *shape):
        x = torch.full(shape, self.rank + 1.0, device=self.device)
        if self.rank == self.late:
            torch.cuda._sleep(PAUSE)
        self.module.all_reduce(x, async_op=True)
        return x


def behind(module, device, late, asynchronous):
    """The calls: their results, and what these are to be, by name."""
    written = Writer(module, device, late)
    world, total, options = written.world, written.total, {"async_op": asynchronous}
    waited = (lambda work: work.wait()) if asynchronous else (lambda _: None)
    for name in ("small", "large"):
        n = 4 if name == "small" else 3 << 20
        x = written(n, 2)
        waited(module.all_reduce(x[:, 0], **options))
        yield f"{name} strided", x, [total * world, total]
        x, parts = written(n), [torch.zeros(n, device=device) for _ in range(world)]
        waited(module.all_gather(parts, x, **options))
        yield f"{name} list", torch.stack(parts, 1), [total] * world
        x = written(world, n)
        out = torch.zeros(n, device=device)
        waited(module.reduce_scatter(out, list(x), **options))
        yield f"{name} reduce_scatter", out.view(-1, 1), [total * world]
        x = written(n, 2)
        waited(module.all_reduce(torch.view_as_complex(x), **options))
        yield f"{name} complex", x, [total * world] * 2
        # The memory of copies is used again at once.
        for _ in range(3):
            x = written(n, 2)
            waited(module.all_reduce(x[:, 1], **options))
        yield f"{name} again", x, [total, total * world]
        if module is dist:
            x = written(n)
            waited(dist.all_reduce(x, dist._make_nccl_premul_sum(0.5), **options))
            yield f"{name} factor", x.view(-1, 1), [total * world / 2]


def is_right(result, row):
    expected = torch.tensor(row, device=result.device, dtype=result.dtype).expand(result.shape)
    return torch.equal(result, expected)


def orders(device):
    for module in (dist, symmpool):
        for late in range(dist.get_world_size()):
            for asynchronous in (False, True):
                for name, result, row in behind(module, device, late, asynchronous):
                    where = f"{module.__name__}, rank {late} late, async {asynchronous}: {name}"
                    check(where, is_right(result, row), result.flatten()[:4].tolist())


def captured(device):
    """A strided and a list call behind one that nobody waited for, in a graph that is replayed."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for module in (dist, symmpool):
        x, y = torch.zeros(64, 2, device=device), torch.zeros(64, device=device)
        parts = [torch.zeros(64, device=device) for _ in range(world)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            module.all_reduce(y, async_op=True)
            work = module.all_gather(parts, y, async_op=True)
            module.all_reduce(x[:, 1], async_op=True).wait()
            work.wait()
        for step in range(1, 4):
            x.fill_(step)
            y.fill_(step * (rank + 1))
            torch.cuda.synchronize()
            dist.barrier()
            graph.replay()
            torch.cuda.synchronize()
            total = step * world * (world + 1) / 2
            right = is_right(torch.stack(parts, 1), [total] * world) and is_right(x[:, 1:], [step * world])
            check(f"{module.__name__} captured, step {step}", right, [each[0].item() for each in parts])


def registered(device):
    wait = torch.ops._c10d_functional.wait_tensor
    c10d._set_allow_inflight_collective_as_graph_input(True)
    try:
        for late in range(dist.get_world_size()):
            x = torch.ones(1 << 20, device=device)
            if dist.get_rank() == late:
                torch.cuda._sleep(PAUSE)
            work = dist.all_reduce(x, async_op=True)
            found = wait(x).clone()
            check("wait_tensor", is_right(found.view(-1, 1), [dist.get_world_size()]), found[:2].tolist())
            work.wait()
        check("no Work is left", c10d._get_work_registry_size() == 0, c10d._get_work_registry_size())
    finally:
        c10d._set_allow_inflight_collective_as_graph_input(False)


def refusals(device):
    world, rank = dist.get_world_size(), dist.get_rank()

    def lacking(*_):
        raise torch.OutOfMemoryError("none left")

    for module in (dist, symmpool):
        for asynchronous in (False, True):
            for kind in ("expanded", "no memory"):
                usual = plans.plain, plans.destination
                # A communicator on devices is closed by calls that differ: each case has a group of its own.
                group = dist.new_group(backend="symmpool")
                module.all_reduce(torch.ones(1, device=device), group=group)
                x = torch.ones(8, 2, device=device)[:, 0]
                if rank == 1 and kind == "expanded":
                    x = torch.ones(1, device=device).expand(8)
                elif rank == 1:
                    plans.plain = plans.destination = lacking
                raised = None
                try:
                    work = module.all_reduce(x, group=group, async_op=asynchronous)
                    if asynchronous:
                        work.wait()
                    torch.cuda.synchronize()
                    symmpool.communicator(group, str(device)).synchronize()
                except Exception as error:
                    raised = error
                plans.plain, plans.destination = usual
                right = isinstance(raised, (torch.OutOfMemoryError, symmpool.Error))
                name = f"{module.__name__}, {kind}, async {asynchronous}"
                check(f"{name} is an error", right, repr(raised))
                y = torch.full((5,), rank + 1.0, device=device)
                raised = None
                try:
                    module.all_reduce(y, group=group)
                    torch.cuda.synchronize()
                    symmpool.communicator(group, str(device)).synchronize()
                except symmpool.Error as error:
                    raised = error
                right = raised is not None or is_right(y.view(-1, 1), [world * (world + 1) / 2])
                check(f"behind {name}", right, y.tolist())


def messages(device):
    rank, values = dist.get_rank(), torch.arange(12.0, device=device).view(4, 3)
    if rank > 1:
        return
    for number, view in enumerate((values.t().contiguous().t(), torch._neg_view(-values))):
        got = torch.zeros(3, 4, device=device).t()
        if rank == 0:
            dist.send(view, 1)
        else:
            dist.recv(got, 0)
            check(f"message {number}", torch.equal(got, values), got.tolist())


def main():
    device = ranks_start.device_of("cuda")
    if device is None or int(os.environ["WORLD_SIZE"]) < 2:
        sys.exit("this needs two ranks, and a GPU for each (or SYMMPOOL_SHARED_DEVICE=1)")
    dist.init_process_group("symmpool", timeout=datetime.timedelta(seconds=60))
    dist.all_reduce(torch.ones(1, device=device))
    for part in (orders, captured, registered, refusals, messages):
        part(torch.device(device))
        dist.barrier()
    if dist.get_rank() == 0:
        print(f"calls in order on {dist.get_world_size()} ranks, {len(failures)} wrong", flush=True)
    dist.destroy_process_group()
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
