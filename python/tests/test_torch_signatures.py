"""symmpool's calls beside torch.distributed's: names, order of arguments, defaults; the new ones run."""

import builtins
import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin

import symmpool

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text()

#: torch.distributed's communication; what it has besides are groups and stores.
CALLS = [
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "gather_single",
    "irecv",
    "isend",
    "monitored_barrier",
    "P2POp",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
]


def parameters(function):
    """Returns the parameters of a call in order: each name, and its default."""
    of = inspect.signature(function).parameters.values()
    positional = [each for each in of if each.kind is each.POSITIONAL_OR_KEYWORD]
    return [(each.name, default(each)) for each in positional], {
        each.name for each in of if each.kind is each.KEYWORD_ONLY
    }


#: Arguments of newer torch that ours lack, which torch has behind the others.
NEWER = {"all_gather_object": "weights_only", "barrier": "timeout"}


def parameters_of_torch(name):
    """Returns the parameters of torch's call, without the newer ones."""
    positional, named = parameters(getattr(dist, name))
    return [each for each in positional if each[0] != NEWER.get(name)], named


def default(parameter):
    if parameter.default is parameter.empty:
        return "needed"
    # Ours are strings by the names of torch's.
    return str(getattr(parameter.default, "name", parameter.default)).rsplit(".", 1)[-1].lower()


def differences():
    """How ours differ: a line for each."""
    found = []
    for name in CALLS:
        theirs, ours = getattr(dist, name, None), getattr(symmpool, name, None)
        if ours is None:
            found.append(f"`{name}` is not there")
        elif theirs is None:
            continue  # a name of another version of torch
        else:
            (want, _), (have, more) = parameters_of_torch(name), parameters(ours)
            if want != have:
                found.append(f"`{name}` takes {have}, torch's {want}")
            found += [f"`{name}` also takes `{each}=`" for each in sorted(more)]
    return found


def test_names_order_and_defaults_are_torchs():
    found = differences()
    print(*found, sep="\n")
    section = PAGE.split("#### What differs from torch.distributed", 1)[1].split("\n#", 1)[0]
    listed = [line.removeprefix("- ").rstrip(".") for line in section.splitlines() if line.startswith("- `")]
    assert sorted(listed) == sorted(found), "docs/python.md must list:\n" + "\n".join(
        f"- {e}." for e in found
    )


def test_every_new_argument_of_ours_is_by_name_alone():
    """torch may give any position another meaning."""
    for name in CALLS:
        theirs, ours = getattr(dist, name, None), getattr(symmpool, name, None)
        if theirs is not None and ours is not None:
            assert len(parameters(ours)[0]) == len(parameters_of_torch(name)[0]), name
            if name in NEWER:
                assert f"`{NEWER[name]}=` of `{name}`" in PAGE


def test_signatures_say_types():
    for name in CALLS:
        function = getattr(symmpool, name, None)
        if inspect.isfunction(function):
            for each in inspect.signature(function).parameters.values():
                assert each.annotation not in ("Any", each.empty) or each.name == "obj", f"{name}: {each}"


def test_communicators_take_the_reduction_second_as_torch_does():
    assert list(inspect.signature(symmpool.Communicator.all_reduce).parameters)[1:3] == ["tensor", "op"]


def test_a_star_hides_nothing_of_pythons_own():
    hidden = [name for name in symmpool.__all__ if hasattr(builtins, name)]
    assert not hidden
    names = {}
    exec("from symmpool import *", names)
    assert "all_reduce" in names and "TimeoutError" not in names


def test_a_communicator_is_where_a_pool_would_be():
    assert values(1, where) == [("cpu", "cpu")]


def where(group):
    pool = symmpool.Pool(group)
    symmpool.forget(pool)
    device = pool.device
    del pool
    comm = symmpool.communicator(group)
    found = symmpool._symmpool.default_device()
    comm.barrier()
    return device, found


