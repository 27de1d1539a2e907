"""Calls that one rank refuses, by the backend and by module-level functions: every other rank hears of it at
once, and the next call is right."""

import datetime
import time

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin
from walk import AT_ONCE, observed

import symmpool
from symmpool import ops

ONES = torch.ones


def expanded(*shape):
    return torch.ones(1).expand(shape)


#: Names of torch.distributed and of this package, each with arguments that are right on a rank of a world,
#: and some that are wrong.
CALLS = {
    "all_reduce": (lambda me, world: (ONES(4),), lambda me, world: (expanded(4),)),
    "reduce": (lambda me, world: (ONES(4), 1), lambda me, world: (expanded(4), 1)),
    "broadcast": (lambda me, world: (ONES(4), 0), lambda me, world: (expanded(4), 0)),
    "all_gather": (
        lambda me, world: ([ONES(2) for _ in range(world)], ONES(2)),
        lambda me, world: ([ONES(2)], ONES(2)),
    ),
    "all_gather: uneven": (
        lambda me, world: ([ONES(2) for _ in range(world)], ONES(2)),
        lambda me, world: ([ONES(2) for _ in range(world)], ONES(3)),
    ),
    "all_gather: expanded": (
        lambda me, world: ([ONES(2) for _ in range(world)], ONES(2)),
        lambda me, world: ([expanded(2) for _ in range(world)], ONES(2)),
    ),
    "all_gather: none": (
        lambda me, world: ([ONES(2) for _ in range(world)], ONES(2)),
        lambda me, world: ([], ONES(2)),
    ),
    "all_gather_into_tensor": (
        lambda me, world: (ONES(2 * world), ONES(2)),
        lambda me, world: (expanded(2 * world), ONES(2)),
    ),
    "all_gather_into_tensor: short": (
        lambda me, world: (ONES(2 * world), ONES(2)),
        lambda me, world: (ONES(2 * world, 2)[: 2 * world - 1, 0], ONES(2)),
    ),
    "reduce_scatter": (
        lambda me, world: (ONES(2), [ONES(2) for _ in range(world)]),
        lambda me, world: (ONES(2), [ONES(2)]),
    ),
    "reduce_scatter: uneven": (
        lambda me, world: (ONES(2), [ONES(2) for _ in range(world)]),
        lambda me, world: (ONES(3), [ONES(2) for _ in range(world)]),
    ),
    "reduce_scatter: expanded": (
        lambda me, world: (ONES(2), [ONES(2) for _ in range(world)]),
        lambda me, world: (expanded(2), [ONES(2) for _ in range(world)]),
    ),
    "reduce_scatter_tensor": (
        lambda me, world: (ONES(2), ONES(2 * world)),
        lambda me, world: (expanded(2), ONES(2 * world)),
    ),
    "reduce_scatter_tensor: short": (
        lambda me, world: (ONES(2), ONES(2 * world)),
        lambda me, world: (ONES(2, 2)[:, 0], ONES(2 * world + 1)),
    ),
    "all_to_all": (
        lambda me, world: ([ONES(2) for _ in range(world)], [ONES(2) for _ in range(world)]),
        lambda me, world: ([ONES(2) for _ in range(world)], [ONES(2)]),
    ),
    "all_to_all: expanded": (
        lambda me, world: ([ONES(2) for _ in range(world)], [ONES(2) for _ in range(world)]),
        lambda me, world: ([expanded(2) for _ in range(world)], [ONES(2) for _ in range(world)]),
    ),
    "all_to_all_single": (
        lambda me, world: (ONES(world), ONES(world)),
        lambda me, world: (expanded(world), ONES(world)),
    ),
    "all_to_all_single: sizes": (
        lambda me, world: (ONES(world), ONES(world), [1] * world, [1] * world),
        lambda me, world: (ONES(world), ONES(world), [2] * world, [1] * world),
    ),
    "gather": (
        lambda me, world: (ONES(2), [ONES(2) for _ in range(world)] if me == 0 else None),
        lambda me, world: (ONES(2), [ONES(3) for _ in range(world)] if me == 0 else [ONES(2)] * world),
    ),
    "scatter": (
        lambda me, world: (ONES(2), [ONES(2) for _ in range(world)] if me == 0 else None),
        lambda me, world: (expanded(2), [ONES(2) for _ in range(world)] if me == 0 else None),
    ),
}


