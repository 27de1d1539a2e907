"""Channels of messages between two ranks, over gloo's connections, which wait for both ranks as NCCL's do.

What NCCL makes of them is asked on devices (`gpu/ranks_torch.py`)."""

import datetime
import random
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import values

from symmpool.errors import InvalidStateError, TimeoutError  # noqa: A004
from symmpool.messages import Messages

CPU = torch.device("cpu")


class Rank:
    """A rank that sends and receives."""

    def __init__(self, group, folder, seconds=30):
        self.rank, self.world = group.rank, group.world
        store = dist.FileStore(str(Path(folder) / "store"), self.world)

        def connect(source, target):
            place = (0 if self.rank == source else 1, 2)
            meeting = dist.PrefixStore(f"{source}-{target}", store)
            timeout = datetime.timedelta(seconds=seconds)
            gloo = dist.ProcessGroupGloo(meeting, *place, timeout=timeout)
            two = dist.ProcessGroup(meeting, *place)
            two._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
            return two

        self.messages = Messages(connect)

    def send(self, tensor, to):
        return self.messages.begin(self.rank, to, CPU, lambda two: two.send([tensor], 1, 0))

    def receive(self, tensor, source):
        return self.messages.begin(source, self.rank, CPU, lambda two: two.recv([tensor], 0, 0))


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
        wrong += [
            (p, turn, n) for (p, n), tensor in came.items() if tensor.tolist() != [p, turn, n]
        ]
        assert all(work.is_completed() for work in works)
    threads = [each.name for each in threading.enumerate() if each.name.startswith("message")]
    me.messages.shutdown(30)
    return wrong, threads, len(me.messages.groups())


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_all_send_first_reach_each_other(world, tmp_path):
    found = values(world, all_send_first, str(tmp_path))
    assert found == [([], [], 2 * (world - 1))] * world


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
    with pytest.raises(TimeoutError, match="message from rank 0 to rank 1: the other rank"):
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
        with pytest.raises(RuntimeError):
            work.wait()
        assert work.is_completed() and not work.is_success() and work.exception() is not None
    assert time.monotonic() - began < 20
    with pytest.raises(InvalidStateError, match="message from rank 0 to rank 1"):
        me.send(torch.zeros(1), 1)
    me.messages.shutdown(5)
    return "told"


def test_a_rank_that_never_comes_is_told_of(tmp_path):
    assert values(2, nobody_comes, str(tmp_path)) == ["told", "absent"]


def own_fault(group, folder):
    me = Rank(group, folder)
    if me.rank == 1:
        came = torch.empty(1)
        me.receive(came, 0).wait()
        return came.item()

    def fault(two):
        raise ValueError("no such message")

    wrong = me.messages.begin(0, 1, CPU, fault)
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
    me.messages.abort()
    if work is not None:
        with pytest.raises(InvalidStateError, match="has ended"):
            work.wait()
        with pytest.raises(InvalidStateError, match="has ended"):
            me.send(torch.zeros(1), 1)
    return True


def test_an_end_tells_what_is_in_line(tmp_path):
    assert values(2, ended, str(tmp_path)) == [True, True]
