"""`with pool:`, and the functions behind it that torch's allocator calls.

There is no torch here: what it does in a scope is done by a stand-in that allocates through the
same functions. The real one is in python/tests/gpu.
"""

import contextlib
import ctypes
import os
import sys
import threading
import types

import pytest
from ranks import run, values

import symmpool
from symmpool import _symmpool
from symmpool.memory import scope

MIB = 1 << 20


def functions(slot):
    """A slot's two functions, found by name as torch finds them."""
    library = ctypes.CDLL(_symmpool.__file__)
    alloc, free = (getattr(library, name) for name in slot.names)
    alloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    alloc.restype = ctypes.c_void_p
    free.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    free.restype = None
    return (lambda size, device=0: alloc(size, device, None)), (lambda at: free(at, 0, 0, None))


class OutOfMemory(RuntimeError):
    pass


class Standin:
    """Stand-in for the parts of torch that a scope needs, on memory of the CPU."""

    def __init__(self):
        self.capturing = False
        self.active = threading.local()
        self.entered = 0
        self.cuda = types.SimpleNamespace(
            MemPool=self.MemPool,
            device=contextlib.nullcontext,
            is_current_stream_capturing=lambda: self.capturing,
            memory=types.SimpleNamespace(CUDAPluggableAllocator=self.Allocator),
            use_mem_pool=self.use_mem_pool,
        )

    class Allocator:
        def __init__(self, library, alloc, free):
            found = ctypes.CDLL(library)
            self.alloc, self.free = getattr(found, alloc), getattr(found, free)
            self.alloc.restype = ctypes.c_void_p
            self.alloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
            self.free.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]

        def allocator(self):
            return self

    class MemPool:
        id = (0, 7)

        def __init__(self, allocator):
            self.allocator, self.segments = allocator, []

        def __del__(self):
            for address in self.segments:
                self.allocator.free(address, 0, 0, None)

    @contextlib.contextmanager
    def use_mem_pool(self, mempool, device):
        self.entered += 1
        before, self.active.pool = getattr(self.active, "pool", None), mempool
        try:
            yield
        finally:
            self.entered -= 1
            self.active.pool = before

    def empty(self, bytes):
        """A segment, as torch asks for one."""
        found = self.active.pool.allocator.alloc(bytes, 0, None)
        if found is None:
            raise OutOfMemory(f"{bytes} bytes")
        self.active.pool.segments.append(found)
        return found


@contextlib.contextmanager
def within(scope, pool):
    scope.enter()
    try:
        yield
    except BaseException as error:
        scope.leave(pool, type(error), error)
        raise
    else:
        scope.leave(pool, None, None)


@pytest.fixture
def pool():
    group = symmpool.Group.in_process(1, timeout=20)[0]
    return symmpool.Pool(group, "cpu")


@pytest.fixture(autouse=True)
def fresh_allocators(monkeypatch):
    """The stand-in's allocators are not kept for a slot's later users."""
    monkeypatch.setattr(scope, "_allocators", {})
    monkeypatch.setattr(scope, "_postponed", [])


def test_torchs_scope_is_entered_and_left_by_its_own_steps():
    said = []

    def plain(name):
        said.append(f"into {name}")
        try:
            yield
        finally:
            said.append(f"out of {name}")

    class Other:
        def __init__(self, name):
            self.steps = plain(name)

        def __enter__(self):
            next(self.steps)

        def __exit__(self, *_):
            next(self.steps, None)

    made = contextlib.contextmanager(plain)
    for manager, steps in [(made, plain), (Other, None)]:
        found = scope._steps_of(manager)
        assert found is (steps or found)
        inside = found("it")
        assert said == []
        next(inside)
        assert said == ["into it"]
        assert next(inside, None) is None and said == ["into it", "out of it"]
        said.clear()
    # torch's is of the quick kind.
    torch = pytest.importorskip("torch")
    assert scope._steps_of(torch.cuda.use_mem_pool) is torch.cuda.use_mem_pool.__wrapped__


