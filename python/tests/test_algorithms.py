"""A communicator's algorithms: which there are, calls by name, and who chooses where a call names none."""

import gc
import warnings
import weakref

import numpy as np
import pytest
from ranks import values

import symmpool
from symmpool import language as sl
from symmpool.language import library

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")


def run(comm, collective, name, x, out):
    match collective:
        case "all_reduce":
            comm.all_reduce(x, out=out, algorithm=name)
        case "reduce_scatter":
            comm.reduce_scatter_tensor(out, x, algorithm=name)
        case "all_gather":
            comm.all_gather_into_tensor(out, x, algorithm=name)
        case "all_to_all":
            comm.all_to_all_single(out, x, algorithm=name)
        case _:
            comm.broadcast(out, 1, algorithm=name)


def lists_and_runs(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=30)
    world, count = comm.world, 1000
    comm.register(library.direct_all_gather.compile(world))
    found = {}
    for collective in COLLECTIVES:
        results = []
        for algorithm in comm.algorithms(collective):
            parts = {"reduce_scatter": (world, 1), "all_gather": (1, world), "all_to_all": (world, world)}
            inputs, outputs = parts.get(collective, (1, 1))
            for run_it in (
                lambda x, out, a=algorithm, c=collective: run(comm, c, a.name, x, out),
                lambda x, out, a=algorithm: a.execute(
                    comm, x, out, src=a.collective == "broadcast" and 1 or 0
                ),
            ):
                x, out = pool.empty(inputs * count, np.int32), pool.empty(outputs * count, np.int32)
                np.asarray(x)[:] = np.arange(inputs * count) + comm.rank
                np.asarray(out)[:] = comm.rank
                run_it(out if collective == "broadcast" else x, out)
                results.append(np.asarray(out).tolist())
        assert all(each == results[0] for each in results), collective
        found[collective] = [(each.name, each.origin) for each in comm.algorithms(collective)]
    one_shot = next(each for each in comm.algorithms("all_reduce") if each.name == "one_shot")
    assert one_shot.constraints["dtypes"][:2] == ["float32", "float64"] and one_shot.world == world
    assert one_shot.constraints["bytes"] == (0, None) and one_shot.blocks is None and one_shot.scratch == 0
    assert "builtin" in repr(one_shot) and len(one_shot.hash) == 16
    for call in (one_shot.to_json, one_shot.explain):
        with pytest.raises(symmpool.UnsupportedError, match="built in"):
            call()
    return found


def test_built_in_algorithms_are_listed_and_run_by_name():
    found = values(3, lists_and_runs)
    assert found[0] == found[1] == found[2]
    assert found[0]["all_gather"] == [
        ("direct_all_gather", "plan"), ("scratch", "builtin"), ("direct", "builtin"),
    ]  # fmt: skip
    names = [name for name, _ in found[0]["all_reduce"]]
    assert names[:2] == ["one_shot", "two_shot"]
    assert all(len(found[0][each]) >= 2 for each in COLLECTIVES)


def options(group):
    pool = symmpool.Pool(group, "cpu")
    for wrong in ({"all_reduce": 3}, {"gossip": "ring"}, {3: "ring"}):
        with pytest.raises(symmpool.InvalidArgumentError):
            symmpool.Communicator(pool, algorithms=wrong)
        pool.resync()
    comm = symmpool.Communicator(pool, timeout=30, algorithms={"all_reduce": "mine", "all_gather": "direct"})
    assert comm.algorithm == "mine"
    x, out = np.ones(4, np.float32), np.empty(8, np.float32)
    with pytest.raises(symmpool.InvalidArgumentError, match='\'?"mine"'):
        comm.all_reduce(x)
    with pytest.raises(symmpool.UnsupportedError, match="all-gather algorithm direct"):
        comm.all_gather_into_tensor(out, x)
    plan = library.one_shot_all_reduce.trace(2).replace('"one_shot_all_reduce"', '"mine"', 1)
    comm.register(sl.Algorithm(plan))
    comm.all_reduce(x)
    return x.tolist()


def test_options_name_algorithms_that_are_registered_later():
    assert values(2, options) == [[2.0] * 4] * 2


