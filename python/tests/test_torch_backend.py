"""The backend of torch.distributed, between processes on the CPU."""

import datetime
import gc
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin

import symmpool
from symmpool import backend
from symmpool.communicators import cache
from symmpool.torch_backend.registration import has_python_backends


def ours(group, folder):
    me, world = begin(group, folder, "symmpool")
    right = {}
    x = torch.full((8,), me + 1.0)
    dist.all_reduce(x)
    right["all_reduce"] = x.tolist() == [world * (world + 1) / 2] * 8
    y = torch.full((4, 2), float(me)).t()
    work = dist.all_reduce(y, dist.ReduceOp.AVG, async_op=True)
    work.wait()
    right["not contiguous"] = y.tolist() == [[(world - 1) / 2] * 4] * 2 and work.is_completed()
    # Who asks, and does not wait, finds the result where it belongs as well.
    polled = torch.full((4, 2), float(me)).t()
    work = dist.all_reduce(polled, async_op=True)
    end = time.monotonic() + 60
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0.001)
    found = polled.tolist() == [[world * (world - 1) / 2] * 4] * 2
    right["not contiguous, polled"] = found and work.is_success()
    gathered = torch.empty(2 * world, dtype=torch.bool)
    dist.all_gather_into_tensor(gathered, torch.tensor([me == 1, True]))
    expected = [flag for rank in range(world) for flag in (rank == 1, True)]
    right["all_gather"] = gathered.tolist() == expected
    part = torch.empty(2, dtype=torch.int64)
    dist.reduce_scatter_tensor(part, torch.arange(2 * world), dist.ReduceOp.MAX)
    right["reduce_scatter"] = part.tolist() == [2 * me, 2 * me + 1]
    z = torch.full((3,), complex(me, 1), dtype=torch.complex64)
    dist.broadcast(z, 1)
    right["broadcast"] = z.tolist() == [complex(1, 1)] * 3
    swapped = torch.empty(world)
    dist.all_to_all_single(swapped, torch.full((world,), float(me)))
    right["all_to_all"] = swapped.tolist() == list(range(world))
    uneven = torch.empty(sum(range(world)), 2)
    rows = torch.full((me * world, 2), float(me))
    dist.all_to_all_single(uneven, rows, list(range(world)), [me] * world)
    right["uneven"] = uneven[:, 1].tolist() == [r for r in range(world) for _ in range(r)]
    dist.barrier()
    counts = symmpool.backend.backend_counts()
    assert backend.last_backend() == "symmpool"
    dist.destroy_process_group()
    return right, counts


@pytest.mark.parametrize("world", [2, 4])
def test_what_is_served_is_right_and_is_reported(world, tmp_path):
    for right, counts in values(world, ours, str(tmp_path)):
        assert all(right.values()), right
        assert counts == {
            "all_reduce": {"symmpool": 3},
            "all_gather_into_tensor": {"symmpool": 1},
            "reduce_scatter_tensor": {"symmpool": 1},
            "broadcast": {"symmpool": 1},
            "all_to_all_single": {"symmpool": 2},
            "barrier": {"symmpool": 1},
        }


def dropped(group, folder):
    _, world = begin(group, folder, "symmpool")
    x, weight = torch.ones(3, 2).t(), torch.nn.Parameter(torch.ones(3, 2).t())
    with torch.inference_mode():
        inferred = torch.ones(3, 2).t()
        dist.all_reduce(inferred, async_op=True)
    dist.all_reduce(x, async_op=True)
    dist.all_reduce(weight, async_op=True)
    # Comes after them all.
    dist.barrier()
    right = [each.tolist() == [[world] * 3] * 2 for each in (x, weight, inferred)]
    waited = dist.all_reduce(torch.ones(1), async_op=True)
    observed = waited.get_future().then(lambda done: done.value()[0].item())
    right.append(waited.wait() and observed.wait() == world and waited.is_success())
    dist.destroy_process_group()
    return right


def test_results_that_nobody_waits_for_come_to_where_they_belong(tmp_path):
    assert values(2, dropped, str(tmp_path)) == [[True] * 4] * 2


