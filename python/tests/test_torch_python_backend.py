"""The backend below torch's own process groups, in torch 2.14 and newer."""

import datetime
import json
import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run, values
from test_errors import free_port
from test_torch_distributed import begin

import symmpool
from symmpool import backend
from symmpool.groups.process_groups import ours
from symmpool.torch_backend import registration
from symmpool.torch_backend.process_group import SymmpoolProcessGroup
from symmpool.torch_backend.python_backend import SymmpoolBackend

CPU = torch.device("cpu")


def hooked(group, folder):
    me, world = begin(group, folder, "symmpool")
    there, seen = dist.group.WORLD, []
    there.register_pre_hook(1, lambda call: seen.append(("pre", call.name.name, call.async_op)))
    there.register_post_hook(2, lambda call: seen.append(("post", call.name.name, call.work is not None)))
    x = torch.ones(4)
    dist.all_reduce(x)
    dist.all_reduce(x, async_op=True).wait()
    dist.all_gather_into_tensor(torch.zeros(4 * world), x)
    dist.barrier()
    there.unregister_pre_hook(1)
    there.unregister_post_hook(2)
    dist.all_reduce(x)
    kinds = type(there), type(there._get_backend(CPU))
    dist.destroy_process_group()
    return seen, kinds == (dist.ProcessGroup, SymmpoolBackend)


def test_hooks_see_every_call(tmp_path):
    assert registration.has_python_backends()
    gather = (
        "ALLGATHER_BASE" if hasattr(torch._C._distributed_c10d.HookOpName, "ALLGATHER_BASE") else "ALLGATHER"
    )
    calls = [("ALLREDUCE", False), ("ALLREDUCE", True), (gather, False), ("BARRIER", False)]
    seen = [(when, *call) for call in calls for when in ("pre", "post")]
    assert values(2, hooked, str(tmp_path)) == [(seen, True)] * 2


def between_versions(group, folder):
    """A torch whose version has a part of what backends in Python need."""
    registration.has_python_backends = lambda: False
    me, world = begin(group, folder, "symmpool")
    x = torch.ones(2)
    dist.all_reduce(x)
    # Its own group, whose gloo is made later.
    some = dist.new_group(range(world))
    dist.all_reduce(x, group=some)
    found = x.tolist(), some.rank() == me, some.size() == world, type(some) is SymmpoolProcessGroup
    dist.destroy_process_group()
    return found


def test_versions_under_development_have_the_older_group(tmp_path):
    assert values(2, between_versions, str(tmp_path)) == [([4.0] * 2, True, True, True)] * 2


def raises_in_a_hook(group, folder):
    me, _ = begin(group, folder, "symmpool")

    def hook(call):
        raise ValueError("the program's own")

    x = torch.ones(4)
    dist.all_reduce(x)
    dist.group.WORLD.register_pre_hook(1, hook)
    with pytest.raises(ValueError, match="the program's own"):
        dist.all_reduce(x)
    dist.group.WORLD.unregister_pre_hook(1)
    dist.all_reduce(x)
    # Behind a call that was made: its result is there, and the error is this rank's.
    dist.group.WORLD.register_post_hook(2, hook)
    with pytest.raises(ValueError, match="the program's own"):
        dist.all_reduce(x)
    dist.group.WORLD.unregister_post_hook(2)
    after = x.tolist()
    dist.all_reduce(x)
    dist.destroy_process_group()
    return after, x.tolist()


def test_a_hook_that_raises_ends_its_call_and_no_other(tmp_path):
    assert values(2, raises_in_a_hook, str(tmp_path)) == [([8.0] * 4, [16.0] * 4)] * 2


def named_twice(group, folder):
    said = []
    for nth, named in enumerate(("cpu:symmpool,cpu:symmpool", "cpu:symmpool,cpu:gloo", "symmpool,symmpool")):
        with pytest.raises((ValueError, AssertionError)) as error:
            os.makedirs(f"{folder}/{nth}", exist_ok=True)
            begin(group, f"{folder}/{nth}", named)
        said.append(str(error.value))
    begin(group, folder, "cpu:symmpool,cuda:symmpool")
    x = torch.ones(2)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return ["Duplicate" in text or "Unknown" in text for text in said], x.tolist()


def test_a_backend_that_is_named_twice_is_refused_and_the_next_group_works(tmp_path):
    assert values(2, named_twice, str(tmp_path)) == [([True] * 3, [2.0, 2.0])] * 2