def new_names(group, folder):
    me, world = begin(group, folder)
    x = torch.full((3,), float(me))
    out, part = torch.zeros(3 * world), torch.zeros(1)
    symmpool.all_gather_single(out, x)
    assert out.tolist() == [float(rank) for rank in range(world) for _ in range(3)]
    symmpool.reduce_scatter_single(part, torch.arange(float(world)), "max", async_op=True).wait()
    assert part.item() == me
    whole = torch.zeros(world, 3) if me == 1 else None
    symmpool.gather_single(x, whole, dst=1)
    if me == 1:
        assert whole[:, 2].tolist() == list(range(world))
    for dtype in (torch.float32, torch.int16):
        both = [torch.ones(2, dtype=dtype), torch.ones(3, 2, dtype=dtype)[:, 0], torch.ones(0, dtype=dtype)]
        assert symmpool.all_reduce_coalesced(both) is None
        work = symmpool.all_reduce_coalesced(both, async_op=True)
        assert work.wait() and work.is_completed() and work.exception() is None
        assert [each.tolist() for each in both] == [[world**2] * 2, [world**2] * 3, []]
    objects = [None] * world
    symmpool.all_gather_object(objects, {"rank": me, "text": "x" * me * 1000})
    assert [each["rank"] for each in objects] == list(range(world)) and len(objects[-1]["text"]) > 1000
    with torch.device("meta"):
        symmpool.all_gather_object(objects, me)
    assert objects == list(range(world))
    # The others hear of what one rank refuses.
    error = symmpool.InvalidArgumentError if me == 0 else symmpool.DivergedError
    for call in (
        lambda: symmpool.all_reduce_coalesced([] if me == 0 else both),
        lambda: symmpool.all_reduce_coalesced([*both, torch.ones(1)] if me == 0 else both),
        lambda: symmpool.all_gather_object([] if me == 0 else objects, me),
        lambda: symmpool.gather_single(x, torch.zeros(1) if me == 0 else None),
    ):
        with pytest.raises(error):
            call()
    symmpool.barrier()
    assert group.world_size == world
    dist.destroy_process_group()
    return True


def test_names_of_torch_work(tmp_path):
    assert values(3, new_names, str(tmp_path)) == [True] * 3


def messages(group, folder, before):
    me, world = begin(group, folder)
    if not before:
        symmpool.barrier()
    right, left = (me + 1) % world, (me - 1) % world
    # All begin to send what no queue holds, then receive.
    big, came = torch.full((1 << 20,), float(me)), torch.zeros(1 << 20)
    works = [symmpool.isend(big, right), symmpool.irecv(came, left)]
    for work in works:
        work.wait()
    assert came[-1].item() == left and all(work.is_completed() for work in works)
    small = torch.zeros(2)
    ops = [
        symmpool.P2POp(symmpool.irecv, small, left),
        symmpool.P2POp(symmpool.isend, torch.full((2,), 5.0 + me), group_peer=right),
    ]
    for work in symmpool.batch_isend_irecv(ops):
        work.wait()
    assert small.tolist() == [5.0 + left] * 2
    theirs = [dist.P2POp(dist.isend, small, right), dist.P2POp(dist.irecv, torch.zeros(2), left)]
    for work in symmpool.batch_isend_irecv(theirs):
        work.wait()
    # Many at once, in order, behind each other.
    got = [torch.zeros(1, dtype=torch.int64) for _ in range(20)]
    received = [symmpool.irecv(each, left) for each in got]
    sent = [symmpool.isend(torch.tensor([at]), right) for at in range(20)]
    for work in [*received, *sent]:
        work.wait()
    assert [each.item() for each in got] == list(range(20))
    # From whoever sends.
    if me == 0:
        found, sources = [], []
        for _ in range(2 * (world - 1)):
            x = torch.zeros(2)
            sources.append(symmpool.recv(x))
            found.append(x[0].item())
        assert sorted(sources) == sorted(list(range(1, world)) * 2)
        assert found == [float(source) for source in sources]
    else:
        for _ in range(2):
            symmpool.send(torch.full((2,), float(me)), 0)
    symmpool.barrier()
    for wrong in ([], None, [3]):
        with pytest.raises(symmpool.InvalidArgumentError, match="p2p_op_list"):
            symmpool.batch_isend_irecv(wrong)
    with pytest.raises(symmpool.InvalidArgumentError, match="isend"):
        symmpool.P2POp(symmpool.send, small, right)
    dist.destroy_process_group()
    return True


@pytest.mark.parametrize("before", [False, True], ids=["after_a_collective", "before_any"])
def test_messages_are_begun_in_any_order(before, tmp_path):
    assert values(3, messages, str(tmp_path), before) == [True] * 3


def refused(group, folder):
    me, _ = begin(group, folder)
    symmpool.barrier()
    x = torch.ones(4)
    if me == 0:
        with pytest.raises(symmpool.InvalidArgumentError, match="layout"):
            symmpool.isend(x.to_sparse(), 1).wait()
    else:
        work = symmpool.irecv(x, 0)
        with pytest.raises(symmpool.DivergedError, match="rank 0 declined"):
            work.wait()
        assert isinstance(work.exception(), symmpool.DivergedError)
    # The next ones arrive.
    came = torch.zeros(4)
    works = [symmpool.isend(x + me, 1 - me), symmpool.irecv(came, 1 - me)]
    for work in works:
        work.wait()
    assert works[1].get_future().wait()[0].tolist() == came.tolist() == [2.0 - me] * 4
    symmpool.communicator().timeout = 0.5
    if me == 0:
        with pytest.raises(symmpool.TimeoutError, match="no rank has sent"):
            symmpool.recv(x)
    dist.barrier()
    dist.destroy_process_group()
    return True


def test_a_message_that_is_refused_or_does_not_come_is_an_error(tmp_path):
    assert values(2, refused, str(tmp_path)) == [True] * 2
