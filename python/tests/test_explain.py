"""Tests of what communicators say of calls before they are made, and what programs hear of devices without
room."""

import dataclasses
import warnings

import numpy as np
import pytest
from ranks import values

import symmpool
from symmpool.memory import held

COUNT = 1 << 18


def made(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=20)
    return pool, comm


def each_collective(group):
    pool, comm = made(group)
    x, out = pool.zeros(COUNT, dtype="f32"), pool.zeros(COUNT, dtype="f32")
    part = pool.zeros(COUNT // 2, dtype="f32")
    before = pool.stats()["commits"]
    due = comm.explain("all_reduce", x, out)
    assert pool.is_commit_due and pool.stats()["commits"] == before
    pool.commit()
    said = {
        "all_reduce": comm.explain("all_reduce", x, out=out, op="max"),
        "in place": comm.explain("all_reduce", x),
        "reduce_scatter": comm.explain("reduce_scatter", x, part),
        "all_gather": comm.explain("all_gather", part, x),
        "all_to_all": comm.explain("all_to_all", x, out),
        "broadcast": comm.explain("broadcast", x, src=1),
    }
    methods = ("reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single")
    again = [comm.explain(methods[0], x, part), comm.explain(methods[1], part, x)]
    again.append(comm.explain(methods[2], x, out))
    ordinary = np.zeros(COUNT, np.float32)
    said["ordinary"] = comm.explain("all_reduce", ordinary)
    said["from ordinary"] = comm.explain("all_gather", ordinary[: COUNT // 2], x)
    said["mixed"] = comm.explain("reduce_scatter", ordinary, part)
    # Nothing was made or committed, and what follows is the first call of all ranks.
    assert pool.stats()["commits"] == before + 1
    comm.all_reduce(x, out=out)
    return due, said, again


def test_every_collective_is_explained():
    for due, said, again in values(2, each_collective):
        # The commit that the call makes first is foreseen.
        assert due.windows == ("input", "output") and due == dataclasses.replace(said["all_reduce"])
        assert [said[name] for name in ("reduce_scatter", "all_gather", "all_to_all")] == again
        for name, one in said.items():
            assert one.memory == "host" and one.blocks is None and one.device_sms is None
            assert one.launches == () and one.takes == 0 and one.chosen_by == "rule"
            assert one.bytes == 4 * COUNT and one.dtype == "float32"
            assert one.is_best or "no window" in one.kept_by[0], name
            assert str(one).startswith(f"{one.collective} of {one.bytes} bytes")
        assert said["all_reduce"].algorithm == "two_shot" and said["in place"].windows == ("input", "output")
        assert said["all_gather"].is_best and "That is its best case" in str(said["all_gather"])
        assert said["ordinary"].windows == ()
        assert said["ordinary"].algorithm == "one_shot" and said["ordinary"].best_algorithm == "two_shot"
        assert said["ordinary"].kept_by == ("input and output are no windows of the pool",)
        assert said["from ordinary"].windows == ("output",) and said["from ordinary"].is_best
        assert "the input is no window" in said["mixed"].kept_by[0]
        with pytest.raises(dataclasses.FrozenInstanceError):
            due.algorithm = "another"


def what_chooses(group):
    pool, comm = made(group)
    x = pool.zeros(COUNT, dtype="f32")
    pool.commit()
    named = comm.explain("all_reduce", x, algorithm="one_shot")
    comm.select("all_reduce", lambda *call: "one_shot")
    selected = comm.explain("all_reduce", x)
    comm.select("all_reduce", lambda *call: "no such name")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Only a call says that the choice cannot be followed.
        not_followed = comm.explain("all_reduce", x)
    comm.select("all_reduce", None)
    requested = symmpool.Communicator(pool, algorithm="one_shot").explain("all_reduce", x)
    comm.barrier()
    return named, selected, not_followed, requested


def test_what_chose_the_algorithm_is_said():
    for named, selected, not_followed, requested in values(2, what_chooses):
        assert (named.algorithm, named.chosen_by) == ("one_shot", "call")
        assert (selected.algorithm, selected.chosen_by) == ("one_shot", "selector")
        assert (not_followed.algorithm, not_followed.chosen_by) == ("two_shot", "rule")
        assert (requested.algorithm, requested.chosen_by) == ("one_shot", "requested")


def bad_input(group):
    pool, comm = made(group)
    x, part = pool.zeros(COUNT, dtype="f32"), pool.zeros(COUNT // 2, dtype="f32")
    pool.commit()
    raised = []

    def refused(*arguments, **options):
        with pytest.raises((symmpool.Error, TypeError)) as error:
            comm.explain(*arguments, **options)
        raised.append((error.type.__name__, str(error.value)))

    # One rank alone asks for what cannot be.
    if comm.rank == 1:
        refused("all_reduces", x)
        refused("reduce_scatter", x)
        refused("reduce_scatter", x, x)
        refused("all_gather", part)
        refused("broadcast", x, x)
        refused("broadcast", x, src=2)
        refused("all_reduce", x, algorithm="none")
        refused("all_reduce", x, op="none")
        refused("all_reduce", x, algorithm="two_shot_push")
        refused("all_reduce", x[: COUNT // 2], out=x[1 : COUNT // 2 + 1])
        refused("all_reduce", np.zeros(4, np.complex64))
        refused("all_reduce", "text")
        refused(5, x)
    comm.all_reduce(x)
    x[:] = comm.rank
    comm.all_reduce(x)
    assert float(x[0]) == 1.0
    return raised


def test_bad_input_is_an_error_of_which_no_other_rank_hears():
    none, raised = values(2, bad_input)
    assert none == [] and len(raised) == 13
    typed = {"InvalidArgumentError", "UnsupportedError", "TypeError"}
    assert {kind for kind, _ in raised} == typed
    assert "all_reduce, reduce_scatter, all_gather" in raised[0][1]
    assert raised[1] == ("InvalidArgumentError", "symmpool: out: reduce_scatter has an output of its own")


def closed(group):
    _, comm = made(group)
    comm.timeout = 0.2
    if comm.rank == 0:
        # The other rank does not come, or has ended.
        gone = (symmpool.errors.TimeoutError, symmpool.PeerLostError)
        with pytest.raises(gone) as why:
            comm.barrier()
        with pytest.raises(why.type):
            comm.explain("all_reduce", np.zeros(4, np.float32))


def test_a_closed_communicator_says_why():
    values(2, closed)


def test_users_hear_once_for_each_group_that_a_device_has_no_room(monkeypatch):
    memory = {"device": "cuda:1", "total": 16 << 20, "wanted": 389 << 20}
    groups = [{"group": "tp", **memory}, {"group": "ep", **memory, "wanted": 0}]
    monkeypatch.setattr(held, "communicator_memory", lambda: groups)
    monkeypatch.setattr(held, "_warned", set())
    with pytest.warns(RuntimeWarning, match=r"'tp'.*407,896,064 bytes.*cuda:1.*2.5 times") as found:
        held.warn_of_shortages()
    assert len(found) == 1 and found[0].filename == __file__
    groups[1]["wanted"] = 1
    with pytest.warns(RuntimeWarning, match="'ep'") as found:
        held.warn_of_shortages()
        held.warn_of_shortages()
    assert len(found) == 1