def is_left_out(where, name, culprit):
    """Whether a rank's call is right all the same: it only reads what it could not write to. Or torch itself
    refuses the call, before a backend gets it, so that the other ranks cannot know."""
    return (name, culprit) in (("reduce", 0), ("broadcast", 0)) or (where, name, culprit) == (
        "backend",
        "gather",
        1,
    )


def refused(group, folder, where, culprit):
    me, world = begin(group, folder, "symmpool" if where == "backend" else "gloo")
    module = dist if where == "backend" else symmpool
    module.all_reduce(ONES(1))
    failures = []
    for name, (right, wrong) in CALLS.items():
        if is_left_out(where, name, culprit):
            continue
        for asynchronous in (False, True):
            function = getattr(module, name.partition(":")[0])
            arguments = (wrong if me == culprit else right)(me, world)

            def call(function=function, arguments=arguments, asynchronous=asynchronous):
                work = function(*arguments, async_op=asynchronous)
                if asynchronous:
                    work.wait()

            raised, seconds = observed(call)
            expected = symmpool.InvalidArgumentError if me == culprit else symmpool.DivergedError
            total = torch.full((3,), float(me + 1))
            module.all_reduce(total)
            if (
                not isinstance(raised, expected)
                or seconds > AT_ONCE
                or total.tolist() != [world * (world + 1) / 2] * 3
            ):
                failures.append((name, asynchronous, repr(raised), round(seconds, 1), total.tolist()))
    dist.destroy_process_group()
    return failures


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("where", ["backend", "module"])
def test_what_one_rank_refuses_is_an_error_on_all_and_the_next_call_is_right(where, culprit, tmp_path):
    assert values(2, refused, str(tmp_path), where, culprit) == [[], []]


def refused_first(group, folder, where, name):
    """The group's first call, which rank 1 refuses a while before the others come to it."""
    me, world = begin(group, folder, "symmpool" if where == "backend" else "gloo")
    module = dist if where == "backend" else symmpool
    if me != 1:
        time.sleep(2)
    right, wrong = CALLS[name]
    arguments = (wrong if me == 1 else right)(me, world)
    raised, seconds = observed(lambda: getattr(module, name)(*arguments))
    total = torch.full((3,), float(me + 1))
    module.all_reduce(total)
    dist.destroy_process_group()
    return type(raised).__name__, seconds < 1.5 if me == 1 else seconds < AT_ONCE, total.tolist()


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all_single"])
@pytest.mark.parametrize("where", ["backend", "module"])
def test_a_groups_first_call_is_refused_without_waiting_for_the_others(where, name, tmp_path):
    zero, one = values(2, refused_first, str(tmp_path), where, name)
    assert one == ("InvalidArgumentError", True, [3.0] * 3)
    assert zero == ("DivergedError", True, [3.0] * 3)


def refused_of_several(group, folder, asynchronous):
    """Functional collectives on lists: rank 1's second tensor cannot be written to."""
    me, world = begin(group, folder, "symmpool")
    options = dist.AllreduceCoalescedOptions()
    options.asyncOp = asynchronous
    tensors = [ONES(2), expanded(2) if me == 1 else ONES(2), ONES(2)]

    def call():
        dist.group.WORLD.allreduce_coalesced(tensors, options).wait()

    raised, seconds = observed(call)
    total = torch.full((3,), float(me + 1))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return type(raised).__name__, seconds < AT_ONCE, total.tolist(), tensors[0].tolist()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_call_of_several_that_a_rank_refuses_leaves_all_in_step(asynchronous, tmp_path):
    zero, one = values(2, refused_of_several, str(tmp_path), asynchronous)
    assert zero[0] == "DivergedError" and one[0] == "InvalidArgumentError"
    assert zero[1:3] == one[1:3] == (True, [3.0] * 3)
    # None of them was made.
    assert zero[3] == one[3] == [1.0] * 2


