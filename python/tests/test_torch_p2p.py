"""Channels of messages between two ranks, over gloo's connections, which wait for both ranks as NCCL's do.

What NCCL makes of them is asked on devices (`gpu/ranks_torch.py`)."""

import datetime
import random
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_errors import free_port

from symmpool.errors import InvalidStateError, TimeoutError, UnsupportedError
from symmpool.groups.store import own_connection
from symmpool.torch_backend import fallback, p2p
from symmpool.torch_backend.nccl_p2p import NcclChannels
from symmpool.torch_backend.work import DoneTorchWork

CPU = torch.device("cpu")


class Rank:
    """A rank that sends and receives."""

    def __init__(self, group, folder, seconds=30, store=None):
        self.rank, self.world = group.rank, group.world
        self.store = store = store or dist.FileStore(str(Path(folder) / "store"), self.world)

        def connect(source, target, meet):
            place = (0 if self.rank == source else 1, 2)
            meeting = dist.PrefixStore(f"{source}-{target}", own_connection(store))
            meet(meeting, place[0], seconds)
            timeout = datetime.timedelta(seconds=seconds)
            gloo = dist.ProcessGroupGloo(meeting, *place, timeout=timeout)
            two = dist.ProcessGroup(meeting, *place)
            two._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
            return two

        self.channels = NcclChannels(connect)

    def send(self, tensor, to):
        return self.channels.begin(self.rank, to, [tensor], lambda two, sent: two.send(sent, 1, 0))

    def receive(self, tensor, source):
        return self.channels.begin(source, self.rank, [tensor], lambda two, to: two.recv(to, 0, 0))


def all_send_first(group, folder):
    me = Rank(group, folder)
    peers = [rank for rank in range(me.world) if rank != me.rank]
    wrong = []
    for turn in range(5):
        # In any order: no two ranks need open their channels in one.
        random.shuffle(peers)
        works = [me.send(torch.tensor([me.rank, turn, n]), p) for p in peers for n in range(3)]
        random.shuffle(peers)
        came = {(p, n): torch.empty(3, dtype=torch.int64) for p in peers for n in range(3)}
        works += [me.receive(tensor, p) for (p, _), tensor in came.items()]
        for work in works:
            work.wait()
        wrong += [(p, turn, n) for (p, n), tensor in came.items() if tensor.tolist() != [p, turn, n]]
        assert all(work.is_completed() for work in works)
    threads = [each.name for each in threading.enumerate() if each.name.startswith("sends")]
    me.channels.shutdown(30)
    return wrong, threads, len(me.channels.groups())


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_all_send_first_reach_each_other(world, tmp_path):
    found = values(world, all_send_first, str(tmp_path))
    assert found == [([], [], 2 * (world - 1))] * world


def all_receive_first(group, folder, port):
    server = group.rank == 0
    seconds = datetime.timedelta(seconds=20)
    store = dist.TCPStore("127.0.0.1", port, group.world, server, timeout=seconds)
    me = Rank(group, folder, store=store)
    peers = [rank for rank in range(me.world) if rank != me.rank]
    came = {peer: torch.empty(1) for peer in peers}
    began = time.monotonic()
    works = [me.receive(came[peer], peer) for peer in peers]
    # They wait in line by now.
    time.sleep(0.3)
    works += [me.send(torch.tensor([float(me.rank)]), peer) for peer in peers]
    for work in works:
        work.wait()
    took = time.monotonic() - began
    store.set(f"over/{me.rank}", "")
    store.wait([f"over/{rank}" for rank in range(me.world)])
    return [came[peer].item() == peer for peer in peers], took < 15


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_all_receive_first_leave_the_store_to_those_who_send(world, tmp_path):
    found = values(world, all_receive_first, str(tmp_path), free_port())
    assert found == [([True] * (world - 1), True)] * world


def late(group, folder):
    me = Rank(group, folder, seconds=1 if group.rank == 0 else 3)
    if me.rank == 1:
        me.store.wait(["gone"])
        # Who was here before and has left is not taken for one that is here.
        work = me.receive(torch.empty(1), 0)
        with pytest.raises(TimeoutError, match="in 3.0 s"):
            work.wait()
        return True
    with pytest.raises(TimeoutError, match="in 1.0 s"):
        me.send(torch.zeros(1), 1).wait()
    me.store.set("gone", "")
    return True


def test_one_that_comes_when_the_other_has_given_up_waits_no_longer_than_that(tmp_path):
    assert values(2, late, str(tmp_path)) == [True, True]


