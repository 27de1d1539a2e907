"""Meeting in a store that is Python's: one of torch's kind, without torch."""

import gc
import threading
import time
import weakref

import pytest

import symmpool
from symmpool.groups import pool_registry
from symmpool.groups import store as store_module
from symmpool.groups.store import StoreAdapter


class Store:
    """Store with the methods of torch.distributed.Store, in this process."""

    def __init__(self):
        self.lock, self.values = threading.Lock(), {}

    def set(self, key, value):
        with self.lock:
            self.values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key):
        with self.lock:
            return self.values[key]

    def add(self, key, delta):
        with self.lock:
            total = int(self.values.get(key, b"0")) + delta
            self.values[key] = str(total).encode()
            return total

    def check(self, keys):
        with self.lock:
            return all(key in self.values for key in keys)

    def delete_key(self, key):
        with self.lock:
            return self.values.pop(key, None) is not None


def on_threads(world, function):
    """Returns the results or errors of `function(rank)` on every rank."""
    found = [None] * world

    def run(rank):
        try:
            found[rank] = function(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_pools_meet_in_a_store_of_the_callers():
    store = Store()

    def rank(number):
        pool = symmpool.Pool((store, number, 3), "cpu:0", timeout=20)
        second = symmpool.Pool((store, number, 3), "cpu", timeout=20)
        comm = symmpool.Communicator(second, timeout=20)
        block = pool.block(4, "int32")
        pool.commit()
        assert pool.is_window(block)
        x = second.block(1, "float64").numpy()
        x[:] = number + 1
        comm.all_reduce(x)
        return float(x[0])

    assert on_threads(3, rank) == [6.0] * 3
    # Each of six groups leaves its count, and what its last gathers were.
    parts = [key for key in store.values if "/run/" not in key]
    assert len(parts) <= 6 * 4, sorted(store.values)


def test_a_missing_rank_is_named_and_a_second_try_meets():
    store = Store()
    with pytest.raises(symmpool.TimeoutError, match="rank 1") as raised:
        symmpool.Pool((store, 0, 2), "cpu", timeout=0.2)
    assert raised.value.ranks == (1,)

    def rank(number):
        return symmpool.Pool((store, number, 2), "cpu", timeout=20).world

    assert on_threads(2, rank) == [2, 2]


def test_a_rank_that_is_absent_is_named_by_those_who_give_up_later_too():
    store = Store()

    def rank(number):
        if number == 2:
            return None
        # Rank 0 has given up, and taken back what it had brought, before the others do; then rank 3 comes.
        time.sleep(0.9 if number == 3 else 0)
        symmpool.Pool((store, number, 4), "cpu", timeout=0.6 if number == 0 else 1.2)

    found = on_threads(4, rank)
    assert [each and each.ranks for each in found] == [(2, 3), (2,), None, (2,)], found
    # Entries that were left say nothing of a later try.
    time.sleep(0.7)
    with pytest.raises(symmpool.TimeoutError) as raised:
        symmpool.Pool((store, 1, 4), "cpu", timeout=0.3)
    assert raised.value.ranks == (0, 2, 3)
    everyone = on_threads(4, lambda number: symmpool.Pool((store, number, 4), "cpu", timeout=20).world)
    assert everyone == [4] * 4


def test_two_ranks_with_one_number_miss_the_one_that_is_not_there():
    store = Store()
    found = on_threads(2, lambda _: symmpool.Pool((store, 0, 2), "cpu", timeout=0.5))
    assert [each.ranks for each in found] == [(1,), (1,)], found
    assert all(isinstance(each, symmpool.TimeoutError) for each in found)


def test_worlds_that_differ_are_reported():
    store = Store()
    adapters = [StoreAdapter(store), StoreAdapter(store)]
    worlds = [2, 3]

    def rank(number):
        return adapters[number].all_gather("g/x/0", number, worlds[number], b"", 1.0)

    found = on_threads(2, rank)
    assert isinstance(found[0], symmpool.DivergedError), found
    assert isinstance(found[1], symmpool.TimeoutError) and found[1].ranks == (2,)


def test_a_store_that_fails_is_no_riddle():
    class Gone(Store):
        def check(self, keys):
            raise ConnectionResetError("the server went away")

    with pytest.raises(symmpool.PeerLostError, match="server went away") as raised:
        symmpool.Pool((Gone(), 0, 2), "cpu", timeout=5)
    assert "lost rank" not in str(raised.value), "nobody knows which"

    class Odd(Store):
        def set(self, key, value):
            raise RuntimeError("no space left")

    with pytest.raises(symmpool.Error, match="no space left"):
        symmpool.Pool((Odd(), 0, 2), "cpu", timeout=5)


@pytest.mark.parametrize(
    "group", ["a name", 7, (1, 2), (Store(), -1, 2), (Store(), 0, 1.5), (object(), 0, 1), object()]
)
def test_what_is_no_group_is_refused(group):
    with pytest.raises(symmpool.InvalidArgumentError, match="group|store|rank"):
        symmpool.Pool(group, "cpu")
    with pytest.raises(symmpool.InvalidArgumentError):
        symmpool.Pool((Store(), 2, 2), "cpu")


def test_a_group_of_a_store_has_a_name():
    store = Store()
    group = symmpool.Group.from_store(store, 0, 1, name="trainer", timeout=5)
    assert (group.rank, group.world) == (0, 1)
    assert symmpool.Pool(group, "cpu").world == 1


def test_pools_of_a_group_are_known_while_they_live():
    (group,) = symmpool.Group.in_process(1)
    first, second = symmpool.Pool(group, "cpu"), symmpool.Pool(group, "cpu")
    assert pool_registry.pools_of(group) == [first, second]
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None and pool_registry.pools_of(group) == [second]


class Late(Store):
    """Store like torch's TCPStore: waits by itself, in slices that warn when they end in vain."""

    def __init__(self):
        super().__init__()
        self.calls, self.vain, self.timeout = [], 0, None

    def set_timeout(self, timeout):
        self.timeout = timeout.total_seconds()

    def has_extended_api(self):
        return True

    def clone(self):
        return self

    def check(self, keys):
        self.calls.append("check")
        return super().check(keys)

    def multi_get(self, keys):
        self.calls.append("multi_get")
        end = time.monotonic() + self.timeout
        while not Store.check(self, keys):
            if time.monotonic() > end:
                self.vain += 1
                raise RuntimeError("wait timeout after 1000ms")
            time.sleep(0.001)
        return [self.get(key) for key in keys]


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setattr(store_module, "tcp_below", lambda store: store)
    monkeypatch.setattr(store_module, "SLICE", 0.1)
    return Late()


def test_a_late_rank_costs_one_blocking_slice(late):
    adapter = StoreAdapter(late)
    other = threading.Timer(0.5, lambda: StoreAdapter(late).all_gather("g/x/0", 1, 2, b"b", 5.0))
    other.start()
    assert adapter.all_gather("g/x/0", 0, 2, b"a", 5.0) == [b"a", b"b"]
    other.join()
    assert late.vain == 1, "torch warns of each"
    late.calls.clear()
    # Who is in time asks once, and does not look whether it is worth it.
    late.set("symmpool/1/g/x/1/1", (2).to_bytes(4, "little") + b"d")
    assert adapter.all_gather("g/x/1", 0, 2, b"c", 5.0) == [b"c", b"d"]
    assert late.calls == ["multi_get"]


def test_a_rank_that_never_comes_costs_one_slice_and_the_time_that_was_given(late):
    began = time.monotonic()
    with pytest.raises(symmpool.TimeoutError) as raised:
        StoreAdapter(late).all_gather("g/x/0", 0, 2, b"a", 0.6)
    assert raised.value.ranks == (1,) and late.vain == 1
    assert 0.5 < time.monotonic() - began < 5
