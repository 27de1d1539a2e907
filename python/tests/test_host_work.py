"""Who makes calls with `async_op=True` on the CPU: the thread, or the program that waits for them."""

import threading
import time

import pytest

from symmpool.communicators.host_work import Worker
from symmpool.errors import InvalidStateError


class Owner:
    pass


@pytest.fixture
def owner():
    return Owner()


def here(made, number):
    made.append((number, threading.get_ident()))


def test_who_waits_at_once_makes_the_call_and_those_before_it_in_order(owner):
    worker, made, me = Worker(owner), [], threading.get_ident()
    for round in range(200):
        works = [worker.submit(here, (made, 3 * round + nth), []) for nth in range(3)]
        assert works[-1].wait() and all(work.is_success() for work in works)
        works[0].wait()
    assert [number for number, _ in made] == list(range(600))
    # The thread may have been faster now and then.
    assert sum(maker == me for _, maker in made) > 200


def test_what_nobody_waits_for_is_made_soon_and_by_the_thread(owner):
    worker, made, me = Worker(owner), [], threading.get_ident()
    works = [worker.submit(here, (made, number), []) for number in range(50)]
    end = time.monotonic() + 20
    while not works[-1].is_completed() and time.monotonic() < end:
        time.sleep(0.001)
    assert [number for number, _ in made] == list(range(50))
    assert all(maker != me for _, maker in made)


def test_calls_that_go_by_copies_and_waits_with_a_timeout_are_left_to_the_thread(owner):
    worker, made, me = Worker(owner), [], threading.get_ident()

    def prepared():
        here(made, 0)
        return (made, 1), lambda: here(made, 2)

    worker.submit(here, (None, None), [], prepared).wait()
    worker.submit(here, (made, 3), []).wait(30)
    assert [number for number, _ in made] == [0, 1, 2, 3]
    assert all(maker != me for _, maker in made)


def test_ctrl_c_right_before_a_call_leaves_it_to_be_made_once(owner):
    class Once:
        """A bell whose answer is interrupted once."""

        def __init__(self, bell):
            self.bell, self.is_over = bell, False
            self.ring, self.wait = bell.ring, bell.wait

        def answer(self):
            self.bell.answer()
            if not self.is_over and threading.current_thread() is threading.main_thread():
                self.is_over = True
                raise KeyboardInterrupt

    worker, made = Worker(owner), []
    calls = worker._queue
    worker.submit(here, (made, 0), []).wait()
    calls._bell = Once(calls._bell)
    stopped = 0
    for number in range(1, 40):
        work = worker.submit(here, (made, number), [])
        try:
            work.wait()
        except KeyboardInterrupt:
            stopped += 1
        worker.submit(here, (made, -number), []).wait()
    assert [number for number, _ in made] == [0, *(each for n in range(1, 40) for each in (n, -n))]
    assert stopped <= 1


def test_threads_that_wait_at_once_make_each_call_once(owner):
    worker, made = Worker(owner), []
    works = [worker.submit(here, (made, number), []) for number in range(400)]
    threads = [threading.Thread(target=lambda: [work.wait() for work in works]) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert [number for number, _ in made] == list(range(400))


def test_ctrl_c_in_a_call_that_the_program_makes_ends_it_and_later_calls_are_made(owner):
    worker, made = Worker(owner), []

    def stop():
        # Only where the program makes the call: no signal is handled in the thread.
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        raise ValueError("the thread was faster")

    stopped = None
    for _ in range(100):
        stopped = worker.submit(stop, (), [])
        try:
            stopped.wait()
        except KeyboardInterrupt:
            break
        except ValueError:
            continue
    assert isinstance(stopped.exception(), InvalidStateError) and stopped.is_completed()
    with pytest.raises(InvalidStateError, match="KeyboardInterrupt"):
        stopped.wait()
    assert worker.submit(here, (made, 1), []).wait() and len(made) == 1


def test_an_error_is_raised_where_the_program_waits(owner):
    worker = Worker(owner)

    def fails():
        raise ValueError("no")

    for _ in range(20):
        with pytest.raises(ValueError, match="no"):
            worker.submit(fails, (), []).wait()