def views(group, folder):
    me, world = begin(group, folder, "symmpool")
    right = {}
    rows = (torch.arange(6.0).reshape(3, 2) + me).t()
    gathered, transposed = torch.empty(2 * world, 3), torch.empty(3, 2 * world).t()
    dist.all_gather_into_tensor(gathered, rows)
    dist.all_gather_into_tensor(transposed, rows)
    expected = torch.cat([rows - me + rank for rank in range(world)])
    right["all_gather"] = torch.equal(gathered, expected) and torch.equal(transposed, expected)
    part = torch.empty(1, 3)
    dist.reduce_scatter_tensor(part, torch.full((3, 1), me + 1.0).expand(3, world).t())
    right["reduce_scatter"] = part.tolist() == [[world * (world + 1) / 2] * 3]
    swapped = torch.empty(world)
    dist.all_to_all_single(swapped, torch.full((1,), float(me)).expand(world))
    right["all_to_all"] = swapped.tolist() == list(range(world))
    observed = torch.full((1,), 5.0).expand(4) if me == 1 else torch.zeros(4, 2)[:, 0]
    dist.broadcast(observed, 1)
    right["broadcast"] = observed.tolist() == [5.0] * 4
    # Contiguous, but the memory has the other sign.
    negative = torch._neg_view(torch.ones(2))
    dist.all_reduce(negative)
    right["negative"] = negative.tolist() == [-world] * 2
    gathered = torch.empty(2 * world)
    dist.all_gather_into_tensor(gathered, torch._neg_view(torch.ones(2)))
    right["negative input"] = gathered.tolist() == [-1] * 2 * world
    with pytest.raises(symmpool.InvalidArgumentError, match="share their memory"):
        dist.all_reduce(torch.ones(1).expand(4))
    dist.barrier()
    right["served"] = all(set(each) == {"symmpool"} for each in backend.backend_counts().values())
    dist.destroy_process_group()
    return right


@pytest.mark.parametrize("world", [2, 4])
def test_views_are_served_by_what_they_show(world, tmp_path):
    for right in values(world, views, str(tmp_path)):
        assert all(right.values()), right


