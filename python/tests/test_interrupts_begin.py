"""Ctrl-C while a call with `async_op=True` is begun: whether or not it was begun, nothing hangs and later
calls come behind it."""

import faulthandler
import gc
import threading
import time
import weakref

import pytest
from interruptions import interrupted_everywhere

import symmpool
from symmpool.communicators.entry import CommunicatorEntry

MODULES = ("symmpool.communicators.entry", "symmpool.communicators.host_work")


@pytest.fixture(autouse=True)
def limited():
    faulthandler.dump_traceback_later(100, exit=True)
    yield
    # Communicators that are gone leave no thread.
    end = time.monotonic() + 10
    while any(each.name == "symmpool collectives" for each in threading.enumerate()):
        gc.collect()
        assert time.monotonic() < end, "a thread is still there"
        time.sleep(0.01)
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def pool(tmp_path):
    return symmpool.Pool(symmpool.Group(0, 1, f"file://{tmp_path}/store"), "cpu")


class Silent:
    def __init__(self, bell):
        self.bell, self.wait = bell, bell.wait

    def ring(self):
        pass

    answer = ring


def begun(entry, made, name, seconds=0.0):
    def call():
        time.sleep(seconds)
        made.append(name)

    return entry.begin(call, (), [])


def directly(entry, made, name):
    entry.run(lambda: made.append(name), (), [], False, lambda: ((), None))


@pytest.mark.parametrize("before", ["nothing", "idle", "behind another"])
def test_ctrl_c_while_a_call_is_begun_leaves_the_order_of_calls(pool, before):
    def prepare():
        entry, made = CommunicatorEntry(pool), []
        if before != "nothing":
            begun(entry, made, "earlier").wait()
        if before == "behind another":
            begun(entry, made, "slow", 0.02)
        return entry, made

    places = []
    for (entry, made), work, place in interrupted_everywhere(
        prepare, lambda given: begun(*given, "begun", 0.002), MODULES
    ):
        places.append(place)
        earlier = {"nothing": [], "idle": ["earlier"], "behind another": ["earlier", "slow"]}[before]
        directly(entry, made, "direct")
        if work is None and "begun" not in made:
            # It was lost, and is not made later.
            time.sleep(0.01)
            assert made == [*earlier, "direct"], (place, made)
        else:
            assert made == [*earlier, "begun", "direct"], (place, made)
        # The entry is as good as before.
        later = begun(entry, made, "later")
        directly(entry, made, "last")
        assert later.is_completed() and made[-2:] == ["later", "last"], (place, made)
    assert len(places) > 5 and places[-1] is None


@pytest.mark.parametrize("waits", ["another call", "wait", "result", "join"])
def test_ctrl_c_while_a_call_is_waited_for_leaves_it_to_be_made_once(pool, waits):
    def prepare():
        entry, made = CommunicatorEntry(pool), []
        begun(entry, made, "earlier").wait()
        # The thread hears of nothing, so that this one makes the calls.
        entry.runner._queue._bell = Silent(entry.runner._queue._bell)
        return entry, made, begun(entry, made, "begun"), begun(entry, made, "second")

    def act(given):
        entry, made, first, second = given
        if waits == "another call":
            return directly(entry, made, "direct")
        return second.wait() if waits == "wait" else second.result() if waits == "result" else second.join()

    for (entry, made, first, second), _, place in interrupted_everywhere(prepare, act, MODULES):
        entry.runner._queue._bell = entry.runner._queue._bell.bell
        directly(entry, made, "after")
        assert [each for each in made if each != "direct"] == ["earlier", "begun", "second", "after"], (
            place,
            made,
        )
        assert first.is_completed() and second.is_completed(), place
        # The thread makes calls as before.
        begun(entry, made, "later").wait(10)
        assert made[-1] == "later", (place, made)


def test_a_call_that_was_begun_when_ctrl_c_came_is_made_though_nobody_waits(pool):
    def prepare():
        entry, made = CommunicatorEntry(pool), []
        begun(entry, made, "earlier").wait()
        time.sleep(0.001)
        return entry, made, begun(entry, made, "slow", 0.01)

    for (entry, made, _), _, place in interrupted_everywhere(
        prepare, lambda given: begun(*given[:2], "begun"), MODULES
    ):
        queue = entry.runner._queue
        end = time.monotonic() + 10
        while queue.waiting and time.monotonic() < end:
            time.sleep(0.001)
        assert not queue.waiting, (place, made)


def test_the_thread_sleeps_when_a_call_was_made_before_its_bell_rang(pool):
    entry, made = CommunicatorEntry(pool), []
    begun(entry, made, "first").wait()
    queue = entry.runner._queue
    # The bell rings as where another thread takes a call between its coming into the queue and the bell.
    queue._bell.ring()
    waits, bell = [], queue._bell

    class Counted:
        ring, answer = bell.ring, bell.answer

        @staticmethod
        def wait():
            waits.append(time.monotonic())
            bell.wait()

    queue._bell = Counted
    time.sleep(0.2)
    assert len(waits) < 10
    begun(entry, made, "second").wait(10)
    assert made == ["first", "second"]


def test_threads_that_begin_and_make_calls_leave_none_behind(pool):
    entry, made = CommunicatorEntry(pool), []
    wrong = []

    def calls(at):
        for number in range(100):
            begun(entry, made, (at, number, 0))
            directly(entry, made, (at, number, 1))
            if (at, number, 0) not in made[:-1]:
                wrong.append((at, number))

    threads = [threading.Thread(target=calls, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and len(made) == 800


def test_what_a_call_was_given_is_not_kept_by_the_order_of_calls(pool):
    class Given:
        pass

    entry, made = CommunicatorEntry(pool), []
    given = Given()
    gone = weakref.ref(given)
    entry.begin(lambda given: made.append(1), (given,), [given]).wait()
    del given
    assert gone() is None
