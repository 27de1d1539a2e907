"""`with pool:` on one GPU, with the real torch: what PyTorch tests of a MemPool with an allocator of
its own, and what a pool adds."""

import gc
import random
import sys
import threading
import time

import pytest
from one_process import run_program

import symmpool

MIB = 1 << 20


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def pool(torch):
    group = symmpool.Group.in_process(1, timeout=60)[0]
    return symmpool.Pool(group, "cuda:0")


def live(pool):
    return pool._scope().slot.live


def python(program):
    return run_program(program)[0]


def test_tensors_made_in_a_scope_are_windows_when_it_ends(torch, pool):
    outside = torch.empty(MIB, device="cuda")
    with pool:
        small = torch.randn(10, device="cuda")
        large = torch.randn(30 * MIB, device="cuda")
        assert pool.is_commit_due
    assert pool.is_window(small) and pool.is_window(large) and not pool.is_window(outside)
    assert not pool.is_commit_due and pool.stats()["commits"] == 1
    assert torch.equal(large.cpu(), large.clone().cpu())
    after = torch.empty(MIB, device="cuda")
    assert not pool.is_window(after)


def test_a_scope_in_which_nothing_grew_costs_little(torch, pool):
    mempool = torch.cuda.MemPool()

    def enter(context):
        best = float("inf")
        for _ in range(20):
            begin = time.perf_counter()
            for _ in range(500):
                with context():
                    pass
            best = min(best, (time.perf_counter() - begin) / 500 * 1e6)
        return best

    with pool:
        pass
    # In turns, so that what else runs on the machine slows both.
    both = [(enter(lambda: pool), enter(lambda: torch.cuda.use_mem_pool(mempool))) for _ in range(3)]
    ours, theirs = map(min, zip(*both, strict=True))
    print(f"\nscope: with pool {ours:.2f} us, torch.cuda.use_mem_pool {theirs:.2f} us")
    assert ours <= theirs + 1.0
    assert pool.stats()["commits"] == 0


def test_segments_and_ids_show_in_torchs_snapshot(torch, pool):
    with pool:
        tensor = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    mempool = pool._scope().mempool
    segments = [s for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] == mempool.id]
    assert len(segments) == 1
    start, size = segments[0]["address"], segments[0]["total_size"]
    assert start <= tensor.data_ptr() < start + size


def test_addresses_order_as_the_lane_does_however_memory_is_freed(torch, pool):
    """The order in which torch frees says nothing about where the next tensor goes."""

    def program(seed):
        # Sizes come in the same order; what is freed between goes in an order of its own.
        sizes, order = random.Random(7), random.Random(seed)
        group = symmpool.Group.in_process(1, timeout=60)[0]
        mine = symmpool.Pool(group, "cuda:0")
        offsets, base = [], None
        for _ in range(5):
            with mine:
                tensors = [
                    torch.empty(sizes.randrange(1, 40 * MIB), dtype=torch.uint8, device="cuda")
                    for _ in range(20)
                ]
            base = base or tensors[0].data_ptr()
            offsets += [t.data_ptr() - base for t in tensors]
            order.shuffle(tensors)
            while tensors:
                tensors.pop()
        return offsets

    first = program(1)
    # Holes elsewhere in the address space do not matter either.
    holes = [torch.empty(random.randrange(1, 64 * MIB), dtype=torch.uint8, device="cuda") for _ in range(50)]
    del holes[::2]
    assert program(2) == first


def test_threads_in_one_order(torch, pool):
    """Threads that take turns in one order get what one thread gets."""
    addresses = []

    def body(turn, after):
        turn.wait()
        with pool:
            addresses.append(torch.empty(5 * MIB, device="cuda"))
        after.set()

    turns = [threading.Event() for _ in range(5)]
    threads = [threading.Thread(target=body, args=pair) for pair in zip(turns, turns[1:])]
    for thread in reversed(threads):
        thread.start()
    turns[0].set()
    for thread in threads:
        thread.join()
    places = [t.data_ptr() for t in addresses]
    assert places == sorted(places) and all(pool.is_window(t) for t in addresses)


