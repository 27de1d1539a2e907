"""Meeting in torch's TCPStore: how many connections there are to its server."""

import gc
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run, values
from test_errors import free_port

import symmpool
from symmpool.groups import store as store_module
from symmpool.groups.process_groups import ours
from symmpool.groups.store import StoreAdapter


def counted():
    """The stores that are cloned from here on, in order."""
    cloned = []
    for kind in (dist.TCPStore, dist.PrefixStore):

        def clone(self, own=kind.clone):
            # A store below prefixes is cloned by the one above it.
            cloned.append(self)
            return own(self)

        kind.clone = clone
    return cloned


def connected(group, port):
    me, world = group.rank, group.world
    cloned = counted()
    store = dist.TCPStore("127.0.0.1", port, world, me == 0)
    dist.init_process_group("symmpool", store=store, rank=me, world_size=world)
    x = torch.ones(3)
    dist.all_reduce(x)
    symmpool.all_reduce(x)
    # All of them meet in one store, where the first call of each makes several agreements.
    pools = [symmpool.Pool(device="cpu") for _ in range(2)]
    counts = [len(cloned)]
    half = dist.new_group(range(world), backend="gloo")
    symmpool.all_reduce(x, group=half)
    counts.append(len(cloned))

    def another():
        pools.append(symmpool.Pool(device="cpu"))

    thread = threading.Thread(target=another)
    thread.start()
    thread.join(60)
    counts.append(len(cloned))
    right = x.tolist() == [world**3] * 3 and len(pools) == 3
    dist.barrier()
    dist.destroy_process_group()
    pools.clear()
    cloned.clear()
    del half
    gc.collect()
    left = sum(kept() is not None for kept in store_module._connections.values())
    # The server is there for as long as somebody may ask.
    symmpool.Pool(group, "cpu")
    return right, counts, left


def test_a_store_has_one_connection_for_each_thread():
    # Another group, which has a store of its own on the same server, has none of its own; another thread has.
    assert values(2, connected, free_port()) == [(True, [1, 1, 2], 0)] * 2


def taken(kind, port, group, count):
    """Descriptors and threads of this process for each group that it keeps open."""
    dist.init_process_group(
        kind, init_method=f"tcp://127.0.0.1:{port}", rank=group.rank, world_size=group.world
    )
    dist.all_reduce(torch.ones(1))
    found = [[len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")]]
    groups = [dist.new_group(range(group.world), backend=kind) for _ in range(count)]
    total = [torch.ones(2) for _ in groups]
    for each, x in zip(groups, total, strict=True):
        dist.all_reduce(x, group=each)
    found.append([len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")])
    right = all(x.tolist() == [group.world] * 2 for x in total)
    dist.destroy_process_group()
    gc.collect()
    return right, [(after - before) / count for before, after in zip(*found, strict=True)]


def many_groups(group, ports, count):
    return [taken(kind, port, group, count) for kind, port in zip(("gloo", "symmpool"), ports, strict=True)]


def test_a_group_takes_no_more_descriptors_and_threads_than_one_of_gloo():
    for gloo, own in values(2, many_groups, (free_port(), free_port()), 25):
        assert gloo[0] and own[0]
        assert all(mine <= theirs for mine, theirs in zip(own[1], gloo[1], strict=True)), (gloo, own)


def with_equal_keys(group, port):
    """Stores with prefixes in prefixes, whose keys do not meet."""
    store = dist.TCPStore("127.0.0.1", port, group.world, group.rank == 0)
    stores = [dist.PrefixStore(f"a{at}/", dist.PrefixStore("b", store)) for at in range(3)]
    adapters = [StoreAdapter(each) for each in stores]
    # One that is made anew on the same keys finds what was there.
    adapters.append(StoreAdapter(dist.PrefixStore("a1/", dist.PrefixStore("b", store))))
    for at, adapter in enumerate(adapters[:3]):
        if group.rank == at % group.world:
            adapter.set("key", f"{at}".encode(), 5)
    found = [adapter.get("key", 20) for adapter in adapters]
    adapters[0].all_gather("end/0/x", group.rank, group.world, b"", 20)
    # Rank 0 serves the store: it stays until the others have read all of it.
    if group.rank == 0:
        adapters[0].get("left", 20)
    else:
        adapters[0].set("left", b"", 5)
    return found, len({id(adapter._connections) for adapter in adapters})


def test_stores_of_one_server_share_its_connections_and_no_keys():
    assert values(2, with_equal_keys, free_port()) == [([b"0", b"1", b"2", b"1"], 1)] * 2


def child_of(group):
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    adapter = StoreAdapter(store)
    adapter.set("x", b"parent", 5)
    mine = adapter._here()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        own = adapter._here() is not mine
        found = adapter.get("x", 5)
        adapter.set("x", b"child", 5)
        os.write(writing, f"{own} {found.decode()}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(reading, 100).decode()
    return said, adapter.get("x", 5), adapter._here() is mine


def test_a_forked_child_has_connections_of_its_own():
    assert values(1, child_of) == [("True parent", b"child", True)]


def without_server(group, port):
    me, world = group.rank, group.world
    store = dist.TCPStore("127.0.0.1", port, world, me == 0)
    dist.init_process_group("gloo", store=store, rank=me, world_size=world)
    pool = symmpool.Pool(device="cpu")
    if me == 0:
        store.wait(["made"])
        os._exit(0)
    # Making a pool ends on one rank before the other, by the store that rank 0 serves.
    store.set("made", "yes")
    time.sleep(0.5)
    with pytest.raises(symmpool.PeerLostError, match="lost rank 0: .*serves the store is gone") as raised:
        symmpool.Pool(device="cpu", timeout=20)
    del pool
    return raised.value.ranks


def test_a_store_that_went_with_its_rank_names_the_rank():
    assert run(2, without_server, free_port())[1].value == (0,)


def asked(group, port, within):
    """Returns the requests to the store that a new group's first call waits for."""
    dist.init_process_group(
        "symmpool", init_method=f"tcp://127.0.0.1:{port}", rank=group.rank, world_size=group.world
    )
    dist.all_reduce(torch.ones(1))
    half = dist.new_group(range(group.world))
    if not within:
        ours(half).within = None
    calls = []

    def call(function, *arguments, own=StoreAdapter._call):
        calls.append(function.__name__)
        return own(function, *arguments)

    StoreAdapter._call = staticmethod(call)
    x = torch.ones(3)
    dist.all_reduce(x, group=half)
    first = [name for name in calls if name != "set"]
    calls.clear()
    dist.all_reduce(x, group=half)
    right = x.tolist() == [group.world**2] * 3 and calls == []
    dist.destroy_process_group()
    return right, first


@pytest.mark.parametrize("within", [True, False])
def test_a_groups_first_call_asks_the_store_twice_or_not_at_all(within):
    # For the prefix of the group's keys, and for what all ranks say of themselves.
    for right, first in values(3, asked, free_port(), within):
        assert right and first == ([] if within else ["compare_set", "multi_get"])