def test_a_scope_makes_the_calls_of_torchs_own_without_its_context_manager(pool, monkeypatch):
    torch = pytest.importorskip("torch")
    # Where this fails torch's scope has other steps, which its context manager makes then.
    calls = scope._calls_of(torch)
    assert [call.__name__ for call in calls] == list(scope._CALLS)

    def other(mempool, device):
        torch._cuda_prepare(mempool)
        yield

    for manager in (contextlib.contextmanager(other), Standin().use_mem_pool, len):
        fake = types.SimpleNamespace(cuda=types.SimpleNamespace(use_mem_pool=manager))
        assert scope._calls_of(fake) is None

    standin, said = Standin(), []
    calls = [lambda *given, name=name: said.append((name, *given)) for name in ("begin", "end", "release")]
    monkeypatch.setattr(scope, "_calls_of", lambda _: calls)
    inside = scope.Scope(pool, standin)
    with within(inside, pool), within(inside, pool):
        assert said == [("begin", 0, (0, 7))]
    assert said[1:] == [("end", 0, (0, 7)), ("release", 0, (0, 7))] and standin.entered == 0
    calls[0] = lambda *_: (_ for _ in ()).throw(RuntimeError("no such MemPool"))
    inside = scope.Scope(pool, standin)
    with pytest.raises(RuntimeError, match="no such MemPool"), within(inside, pool):
        pass
    assert not scope._threads.scopes


def test_in_a_capture_a_scope_is_torchs_own_where_that_keeps_the_memory(pool, monkeypatch):
    """torch 2.15 has the graph that is captured keep the MemPool."""
    standin, said = Standin(), []
    calls = [lambda *given, name=name: said.append(name) for name in ("begin", "end", "release")]
    monkeypatch.setattr(scope, "_calls_of", lambda _: calls)
    monkeypatch.setattr(scope, "_names_in", lambda _: {"is_current_stream_capturing", "id"})
    inside = scope.Scope(pool, standin)
    with within(inside, pool):
        assert said == ["begin"] and standin.entered == 0
    standin.capturing = True
    with within(inside, pool):
        assert standin.entered == 1
    assert said == ["begin", "end", "release"]


def test_on_the_cpu_a_scope_says_what_to_do_instead(pool):
    with pytest.raises(symmpool.UnsupportedError, match="pool.empty"), pool:
        pass
    with pytest.raises(symmpool.UnsupportedError, match="pool.zeros"), symmpool.use_pool(pool):
        pass
    assert not pool.is_commit_due


def test_zeros_and_reserve(pool):
    pytest.importorskip("numpy")
    pool.reserve(100 * MIB)
    assert pool.stats()["reserved"] >= 100 * MIB and pool.is_commit_due
    pool.commit()
    x = pool.zeros((3, 5), __import__("numpy").float32)
    assert x.shape == (3, 5) and not x.any()
    assert not pool.is_commit_due, "what was reserved is used"
    with pytest.raises(symmpool.OutOfMemoryError):
        pool.reserve(1 << 60)


def test_every_pair_of_functions_is_exported_by_the_extension():
    library = ctypes.CDLL(_symmpool.__file__)
    for index in range(64):
        assert hasattr(library, f"symmpool_alloc_{index}") and hasattr(library, f"symmpool_free_{index}")
    # The C API too, of the same state.
    library.symmpool_version.restype = ctypes.c_char_p
    assert library.symmpool_version().decode() == symmpool.__version__


def test_a_slot_serves_the_pools_lane(pool):
    slot = symmpool.Slot(pool)
    alloc, free = functions(slot)
    assert (
        slot.addresses[0]
        == ctypes.cast(getattr(ctypes.CDLL(_symmpool.__file__), slot.names[0]), ctypes.c_void_p).value
    )
    first, second = alloc(2 * MIB), alloc(20 * MIB)
    assert second - first == 2 * MIB and slot.live == 2
    assert pool.commit()["windows_added"] > 0
    free(second)
    free(first)
    assert slot.live == 0 and pool.commit()["blocks_returned"] == 2
    assert alloc(2 * MIB) == first
    free(first)
    assert slot.take_failure() is None
    assert alloc(-5) is None
    assert isinstance(slot.take_failure(), symmpool.InvalidArgumentError)
    assert slot.take_failure() is None
    free(12345)
    assert hex(12345) in str(slot.take_failure())


def test_memory_outlives_the_pool_and_everything_else(pool):
    slot = symmpool.Slot(pool)
    alloc, free = functions(slot)
    block = alloc(4096)
    ctypes.memset(block, 7, 4096)
    del slot, pool
    assert ctypes.string_at(block, 4096) == b"\7" * 4096
    assert alloc(1) is None, "closed"
    free(block)
    free(block)


