"""Which ranks share a host, and hosts that are pretended."""

import os

import numpy as np
import pytest
import ranks
from test_stores import Store, on_threads

import symmpool

HOST_ID = "SYMMPOOL_HOST_ID"


def hosts_of_some_that_pretend(group, ids):
    """Sets this rank's id, and returns the hosts that it finds."""
    set_id(ids[group.rank])
    found = group.hosts()
    # The result is remembered, also if the other ranks are gone.
    assert group.hosts() == found
    return found


def set_id(value):
    if value is None:
        os.environ.pop(HOST_ID, None)
    else:
        os.environ[HOST_ID] = value


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([None, "b", None], ((0, 2), (1,))),
        (["b", "a", "b"], ((0, 2), (1,))),
        (["a", "a", "a"], ((0, 1, 2),)),
        (["x", "y", "é"], ((0,), (1,), (2,))),
    ],
)
def test_ranks_with_equal_ids_share_a_host(ids, expected):
    assert ranks.values(3, hosts_of_some_that_pretend, ids) == [expected] * 3


def test_a_group_of_one_is_on_one_host():
    (group,) = symmpool.Group.in_process(1)
    assert group.hosts() == ((0,),)


def error_of(function):
    with pytest.raises(symmpool.Error) as raised:
        function()
    return type(raised.value), str(raised.value), raised.value.ranks


def hosts_with_ids_that_make_no_sense(group, values):
    found = []
    for value in values:
        set_id(os.fsdecode(value) if group.rank == 1 else None)
        # A pool fails alike.
        found.append((error_of(group.hosts), error_of(lambda: symmpool.Pool(group, "cpu"))))
    set_id(None)
    return found, group.hosts(), symmpool.Pool(group, "cpu").world


def test_an_id_that_makes_no_sense_is_named_with_its_rank_on_all_ranks():
    values = ["", " ", "a b", "a\n", "\t", "x" * 10240, "\u200b", "\x1b[31m", b"a\xff"]
    for found, hosts, world in ranks.values(2, hosts_with_ids_that_make_no_sense, values):
        assert len(found) == len(values)
        for kind, text, named in (error for pair in found for error in pair):
            assert kind is symmpool.InvalidArgumentError
            assert named == (1,) and "rank 1 failed" in text and f"{HOST_ID}=" in text, text
            assert "unset it where nothing is pretended" in text and len(text) < 700, text
        assert hosts == ((0, 1),) and world == 2


def second_group_with_another_id(group, folder, before, after):
    set_id(before if group.rank == 1 else None)
    first = group.hosts()
    set_id(after if group.rank == 1 else None)
    # This group remembers, and another one does not.
    assert group.hosts() == first
    second = symmpool.Group(group.rank, group.world, f"file://{folder}", timeout=20)
    found = error_of(second.hosts)
    set_id(before if group.rank == 1 else None)
    assert second.hosts() == first
    return found


@pytest.mark.parametrize(
    ("before", "after", "texts"),
    [
        ("a", "b", ('was "a"', 'is "b" now')),
        (None, "b", ("was not set", 'is "b" now')),
        ("a", None, ('was "a"', "is not set now")),
    ],
)
def test_an_id_that_changes_in_a_running_process_is_named_with_its_rank(tmp_path, before, after, texts):
    for kind, text, named in ranks.values(2, second_group_with_another_id, str(tmp_path), before, after):
        assert kind is symmpool.InvalidStateError
        assert named == (1,) and "rank 1" in text and all(part in text for part in texts), text


def pool_over_hosts(group, ids):
    set_id(ids[group.rank])
    pool = symmpool.Pool(group, "cpu")
    return pool.hosts, (pool.rank, pool.world)


def test_a_pool_says_which_ranks_can_map_each_other():
    found = ranks.values(3, pool_over_hosts, ["a", "b", "a"])
    assert found == [(((0, 2), (1,)), (rank, 3)) for rank in range(3)]


def sum_on_one_host(group):
    x = np.full(8, group.rank + 1.0, np.float32)
    symmpool.Communicator(symmpool.Pool(group, "cpu")).all_reduce(x)
    return float(x[0]), group.hosts()


def test_ranks_with_one_id_share_memory():
    found = ranks.values(3, sum_on_one_host, environment={HOST_ID: "node-7.example.org"})
    assert found == [(6.0, ((0, 1, 2),))] * 3


def forked_with_another_id(group):
    set_id("parent")
    assert group.hosts() == ((0,),)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            set_id("child")
            (own,) = symmpool.Group.in_process(1)
            assert own.hosts() == ((0,),)
            # The parent's group is refused, whatever it remembers.
            assert error_of(group.hosts)[0] is symmpool.InvalidStateError
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    (again,) = symmpool.Group.in_process(1)
    return os.waitstatus_to_exitcode(status), again.hosts()


def test_a_forked_child_may_pretend_something_else():
    assert ranks.values(1, forked_with_another_id) == [(0, ((0,),))]


def test_groups_on_one_store_may_begin_with_different_calls():
    store = Store()

    def rank(number):
        pool = symmpool.Pool((store, number, 2), "cpu", timeout=20)
        group = symmpool.Group.from_store(store, number, 2, timeout=20)
        # Parts that the pool has left in the store are none of the second group's.
        return pool.world, group.hosts(), symmpool.Pool(group, "cpu").world

    assert on_threads(2, rank) == [(2, ((0, 1),), 2)] * 2


def test_a_rank_that_does_not_ask_is_named():
    first, _ = symmpool.Group.in_process(2, timeout=0.2)
    with pytest.raises(symmpool.TimeoutError, match="hosts of the group") as raised:
        first.hosts()
    assert raised.value.ranks == (1,)