needs_215 = pytest.mark.skipif(
    registration.version() < (2, 15), reason="torch 2.14 has it for its own backends alone"
)


def recorded(group, folder):
    begin(group, folder, "symmpool")
    x = torch.ones(4)
    for _ in range(3):
        dist.all_reduce(x)
    dist.broadcast(x, 0, async_op=True).wait()
    trace = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(backend="symmpool"))
    dist.destroy_process_group()
    return [entry["profiling_name"] for entry in trace["entries"]]


@needs_215
def test_the_flight_recorder_has_every_call(tmp_path):
    for names in values(2, recorded, str(tmp_path)):
        assert names == ["symmpool:all_reduce"] * 3 + ["symmpool:broadcast"]


def asked_of_work(group, folder):
    me, _ = begin(group, folder, "symmpool")
    found = {}
    x = torch.ones(4)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    found["done"] = work.is_completed() and work.is_success() and work.exception() is None
    found["result"] = work.result()[0] is x
    found["future"] = work.get_future().wait()[0].tolist() == [2.0] * 4
    # A call of gloo's, whose Work the program gets as ours.
    sparse = torch.sparse_coo_tensor([[me]], [1.0], (2,))
    other = dist.all_reduce(sparse, async_op=True)
    other.wait()
    found["gloo"] = other.is_completed() and sparse.to_dense().tolist() == [1.0, 1.0]
    # Work of a group of gloo's own answers as ever.
    there = dist.new_group(backend="gloo")
    theirs = dist.all_reduce(torch.ones(1), group=there, async_op=True)
    theirs.wait()
    found["torch's own"] = theirs.is_completed() and theirs.is_success()
    if me == 0:
        message = dist.irecv(torch.zeros(2), None)
        found["open"] = not message.is_completed()
        dist.send(torch.zeros(1), 1)
        message.wait()
        found["source"] = message._source_rank() == 1 and message.is_completed()
    else:
        dist.recv(torch.zeros(1), 0)
        dist.send(torch.ones(2), 0)
    # A message that fails: its future raises, and has no error as its value.
    if me == 0:
        lost = dist.irecv(torch.zeros(2), 1, tag=5)
        future = lost.get_future()
        with pytest.raises((RuntimeError, symmpool.TimeoutError)):
            lost.wait(datetime.timedelta(seconds=0.1))
    dist.barrier()
    ours(dist.group.WORLD).abort()
    if me == 0:
        with pytest.raises((RuntimeError, symmpool.Error)):
            future.wait()
        found["failed"] = lost.exception() is not None and not lost.is_success()
    return [name for name, is_right in found.items() if not is_right]


def test_work_answers_all_that_torch_does_not_pass_on(tmp_path):
    assert values(2, asked_of_work, str(tmp_path)) == [[], []]


def gathered(group, folder):
    me, world = begin(group, folder, "symmpool")
    x, found = torch.full((2, 3), me + 1.0), []
    for call in (dist.gather_single, dist.gather_into_tensor):
        out = torch.zeros(2 * world, 3) if me == 1 else None
        call(x, out, dst=1)
        found.append(None if out is None else out[:, 0].tolist())
    counts = backend.backend_counts()["gather_single"]
    # The others hear why the root refuses, and the next call is right.
    here, there = symmpool.InvalidArgumentError, symmpool.DivergedError
    needed = "elements row by row are needed" if me == 1 else "rank itself declined"
    with pytest.raises(here if me == 1 else there, match=needed):
        dist.gather_single(x, torch.zeros(5) if me == 1 else None, dst=1)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return found, counts, x[0, 0].item()


