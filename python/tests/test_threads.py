"""Threads: ranks that are threads of one process, which works only if waits let others run."""

import threading
import time

import numpy as np
import pytest

import symmpool
from symmpool.communicators import entry
from symmpool.groups import pool_registry


def on_threads(world, body, timeout=20):
    """Runs `body(group)` on a thread for every rank; returns what each returned."""
    results = [None] * world

    def rank(group):
        results[group.rank] = body(group)

    groups = symmpool.Group.in_process(world, timeout=timeout)
    threads = [threading.Thread(target=rank, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def test_ranks_can_be_threads():
    def body(group):
        pool = symmpool.Pool(group, "cpu")
        comm = symmpool.Communicator(pool, timeout=20)
        x = pool.empty(10_000, np.float32)
        total = 0
        for step in range(50):
            x[...] = step + pool.rank
            comm.all_reduce(x)
            total += float(x[0])
        return total

    assert on_threads(3, body) == [sum(3 * step + 3 for step in range(50))] * 3


def test_a_waiting_call_lets_other_threads_run():
    def body(group):
        pool = symmpool.Pool(group, "cpu")
        comm = symmpool.Communicator(pool, timeout=20)
        if group.rank == 1:
            time.sleep(1)
            comm.barrier()
            return None
        turns, done = [0], threading.Event()

        def count():
            while not done.is_set():
                turns[0] += 1
                time.sleep(0.001)

        other = threading.Thread(target=count)
        other.start()
        comm.barrier()
        done.set()
        other.join()
        return turns[0] > 50

    assert on_threads(2, body)[0]


def test_communicators_work_side_by_side():
    def body(group):
        pool = symmpool.Pool(group, "cpu")
        comms = [symmpool.Communicator(pool, timeout=20) for _ in range(3)]
        arrays = [pool.empty(n, np.int64) for n in (10, 5000, 100_000)]
        pool.commit()

        def work(comm, array):
            array[...] = 1
            for _ in range(10):
                comm.all_reduce(array)

        threads = [threading.Thread(target=work, args=pair) for pair in zip(comms, arrays)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return [(array == 2**10).all() for array in arrays]

    assert all(all(found) for found in on_threads(2, body))


def test_ranks_that_are_threads_find_their_communicators():
    def body(group):
        x = np.full(8, group.rank + 1, np.int64)
        symmpool.all_reduce(x, group=group)
        pool = symmpool.Pool(group, "cpu")
        y = pool.empty(8, np.int64)
        y[...] = group.rank
        symmpool.all_reduce(y, group=group)
        return x.tolist() + y.tolist()

    assert on_threads(3, body) == [[6] * 8 + [3] * 8] * 3


@pytest.mark.parametrize("met", [False, True])
def test_tensors_of_different_pools_are_an_error_on_all_ranks(met, monkeypatch):
    monkeypatch.setattr(pool_registry, "DEFAULT_TIMEOUT", 1.0)
    both = threading.Barrier(2)

    def body(group):
        pools = [symmpool.Pool(group, "cpu") for _ in range(2)]
        tensors = [pool.empty(3, np.int64) for pool in pools]
        for tensor in tensors if met else ():
            symmpool.all_reduce(tensor, group=group)
        with pytest.raises(symmpool.TimeoutError, match=f"pool {group.rank + 1} of the 2") as raised:
            symmpool.all_reduce(tensors[group.rank], group=group)
        if met:
            # A call that nothing has waited for yet says it too, when it is waited for.
            late = symmpool.all_reduce(tensors[group.rank], group=group, async_op=True)
            with pytest.raises(symmpool.TimeoutError, match=f"pool {group.rank + 1} of the 2"):
                late.wait(20)
        both.wait(20)  # a rank that leaves is lost to the other
        return raised.value.ranks

    assert on_threads(2, body, timeout=1) == [(1,), (0,)]


def test_threads_that_come_at_once_get_one_communicator(monkeypatch):
    made = []

    def slow(pool, **options):
        made.append(pool)
        time.sleep(0.2)
        return symmpool.Communicator(pool, **options)

    monkeypatch.setattr(entry, "Communicator", slow)
    (group,) = symmpool.Group.in_process(1)
    begin, found = threading.Barrier(8), []

    def call():
        begin.wait()
        found.append(symmpool.communicator(group))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 8 and all(each is found[0] for each in found)
    assert len(made) == 1 and pool_registry.pools_of(group) == made


def test_what_could_not_be_made_is_made_by_the_next_call(monkeypatch):
    def refuse(pool, **_):
        raise symmpool.UnsupportedError("not now")

    (group,) = symmpool.Group.in_process(1)
    x = np.ones(3, np.float32)
    with monkeypatch.context() as patched, pytest.raises(symmpool.UnsupportedError) as raised:
        patched.setattr(entry, "Communicator", refuse)
        symmpool.all_reduce(x, group=group)
    # Also while the error keeps alive what there was when it was raised.
    assert raised.value.__traceback__ is not None and pool_registry.pools_of(group) == []
    symmpool.all_reduce(x, group=group)
    assert len(pool_registry.pools_of(group)) == 1


def watched(group):
    comm = symmpool.Communicator(symmpool.Pool(group, "cpu"), timeout=2)
    if comm.rank == 1:
        time.sleep(4)
        return None
    ended = []

    def call():
        try:
            comm.barrier()
        except symmpool.Error as error:
            ended.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.3)
    longest, none = 0.0, 0
    while thread.is_alive():
        asked = time.monotonic()
        none += comm.failure is None
        longest = max(longest, time.monotonic() - asked)
        time.sleep(0.02)
    return longest, none, type(ended[0]).__name__, type(comm.failure).__name__


def test_a_watchdog_hears_at_once_while_another_thread_is_in_a_call():
    longest, none, ended, failure = on_threads(2, watched)[0]
    assert longest < 0.2 and none > 10
    assert ended == failure == "TimeoutError"
