"""torch.distributed's functions on a group of the backend and on a group of gloo do the same."""

import contextlib
import datetime
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ranks import values
from test_torch_distributed import begin

import symmpool  # noqa: F401


def own(count, dtype=torch.float32):
    """Returns this rank's input: different on each rank."""
    return torch.arange(count, dtype=dtype) + 10 * dist.get_rank()


def reduced(world):
    tensors = [own(5), own(3)]
    for root, op in enumerate((dist.ReduceOp.SUM, dist.ReduceOp.MAX)):
        dist.reduce(tensors[root], root, op)
    me = dist.get_rank()
    return tensors[me].tolist() if me < 2 else None


def gathered(world):
    root = world - 1
    to = [torch.empty(3) for _ in range(world)] if dist.get_rank() == root else None
    dist.gather(own(3), to, root)
    return to and torch.cat(to).tolist()


def scattered(world):
    parts = [own(2) + rank for rank in range(world)] if dist.get_rank() == 1 else None
    mine = torch.empty(2)
    dist.scatter(mine, parts, 1)
    return mine.tolist()


def all_gathered(world):
    to = [torch.empty(3) for _ in range(world)]
    dist.all_gather(to, own(3))
    work = dist.all_gather([torch.empty(3) for _ in range(world)], own(3), async_op=True)
    work.wait()
    return torch.cat(to).tolist()


def all_gathered_unevenly(world):
    to = [torch.empty(1 + rank) for rank in range(world)]
    dist.all_gather(to, own(1 + dist.get_rank()))
    return torch.cat(to).tolist()


def reduce_scattered_lists(world):
    mine = torch.empty(2)
    dist.reduce_scatter(mine, [own(2) + rank for rank in range(world)])
    return mine.tolist()


def objects(world):
    me = dist.get_rank()
    everyones = [None] * world
    dist.all_gather_object(everyones, {"rank": me, "long": "x" * 1000 * me})
    observed = [f"from {me}", me]
    dist.broadcast_object_list(observed, 1)
    mine = [None]
    dist.scatter_object_list(mine, [f"to {rank}" for rank in range(world)] if me == 0 else None)
    gathered = [None] * world if me == 1 else None
    dist.gather_object(me, gathered, 1)
    return [each["rank"] for each in everyones], observed, mine, gathered


