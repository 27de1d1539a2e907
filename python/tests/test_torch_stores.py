"""Meeting in torch's TCPStore: how many connections there are to its server."""

import gc
import os
import threading

import torch
import torch.distributed as dist
from ranks import values
from test_errors import free_port

import symmpool
from symmpool.groups import store as store_module
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
    # That of another group, which has a store of its own; and that of another thread.
    assert values(2, connected, free_port()) == [(True, [1, 2, 3], 0)] * 2


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