def test_single_tensors_are_gathered(tmp_path):
    counts = {"symmpool": 2}
    parts = [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    first, second, third = values(3, gathered, str(tmp_path))
    assert second == ([parts] * 2, counts, 6.0)
    assert first == third == ([None] * 2, counts, 6.0)


def split_in_parts(group, folder):
    me, _ = begin(group, folder, "symmpool")
    dist.all_reduce(torch.ones(1))
    made = dist.split_group(split_ranks=[[0, 2]])
    found = None
    if made is not dist.GroupMember.NON_GROUP_MEMBER:
        x, y = torch.full((3,), me + 1.0), torch.full((3,), me + 1.0)
        dist.all_reduce(x, group=made)
        symmpool.all_reduce(y, group=made)
        found = x.tolist(), y.tolist(), dist.get_backend(made), backend.last_backend()
        with pytest.raises(symmpool.DivergedError):
            # One rank's call is another one than the other's.
            dist.all_reduce(x, dist.ReduceOp.MAX if me == 0 else dist.ReduceOp.MIN, group=made)
    dist.barrier()
    dist.destroy_process_group()
    return found


@needs_215
def test_a_group_is_split(tmp_path):
    first, second, third = values(3, split_in_parts, str(tmp_path))
    assert first == third == ([4.0] * 3, [4.0] * 3, "symmpool", "symmpool") and second is None


def shrunk(group, port):
    dist.init_process_group(
        "symmpool",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=group.rank,
        world_size=group.world,
        timeout=datetime.timedelta(seconds=20),
    )
    x = torch.full((3,), group.rank + 1.0)
    dist.all_reduce(x)
    if group.rank == 1:
        os._exit(0)
    # Only ranks whose processes have ended can be left out.
    with pytest.raises(symmpool.InvalidArgumentError, match="is alive; only ranks whose processes"):
        dist.shrink_group([2 - group.rank])
    # torch itself refuses ranks that there are none of, twice the same one, and none at all.
    for wrong in ([7], [1, 1], [], [group.rank]):
        with pytest.raises((ValueError, RuntimeError)):
            dist.shrink_group(wrong)
    time.sleep(0.2)
    dist.shrink_group([1])
    y = torch.full((3,), group.rank + 1.0)
    dist.all_reduce(y)
    found = y.tolist(), dist.get_rank(), dist.get_world_size(), dist.get_backend(), backend.last_backend()
    dist.destroy_process_group()
    return found


def test_ranks_that_are_left_go_on():
    first, lost, last = run(3, shrunk, free_port())
    assert lost.error is not None
    assert first.value == ([4.0] * 3, 0, 2, "symmpool", "symmpool"), first.error
    assert last.value == ([4.0] * 3, 1, 2, "symmpool", "symmpool"), last.error


def refused(group, folder):
    begin(group, folder, "symmpool")
    there, said = dist.group.WORLD, []
    own = there._get_backend(CPU)
    calls = [
        lambda: there.new_window(torch.ones(1)),
        lambda: dist.distributed_c10d._get_reconfigure_handle(),
        lambda: dist.distributed_c10d._reconfigure(1, ["a"]),
        own.suspend,
        own.resume,
        own.memory_stats,
    ]
    for call in calls:
        with pytest.raises(symmpool.UnsupportedError, match=r"^symmpool: .* is not served: ") as error:
            call()
        said.append(str(error.value).count("symmpool: "))
    assert not there.supports_window and not there.supports_reconfigure
    dist.destroy_process_group()
    with pytest.raises(symmpool.UnsupportedError, match="enable_reconfigure is not served"):
        dist.init_process_group(
            "symmpool", store=dist.HashStore(), rank=0, world_size=1, enable_reconfigure=True
        )
    return said


def test_what_is_not_served_is_refused_by_a_sentence(tmp_path):
    assert values(2, refused, str(tmp_path)) == [[1] * 6] * 2


def aborted(group, folder):
    begin(group, folder, "symmpool")
    called = []
    dist.group.WORLD.register_abort_hook(3, lambda: called.append(3))
    dist.group.WORLD.register_abort_hook(4, lambda: called.append(4))
    dist.group.WORLD.unregister_abort_hook(4)
    dist.all_reduce(torch.ones(1))
    there = dist.group.WORLD
    dist.distributed_c10d._abort_process_group()
    with pytest.raises(symmpool.InvalidStateError):
        there.allreduce([torch.ones(1)]).wait()
    return called


def test_hooks_are_called_before_an_abort(tmp_path):
    assert values(2, aborted, str(tmp_path)) == [[3], [3]]


def in_detail(group, folder):
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    me, _ = begin(group, folder, "symmpool")
    x = torch.ones(4)
    dist.all_reduce(x)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    with pytest.raises(RuntimeError, match="Detected mismatch between collectives on ranks"):
        dist.all_reduce(x) if me == 0 else dist.broadcast(x, 0)
    wrapped = type(dist.group.WORLD._get_backend(CPU)).__name__
    served = backend.backend_counts()["all_reduce"]
    dist.destroy_process_group()
    return x.tolist(), wrapped, served, work.is_completed()


def test_torchs_checks_of_calls_wrap_it(tmp_path):
    expected = ([4.0] * 4, "_ProcessGroupWrapper", {"symmpool": 2}, True)
    assert values(2, in_detail, str(tmp_path)) == [expected] * 2
