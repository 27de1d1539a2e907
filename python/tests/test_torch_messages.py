"""Messages of `symmpool.send` and `recv` that one of the two ranks cannot make: both learn that at once."""

import time

import pytest
import torch
from ranks import values

import symmpool
from symmpool.collectives import layout
from symmpool.torch_backend import p2p


def both(group, call, counterpart, error, kind=symmpool.InvalidArgumentError):
    """Rank 0 makes a call that it cannot make, and rank 1 its counterpart."""
    began = time.monotonic()
    if group.rank == 0:
        with pytest.raises(kind, match=error):
            call()
    else:
        with pytest.raises(symmpool.DivergedError, match="rank 0 declined its own") as caught:
            counterpart()
        assert caught.value.ranks == (0,)
    assert time.monotonic() - began < 15
    # The next message arrives, in either direction, and so does a collective.
    x, came = torch.full((3,), 4.0 + group.rank), torch.zeros(3)
    for sender in (0, 1):
        if group.rank == sender:
            symmpool.send(x, 1 - sender, group)
        else:
            symmpool.recv(came, sender, group)
    assert came.tolist() == [5.0 - group.rank] * 3
    symmpool.all_reduce(x, group=group)
    assert x.tolist() == [9.0] * 3


def refused(group):
    symmpool.barrier(group)
    good, zeros = torch.ones(8), torch.zeros(8)
    shared = torch.zeros(1).expand(8)
    sparse = good.to_sparse()
    fail = MemoryError("no memory for the copy")

    def without_memory(call, *arguments):
        def no_memory(tensor):
            raise fail

        plain, layout.plain = layout.plain, no_memory
        try:
            call(*arguments)
        finally:
            layout.plain = plain

    def receive():
        symmpool.recv(zeros, 0, group)

    both(group, lambda: symmpool.send(sparse, 1, group), receive, "layout")
    both(group, lambda: symmpool.send("x", 1, group), receive, "tensor", TypeError)
    strided = torch.ones(8, 2)[:, 0]
    both(group, lambda: without_memory(symmpool.send, strided, 1, group), receive, "copy", MemoryError)
    # A message that was sent before it was refused is reported to the next one, which is not made.
    if group.rank == 0:
        with pytest.raises(symmpool.InvalidArgumentError, match="share"):
            symmpool.recv(shared, 1, group)
    else:
        with pytest.raises(symmpool.DivergedError, match="rank 0 declined its own recv"):
            symmpool.send(good, 0, group)
            symmpool.recv(zeros, 0, group)
    symmpool.barrier(group)
    assert zeros.tolist() == [0.0] * 8
    return True


def test_a_message_that_a_rank_refuses_fails_on_both():
    assert values(2, refused) == [True, True]


def behind_others(group):
    """Wrong arguments behind calls that were begun, and copies of what those calls write."""
    me = group.rank
    symmpool.barrier(group)
    x = torch.full((4, 2), 1.0)
    works = [symmpool.all_reduce(x, group=group, async_op=True) for _ in range(3)]
    if me == 0:
        symmpool.send(x[:, 1], 1, group)
        found = None
    else:
        found = torch.zeros(4, 2)[:, 0]
        symmpool.recv(found, 0, group)
    begun = symmpool.all_reduce(x, group=group, async_op=True)
    if me == 0:
        with pytest.raises(symmpool.InvalidArgumentError):
            symmpool.send(x.to_sparse(), 1, group)
    else:
        with pytest.raises(symmpool.DivergedError, match="rank 0 declined"):
            symmpool.recv(torch.zeros(4), 0, group)
    for work in [*works, begun]:
        work.wait()
    symmpool.barrier(group)
    return found is None or found.tolist(), x[0, 0].item()


def test_messages_come_behind_calls_that_were_begun():
    assert values(2, behind_others) == [(True, 16.0), ([8.0] * 4, 16.0)]


def types(group, sent, expected):
    symmpool.barrier(group)
    if group.rank == 0:
        with pytest.raises(symmpool.DivergedError, match="which expects") as caught:
            symmpool.send(torch.ones(4, dtype=sent), 1, group)
            symmpool.recv(torch.ones(1), 1, group)
    else:
        with pytest.raises(symmpool.DivergedError, match="which expects") as caught:
            symmpool.recv(torch.ones(4, dtype=expected), 0, group)
    symmpool.barrier(group)
    return caught.value.ranks


@pytest.mark.parametrize(
    "sent, expected",
    [
        (torch.float32, torch.int32),
        (torch.bfloat16, torch.float16),
        (torch.complex64, torch.float64),
        (torch.bool, torch.uint8),
        (torch.float8_e4m3fn, torch.float8_e5m2),
    ],
)
def test_elements_of_another_type_are_refused_on_both_ranks(sent, expected):
    assert values(2, types, sent, expected) == [(0, 1), (0, 1)]


def test_a_rank_that_sends_itself_what_does_not_fit_fails_both_calls(monkeypatch):
    class Stream:
        def record_event(self):
            return None

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    channel = p2p._SelfChannel()
    first = channel.begin(torch.ones(4), True)
    with pytest.raises(symmpool.InvalidArgumentError, match="both must be the same"):
        channel.begin(torch.ones(4, dtype=torch.int32), False)
    with pytest.raises(symmpool.InvalidArgumentError, match="both must be the same"):
        first.wait()
    assert first.is_completed() and not first.is_success() and first.exception() is not None
    # The next ones are paired with each other.
    assert not channel.begin(torch.ones(2), False).is_completed()


class Comm:
    """A communicator that notes what it is given."""

    def __init__(self):
        self.given = []

    def send(self, tensor, peer, stream):
        self.given.append(("send", peer))

    def _decline(self, why, message, stream):
        self.given.append((why, message))
        raise symmpool.InvalidArgumentError(why)


class Side:
    """A stream of a channel: makes calls at once."""

    def __init__(self, *_):
        self.handle = 1

    def submit(self, comm, call, arguments, results, prepared=None):
        if prepared is not None:
            arguments, _ = prepared(stream=self.handle)
        call(*arguments, stream=self.handle)


def test_a_message_of_the_backend_that_cannot_be_begun_is_reported(monkeypatch):
    comm, x = Comm(), torch.ones(3)
    monkeypatch.setattr(p2p, "SideStream", Side)

    def no_memory(tensor):
        raise MemoryError("no memory for the copy")

    messages = p2p.PointToPoint(0, 2, None)
    messages.use_communicator(lambda here: [here], comm, None, None)
    messages.begin(x, 1, True)
    monkeypatch.setattr(p2p.layout, "plain", no_memory)
    with pytest.raises(MemoryError):
        messages.begin(torch.ones(3, 2)[:, 0], 1, True)
    assert comm.given == [("send", 1), ("MemoryError: no memory for the copy", ("send", 1))]
