"""Ctrl-C while a collective waits for other ranks, in host memory."""

import os
import signal
import threading
import time

import numpy as np
import pytest
from ranks import run

import symmpool


def interrupted(call):
    """Returns the cause of the error that Ctrl-C raises in the middle of a call, and after how many
    seconds."""
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt) as raised:
        call()
    cause = raised.value.__cause__
    return type(cause).__name__, str(cause), time.monotonic() - started - 0.5


CALLS = {
    "barrier": lambda comm: comm.barrier(),
    "all_reduce": lambda comm: comm.all_reduce(np.ones(1000)),
    "recv": lambda comm: comm.recv(np.ones(4), 1),
}


def alone(group, call):
    comm = symmpool.Communicator(symmpool.Pool(group, "cpu"), timeout=300)
    if comm.rank == 0:
        found = interrupted(lambda: CALLS[call](comm))
        return *found, isinstance(comm.failure, symmpool.InvalidStateError)
    time.sleep(2)
    with pytest.raises(symmpool.PeerLostError) as raised:
        comm.barrier()
    return raised.value.ranks, str(raised.value)


@pytest.mark.parametrize("call", CALLS)
def test_ctrl_c_ends_a_wait_and_the_other_ranks_hear_who_left(call):
    zero, *others = run(3, alone, call)
    assert zero.error is None, zero.error
    kind, text, seconds, closed = zero.value
    assert kind == "InvalidStateError" and seconds < 1.5 and closed
    assert "interrupted while waiting for rank 1" in text and call in text, text
    for other in others:
        assert other.error is None, other.error
        ranks, text = other.value
        assert ranks == (0,) and "interrupted" in text, text


def on_a_channel(group):
    comm = symmpool.Communicator(symmpool.Pool(group, "cpu"), timeout=300)
    found = interrupted(lambda: comm.wait(1, timeout=60)) if comm.rank == 0 else None
    # A wait on a channel closes nothing.
    comm.barrier()
    return found


def test_ctrl_c_ends_a_wait_on_a_channel_and_the_communicator_stays_usable():
    zero, one = run(2, on_a_channel)
    assert zero.error is None and one.error is None, (zero.error, one.error)
    kind, text, seconds = zero.value
    assert kind == "InvalidStateError" and seconds < 1.5 and "signal of rank 1" in text


STOPS = {"KeyboardInterrupt": KeyboardInterrupt, "SystemExit": SystemExit}


def in_a_selector(group, stop):
    comm = symmpool.Communicator(symmpool.Pool(group, "cpu"), timeout=60)

    def choose(*call):
        if comm.rank == 0 and stop == "SystemExit":
            raise SystemExit(3)
        if comm.rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
        return None

    comm.select("all_reduce", choose)
    started = time.monotonic()
    with pytest.raises(STOPS[stop] if comm.rank == 0 else symmpool.Error) as raised:
        comm.all_reduce(np.ones(4))
    seconds = time.monotonic() - started
    comm.select("all_reduce", None)
    # The call was refused as one with wrong arguments is: all have made as many, and go on.
    total = np.ones(4)
    comm.all_reduce(total)
    return str(raised.value.__cause__ or raised.value), seconds, total.tolist(), comm.failure


@pytest.mark.parametrize("stop", STOPS)
def test_what_ends_a_program_goes_through_a_selector_and_the_other_ranks_hear_of_it(stop):
    zero, *others = run(3, in_a_selector, stop)
    for rank in (zero, *others):
        assert rank.error is None, rank.error
        text, seconds, total, failure = rank.value
        assert seconds < 10 and total == [3.0] * 4 and failure is None, rank.value
    assert stop in zero.value[0], zero.value
    assert all("rank 0" in other.value[0] for other in others), others


class Alarm(Exception):
    pass


def behind_others(group, stop):
    """A synchronous call waits for those that were begun before it, and ends by a signal. What follows is in
    order all the same."""
    pool = symmpool.Pool(group, "cpu")
    me, kind = pool.rank, {"alarm": Alarm, "ctrl-c": KeyboardInterrupt}[stop]

    def ring(*_):
        raise kind

    symmpool.barrier(pool)
    signal.signal(signal.SIGALRM, ring)
    found, raised = [], None
    for _ in range(3):
        # The other ranks are late, so that the calls that were begun wait for them in a thread.
        if me != 0:
            time.sleep(0.6)
        begun = [np.full(8, (me + 1.0) * 10 ** (at + 3)) for at in range(3)]
        works = [symmpool.all_reduce(x, group=pool, async_op=True) for x in begun]
        x = np.full(8, 100.0)
        if me == 0:
            time.sleep(0.05)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            symmpool.all_reduce(x, group=pool)
        except (Alarm, KeyboardInterrupt, symmpool.DivergedError) as error:
            raised = type(error).__name__
        later = [np.full(8, (me + 1.0) * 10**at) for at in range(3)]
        for each in later:
            symmpool.all_reduce(each, group=pool)
        for work in works:
            work.wait()
        found.append(([each[0] for each in (*later, *begun)], raised, x.tolist() == [100.0] * 8))
    return found


@pytest.mark.parametrize("stop", ["alarm", "ctrl-c"])
def test_a_wait_for_earlier_calls_that_a_signal_ends_leaves_the_order_of_calls(stop):
    zero, one = run(2, behind_others, stop)
    assert zero.error is None and one.error is None, (zero.error, one.error)
    sums = [3.0 * 10**at for at in range(6)]
    own = {"alarm": "Alarm", "ctrl-c": "KeyboardInterrupt"}[stop]
    assert zero.value == [(sums, own, True)] * 3, zero.value
    assert one.value == [(sums, "DivergedError", True)] * 3, one.value