# Whatever a thread does when the program ends, the end takes a while: there are objects to be let go of.
ENDS = """
import datetime, sys, time
import torch, torch.distributed as dist
from symmpool.torch_backend.nccl_p2p import NcclChannels

class Late:
    def __del__(self):
        end = time.monotonic() + 1
        while time.monotonic() < end:
            pass

class Slow:
    store = dist.HashStore()

    def check(self, keys):
        try:
            self.store.wait(keys, datetime.timedelta(seconds=0.1))
        except dist.DistStoreError:
            return False

    def set(self, *_):
        pass

    delete_key = set

sys.late = Late()
sys.channels = NcclChannels(lambda source, target, meet: meet(Slow(), 0, 60))
sys.work = sys.channels.begin(0, 1, [torch.ones(1)], None)
time.sleep(0.2)
"""


def test_a_program_may_end_while_a_message_waits():
    began = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and time.monotonic() - began < 30, ended.stderr


def no_more_threads(group, folder):
    me, start = Rank(group, folder), threading.Thread.start
    if me.rank == 1:
        came = torch.empty(1)
        me.receive(came, 0).wait()
        return came.item()

    def refuse(self):
        raise RuntimeError("can't start new thread")

    threading.Thread.start = refuse
    with pytest.raises(RuntimeError, match="new thread"):
        me.send(torch.tensor([2.0]), 1)
    threading.Thread.start = start
    me.send(torch.tensor([3.0]), 1).wait()
    return 3.0


def test_a_message_for_which_there_is_no_thread_is_not_in_line(tmp_path):
    assert values(2, no_more_threads, str(tmp_path)) == [3.0, 3.0]


def first_is_waited_for(group, folder):
    me = Rank(group, folder)
    done = Path(folder) / "begun"
    if me.rank == 1:
        while not done.exists():
            time.sleep(0.01)
        came = torch.empty(1)
        me.receive(came, 0).wait()
        return came.item()
    work = me.send(torch.tensor([5.0]), 1)
    assert not work.is_completed() and not work.is_success()
    with pytest.raises(TimeoutError, match="sends from rank 0 to rank 1: the other rank"):
        work.wait(datetime.timedelta(seconds=0.1))
    done.touch()
    assert work.wait() and work.is_completed() and work.exception() is None
    return 5.0


def test_the_first_message_waits_beside_the_program(tmp_path):
    assert values(2, first_is_waited_for, str(tmp_path)) == [5.0, 5.0]


def nobody_comes(group, folder):
    me = Rank(group, folder, seconds=1)
    if me.rank == 1:
        return "absent"
    first, second = me.send(torch.zeros(1), 1), me.send(torch.ones(1), 1)
    began = time.monotonic()
    for work in (first, second):
        with pytest.raises(TimeoutError, match="from rank 0 to rank 1: the other rank did not come"):
            work.wait()
        assert work.is_completed() and not work.is_success() and work.exception() is not None
    assert time.monotonic() - began < 20
    with pytest.raises(InvalidStateError, match="sends from rank 0 to rank 1"):
        me.send(torch.zeros(1), 1)
    me.channels.shutdown(5)
    return "error"


def test_a_rank_that_never_comes_is_reported(tmp_path):
    assert values(2, nobody_comes, str(tmp_path)) == ["error", "absent"]


def own_fault(group, folder):
    me = Rank(group, folder)
    if me.rank == 1:
        came = torch.empty(1)
        me.receive(came, 0).wait()
        return came.item()

    def fault(two, sent):
        raise ValueError("no such message")

    wrong = me.channels.begin(0, 1, [torch.zeros(1)], fault)
    right = me.send(torch.tensor([7.0]), 1)
    with pytest.raises(ValueError, match="no such message"):
        wrong.wait()
    right.wait()
    return 7.0


def test_a_message_at_fault_leaves_the_others(tmp_path):
    assert values(2, own_fault, str(tmp_path)) == [7.0, 7.0]


def ended(group, folder):
    me = Rank(group, folder, seconds=2)
    work = me.send(torch.zeros(1), 1) if me.rank == 0 else None
    me.channels.abort()
    if work is not None:
        with pytest.raises(InvalidStateError, match="has ended"):
            work.wait()
        with pytest.raises(InvalidStateError, match="has ended"):
            me.send(torch.zeros(1), 1)
    return True


def test_an_end_tells_what_is_in_line(tmp_path):
    assert values(2, ended, str(tmp_path)) == [True, True]


class Batches:
    """Stands for a group of NCCL's: what is begun in a batch of its own has work without results."""

    supports_coalescing = True

    def __init__(self):
        self.open, self.sent = False, 0

    def _get_backend(self, device):
        return self

    def _start_coalescing(self, device):
        assert not self.open
        self.open = True
        time.sleep(0.001)

    def _end_coalescing(self, device):
        self.open = False
        return DoneTorchWork([], device)

    def send(self, tensors, *_):
        assert self.open
        self.sent += 1