def the_rest(group, folder):
    me, world = begin(group, folder, "symmpool")
    right = []
    total = torch.sparse_coo_tensor([[me]], [1.0], (world,))
    dist.all_reduce(total)
    right.append(total.to_dense().tolist() == [1.0] * world and backend.last_backend() == "gloo")
    short = torch.tensor([me], dtype=torch.int16)
    dist.broadcast(short, 1)  # only moves, so ours takes it
    right.append(short.item() == 1 and backend.last_backend() == "symmpool")
    parts = [torch.empty(2) for _ in range(world)]
    dist.all_gather(parts, torch.full((2,), float(me)))
    right.append([part[0].item() for part in parts] == list(range(world)))
    if me == 0:
        dist.send(torch.ones(3), 1)
    elif me == 1:
        got = torch.zeros(3)
        dist.recv(got, 0)
        right.append(got.tolist() == [1.0] * 3)
    to = [torch.empty(1) for _ in range(world)] if me == 0 else None
    dist.gather(torch.tensor([float(me)]), to)
    if me == 0:
        right.append([each.item() for each in to] == list(range(world)))
    mine = torch.empty(1)
    dist.scatter(mine, [torch.tensor([float(r)]) for r in range(world)] if me == 0 else None)
    right.append(mine.item() == me)
    total = torch.ones(2)
    dist.reduce(total, 0)
    right.append(me != 0 or total.tolist() == [world] * 2)
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": me})
    right.append([each["rank"] for each in objects] == list(range(world)))
    observed = [f"from {me}"]
    dist.broadcast_object_list(observed, 1)
    right.append(observed == ["from 1"])
    half = dist.new_group(range(world // 2, world))
    if me >= world // 2:
        x = torch.ones(1)
        dist.all_reduce(x, group=half)
        right.append(x.item() == world - world // 2)
    others = {each for each, where in backend.backend_counts().items() if "gloo" in where}
    dist.destroy_process_group()
    return right, sorted(others - {"send", "recv"})


@pytest.mark.parametrize("world", [2, 4])
def test_what_is_not_served_goes_to_gloo(world, tmp_path):
    for right, others in values(world, the_rest, str(tmp_path)):
        assert all(right), right
        assert others == ["all_reduce"]


def reduced_to_one(group, folder):
    me, world = begin(group, folder, "symmpool")
    right = []
    backend.backend_counts(reset=True)
    for root in range(world):
        for wait in (False, True):
            # Not laid out row by row, and in one call's order on every rank.
            x = torch.arange(6.0).view(2, 3).t() + me
            before = x.clone()
            work = dist.reduce(x, root, async_op=wait)
            if wait:
                work.wait()
            total = sum(torch.arange(6.0).view(2, 3).t() + rank for rank in range(world))
            right.append(torch.equal(x, total if me == root else before))
    most = torch.tensor([me], dtype=torch.int64)
    dist.reduce(most, 1, dist.ReduceOp.MAX)
    right.append(most.item() == (world - 1 if me == 1 else me))
    counts = backend.backend_counts()
    dist.destroy_process_group()
    return right, counts


def test_reduce_is_ours_in_host_memory_and_writes_to_the_root_alone(tmp_path):
    for right, counts in values(3, reduced_to_one, str(tmp_path)):
        assert all(right), right
        assert counts == {"reduce": {"symmpool": 7}}


def profiled(group, folder):
    """Returns the entries of torch's profiler for calls of ours, and who served calls by roots and lists."""
    me, world = begin(group, folder, "symmpool")
    x = torch.ones(4)
    dist.all_reduce(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
    shown = {each.key: each.count for each in found.key_averages() if each.key.startswith("symmpool:")}
    backend.backend_counts(reset=True)
    columns = [torch.zeros(3, 2).t() for _ in range(world)] if me == 1 else None
    dist.gather(torch.full((2, 3), me + 1.0), columns, dst=1)
    right = columns is None or [each.sum().item() for each in columns] == [
        6.0 * (r + 1) for r in range(world)
    ]
    mine = torch.zeros(2, 2).t()
    parts = [torch.arange(4.0).view(2, 2) * (r + 1) for r in range(world)] if me == 1 else None
    dist.scatter(mine, parts, src=1, async_op=True).wait()
    right &= torch.equal(mine, torch.arange(4.0).view(2, 2) * (me + 1))
    counts = backend.backend_counts()
    dist.destroy_process_group()
    return shown, right, counts


def test_the_profiler_shows_calls_and_gathers_and_scatters_are_ours(tmp_path):
    counts = {"gather": {"symmpool": 1}, "scatter": {"symmpool": 1}}
    for shown, right, served in values(3, profiled, str(tmp_path)):
        assert shown == {"symmpool:all_reduce": 2} and right and served == counts


def calls_of_python(group, folder):
    """How many functions a small call on the backend calls in the package, those of C among them."""
    begin(group, folder, "symmpool")
    x, opts = torch.zeros(4), dist.AllreduceOptions()
    opts.asyncOp = False
    work = dist.group.WORLD
    work.allreduce([x], opts)
    counted = []

    def count(frame, event, _):
        if event in ("call", "c_call"):
            counted.append(frame.f_code.co_name)

    sys.setprofile(count)
    work.allreduce([x], opts)
    sys.setprofile(None)
    dist.destroy_process_group()
    return counted


def test_a_small_call_does_little_in_python(tmp_path):
    for counted in values(2, calls_of_python, str(tmp_path)):
        # More calls of functions than these cost more than the call itself takes in host memory.
        assert len(counted) <= 30, counted


def beside_gloo(group, folder):
    begin(group, folder, "cuda:symmpool,cpu:gloo")
    x = torch.ones(3)
    dist.all_reduce(x)
    dist.barrier()
    counts = backend.backend_counts()
    dist.destroy_process_group()
    return x.tolist(), counts


def test_a_backend_that_is_named_for_a_device_serves_it(tmp_path):
    # Where a group is torch's own, so is gloo, which is called without ours.
    counts = {} if has_python_backends() else {"all_reduce": {"gloo": 1}, "barrier": {"gloo": 1}}
    assert values(2, beside_gloo, str(tmp_path)) == [([2.0] * 3, counts)] * 2


def cannot(group, folder):
    me, _ = begin(group, folder, "symmpool")
    if me == 1:
        make = cache.communicator

        # This rank lacks what calls need, and the others have it. They are not to wait for it in vain.
        def refuse(key, device):
            make(key, device)
            cache.end(key, False)
            raise symmpool.UnsupportedError("not on this machine")

        cache.communicator = refuse
    x = torch.ones(3)
    began = time.monotonic()
    dist.all_reduce(x)
    assert time.monotonic() - began < 10
    last = backend.last_backend()
    dist.destroy_process_group()
    return x.tolist(), last


def test_where_one_rank_cannot_all_go_to_the_other_backend(tmp_path):
    assert values(2, cannot, str(tmp_path)) == [([2.0] * 3, "gloo")] * 2


def cannot_while_others_wait(group, folder):
    me, _ = begin(group, folder, "symmpool", datetime.timedelta(seconds=2))
    if me == 1:

        def refuse(*_):
            raise symmpool.UnsupportedError("not on this machine")

        cache.communicator = refuse
    elif me == 2:
        # The last to come has as long as the others, who were here before.
        time.sleep(1)
    began = time.monotonic()
    x = torch.ones(3)
    dist.all_reduce(x)
    took = time.monotonic() - began
    dist.destroy_process_group()
    return x.tolist(), backend.last_backend(), took


def test_a_rank_that_cannot_make_a_pool_is_an_error_on_those_that_wait_for_it(tmp_path):
    for found, last, took in values(3, cannot_while_others_wait, str(tmp_path)):
        assert found == [3.0] * 3 and last == "gloo"
        # The wait took as long as the timeout says, and as long as a rank was late.
        assert took < 2 + 1 + 0.8


def never_comes(group, folder):
    me, _ = begin(group, folder, "symmpool", datetime.timedelta(seconds=2))
    observed = None
    if me != 1:
        began = time.monotonic()
        with pytest.raises(symmpool.TimeoutError) as raised:
            dist.all_reduce(torch.ones(3))
        observed = str(raised.value), raised.value.ranks, time.monotonic() - began
    return observed


def test_a_rank_that_does_not_come_to_the_first_call_is_named(tmp_path):
    first, nothing, last = values(3, never_comes, str(tmp_path))
    assert nothing is None
    for text, ranks, took in (first, last):
        # The other may have left already.
        assert 1 in ranks
        assert 1.9 < took < 3
        assert "did not come to the first call on cpu of group '0' (default_pg)" in text
    texts = [text for text, ranks, _ in (first, last) if ranks == (1,)]
    assert texts and all("symmpool: rank 1 did not come" in text for text in texts)


def comes_late(group, folder):
    me, world = begin(group, folder, "symmpool", datetime.timedelta(seconds=1))
    x = torch.ones(3)
    if me == 0:
        with pytest.raises(symmpool.TimeoutError):
            dist.all_reduce(x)
        Path(folder, "tried").touch()
    while not Path(folder, "tried").exists():
        time.sleep(0.01)
    dist.all_reduce(x)
    last = backend.last_backend()
    dist.destroy_process_group()
    return x.tolist() == [world] * 3, last


def test_a_second_try_of_the_first_call_meets_those_who_come_to_it(tmp_path):
    assert values(2, comes_late, str(tmp_path)) == [(True, "symmpool")] * 2


def train(group, folder, name):
    me, world = begin(group, folder, name)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.ReLU(), torch.nn.Linear(20, 3))
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1)
    losses = []
    for step in range(4):
        torch.manual_seed(1000 * step + me)
        loss = parallel(torch.randn(8, 10)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    everyone = torch.empty(world * weights.numel())
    dist.all_gather_into_tensor(everyone, weights)
    same = all(torch.equal(part, weights) for part in everyone.chunk(world))
    served = backend.backend_counts().get("all_reduce", {})
    # The model and what trains it know each other. While they are there so is the group, and at exit
    # gloo's threads may still let go of tensors of Python, which ends the process ("terminate called").
    del parallel, model, optimizer, loss
    gc.collect()
    dist.destroy_process_group()
    return losses, same, served


def test_data_parallel_training_is_as_with_gloo(tmp_path):
    (tmp_path / "ours").mkdir()
    (tmp_path / "gloo").mkdir()
    ours_found = values(2, train, str(tmp_path / "ours"), "symmpool")
    gloo_found = values(2, train, str(tmp_path / "gloo"), "gloo")
    for (losses, same, served), (expected, _, _) in zip(ours_found, gloo_found, strict=True):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert same and set(served) == {"symmpool"} and served["symmpool"] >= 4


def functional(group, folder):
    import torch.distributed._functional_collectives as functional_collectives

    _, world = begin(group, folder, "symmpool")
    x = functional_collectives.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    y = functional_collectives.all_gather_tensor(torch.ones(2), 0, dist.group.WORLD)
    z = functional_collectives.reduce_scatter_tensor(torch.ones(world, 2), "sum", 0, dist.group.WORLD)
    many = [torch.ones(3), torch.ones(2, 2).t()]
    sums = functional_collectives.all_reduce_coalesced(many, "sum", dist.group.WORLD)
    right = [x.tolist() == [world] * 3, y.tolist() == [1.0] * 2 * world, z.tolist() == [[world] * 2]]
    right += [each.tolist() == (world * was).tolist() for each, was in zip(sums, many, strict=True)]
    counts = backend.backend_counts()
    # C++ calls them so, with options that it has by itself.
    outputs = [torch.empty(world), torch.empty(2 * world)]
    work = dist.group.WORLD.allgather_into_tensor_coalesced(outputs, [torch.ones(1), torch.ones(2)])
    work.get_future().wait()
    right += [work.is_completed() and work.is_success() and work.exception() is None]
    right += [all(each.tolist() == [1.0] * each.numel() for each in work.result())]
    dist.group.WORLD._allgather_base(outputs[0], torch.zeros(1)).wait()
    right += [outputs[0].tolist() == [0.0] * world]
    dist.destroy_process_group()
    return right, counts


def test_functional_collectives_come_to_ours(tmp_path):
    for right, counts in values(2, functional, str(tmp_path)):
        assert all(right), right
        assert counts == {
            "all_reduce": {"symmpool": 3},
            "all_gather_into_tensor": {"symmpool": 1},
            "reduce_scatter_tensor": {"symmpool": 1},
        }


def batched(group, folder):
    me, world = begin(group, folder, "symmpool")
    manager = dist.distributed_c10d._coalescing_manager
    cpu, right = torch.device("cpu"), []
    for _ in range(2):
        came, observed, sums = torch.zeros(1), torch.full((3, 2), float(me)).t(), torch.tensor([1 << me])
        with manager(device=cpu, async_ops=True) as works:
            # torch before 2.6 has all messages of a batch so.
            dist.isend(torch.tensor([float(me)]), (me + 1) % world)
            dist.irecv(came, (me - 1) % world)
            dist.broadcast(observed, 1, async_op=True)
            dist.reduce(sums, 0, dist.ReduceOp.BOR, async_op=True)
        works.wait()
        right += [came.item() == (me - 1) % world, observed.tolist() == [[1.0] * 3] * 2]
        right += [me != 0 or sums.item() == (1 << world) - 1, len(works.works) == 1]
    with manager(device=cpu):
        dist.all_reduce(came)
    right.append(came.item() == world * (world - 1) / 2)
    # None is noted any more.
    work = dist.isend(came, (me + 1) % world)
    dist.recv(torch.zeros(1), (me - 1) % world)
    work.wait()
    right.append(dist.group.WORLD._end_coalescing(cpu) is None)
    dist.destroy_process_group()
    return right


@pytest.mark.parametrize("world", [2, 3])
def test_a_batch_of_torchs_is_waited_for_as_one(world, tmp_path):
    for right in values(world, batched, str(tmp_path)):
        assert all(right), right


def disagreeing(group, folder):
    me, _ = begin(group, folder, "symmpool")
    tensors = [torch.ones(3), torch.ones(5 + me), torch.ones(2)]
    work = dist.group.WORLD.allreduce_coalesced(tensors)
    with pytest.raises(symmpool.DivergedError):
        work.wait()
    right = [not work.is_success(), isinstance(work.exception(), symmpool.DivergedError)]
    with pytest.raises(Exception, match="all_reduce"):
        work.get_future().wait()
    dist.destroy_process_group()
    return right + [tensors[0].tolist() == [2.0] * 3, tensors[2].tolist() == [2.0] * 2]


def test_one_call_of_several_that_fails_is_the_error_of_all(tmp_path):
    for right in values(2, disagreeing, str(tmp_path)):
        assert all(right), right


def told_of_a_timeout(group, folder, new):
    me, _ = begin(group, folder, "cpu:symmpool")
    x = torch.ones(8)
    dist.all_reduce(x)
    second = datetime.timedelta(seconds=1)
    if new:
        dist.group.WORLD.set_timeout(second)
    else:
        # torchtitan does so when a training's first step is over.
        dist.distributed_c10d._set_pg_timeout(second, dist.group.WORLD)
    later = symmpool.communicator(symmpool.Pool(device="cpu"), "cpu").timeout
    error, waited = None, 0
    if me == 0:
        began = time.monotonic()
        with pytest.raises(symmpool.TimeoutError) as raised:
            dist.all_reduce(x)
        error, waited = str(raised.value), time.monotonic() - began
    # Rank 1 does not come to that call, and stays until it is over.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"over/{me}", "")
    store.wait(["over/0", "over/1"])
    dist.destroy_process_group()
    return later, error, waited


@pytest.mark.parametrize("new", [False, True])
def test_a_process_groups_new_timeout_is_ours_too(new, tmp_path):
    if new and not hasattr(dist.ProcessGroup, "set_timeout"):
        pytest.skip("torch has no such method yet")
    (later, error, waited), (others, _, _) = values(2, told_of_a_timeout, str(tmp_path), new)
    assert later == others == 1
    assert "1.0s waiting for rank 1 in all_reduce" in error
    assert 1 <= waited < 20