def selects(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=30)
    comm.register(library.two_shot_all_reduce.compile(2))
    x = pool.empty(100, np.float32)
    np.asarray(x)[:] = 1
    seen = []

    def choose(*call):
        seen.append(call)
        return "two_shot_all_reduce"

    comm.select("all_reduce", choose)
    comm.all_reduce(x, "max")
    comm.all_reduce(np.ones(3), algorithm="one_shot")
    comm.all_reduce(np.ones(3))
    assert seen == [
        (400, "float32", "max", 2, ["input", "output"], "fully_connected"),
        (24, "float64", "sum", 2, [], "fully_connected"),
    ]
    # A failure is reported once, and the call is made all the same.
    for wrong, word in (
        (lambda *call: 1 / 0, "ZeroDivisionError"),
        (lambda: "one_shot", "TypeError"),
        (lambda *call: "nonsense", "nonsense"),
        (lambda *call: "one_shot_ll", "devices only"),
        (lambda *call: 3, "no name"),
    ):
        comm.select("all_reduce", wrong)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                y = np.ones(3)
                comm.all_reduce(y)
                assert y.tolist() == [2.0] * 3
        (warning,) = caught
        assert warning.category is RuntimeWarning and word in str(warning.message), warning
    for arguments in (("gossip", choose), ("all_reduce", 3)):
        with pytest.raises(symmpool.InvalidArgumentError):
            comm.select(*arguments)
    comm.select("all_reduce", lambda *call: "one_shot" if comm.rank else None)
    with pytest.raises(symmpool.DivergedError, match="by one_shot") as raised:
        comm.all_reduce(np.ones(3))
    assert raised.value.ranks == (1,)
    comm.select("all_reduce", None)
    comm.all_reduce(np.ones(3))


def test_selectors_choose_and_those_that_fail_are_warned_of_once():
    values(2, selects)


def module_level(group):
    pool = symmpool.Pool(group, "cpu")
    for program in (library.one_shot_all_reduce, library.ring_all_gather):
        symmpool.register(program.compile(2), pool)
    x, out, whole = pool.empty(4, np.float32), np.empty(2, np.float32), pool.empty(8, np.float32)
    np.asarray(x)[:] = symmpool.communicator(pool).rank + 1
    symmpool.all_reduce(x, group=pool, algorithm="one_shot_all_reduce")
    symmpool.all_gather_into_tensor(whole, x, pool, algorithm="ring_all_gather")
    symmpool.reduce_scatter_tensor(out, x, group=pool, algorithm="direct")
    symmpool.all_to_all_single(
        np.empty(8, np.float32), np.ones(8, np.float32), group=pool, algorithm="scratch"
    )
    symmpool.broadcast(x, 1, pool, algorithm="direct")
    assert np.asarray(x).tolist() == [3.0] * 4 and out.tolist() == [6.0] * 2
    work = symmpool.all_reduce(x, group=pool, async_op=True, algorithm="two_shot")
    work.wait()
    with pytest.raises(symmpool.InvalidArgumentError, match="one_shot_all_reduce"):
        symmpool.all_reduce(x, group=pool, algorithm="nonsense")
    symmpool.select("all_reduce", lambda *call: "one_shot_all_reduce", pool)
    symmpool.all_reduce(x, group=pool)
    return np.asarray(x).tolist()


def test_module_level_calls_take_names():
    assert values(2, module_level) == [[12.0] * 4] * 2


def names_that_are_none(group):
    pool = symmpool.Pool(group, "cpu")
    for wrong, error in ((3, TypeError), ("\ud800", symmpool.InvalidArgumentError)):
        comm = symmpool.Communicator(pool, timeout=30)
        expected = error if comm.rank == 0 else symmpool.DivergedError
        with pytest.raises(expected, match="algorithm|declined"):
            comm.all_reduce(np.ones(3), algorithm=wrong if comm.rank == 0 else None)


def test_names_that_are_none_are_refused_on_all_ranks():
    values(2, names_that_are_none)


def selectors_that_know_their_communicator(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=30)
    comm.select("all_reduce", lambda *call: comm.algorithms("all_reduce")[0].name)
    comm.all_reduce(np.ones(3))
    gone = weakref.ref(comm)
    del comm
    gc.collect()
    return gone() is None


def test_selectors_keep_no_communicator_alive():
    assert values(2, selectors_that_know_their_communicator) == [True, True]
