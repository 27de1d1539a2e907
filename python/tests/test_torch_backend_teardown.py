"""How a group of the backend ends, and what can come after it."""

import datetime
import gc
import os
import socket
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_errors import free_port
from test_torch_distributed import begin

import symmpool
from symmpool.groups.process_groups import ours
from symmpool.torch_backend import teardown


def mappings():
    return sum("/memfd:symmpool" in line for line in open("/proc/self/maps"))


def meet(group, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(group.rank), WORLD_SIZE=str(group.world))
    dist.init_process_group("symmpool", timeout=datetime.timedelta(seconds=15))


def again_and_again(group, port):
    sums = []
    for turn in range(20):
        meet(group, port)
        x = torch.ones(3)
        dist.all_reduce(x)
        dist.destroy_process_group()
        sums.append(x[0].item())
        # One rank or another is late.
        if turn % group.world == group.rank:
            time.sleep(0.02)
    return sums, mappings()


@pytest.mark.parametrize("world", [2, 4])
def test_groups_come_after_each_other_in_one_process(world):
    assert values(world, again_and_again, free_port()) == [([world] * 20, 0)] * world


def leaves_nothing(group, port):
    gc.disable()
    meet(group, port)
    dist.all_reduce(torch.ones(3))
    made = ours(dist.group.WORLD)
    parts = [made.key, made, made._fallbacks, *made._fallbacks._backends, made._fallbacks.channels]
    left = [(type(part).__name__, weakref.ref(part)) for part in parts]
    del made, parts
    dist.destroy_process_group()
    return [name for name, part in left if part() is not None]


def test_the_parts_of_a_group_hold_none_of_each_other_in_a_circle():
    # They would hold its store, whose server the next group's would find in its place.
    assert values(2, leaves_nothing, free_port()) == [[], []]


def in_one_store(group, port):
    me, world = group.rank, group.world
    store = dist.TCPStore("127.0.0.1", port, world, me == 0)
    sums = []
    for turn in range(5):
        limit = datetime.timedelta(seconds=15)
        dist.init_process_group("symmpool", store=store, rank=me, world_size=world, timeout=limit)
        half = dist.new_group(range(world))
        x = torch.ones(3)
        dist.all_reduce(x, group=half)
        # A fallback backend of torch makes this call.
        dist.all_gather([torch.empty(1) for _ in range(world)], torch.ones(1))
        dist.destroy_process_group()
        sums.append(x[0].item())
        if turn % world == me:
            time.sleep(0.05)
    symmpool.Pool(group, "cpu")
    return sums


def test_groups_come_after_each_other_in_a_store_that_outlives_them():
    assert values(2, in_one_store, free_port()) == [[2.0] * 5] * 2


def at_once(group, port):
    meet(group, port)
    dist.all_reduce(torch.ones(3))
    gc.collect()
    gc.disable()
    dist.destroy_process_group()
    # Nothing is there to ask.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()
    return True


def test_a_destroyed_group_is_gone_with_its_server_before_garbage_is_looked_for():
    assert values(1, at_once, free_port()) == [True]


def stays(group, port):
    store = dist.TCPStore("127.0.0.1", port, group.world, group.rank == 0)
    dist.init_process_group("symmpool", store=store, rank=group.rank, world_size=group.world)
    dist.barrier()
    began = time.monotonic()
    dist.destroy_process_group()
    took = time.monotonic() - began
    # The server is there for as long as somebody may ask.
    symmpool.Pool(group, "cpu")
    return took


def test_a_server_that_stays_is_not_waited_for():
    # The wait is as long as for a server that might go, and no longer.
    assert max(values(2, stays, free_port())) < teardown.LONGEST_WAIT + 2


def test_a_server_is_waited_for_where_connections_to_an_earlier_one_are_held():
    port, held, seconds = free_port(), [], 0.2
    for _ in range(2):
        server = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
        held.append(dist.TCPStore("127.0.0.1", port, None, False))
        if len(held) == 1:
            del server
    servers = [server]
    del server
    began = time.monotonic()
    threading.Timer(seconds, servers.clear).start()
    teardown.await_server(held[1])
    assert seconds * 0.9 < time.monotonic() - began < 20 and not servers


def refused(call):
    with pytest.raises(symmpool.InvalidStateError, match="was shut down on rank") as raised:
        call()
    return str(raised.value)


def held(group, folder):
    me, world = begin(group, folder, "symmpool")
    whole, half = dist.group.WORLD, dist.new_group(range(world))
    pool = symmpool.Pool(half, "cpu")
    x = pool.zeros(3, torch.float32).fill_(1)
    for each in (whole, half):
        dist.all_reduce(x, group=each)
        symmpool.all_reduce(x, group=each)
    before = mappings()
    dist.destroy_process_group(half)
    texts = [refused(lambda: symmpool.all_reduce(x, group=half))]
    y = torch.ones(2)
    # The other group goes on.
    dist.all_reduce(y)
    dist.destroy_process_group()
    options = dist.AllreduceOptions()
    for each in (whole, half):
        refused(lambda each=each: each.allreduce([y], options))
        refused(lambda each=each: each.barrier())
        refused(lambda each=each: each.send([y], (me + 1) % world, 0))
        refused(lambda each=each: symmpool.barrier(each))
        refused(lambda each=each: symmpool.Pool(each, "cpu"))
        each.shutdown()
    # The program's own pool stays, with what is in it.
    right = x.tolist() == [world**4] * 3 and y.tolist() == [world] * 2 and before > mappings() > 0
    del pool, x
    gc.collect()
    return right, mappings(), texts


def test_a_group_that_is_held_lets_go_of_its_memory_and_refuses_calls(tmp_path):
    for right, left, (text,) in values(2, held, str(tmp_path)):
        assert right and left == 0
        assert "destroy_process_group" in text and "group '1'" in text


def under_way(group, folder):
    me, world = begin(group, folder, "symmpool")
    if me == 1:
        time.sleep(0.5)
    tensors = [torch.full((4, 2), float(each)).t() for each in range(5)]
    observed = []
    for tensor in tensors:
        work = dist.all_reduce(tensor, async_op=True)
        work.get_future().add_done_callback(lambda done: observed.append(done.value()[0][0, 0].item()))
    dist.destroy_process_group()
    right = [each.unique().tolist() for each in tensors] == [[world * each] for each in range(5)]
    return right, observed == [world * each for each in range(5)], work.is_success()


def test_what_was_begun_is_done_when_the_group_is_destroyed(tmp_path):
    assert values(2, under_way, str(tmp_path)) == [(True, True, True)] * 2


def aborted(group, folder):
    me, world = begin(group, folder, "symmpool", datetime.timedelta(seconds=3))
    dist.all_reduce(torch.ones(1))
    whole, work = dist.group.WORLD, None
    if me == 0:
        # Nobody else comes.
        work = dist.all_reduce(torch.ones(1), async_op=True)
    began = time.monotonic()
    dist.distributed_c10d._abort_process_group()
    took = time.monotonic() - began
    refused(lambda: whole.barrier())
    if work is not None:
        with pytest.raises((symmpool.PeerLostError, symmpool.TimeoutError)):
            work.wait()
    return took


def test_a_group_that_is_aborted_waits_for_nothing(tmp_path):
    assert max(values(2, aborted, str(tmp_path))) < 2