def test_a_scope_commits_when_the_pool_has_grown_and_only_then(pool):
    torch = Standin()
    inside = scope.Scope(pool, torch)
    with within(inside, pool):
        torch.empty(2 * MIB)
        assert pool.is_commit_due
    assert pool.stats()["commits"] == 1 and not pool.is_commit_due
    with within(inside, pool), within(inside, pool):
        pass
    with pytest.raises(AttributeError), within(inside, pool):
        raise AttributeError
    assert pool.stats()["commits"] == 1 and torch.entered == 0


def test_a_scope_that_is_left_for_a_while_does_not_commit(pool):
    torch = Standin()
    inside = scope.Scope(pool, torch)
    with within(inside, pool):
        torch.empty(2 * MIB)
        inside.leave(pool, None, None, False)
        assert torch.entered == 0 and pool.is_commit_due and pool.stats()["commits"] == 0
        inside.enter()
    assert pool.stats()["commits"] == 1 and not pool.is_commit_due


def test_an_exception_goes_on_and_the_due_commit_happens(pool):
    torch = Standin()
    inside = scope.Scope(pool, torch)
    with pytest.raises(ZeroDivisionError), within(inside, pool):
        torch.empty(2 * MIB)
        raise ZeroDivisionError
    assert pool.stats()["commits"] == 1 and torch.entered == 0
    for stop in (KeyboardInterrupt, SystemExit):
        with pytest.raises(stop), within(inside, pool):
            torch.empty(200 * MIB)
            raise stop
        assert pool.is_commit_due and torch.entered == 0
        pool.commit()


def test_out_of_memory_says_why(pool):
    torch = Standin()
    inside = scope.Scope(pool, torch)
    with pytest.raises(OutOfMemory) as raised, within(inside, pool):
        torch.empty(1 << 60)
    notes = getattr(raised.value, "__notes__", ["range"])
    assert any("range" in note for note in notes), notes


def test_while_capturing_the_commit_is_put_off(pool):
    torch = Standin()
    inside = scope.Scope(pool, torch)
    torch.capturing = True
    with within(inside, pool):
        torch.empty(2 * MIB)
    assert pool.is_commit_due and pool.stats()["commits"] == 0
    torch.capturing = False
    symmpool.commit_postponed()
    assert not pool.is_commit_due and pool.stats()["commits"] == 1
    symmpool.commit_postponed()
    assert pool.stats()["commits"] == 1


def test_threads_have_scopes_of_their_own(pool):
    torch = Standin()
    inside = scope.Scope(pool, torch)
    seen = []
    with within(inside, pool):
        thread = threading.Thread(target=lambda: seen.append(getattr(torch.active, "pool", None)))
        thread.start()
        thread.join()
    assert seen == [None]


def two_pools(group):
    torch = Standin()
    pools = [symmpool.Pool(group, "cpu") for _ in range(2)]
    scopes = [scope.Scope(pool, torch) for pool in pools]
    found = []
    for _ in range(3):
        for pool, inside in zip(pools, scopes, strict=True):
            with within(inside, pool):
                segment = torch.empty(2 * MIB)
                ctypes.memset(segment, pool.rank, 8)
            found.append(segment)
    slots = [inside.slot.index for inside in scopes]
    assert slots[0] != slots[1]
    return [pool.stats()["commits"] for pool in pools], len(set(found))


def test_two_pools_on_one_group_do_not_meet():
    assert values(2, two_pools) == [([1, 1], 6)] * 2


def one_rank_raises(group):
    torch = Standin()
    pool = symmpool.Pool(group, "cpu")
    inside = scope.Scope(pool, torch)
    try:
        with within(inside, pool):
            torch.empty(2 * MIB)
            if pool.rank == 1:
                raise ValueError("only here")
            torch.empty(4 * MIB)
    except ValueError as error:
        return "ValueError", getattr(error, "__notes__", ["diverged"])[-1]
    except symmpool.DivergedError as error:
        return "DivergedError", str(error)
    return "nothing", ""


def test_when_one_rank_raises_the_others_hear_of_it_at_once():
    (first, observed), (second, note) = values(2, one_rank_raises)
    assert (first, second) == ("DivergedError", "ValueError")
    assert "diverged" in observed and "diverged" in note


def one_rank_runs_out(group):
    torch = Standin()
    pool = symmpool.Pool(group, "cpu", stride=1 << 30)
    inside = scope.Scope(pool, torch)
    try:
        with within(inside, pool):
            torch.empty((2 * MIB) if pool.rank == 0 else (1 << 50))
    except (OutOfMemory, symmpool.Error) as error:
        return type(error).__name__
    return "nothing"


def test_out_of_memory_on_one_rank_is_an_error_on_all_ranks():
    first, second = values(2, one_rank_runs_out)
    assert second == "OutOfMemory"
    assert first == "OutOfMemoryError"


