"""Compiled programs that call torch.distributed on a group of the backend."""

import gc
import types

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ranks import values
from test_torch_distributed import begin

import symmpool  # noqa: F401
from symmpool import backend
from symmpool.collectives import layout, plans, reductions
from symmpool.communicators import cache, entry, host_work, torch_state, work
from symmpool.groups import names, pool_registry, process_groups, resolution
from symmpool.torch_backend import counts, process_group, served_devices
from symmpool.torch_backend import work as torch_work


def traced():
    """The functions under the backend that the compiler has taken for a program."""
    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    found = []
    ours = (cache, counts, entry, host_work, layout, names, plans, pool_registry, process_group)
    ours += (process_groups, reductions, resolution, served_devices, torch_state, torch_work, work)
    for module in ours:
        owners = [each for each in vars(module).values() if isinstance(each, type)]
        for owner in (module, *owners):
            for name, value in vars(owner).items():
                if isinstance(value, types.FunctionType) and entries(value.__code__):
                    found.append(f"{value.__module__}.{name}")
    return sorted(set(found))


def train(group, folder, whole):
    me, world = begin(group, folder, "symmpool")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.ReLU(), torch.nn.Linear(20, 3))
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1)
    forward = parallel if whole else torch.compile(parallel, backend="eager")

    def step(x):
        loss = forward(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    made = torch.compile(step, backend="eager") if whole else step
    for turn in range(12):
        torch.manual_seed(1000 * turn + me)
        # Shapes that change, so that it compiles again.
        made(torch.randn(8 + turn % 3, 10))
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    everyone = torch.empty(world * weights.numel())
    dist.all_gather_into_tensor(everyone, weights)
    same = all(torch.equal(part, weights) for part in everyone.chunk(world))
    served = set(backend.backend_counts()["all_reduce"])
    found = traced()
    del parallel, model, optimizer, forward, made, step
    gc.collect()
    dist.destroy_process_group()
    return same, served, found


def test_a_compiled_model_trains_in_data_parallel(tmp_path):
    assert values(2, train, str(tmp_path), False) == [(True, {"symmpool"}, [])] * 2


def test_a_compiled_step_of_data_parallel_training_leaves_the_backend_as_it_is(tmp_path):
    assert values(2, train, str(tmp_path), True) == [(True, {"symmpool"}, [])] * 2


def programs(me, world):
    whole = dist.group.WORLD

    def reduced(x):
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    def gathered(x):
        to = x.new_empty(world * x.numel())
        dist.all_gather_into_tensor(to, x, group=whole)
        return to + 1

    def scattered(x):
        to = x.new_empty(x.numel() // world)
        dist.reduce_scatter_tensor(to, x)
        return to

    def swapped(x):
        to = torch.empty_like(x)
        dist.all_to_all_single(to, x)
        return to

    def functional(x):
        total = funcol.all_reduce(x, "sum", whole) + funcol.all_reduce(x, "max", whole.group_name)
        return total + funcol.all_gather_tensor(x, 0, whole).sum()

    def numbers(x):
        return x + dist.get_rank() + dist.get_world_size()

    # Ends a graph, as on torch's own groups.
    def observed(x):
        y = x + me
        dist.broadcast(y, 1)
        return y

    def waited(x):
        y = x * 2
        work = dist.all_reduce(y, async_op=True)
        dist.barrier()
        work.wait()
        return y + 1

    def direct(x):
        y = x * 2
        whole.allreduce([y], dist.AllreduceOptions()).wait()
        return y + 1

    in_one, in_parts = (reduced, gathered, scattered, swapped, functional, numbers), (observed, waited)
    # From torch 2.15 on compiled programs may call no method of a group, of torch's own neither.
    return in_one, in_parts if hasattr(dist, "set_timeout") else (*in_parts, direct)


def compiled(group, folder):
    me, world = begin(group, folder, "symmpool")
    right, found = {}, []
    in_one, in_parts = programs(me, world)
    for program in (*in_one, *in_parts):
        torch._dynamo.reset()
        made = torch.compile(program, backend="eager", fullgraph=program in in_one)
        x = torch.arange(4.0) + me
        expected = program(x.clone())
        right[program.__name__] = all(torch.equal(made(x.clone()), expected) for _ in range(3))
        found += traced()
    counts = backend.backend_counts()
    dist.destroy_process_group()
    return right, found, set(counts["broadcast"]) | set(counts["all_reduce"])


def test_compiled_calls_come_to_the_backend_and_do_not_trace_into_it(tmp_path):
    for right, found, served in values(2, compiled, str(tmp_path)):
        assert all(right.values()), right
        assert found == [] and served == {"symmpool"}
