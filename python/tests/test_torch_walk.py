"""Every collective of the package and of the backend, with tensors of every kind: each is right, or an error
on every rank at once, and the next call is right."""

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin
from walk import WRONG, expanded, of_another_type, overlapping, views_of, wrong_on_one_rank

import symmpool
from symmpool.torch_backend.registration import has_python_backends

SHAPE = (2, 3)


def mine(rank, dtype):
    """A rank's values: small, so that any sum is exact."""
    numbers = (torch.arange(6).view(SHAPE) + rank) % 3
    return (numbers > 0) if dtype == torch.bool else (numbers + rank).to(dtype)


def total(world, dtype):
    parts = torch.stack([mine(rank, dtype) for rank in range(world)])
    return parts.any(0) if dtype == torch.bool else parts.sum(0).to(dtype)


def every(world, dtype):
    return [mine(rank, dtype) for rank in range(world)]


class Case:
    """A collective: the tensors that a call takes, the call on them, and what is in some of them then."""

    def __init__(self, tensors, call, expected, lists=False):
        self.tensors = [each.clone() for each in tensors]
        self.call, self.expected, self.lists = call, expected, lists

    def is_right(self, tensors):
        return all(torch.equal(tensors[at].detach(), value) for at, value in self.expected.items())


def cases(module, me, world, dtype, **options):
    """The collectives by name, on this rank. `options` are passed to each."""
    x, blank = mine(me, dtype), torch.zeros(SHAPE, dtype=dtype)
    blanks = [blank.clone() for _ in range(world)]
    whole, parts = torch.cat(every(world, dtype)), torch.cat([blank] * world)
    sums, own = total(world, dtype), every(world, dtype)
    found = {
        "all_reduce": Case([x], lambda x: module.all_reduce(x, **options), {0: sums}),
        "reduce": Case(
            [x], lambda x: module.reduce(x, 0, **options), {0: sums if me == 0 else mine(me, dtype)}
        ),
        "broadcast": Case([x], lambda x: module.broadcast(x, 1, **options), {0: mine(1, dtype)}),
        "all_gather_into_tensor": Case(
            [parts, x], lambda to, x: module.all_gather_into_tensor(to, x, **options), {0: whole}
        ),
        "all_gather": Case(
            [x, *blanks],
            lambda x, *to: module.all_gather(list(to), x, **options),
            {at + 1: value for at, value in enumerate(own)},
            True,
        ),
        "reduce_scatter_tensor": Case(
            [blank, torch.cat([x] * world)],
            lambda to, x: module.reduce_scatter_tensor(to, x, **options),
            {0: sums},
        ),
        "reduce_scatter": Case(
            [blank, *(x.clone() for _ in range(world))],
            lambda to, *parts: module.reduce_scatter(to, list(parts), **options),
            {0: sums},
            True,
        ),
        "all_to_all_single": Case(
            [parts, torch.cat([x] * world)],
            lambda to, x: module.all_to_all_single(to, x, **options),
            {0: whole},
        ),
        "all_to_all_single: sizes": Case(
            [parts, torch.cat([x] * world)],
            lambda to, x: module.all_to_all_single(to, x, [2] * world, [2] * world, **options),
            {0: whole},
        ),
        "all_to_all": Case(
            [*blanks, *(x.clone() for _ in range(world))],
            lambda *each: module.all_to_all(list(each[:world]), list(each[world:]), **options),
            dict(enumerate(own)),
            True,
        ),
        "gather": Case(
            [x, *blanks],
            lambda x, *to: module.gather(x, list(to) if me == 0 else None, **options),
            {at + 1: value for at, value in enumerate(own)} if me == 0 else {},
            True,
        ),
        "scatter": Case(
            [blank, *own],
            lambda to, *parts: module.scatter(to, list(parts) if me == 0 else None, **options),
            {0: mine(me, dtype)},
            True,
        ),
    }
    if module is symmpool and "async_op" not in options:
        found["all_reduce: out"] = Case(
            [blank.clone(), x], lambda out, x: module.all_reduce(x, out=out, **options), {0: sums}
        )
    return found


def viewed(tensors, name):
    return [views_of(each).get(name, each) for each in tensors]