def lacking(group, folder, where, asynchronous):
    """Rank 1 finds no memory, or is stopped by Ctrl-C, where a call makes its copies."""
    me, world = begin(group, folder, "symmpool" if where == "backend" else "gloo")
    module = dist if where == "backend" else symmpool
    module.all_reduce(ONES(1))
    found = []
    for failure in (torch.OutOfMemoryError("none left"), MemoryError(), KeyboardInterrupt()):
        if asynchronous and isinstance(failure, KeyboardInterrupt):
            continue  # the thread that copies then gets none

        def fail(*_, failure=failure, **__):
            raise failure

        patched = pytest.MonkeyPatch()
        if me == 1:
            patched.setattr("symmpool.collectives.plans.plain", fail)
            patched.setattr("symmpool.collectives.plans.destination", fail)
        try:
            work = module.all_reduce(torch.ones(4, 2)[:, 0], async_op=asynchronous)
            if asynchronous:
                work.wait()
        except BaseException as error:
            found.append(type(error).__name__)
        patched.undo()
        total = torch.full((3,), float(me + 1))
        module.all_reduce(total)
        found.append(total.tolist() == [3.0] * 3)
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("where", ["backend", "module"])
def test_what_goes_wrong_in_copies_is_an_error_on_all_ranks(where, asynchronous, tmp_path):
    zero, one = values(2, lacking, str(tmp_path), where, asynchronous)
    assert zero == ["DivergedError", True] * (2 if asynchronous else 3), zero
    names = one[::2]
    assert names == ["OutOfMemoryError", "MemoryError", "KeyboardInterrupt"][: len(names)]
    assert all(one[1::2]), one


def without_threads(group, folder, where):
    """Rank 1 can start no thread for its first asynchronous call."""
    me, world = begin(group, folder, "symmpool" if where == "backend" else "gloo")
    module = dist if where == "backend" else symmpool
    module.all_reduce(ONES(1))
    patched = pytest.MonkeyPatch()
    if me == 1:

        def none(_):
            raise RuntimeError("can't start new thread")

        patched.setattr("symmpool.communicators.host_work.threading.Thread.start", none)
    raised, seconds = observed(lambda: module.all_reduce(ONES(3), async_op=True).wait())
    patched.undo()
    total = torch.full((3,), float(me + 1))
    module.all_reduce(total, async_op=True).wait()
    dist.destroy_process_group()
    return type(raised).__name__, seconds < AT_ONCE, total.tolist()


@pytest.mark.parametrize("where", ["backend", "module"])
def test_a_rank_that_can_start_no_thread_is_an_error_on_all(where, tmp_path):
    zero, one = values(2, without_threads, str(tmp_path), where)
    assert zero == ("DivergedError", True, [3.0] * 3) and one == ("RuntimeError", True, [3.0] * 3)