def leaves_without_a_word(group):
    torch = Standin()
    pool = symmpool.Pool(group, "cpu")
    inside = scope.Scope(pool, torch)
    with within(inside, pool):
        torch.empty(2 * MIB)
    scope.kept = (pool, inside)  # nothing is destroyed before the interpreter is
    return True


def test_leaving_without_destroying_anything_ends_well():
    assert [outcome.status for outcome in run(2, leaves_without_a_word)] == [0, 0]


def test_a_forked_child_is_refused_and_harms_nothing(pool):
    slot = symmpool.Slot(pool)
    alloc, free = functions(slot)
    block = alloc(4096)
    child = os.fork()
    if child == 0:
        refused = alloc(4096) is None and "fork" in str(slot.take_failure())
        free(block)
        os._exit(0 if refused else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert slot.live == 1 and pool.stats()["lanes"]["default"]["allocs"] == 1
    free(block)


def test_scopes_that_are_not_left_in_order_are_refused(pool):
    torch = Standin()
    group = symmpool.Group.in_process(1, timeout=20)[0]
    other = symmpool.Pool(group, "cpu")
    outer, inner = scope.Scope(pool, torch), scope.Scope(other, torch)
    with pytest.raises(symmpool.InvalidStateError, match="not in the scope of symmpool.Pool"):
        outer.leave(pool, None, None)
    outer.enter()
    first = torch.active.pool
    inner.enter()
    torch.empty(2 * MIB)
    with pytest.raises(symmpool.InvalidStateError, match="leave that first"):
        outer.leave(pool, None, None)
    assert torch.entered == 2 and torch.active.pool is inner.mempool
    assert not pool.stats()["commits"] and not other.stats()["commits"]
    inner.leave(other, None, None)
    assert torch.active.pool is first and other.stats()["commits"] == 1
    outer.leave(pool, None, None)
    assert torch.entered == 0
    with pytest.raises(symmpool.InvalidStateError, match="not in the scope"):
        outer.leave(pool, None, None)


def test_a_scope_is_left_by_the_thread_that_entered_it(pool):
    torch = Standin()
    inside = scope.Scope(pool, torch)
    inside.enter()
    found = []

    def leave():
        try:
            inside.leave(pool, None, None)
        except symmpool.InvalidStateError as error:
            found.append(str(error))

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert len(found) == 1 and "in the thread that entered it" in found[0] and torch.entered == 1
    inside.leave(pool, None, None)
    assert torch.entered == 0


class Due:
    """A pool whose commit is due, and ends as the test says."""

    def __init__(self, error=None):
        self.is_commit_due, self.error, self.tries = True, error, 0

    def commit(self):
        self.tries += 1
        if self.error is not None:
            raise self.error
        self.is_commit_due = False


def test_a_postponed_commit_that_fails_keeps_no_other_from_its_own():
    pools = [Due(), Due(symmpool.DivergedError("first")), Due(symmpool.Error("second")), Due()]
    scope._postponed[:] = pools
    with pytest.raises(symmpool.DivergedError, match="first") as raised:
        symmpool.commit_postponed()
    assert [each.tries for each in pools] == [1] * 4 and not scope._postponed
    assert "second" in getattr(raised.value, "__notes__", ["second"])[0]
    stopped = [Due(KeyboardInterrupt()), Due()]
    scope._postponed[:] = stopped
    with pytest.raises(KeyboardInterrupt):
        symmpool.commit_postponed()
    assert scope._postponed == stopped


def test_a_capture_that_fails_ends_in_the_postponed_commits(monkeypatch):
    torch = types.SimpleNamespace(cuda=types.SimpleNamespace(graph=contextlib.nullcontext))
    monkeypatch.setitem(sys.modules, "torch", torch)
    for error, tries in ((None, 1), (ValueError, 1), (KeyboardInterrupt, 0)):
        pool = Due()
        expected = contextlib.nullcontext() if error is None else pytest.raises(error)
        with expected, symmpool.graph():
            scope._postponed[:] = [pool]
            if error is not None:
                raise error
        assert pool.tries == tries, error
    failing = Due(symmpool.DivergedError("elsewhere"))
    with pytest.raises(ValueError, match="the capture") as raised, symmpool.graph():
        scope._postponed[:] = [failing]
        raise ValueError("the capture")
    assert "elsewhere" in getattr(raised.value, "__notes__", ["elsewhere"])[0]