def pairs(world):
    me = dist.get_rank()
    got = torch.zeros(4)
    right, left = (me + 1) % world, (me - 1) % world
    ops = [dist.P2POp(dist.isend, own(4), right), dist.P2POp(dist.irecv, got, left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got.tolist()


def sent(world):
    me = dist.get_rank()
    got = torch.zeros(3)
    if me == 0:
        dist.send(own(3), 1, tag=7)
        dist.isend(own(3), 1, tag=8).wait()
        return None
    if me == 1:
        dist.recv(got, 0, tag=7)
        found = dist.recv(torch.zeros(3), tag=8)
        return got.tolist(), found
    return None


def object_pairs(world):
    me = dist.get_rank()
    observed = [f"from {me}"]
    if me == 0:
        dist.send_object_list(observed, 1)
    elif me == 1:
        dist.recv_object_list(observed, 0)
    return observed


def reduced_coalesced(world):
    tensors = [own(5), own(3)]
    dist.all_reduce_coalesced(tensors)
    dist.all_reduce_coalesced(tensors, dist.ReduceOp.MAX)
    future = dist.all_reduce_coalesced([own(2)], async_op=True)
    return [each.tolist() for each in tensors], [each.tolist() for each in future.wait()]


def reduced_coalesced_strided(world):
    tensors = [own(6).reshape(3, 2).t(), own(3)]
    dist.all_reduce_coalesced(tensors)
    return [each.tolist() for each in tensors]


def gathered_coalesced(world):
    lists = [[torch.empty(3), torch.empty(2)] for _ in range(world)]
    dist.all_gather_coalesced(lists, [own(3), own(2)])
    return [[each.tolist() for each in each_list] for each_list in lists]


def managed_reductions(world):
    tensors = [own(4), own(2)]
    with dist.distributed_c10d._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
    manager.wait()
    return [each.tolist() for each in tensors]


def managed_gathers(world):
    outputs = [torch.empty(2 * world), torch.empty(3 * world)]
    with dist.distributed_c10d._coalescing_manager():
        for output, count in zip(outputs, (2, 3), strict=True):
            dist.all_gather_into_tensor(output, own(count))
    again = [torch.empty(2 * world), torch.empty(3 * world)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for output, count in zip(again, (2, 3), strict=True):
            dist.all_gather_into_tensor(output, own(count))
    manager.wait()
    return [each.tolist() for each in outputs + again]


def managed_scatters(world):
    outputs = [torch.empty(2), torch.empty(3)]
    with dist.distributed_c10d._coalescing_manager():
        for output in outputs:
            dist.reduce_scatter_tensor(output, own(output.numel() * world))
    again = [torch.empty(2), torch.empty(3)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for output in again:
            dist.reduce_scatter_tensor(output, own(output.numel() * world))
    manager.wait()
    return [each.tolist() for each in outputs + again]


def managed_on_a_device(world):
    tensors = [own(4), own(2)]
    with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu")):
        for tensor in tensors:
            dist.broadcast(tensor, 1)
    return [each.tolist() for each in tensors]


def functional(world):
    group = dist.group.WORLD
    found = [
        funcol.all_reduce(own(3), "sum", group),
        funcol.all_gather_tensor(own(2), 0, group),
        funcol.reduce_scatter_tensor(own(2 * world), "sum", 0, group),
        funcol.all_to_all_single(own(world), None, None, group),
        funcol.broadcast(own(3), 1, group),
        *funcol.all_reduce_coalesced([own(3), own(2)], "max", group),
        *funcol.all_gather_into_tensor_coalesced([own(3), own(2)], group),
        *funcol.reduce_scatter_tensor_coalesced([own(world), own(2 * world)], "sum", [0, 0], group),
    ]
    return [each.tolist() for each in found]


def monitored_group(world):
    group = dist.new_group(backend="gloo")
    dist.monitored_barrier(group, datetime.timedelta(seconds=20))
    return True


def groups(world):
    me = dist.get_rank()
    found = []
    half = dist.new_group(range(world // 2, world))
    if me >= world // 2:
        x = own(2)
        dist.all_reduce(x, group=half)
        found.append(x.tolist())
    mine, both = dist.new_subgroups(2)
    x = own(2)
    dist.all_reduce(x, group=mine)
    found += [x.tolist(), len(both), dist.get_world_size(mine)]
    mine, _ = dist.new_subgroups_by_enumeration([[rank] for rank in range(world)])
    x = own(2)
    dist.all_reduce(x, group=mine)
    local = dist.new_group([me], use_local_synchronization=True)
    dist.broadcast(x, me, group=local)
    dist.barrier(local)
    dist.destroy_process_group(half)
    return [*found, x.tolist(), dist.get_backend(mine) == dist.get_backend()]


def split(world):
    part = dist.split_group(split_ranks=[list(range(world // 2)), list(range(world // 2, world))])
    x = own(2)
    dist.all_reduce(x, group=part)
    return x.tolist()


def meshes(world):
    from torch.distributed.device_mesh import init_device_mesh

    line = init_device_mesh("cpu", (world,), mesh_dim_names=("all",))
    x = own(2)
    dist.all_reduce(x, group=line.get_group())
    found = [x.tolist(), line.get_local_rank()]
    table = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("rows", "columns"))
    for name in ("rows", "columns"):
        x = own(2)
        dist.all_reduce(x, group=table[name].get_group())
        found += [x.tolist(), table.get_local_rank(name), table[name].size()]
    if world == 4:
        flat = table["rows", "columns"]._flatten("both")
        x = own(2)
        dist.all_reduce(x, group=flat.get_group())
        found.append(x.tolist())
    return found


def spread_over(world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(8.0 * world).reshape(2 * world, 4)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    product = rows @ distribute_tensor(whole.t().contiguous(), mesh, [Replicate()])
    total = distribute_tensor(whole, mesh, [Shard(1)]) @ distribute_tensor(whole.t(), mesh, [Shard(0)])
    spread_out = [columns.to_local(), product.full_tensor(), total.full_tensor()]
    return [each.tolist() for each in (*spread_out, rows.sum().full_tensor())]


def empty(world):
    x = torch.empty(0)
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    to = torch.empty(0)
    dist.all_gather_into_tensor(to, x)
    return list(x.shape), list(to.shape)


def numbers(world):
    x = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(x)
    to = torch.empty(world)
    dist.all_gather_into_tensor(to, x.reshape(1))
    return x.item(), to.tolist()


def complex_numbers(world):
    x = torch.full((3,), complex(dist.get_rank(), 1))
    dist.all_reduce(x)
    dist.all_reduce_coalesced([x])
    return x.tolist()


CHECKS = [
    reduced,
    gathered,
    scattered,
    all_gathered,
    all_gathered_unevenly,
    reduce_scattered_lists,
    objects,
    pairs,
    sent,
    object_pairs,
    reduced_coalesced,
    reduced_coalesced_strided,
    gathered_coalesced,
    managed_reductions,
    managed_gathers,
    managed_scatters,
    functional,
    monitored_group,
    groups,
    split,
    meshes,
    spread_over,
    empty,
    numbers,
    complex_numbers,
    # gloo refuses it, after which torch takes the group for one whose calls are coalesced.
    managed_on_a_device,
]


def every(group, folder, name):
    _, world = begin(group, folder, name)
    # torch warns about names that it is about to drop.
    warnings.simplefilter("ignore")
    found = {}
    for check in CHECKS:
        try:
            found[check.__name__] = check(world)
        except Exception as error:
            found[check.__name__] = type(error).__name__, str(error)
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_every_name_does_what_it_does_on_gloo(world, tmp_path):
    found = {}
    for name in ("gloo", "symmpool"):
        (tmp_path / name).mkdir()
        found[name] = values(world, every, str(tmp_path / name), name)
    for ours, expected in zip(found["symmpool"], found["gloo"], strict=True):
        batch = ours.pop("managed_on_a_device")
        assert batch == [[10.0, 11.0, 12.0, 13.0], [10.0, 11.0]]
        # NCCL gives the same.
        uneven = [10.0 * rank + at for rank in range(world) for at in range(rank + 1)]
        assert ours.pop("all_gathered_unevenly") == uneven
        for check, outcome in ours.items():
            assert expected[check] == outcome, check
    # Refused there: by torch itself, or by gloo.
    failed = {
        check
        for check, outcome in found["gloo"][0].items()
        if isinstance(outcome, tuple) and str(outcome[0]).endswith("Error")
    }
    # Newer torch splits a group of gloo's, and ours as well.
    assert failed - {"split"} == {"all_gathered_unevenly", "managed_on_a_device"}


def monitored(group, folder):
    begin(group, folder, "symmpool")
    # torch 2.15 does not ask for gloo by its name.
    newer = hasattr(dist, "set_timeout")
    asks = pytest.raises(ValueError, match="only implemented for GLOO")
    with contextlib.nullcontext() if newer else asks:
        dist.monitored_barrier()
    dist.barrier()
    dist.destroy_process_group()
    return True


def test_a_monitored_barrier_needs_a_group_of_gloo(tmp_path):
    assert values(2, monitored, str(tmp_path)) == [True, True]
