"""Messages between two ranks: their order, their lengths, and what becomes of those that do not fit."""

import threading
import time

import numpy as np
import pytest
from ranks import run, values

import symmpool

SIZES = [0, 1, 7, 1000, 65_536, 1_000_003]


def data(source, target, nth, count):
    return np.random.default_rng([source, target, nth]).integers(0, 256, count).astype(np.uint8)


def both_ways(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=20)
    peer, wrong = 1 - comm.rank, 0

    def send():
        for nth, count in enumerate(SIZES):
            # Messages lie in the pool and in other memory, at any place.
            whole = pool.empty(count + 1, np.uint8) if nth % 2 else np.empty(count + 1, np.uint8)
            part = np.asarray(whole)[1:]
            part[:] = data(comm.rank, peer, nth, count)
            comm.send(part, peer)

    sender = threading.Thread(target=send)
    sender.start()
    for nth, count in enumerate(SIZES):
        there = np.full(count + 2, 0xA5, np.uint8)
        comm.recv(there[1:-1], peer)
        wrong += not np.array_equal(there[1:-1], data(peer, comm.rank, nth, count))
        wrong += there[0] != 0xA5 or there[-1] != 0xA5
    sender.join()
    return wrong


def test_messages_of_all_lengths_pass_each_other():
    assert values(2, both_ways) == [0, 0]


def around(group):
    comm = symmpool.Communicator(symmpool.Pool(group, "cpu"), timeout=20)
    passed = np.array([comm.rank], np.int64)
    seen = []
    for _ in range(comm.world):
        # All send first: there is room.
        comm.send(passed, (comm.rank + 1) % comm.world)
        comm.recv(passed, (comm.rank + comm.world - 1) % comm.world)
        comm.barrier()
        seen.append(int(passed[0]))
    return seen


def test_ranks_that_all_send_first_do_not_wait_for_each_other():
    assert values(3, around) == [[2, 1, 0], [0, 2, 1], [1, 0, 2]]


def other_messages(group, sent, expected):
    comm = symmpool.Communicator(symmpool.Pool(group, "cpu"), timeout=20)
    there = np.full(expected[0], 7, expected[1])
    text = None
    if comm.rank < 2:
        with pytest.raises(symmpool.DivergedError) as caught:
            if comm.rank == 0:
                # A short message is gone before it is looked at. Then a receive tells, which waits already.
                comm.send(np.ones(*sent), 1)
                comm.recv(np.ones(1), 1)
            comm.recv(there, 0)
        text = str(caught.value)
        assert "rank 0 sends" in text and "to rank 1, which expects" in text
        assert caught.value.ranks == (0, 1) and (there == 7).all()
    # Nobody has waited in vain, and the next message arrives.
    assert comm.failure is None
    comm.barrier()
    if comm.rank == 0:
        comm.send(np.full(3, 5.0), 1)
    if comm.rank == 1:
        came = np.zeros(3)
        comm.recv(came, 0)
        assert came.tolist() == [5.0] * 3
    comm.barrier()
    return text and text[text.index("  rank 0 sends") :]


@pytest.mark.parametrize(
    "sent, expected",
    [
        ((10, "u1"), (11, "u1")),
        ((1 << 20, "u1"), (10, "u1")),
        ((4, "f8"), (8, "f4")),
        ((4, "f4"), (4, "i4")),
        ((1 << 20, "f4"), (1 << 20, "i4")),
        ((0, "f4"), (0, "i4")),
    ],
)
def test_another_message_than_expected_is_an_error_on_both_ranks_at_once(sent, expected):
    began = time.monotonic()
    texts = values(3, other_messages, sent, expected)
    assert texts[0] == texts[1] and texts[2] is None
    assert time.monotonic() - began < 15


def refused(group, sends):
    comm = symmpool.Communicator(symmpool.Pool(group, "cpu"), timeout=20)
    good, wrong, sender = np.ones(4), np.ones(8)[::2], comm.rank == 0
    for turn in range(4):
        if comm.rank == 2:
            continue
        refuses = sender == sends
        call = comm.send if sender else comm.recv
        with pytest.raises(symmpool.Error) as caught:
            call(wrong if refuses else good, 1 - comm.rank)
            # A message that was sent already is refused once the other rank has looked.
            end = time.monotonic() + 15
            while time.monotonic() < end:
                comm.synchronize()
                time.sleep(0.001)
        kind = symmpool.InvalidArgumentError if refuses else symmpool.DivergedError
        assert isinstance(caught.value, kind), caught.value
        if not refuses:
            assert "declined its own" in str(caught.value)
            assert caught.value.ranks == (1 - comm.rank,)
        call(np.full(4, float(turn)) if sender else good, 1 - comm.rank)
        assert sender or (good == turn).all()
    return True


@pytest.mark.parametrize("sends", [True, False])
def test_a_call_that_its_own_rank_refuses_fails_on_the_other(sends):
    assert values(3, refused, sends) == [True] * 3


def named_as_torch_does(group):
    comm = symmpool.Communicator(symmpool.Pool(group, "cpu"), timeout=20)
    other, there = 1 - comm.rank, np.zeros(3)
    comm.send(np.full(3, 1.0), dst=other)
    comm.recv(there, src=other)
    return there.tolist()


def test_ranks_of_messages_have_the_names_of_torch():
    assert values(2, named_as_torch_does) == [[1.0] * 3] * 2


def nobody_comes(group, sends):
    comm = symmpool.Communicator(symmpool.Pool(group, "cpu"), timeout=0.5)
    if comm.rank == 1:
        # It lives, and does nothing.
        comm.wait(0, timeout=20)
        return None
    with pytest.raises(symmpool.TimeoutError, match="rank 1 in " + ("send" if sends else "recv")) as caught:
        while True:
            if sends:
                comm.send(np.ones(1000), 1)
            else:
                comm.recv(np.ones(1000), 1)
    return caught.value.ranks


@pytest.mark.parametrize("sends", [False, True])
def test_a_peer_that_does_not_come_is_named(sends):
    [first, second] = run(2, nobody_comes, sends)
    assert first.value == (1,), first
    # The other rank gets an error that says that the communicator has failed.
    assert second.error is not None or second.value is None


def nonsense(group):
    comm = symmpool.Communicator(symmpool.Pool(group, "cpu"), timeout=20)
    good, me = np.ones(4), comm.rank
    for call, named in [
        (lambda: comm.send(good, me), "itself"),
        (lambda: comm.recv(good, me), "itself"),
        (lambda: comm.send(good, 2), "there are 2 ranks"),
        (lambda: comm.send(good, -1), "dst: -1"),
        (lambda: comm.recv(good, src="0"), "src"),
        (lambda: comm.send(good), "'dst'"),
        (lambda: comm.recv(good), "'src'"),
        (lambda: comm.send(good[::2], 1 - me), "tensor"),
        (lambda: comm.recv(np.broadcast_to(good, (2, 4)), 1 - me), "tensor"),
    ]:
        with pytest.raises((symmpool.InvalidArgumentError, TypeError), match=named):
            call()
    # A message that both ranks refused is over, and the communicator stays usable.
    comm.send(good, 1 - me)
    comm.recv(good, 1 - me)
    comm.barrier()
    return True


def test_what_cannot_be_sent_is_refused_at_once():
    assert values(2, nonsense) == [True, True]