def behind(group, folder, where, waits):
    """Strided, uneven and list calls behind an asynchronous one that writes what they read."""
    me, world = begin(group, folder, "symmpool" if where == "backend" else "gloo")
    module = dist if where == "backend" else symmpool
    module.all_reduce(ONES(1))
    right = {}

    def written(make):
        """A tensor that a call under way, which waits for the last rank, is to fill with sums."""
        tensor = make(me + 1.0)
        dist.barrier()
        if me == world - 1:
            time.sleep(0.2)
        module.all_reduce(tensor, async_op=True)
        return tensor

    def made(name, call, result, expected):
        work = call()
        if waits:
            work.wait()
        found = [each.tolist() for each in result]
        right[name] = found == expected or found

    total = world * (world + 1) / 2
    x = written(lambda value: torch.full((4, 2), value))
    made("strided", lambda: module.all_reduce(x[:, 0], async_op=waits), [x], [[[total * world, total]] * 4])
    y, parts = written(lambda value: torch.full((2,), value)), [ONES(2) for _ in range(world)]
    made("list", lambda: module.all_gather(parts, y, async_op=waits), parts, [[total] * 2] * world)
    z, uneven = written(lambda value: torch.full((me + 1,), value)), [ONES(r + 1) for r in range(world)]
    # Inputs of different sizes: the sum itself is of the first element alone.
    z2 = written(lambda value: torch.full((1,), value))
    del z
    z = z2.expand(me + 1)
    expected = [[total] * (rank + 1) for rank in range(world)]
    made("uneven", lambda: module.all_gather(uneven, z, async_op=waits), uneven, expected)
    inputs, outputs = written(lambda value: torch.full((world, 2), value)), [ONES(2) for _ in range(world)]
    rows = [inputs[rank] for rank in range(world)]
    call = lambda: module.all_to_all(outputs, rows, async_op=waits)  # noqa: E731
    made("all to all", call, outputs, [[total] * 2] * world)
    rows = [each[0] for each in written(lambda value: torch.full((world, 1, 2), value))]
    out = ONES(2)
    call = lambda: module.reduce_scatter(out, rows, async_op=waits)  # noqa: E731
    made("reduce-scatter", call, [out], [[total * world] * 2])
    flag = written(lambda value: torch.full((2,), value))
    half = flag.view(torch.complex64)
    made("complex", lambda: module.all_reduce(half, async_op=waits), [flag], [[total * world] * 2])
    if where == "module" and not waits:
        seen = written(lambda value: torch.full((2, world), value))
        right["operator"] = ops.reduce_scatter_tensor(seen.t()).tolist() == [[total * world] * 2]
    dist.destroy_process_group()
    return right


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("where", ["backend", "module"])
def test_copies_are_made_behind_calls_that_nobody_waited_for(where, waits, tmp_path):
    for right in values(3, behind, str(tmp_path), where, waits):
        assert all(found is True for found in right.values()), right


def timed_out(group, folder):
    """A wrong call of a rank whose others are late: it raises at once, and they hear of it when they come."""
    seconds = datetime.timedelta(seconds=20)
    me, world = begin(group, folder, "symmpool", timeout=seconds)
    dist.all_reduce(ONES(1))
    if me == 0:
        time.sleep(1.5)
    right, wrong = CALLS["all_gather"]
    raised, took = observed(lambda: dist.all_gather(*(wrong if me == 1 else right)(me, world)))
    dist.barrier()
    dist.destroy_process_group()
    return type(raised).__name__, took < 1


def test_a_rank_raises_its_refusal_before_the_others_come(tmp_path):
    zero, one = values(2, timed_out, str(tmp_path))
    assert one == ("InvalidArgumentError", True) and zero == ("DivergedError", True)


def wrong_barriers(group, folder):
    """Barriers with a device that makes no sense on one rank: the group's first call, and a later one."""
    me, _ = begin(group, folder, "gloo")
    found = []
    for options in ({"device_ids": [1, 2]}, {"device": "nowhere"}):
        try:
            symmpool.barrier(**(options if me == 1 else {}))
            found.append(None)
        except symmpool.Error as error:
            found.append(type(error).__name__)
        x = torch.full((2,), me + 1.0)
        symmpool.all_reduce(x)
        found.append(x.tolist())
    dist.destroy_process_group()
    return found


def test_a_barrier_that_one_rank_refuses_is_an_error_on_all(tmp_path):
    zero, one = values(2, wrong_barriers, str(tmp_path))
    assert zero == ["DivergedError", [3.0, 3.0]] * 2
    assert one == ["InvalidArgumentError", [3.0, 3.0]] * 2