def test_threads_in_scopes_by_turns(torch, pool):
    """Their order is nobody's, so no symmetry is promised; what each makes is the pool's all the same,
    and what others make meanwhile is not. (torch has a MemPool in one thread's hands.)"""
    found, outside, start, turn = [], [], threading.Barrier(6), threading.Lock()

    def body(number):
        start.wait()
        for step in range(20):
            outside.append(torch.empty(1 + step * 1000, device="cuda"))
            with turn, pool:
                mine = torch.full((1 + step * 1000,), float(number), device="cuda")
            found.append((number, mine))

    threads = [threading.Thread(target=body, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(found) == 120 and not any(pool.holds(t) for t in outside)
    assert all(pool.is_window(t) and bool((t == number).all()) for number, t in found)


def test_scopes_within_scopes_of_one_pool(torch, pool):
    with pool:
        a = torch.empty(MIB, device="cuda")
        with pool:
            b = torch.empty(MIB, device="cuda")
        c = torch.empty(MIB, device="cuda")
    assert all(pool.is_window(t) for t in (a, b, c))
    assert not pool.is_window(torch.empty(MIB, device="cuda"))
    other = symmpool.Pool(symmpool.Group.in_process(1, timeout=60)[0], "cuda:0")
    with pool, other:
        d = torch.empty(MIB, device="cuda")
        with pytest.raises(symmpool.InvalidStateError, match="Leave the inner scope first"), pool:
            pass
    assert other.is_window(d) and not pool.holds(d)


def test_a_mempool_outlives_its_pool_and_gets_no_more_memory(torch):
    pool = symmpool.Pool(symmpool.Group.in_process(1, timeout=60)[0], "cuda:0")
    with pool:
        tensor = torch.full((MIB,), 7.0, device="cuda")
    scope = pool._scope()
    mempool, slot = scope.mempool, scope.slot
    del pool, scope, slot
    gc.collect()
    with pytest.raises(torch.OutOfMemoryError), torch.cuda.use_mem_pool(mempool):
        torch.empty(1 << 30, device="cuda")
    assert bool((tensor == 7).all())
    del mempool, tensor
    gc.collect()
    torch.cuda.empty_cache()


def test_what_is_free_in_a_pool_serves_nobody_else_when_memory_runs_out(torch, pool):
    with pool:
        torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
    # Also after torch has given back what it could.
    with pool:
        again = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    assert pool.is_window(again)
    assert not pool.is_window(torch.empty(64 * MIB, dtype=torch.uint8, device="cuda"))


def test_another_thread_is_not_in_the_scope(torch, pool):
    found = []
    with pool:
        thread = threading.Thread(target=lambda: found.append(torch.empty(MIB, device="cuda")))
        thread.start()
        thread.join()
    assert not pool.is_window(found[0])


def test_a_tensor_outlives_its_pool(torch, pool):
    with pool:
        tensor = torch.full((MIB,), 7.0, device="cuda")
    del pool
    gc.collect()
    torch.cuda.empty_cache()
    assert bool((tensor == 7).all())
    del tensor
    torch.cuda.empty_cache()
    group = symmpool.Group.in_process(1, timeout=60)[0]
    again = symmpool.Pool(group, "cuda:0")
    with again:
        assert torch.empty(MIB, device="cuda").numel() == MIB


def test_memory_comes_back_when_a_pool_goes(torch):
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        group = symmpool.Group.in_process(1, timeout=60)[0]
        pool = symmpool.Pool(group, "cuda:0")
        with pool:
            tensor = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        del tensor, pool
        gc.collect()
    assert before - torch.cuda.mem_get_info()[0] < 256 * MIB


def test_out_of_memory_is_torchs_error_with_our_reason(torch, pool):
    with pytest.raises(torch.OutOfMemoryError) as raised, pool:
        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
    if sys.version_info >= (3, 11):
        assert any("symmpool" in note for note in raised.value.__notes__)
    with pool:
        assert torch.ones(10, device="cuda").sum() == 10


def test_an_exception_leaves_the_scope(torch, pool):
    with pytest.raises(ZeroDivisionError), pool:
        inside = torch.empty(MIB, device="cuda")
        raise ZeroDivisionError
    assert pool.is_window(inside)
    assert not pool.is_window(torch.empty(MIB, device="cuda"))


def test_two_pools_side_by_side(torch, pool):
    other = symmpool.Pool(symmpool.Group.in_process(1, timeout=60)[0], "cuda:0")
    with pool:
        a = torch.empty(MIB, device="cuda")
        with other:
            b = torch.empty(MIB, device="cuda")
        c = torch.empty(MIB, device="cuda")
    assert [pool.is_window(t) for t in (a, b, c)] == [True, False, True]
    assert [other.is_window(t) for t in (a, b, c)] == [False, True, False]


def test_a_capture_may_grow_the_pool(torch, pool):
    x = torch.ones(MIB, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with symmpool.graph(graph), pool:
        y = torch.empty(40 * MIB, device="cuda")
        y.fill_(3)
        x.add_(1)
    assert not pool.is_commit_due and pool.stats()["commits"] == 1
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert pool.is_window(y) and bool((y == 3).all()) and bool((x == 3).all())


def test_collectives_in_place_on_what_a_scope_made(torch, pool):
    comm = symmpool.Communicator(pool)
    with pool:
        x = torch.ones(MIB, device="cuda")
    comm.all_reduce(x)
    torch.cuda.synchronize()
    assert bool((x == 1).all())


def test_record_stream_and_empty_cache_inside(torch, pool):
    side = torch.cuda.Stream()
    with pool:
        x = torch.ones(8 * MIB, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        x.record_stream(side)
        del x
        torch.cuda.synchronize()
        z = torch.zeros(8 * MIB, device="cuda")
    torch.cuda.empty_cache()
    assert bool((y == 2).all()) and bool((z == 0).all())


@pytest.mark.parametrize(
    "end",
    ["", "raise ValueError('an error of the program')", "import os; os.kill(os.getpid(), 2)"],
    ids=["falls off the end", "an exception in a scope", "Ctrl-C in a scope"],
)
def test_leaving_without_destroying_anything(torch, end):
    program = f"""
        import symmpool, sys, torch
        pool = symmpool.Pool(symmpool.Group.in_process(1)[0], "cuda:0")
        comm = symmpool.Communicator(pool)
        kept = []
        try:
            with pool:
                kept.append(torch.ones(1 << 20, device="cuda"))
                {end or "pass"}
        except (ValueError, KeyboardInterrupt) as error:
            print(type(error).__name__)
        comm.all_reduce(kept[0])
        print("ended", float(kept[0][0]))
    """
    observed = python(program)
    assert "ended 1.0" in observed


def test_a_forked_child_gets_an_error_and_not_the_parents_memory(torch):
    program = """
        import os, symmpool, torch
        pool = symmpool.Pool(symmpool.Group.in_process(1)[0], "cuda:0")
        with pool:
            x = torch.ones(1 << 20, device="cuda")
        child = os.fork()
        if child == 0:
            try:
                with pool:
                    torch.ones(1 << 24, device="cuda")
            except RuntimeError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        print("ended", float(x.sum()))
    """
    assert "ended 1048576.0" in python(program)


def test_a_collective_captured_over_fresh_memory_runs_after_the_commit(torch, pool):
    comm = symmpool.Communicator(pool)
    graph = torch.cuda.CUDAGraph()
    with symmpool.graph(graph):
        with pool:
            x = torch.full((200 * MIB,), 2.0, device="cuda")
        comm.all_reduce(x)
    assert pool.is_window(x) and not pool.is_commit_due
    for _ in range(2):
        graph.replay()
    comm.synchronize() if hasattr(comm, "synchronize") else torch.cuda.synchronize()
    assert bool((x == 2).all())