def walked(group, folder, where, asynchronous):
    me, world = begin(group, folder, "symmpool" if where == "backend" else "gloo")
    module = dist if where == "backend" else symmpool
    options = {"async_op": True} if asynchronous else {}
    failures = []
    for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64):
        views = ["plain", *views_of(mine(me, dtype))]
        if where == "backend" and dtype.is_complex:
            # torch views complex tensors as real ones, and refuses these itself.
            views = [view for view in views if view not in ("conjugated", "negative")]
        for view in views:
            for name, case in cases(module, me, world, dtype, **options).items():
                tensors = viewed(case.tensors, view)
                try:
                    with torch.no_grad():
                        work = case.call(*tensors)
                        if asynchronous:
                            work.wait()
                    if not case.is_right(tensors):
                        failures.append((name, str(dtype), view, [each.tolist() for each in tensors]))
                except Exception as error:
                    failures.append((name, str(dtype), view, f"{type(error).__name__}: {error}"))
    dist.destroy_process_group()
    return failures[:6]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("where", ["backend", "module"])
def test_views_of_every_kind_are_what_they_show_in_every_collective(where, asynchronous, tmp_path):
    assert values(2, walked, str(tmp_path), where, asynchronous) == [[], []]


#: What the backend is not given: torch itself refuses what is no tensor, on one rank alone.
TENSORS = ("freed", "fake", "meta", "sparse")
if has_python_backends():
    # torch has calls of its own for tensors without memory, on groups of all backends.
    TENSORS = ("freed", "sparse")


def wrong_ones(where, name, case, at, culprit):
    """Returns the tensors, by name, that may stand in the place of a call's tensor number `at`."""
    x = case.tensors[at]
    found = {kind: make(x) for kind, make in WRONG.items() if where == "module" or kind in TENSORS}
    found["of another type"] = of_another_type(x)
    # The root of a broadcast and the other ranks of a reduce only read theirs.
    if at in case.expected and (name, culprit) not in (("reduce", 1), ("broadcast", 1)):
        found["expanded"] = expanded(x)
        found["overlapping"] = overlapping(x)
    if where == "backend":
        # gloo makes all-reduces of sparse tensors, and torch itself compares the types of a list.
        if name == "all_reduce":
            found.pop("sparse")
        if case.lists or name == "all_gather_into_tensor" or "all_to_all" in name:
            found.pop("of another type")
    return found


def refused(group, folder, where, asynchronous, culprit):
    me, world = begin(group, folder, "symmpool" if where == "backend" else "gloo")
    module = dist if where == "backend" else symmpool
    options = {"async_op": True} if asynchronous else {}

    def following():
        x = mine(me, torch.float32)
        module.all_reduce(x)
        return torch.equal(x, total(world, torch.float32))

    following()
    failures = []
    for name in cases(module, me, world, torch.float32, **options):
        # Places and kinds are the same on every rank: those of the rank that is wrong.
        there = cases(module, culprit, world, torch.float32, **options)[name]
        places = range(len(there.tensors))
        if name in ("gather", "scatter") and culprit != 0:
            places = range(1)  # it has no list
        for at in places:
            for kind in wrong_ones(where, name, there, at, culprit):
                case = cases(module, me, world, torch.float32, **options)[name]

                def made(*tensors, case=case):
                    work = case.call(*tensors)
                    if asynchronous:
                        work.wait()

                def right(case=case, made=made):
                    made(*case.tensors)

                def wrong(case=case, made=made, at=at, kind=kind, name=name):
                    bad = wrong_ones(where, name, case, at, culprit)[kind]
                    made(*case.tensors[:at], bad, *case.tensors[at + 1 :])

                found = wrong_on_one_rank(me, culprit, right, wrong, following)
                if found is not None:
                    failures.append((name, at, kind, found))
    dist.destroy_process_group()
    return failures


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("where", ["backend", "module"])
def test_what_no_call_can_take_is_an_error_on_every_rank_at_once(where, asynchronous, culprit, tmp_path):
    for failures in values(2, refused, str(tmp_path), where, asynchronous, culprit):
        assert not failures, "\n".join(map(str, failures))