def test_batches_are_one_at_a_time_and_their_work_tells_the_tensors():
    group = Batches()
    messages = NcclChannels(lambda source, target, meet: group)
    works, x, before = [], torch.ones(2), threading.active_count()

    def begin():
        works.append(messages.begin(0, 1, [x], lambda two, sent: two.send(sent)))

    begin()
    while threading.active_count() > before:
        time.sleep(0.01)
    threads = [threading.Thread(target=begin) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert group.sent == len(works) == 21
    for work in works:
        assert work.wait() and work.is_completed() and work.is_success()
        assert work.result()[0] is x
        assert torch.equal(work.get_future().wait()[0], x)


@pytest.mark.parametrize("given, found", [((-1, -1), (6, -1)), ((4, 2), (4, 2)), ((32, 16), (6, 6))])
def test_messages_that_wait_leave_room_on_the_device(given, found):
    # With 7 others 14 channels, each waiting in blocks of its own.
    there = object.__new__(fallback.FallbackBackends)
    there._place = (0, 8)
    config = types.SimpleNamespace(max_ctas=given[0], min_ctas=given[1])
    there._bound(config)
    assert (config.max_ctas, config.min_ctas) == found


def test_messages_of_cuda_tensors_are_refused_where_gloo_would_send_them():
    there = object.__new__(fallback.FallbackBackends)
    there._place, there.names = (0, 2), {"cpu": "gloo", "cuda": "gloo"}
    with pytest.raises(UnsupportedError, match="SYMMPOOL_SHARED_DEVICE=1 ranks may share one"):
        there.begin((0, 1), torch.ones(1))


class Comm:
    """A communicator that notes what it carries."""

    def __init__(self):
        self.carried, self.waited = [], 0

    def send(self, tensor, peer, stream):
        self.carried.append(("send", peer))

    def recv(self, tensor, peer, stream):
        self.carried.append(("recv", peer))

    def synchronize(self, stream):
        self.waited += 1


class Side:
    """A stream of a channel: makes calls at once."""

    def __init__(self, torch, device, explain):
        self.handle = 1

    def submit(self, comm, call, arguments, results, finish):
        call(*arguments, stream=self.handle)
        return finish


def on_device(*arguments):
    """Stand-in for the attributes that `PointToPoint` reads of a CUDA tensor."""
    tensor = torch.ones(*arguments)
    device = types.SimpleNamespace(type="cuda", index=0)
    return types.SimpleNamespace(
        device=device,
        layout=torch.strided,
        is_quantized=False,
        is_contiguous=tensor.is_contiguous,
        is_neg=tensor.is_neg,
        is_conj=tensor.is_conj,
    )


def test_messages_go_by_the_communicator_once_all_ranks_have_one(monkeypatch):
    elsewhere, comm, x = [], Comm(), on_device(3)
    monkeypatch.setattr(p2p, "SideStream", Side)
    messages = p2p.PointToPoint(0, 3, lambda channel, tensor: elsewhere.append(channel))
    messages.begin(x, 1, True)
    observed = []

    def ask(here):
        observed.append(here)
        # Rank 2 has begun to receive from rank 0 by NCCL, and rank 1 knows of nothing.
        return [here, "0>2 1>2"]

    messages.use_communicator(ask, comm, 0, None)
    assert observed == ["0>1"]
    for peer in (1, 2):
        messages.begin(x, peer, True)
        messages.begin(x, peer, False)
    assert elsewhere == [(0, 1), (0, 1), (0, 2)]
    assert comm.carried == [("recv", 1), ("recv", 2)]
    messages.end(True)
    assert comm.waited == 2
    messages.begin(x, 1, False)
    assert elsewhere[-1] == (1, 0)


def test_which_messages_are_carried_depends_on_what_both_ranks_know():
    messages = p2p.PointToPoint(0, 2, None)
    x = on_device(3)
    assert messages.carries([x], 1) and messages.carries([x], 0)
    assert not messages.carries([x], 2) and not messages.carries([x], -1)
    assert not messages.carries([x, x], 1) and not messages.carries([torch.ones(3)], 1)


def test_a_channel_that_nothing_carries_is_ours_later(monkeypatch):
    monkeypatch.setattr(p2p, "SideStream", Side)

    def refuse(channel, tensor):
        raise UnsupportedError("nothing")

    messages, comm, x = p2p.PointToPoint(0, 2, refuse), Comm(), on_device(3)
    with pytest.raises(UnsupportedError):
        messages.begin(x, 1, True)
    messages.use_communicator(lambda here: [here], comm, 0, None)
    messages.begin(x, 1, True)
    assert comm.carried == [("send", 1)]
