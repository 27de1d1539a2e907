"""Over torch.distributed's groups and stores, between processes."""

import datetime
import gc
import os
import tempfile
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import run, values

import symmpool
from symmpool.communicators import cache, entry


def begin(group, folder, backend="gloo", timeout=datetime.timedelta(seconds=30)):
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/torch",
        rank=group.rank,
        world_size=group.world,
        timeout=timeout,
    )
    return group.rank, group.world


def over_the_default_group(group, folder):
    me, world = begin(group, folder)
    x = torch.full((8,), me + 1.0)
    symmpool.all_reduce(x)
    right = [x.tolist() == [world * (world + 1) / 2] * 8]
    first, second = symmpool.Pool(device="cpu"), symmpool.Pool(device="cpu")
    for op, expected in [
        (dist.ReduceOp.SUM, sum(range(1, world + 1))),
        (dist.ReduceOp.MAX, world),
        (dist.ReduceOp.MIN, 1),
        (dist.ReduceOp(dist.ReduceOp.AVG), (world + 1) / 2),
        ("prod", 24 if world == 4 else 2),
    ]:
        for pool in (first, second, None):
            y = torch.empty(3) if pool is None else pool.empty(3, torch.float32)
            symmpool.all_reduce(y.fill_(me + 1), op)
            right.append(y.tolist() == [expected] * 3)
    dist.destroy_process_group()
    # A new default group in the same process, in the same store.
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=me, world_size=world)
    z = torch.ones(2)
    symmpool.all_reduce(z)
    right.append(z.tolist() == [world] * 2)
    dist.destroy_process_group()
    return right


@pytest.mark.parametrize("world", [2, 4])
def test_pools_and_calls_follow_the_default_group(world, tmp_path):
    assert values(world, over_the_default_group, str(tmp_path)) == [[True] * 17] * world


def in_sub_groups(group, folder):
    me, world = begin(group, folder)
    odd = dist.new_group([rank for rank in range(world) if rank % 2])
    even = dist.new_group([rank for rank in range(world) if rank % 2 == 0])
    mine = odd if me % 2 else even
    pool = symmpool.Pool(mine, "cpu")
    x = pool.empty(4, torch.int64).fill_(me)
    symmpool.all_reduce(x, group=mine)
    root = torch.full((2,), me)
    symmpool.broadcast(root, 3 if me % 2 else 2, mine)  # a rank of the default group
    last = torch.full((2,), me)
    symmpool.broadcast(last, group=mine, group_src=1)
    other = even if me % 2 else odd
    with warnings.catch_warnings(record=True) as observed:
        warnings.simplefilter("always")
        assert symmpool.all_reduce(x, group=other) is None
        symmpool.barrier(other)
    try:
        symmpool.Pool(other, "cpu")
        refused = False
    except symmpool.InvalidArgumentError as error:
        refused = "no member" in str(error)
    everyone = torch.ones(1)
    symmpool.all_reduce(everyone)
    dist.destroy_process_group()
    return (pool.rank, pool.world, x[0].item(), root[0].item(), last[0].item()), (
        [each.filename for each in observed] == [__file__] * 2,
        refused,
        everyone.item(),
    )


def test_sub_groups_have_pools_of_their_own(tmp_path):
    found = values(4, in_sub_groups, str(tmp_path))
    assert [each[0] for each in found] == [
        (0, 2, 2, 2, 2),
        (0, 2, 4, 3, 3),
        (1, 2, 2, 2, 2),
        (1, 2, 4, 3, 3),
    ]
    assert [each[1] for each in found] == [(True, True, 4.0)] * 4


def through_a_store(group, folder, kind):
    me, world = group.rank, group.world
    if kind == "file":
        store = dist.FileStore(f"{folder}/store", world)
    else:
        port = 0
        if me == 0:
            store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            port = store.port
        where = symmpool.Pool(group, "cpu").block(1, "int64").numpy()
        where[:] = port
        symmpool.all_reduce(where, group=group)
        if me != 0:
            store = dist.TCPStore("127.0.0.1", int(where[0]), None, False)
    store = dist.PrefixStore("a/prefix", store)
    pools = [symmpool.Pool((store, me, world), "cpu", timeout=20) for _ in range(2)]
    answers = []
    for pool in pools:
        x = pool.empty(2, torch.float32).fill_(me)
        symmpool.all_reduce(x, group=pool)
        answers.append(x[0].item())
    # The store that serves is the last to go.
    symmpool.barrier(group)
    return answers


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_stores_of_torch_serve(kind, tmp_path):
    assert values(3, through_a_store, str(tmp_path), kind) == [[3.0, 3.0]] * 3


def test_a_late_rank_is_named_by_every_store_of_torch():
    with tempfile.TemporaryDirectory() as folder:
        stores = [
            dist.HashStore(),
            dist.FileStore(f"{folder}/store", 2),
            dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False),
        ]
        for store in stores:
            with pytest.raises(symmpool.TimeoutError) as raised:
                symmpool.Pool((store, 0, 2), "cpu", timeout=0.3)
            assert raised.value.ranks == (1,), store
        del store, stores


def a_thread_for_each_group(group, folder):
    me, world = begin(group, folder)
    sides = [dist.new_group(list(range(world))) for _ in range(2)]
    found = [None, None]

    def call(number):
        # The ranks come to the groups in different orders.
        time.sleep(0.5 * (number != me))
        x = torch.full((4,), me + number + 1.0)
        symmpool.all_reduce(x, group=sides[number])
        found[number] = x[0].item()

    threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    symmpool.barrier(group)
    dist.destroy_process_group()
    return found


def test_threads_that_use_a_group_each_do_not_wait_for_each_other(tmp_path):
    assert values(2, a_thread_for_each_group, str(tmp_path)) == [[3.0, 5.0]] * 2


def later_than_the_timeout(group, folder, backend, call_of):
    """How long rank 0 waits for a rank that does not come, in a second call."""
    me, _ = begin(group, folder, backend, datetime.timedelta(seconds=2))
    call = (dist if call_of == "torch" else symmpool).all_reduce
    call(torch.ones(4))
    found = None
    if me == 0:
        start = time.monotonic()
        with pytest.raises(symmpool.TimeoutError) as raised:
            call(torch.ones(4))
        found = time.monotonic() - start, raised.value.ranks
    symmpool.barrier(group)
    return found


@pytest.mark.parametrize("backend, of", [("gloo", "us"), ("symmpool", "us"), ("symmpool", "torch")])
def test_calls_wait_as_long_as_their_process_group(backend, of, tmp_path):
    seconds, ranks = values(2, later_than_the_timeout, str(tmp_path), backend, of)[0]
    assert 1.9 < seconds < 6 and ranks == (1,)


def late_in_one_of_two_groups(group, folder):
    """Rank 0's errors about a rank that does not come, from calls that wait and from asynchronous ones."""
    me, _ = begin(group, folder, timeout=datetime.timedelta(seconds=1))
    other = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1), group_desc="the others")
    x, observed = torch.ones(4), []
    for each in (None, other):
        symmpool.all_reduce(x, group=each)
    if me == 0:
        for each in (other, dist.group.WORLD):
            work = symmpool.all_reduce(x, group=each, async_op=True)
            with pytest.raises(symmpool.TimeoutError) as raised:
                work.wait()
            assert work.exception() is raised.value
            observed.append(str(raised.value))
            with pytest.raises(symmpool.TimeoutError) as raised:
                symmpool.all_reduce(x, group=each)
            observed.append(str(raised.value))
    symmpool.barrier(group)
    return observed, other.group_name


def test_errors_say_which_of_several_groups_the_call_went_to(tmp_path):
    observed, name = values(2, late_in_one_of_two_groups, str(tmp_path))[0]
    for text in observed[:2]:
        assert text.endswith(f"the call went to the pool of group {name!r} (the others) on cpu"), observed
    for text in observed[2:]:
        assert "(default_pg) on cpu" in text and text.count("the call went") == 1, observed


def at_the_first_call(group, folder, backend, call_of):
    me, _ = begin(group, folder, backend, datetime.timedelta(seconds=2))
    call = (dist if call_of == "torch" else symmpool).all_reduce
    found = None
    if me == 0:
        start = time.monotonic()
        with pytest.raises(symmpool.TimeoutError):
            call(torch.ones(4))
        found = time.monotonic() - start
    symmpool.barrier(group)
    return found


@pytest.mark.parametrize("backend, of", [("gloo", "us"), ("symmpool", "torch")])
def test_so_do_first_calls(backend, of, tmp_path):
    seconds = values(2, at_the_first_call, str(tmp_path), backend, of)[0]
    assert 1.9 < seconds < 3.5


def timeouts(group, folder):
    """The timeouts that communicators get on groups with timeouts of their own."""
    observed = []
    made = entry.Communicator

    def note(pool, timeout, **options):
        observed.append(timeout)
        return made(pool, timeout=timeout, **options)

    entry.Communicator = note
    begin(group, folder, "gloo", datetime.timedelta(seconds=11))
    other = dist.new_group([0], timeout=datetime.timedelta(seconds=12))
    endless = dist.new_group([0], timeout=datetime.timedelta(days=90_000))
    c10d = dist.distributed_c10d
    changed = dist.new_group([0])
    c10d._set_pg_timeout(datetime.timedelta(seconds=13), changed)
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=14))
    alone = symmpool.Pool((store, 0, 1), "cpu")
    with_timeout = symmpool.Pool((dist.PrefixStore("other", store), 0, 1), "cpu", timeout=15)
    on_other = symmpool.Pool(other, "cpu", timeout=5)
    for each in (None, on_other, endless, changed, alone, with_timeout):
        symmpool.all_reduce(torch.ones(2), group=each)
    dist.destroy_process_group()
    return observed


def test_timeouts_come_to_communicators(tmp_path):
    assert values(1, timeouts, str(tmp_path)) == [[11, 12, 1e9, 13, 14, 15]]


def on_a_store_of_its_own(group, folder):
    """How long rank 0 waits for rank 1 on a pool of a store that waits 2 s."""
    store = dist.FileStore(f"{folder}/store", 2)
    store.set_timeout(datetime.timedelta(seconds=2))
    pool = symmpool.Pool((store, group.rank, 2), "cpu")
    x = torch.ones(4)
    symmpool.all_reduce(x, group=pool)
    found = None
    if group.rank == 0:
        start = time.monotonic()
        with pytest.raises(symmpool.TimeoutError) as raised:
            symmpool.all_reduce(x, group=pool)
        found = time.monotonic() - start, raised.value.ranks
    symmpool.barrier(group)
    return found


def test_calls_wait_as_long_as_the_store_of_their_pool(tmp_path):
    seconds, ranks = values(2, on_a_store_of_its_own, str(tmp_path))[0]
    assert 1.9 < seconds < 6 and ranks == (1,)


def futures(group, folder):
    me, world = begin(group, folder)
    x = torch.full((4,), float(me))
    work = symmpool.all_reduce(x, async_op=True)
    future = work.get_future().then(lambda done: done.value()[0] / world)
    answer = future.wait().tolist()
    symmpool.barrier()
    dist.destroy_process_group()
    return answer


def test_work_has_a_future_of_its_results(tmp_path):
    assert values(2, futures, str(tmp_path)) == [[0.5] * 4] * 2


def test_operations_of_torch_that_have_no_like_here_are_refused():
    (group,) = symmpool.Group.in_process(1)
    with pytest.raises(symmpool.InvalidArgumentError, match="BAND"):
        symmpool.all_reduce(torch.ones(2), dist.ReduceOp.BAND, group)


def look_up_and_leave(group, folder):
    begin(group, folder)
    for _ in range(2):
        symmpool.all_reduce(torch.ones(4))
    known = list(cache.looked_up[-1]) == [id(dist.group.WORLD)]
    dist.destroy_process_group()
    gc.collect()
    return known, cache.looked_up[-1], cache.cache._references


def test_what_was_looked_up_goes_with_its_group(tmp_path):
    assert values(1, look_up_and_leave, str(tmp_path)) == [(True, {}, {})]


def many_groups(group, folder):
    groups = []
    for number in range(70):
        groups.append(symmpool.Group(group.rank, group.world, f"file://{folder}/{number}"))
        x = torch.ones(3)
        symmpool.all_reduce(x, group=groups[-1])
        assert x.tolist() == [group.world] * 3
    # A pool that the caller makes is as large as ever.
    mine = symmpool.Pool(groups[0], device="cpu", stride=1 << 40)
    return symmpool.all_reduce(mine.zeros(3, torch.float32), group=mine) is None


def test_a_program_has_room_for_many_groups(tmp_path):
    for number in range(70):
        (tmp_path / str(number)).mkdir()
    assert values(2, many_groups, str(tmp_path)) == [True] * 2


def after_the_group_was_destroyed(group, folder):
    me, world = begin(group, folder)
    # A launcher's variables are there for as long as the process is.
    free = str(20000 + me)
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=free)
    x, was = torch.ones(4), dist.group.WORLD
    symmpool.all_reduce(x)
    symmpool.all_reduce(x, group=was)
    dist.destroy_process_group()
    right = [x[0].item()]
    for call in (
        lambda: symmpool.all_reduce(x),
        lambda: symmpool.Pool(device="cpu"),
        lambda: symmpool.all_reduce(x, group=was),
        lambda: symmpool.barrier(group=was),
        lambda: symmpool.Pool(was, device="cpu"),
    ):
        try:
            right.append(call())
        except symmpool.InvalidStateError as error:
            right.append("destroy" in str(error))
    return right


def test_calls_after_a_group_was_destroyed_are_refused(tmp_path):
    expected = [4.0] + [True] * 5
    assert values(2, after_the_group_was_destroyed, str(tmp_path)) == [expected] * 2


def first_call_refused(group, folder, elsewhere):
    me, world = begin(group, folder, timeout=datetime.timedelta(seconds=60))
    part = dist.new_group([0, 1])
    found = []
    if me == 1:
        for call in (
            lambda: symmpool.all_reduce(torch.ones(8).to_sparse()),
            lambda: symmpool.broadcast(torch.ones(4), src=2, group=part),
        ):
            begun = time.monotonic()
            try:
                call()
            except symmpool.InvalidArgumentError as error:
                found.append((str(error), time.monotonic() - begun < 1.5))
    else:
        time.sleep(elsewhere)
        for call in (
            lambda: symmpool.all_reduce(torch.ones(8)),
            lambda: symmpool.broadcast(torch.ones(4), src=0, group=part) if me < 2 else None,
        ):
            try:
                call()
            except symmpool.DivergedError as error:
                found.append(error.ranks)
    x = torch.ones(4)
    symmpool.all_reduce(x)
    if me < 2:
        symmpool.all_reduce(x, group=part)
    return found, x[0].item()


@pytest.mark.parametrize("elsewhere", [0, 4])
def test_a_wrong_argument_in_a_first_call_raises_at_once(tmp_path, elsewhere):
    zero, one, two = values(3, first_call_refused, str(tmp_path), elsewhere)
    assert zero == ([(1,), (1,)], 6.0) and two == ([(1,)], 3.0)
    (first, soon), (second, soon_too) = one[0]
    assert "row by row" in first and "no rank of the call's group" in second
    assert soon and soon_too and one[1] == 6.0


def ends_after_a_refused_first_call(group, folder):
    begin(group, folder, timeout=datetime.timedelta(seconds=60))
    if group.rank == 1:
        symmpool.all_reduce(torch.ones(8).to_sparse())
    time.sleep(4)


def test_a_program_ends_soon_after_a_refused_first_call(tmp_path):
    begun = time.monotonic()
    zero, one = run(2, ends_after_a_refused_first_call, str(tmp_path))
    assert zero.status == 0 and one.status == 1 and "row by row" in one.error
    assert time.monotonic() - begun < 25


def refused_behind_what_was_begun(group, folder):
    me, world = begin(group, folder)
    x, y = torch.ones(4), torch.ones(4)
    symmpool.all_reduce(x)
    found = None
    if me == 1:
        work = symmpool.all_reduce(x, async_op=True)
        begun = time.monotonic()
        try:
            symmpool.all_reduce(torch.ones(8).to_sparse())
        except symmpool.InvalidArgumentError as error:
            found = "row by row" in str(error) and time.monotonic() - begun < 1
        work.wait()
    else:
        time.sleep(2)
        symmpool.all_reduce(x)
        try:
            symmpool.all_reduce(y)
        except symmpool.DivergedError as error:
            found = error.ranks == (1,)
    symmpool.all_reduce(y)
    return found, x[0].item(), y[0].item()


def test_a_wrong_argument_behind_a_call_that_was_begun_raises_at_once(tmp_path):
    assert values(2, refused_behind_what_was_begun, str(tmp_path)) == [(True, 4.0, 2.0)] * 2


def lazily_negated(group, folder):
    me, world = begin(group, folder)
    pool = symmpool.Pool(device="cpu")
    comm = symmpool.Communicator(pool, timeout=20)
    negated = [
        torch._neg_view(torch.ones(4, dtype=dtype)) for dtype in (torch.float32, torch.int32, torch.bfloat16)
    ]
    lazy = [*negated, torch.ones(4, dtype=torch.complex64).conj()]
    refused = []
    for x in lazy:
        try:
            if x.dtype == torch.complex64:
                comm.broadcast(x, 0)
            else:
                comm.all_reduce(x)
        except symmpool.InvalidArgumentError as error:
            refused.append("resolve_" in str(error))
    for x in lazy[:3]:
        try:
            comm.all_gather_into_tensor(torch.ones(8, dtype=x.dtype), x)
        except symmpool.InvalidArgumentError as error:
            refused.append("resolve_neg" in str(error))
    return refused


def test_tensors_of_several_elements_that_are_negated_lazily_are_not_read_raw(tmp_path):
    assert values(2, lazily_negated, str(tmp_path)) == [[True] * 7] * 2


def test_tensors_that_do_not_lie_in_rows_are_refused():
    (group,) = symmpool.Group.in_process(1)
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    others = [nested, jagged, torch.eye(3).to_sparse()]
    if torch.backends.mkldnn.is_available():
        others.append(torch.ones(4, 4).to_mkldnn())
    for x in others:
        with pytest.raises(symmpool.InvalidArgumentError, match="tensor: a (nested tensor|tensor of layout)"):
            comm.all_reduce(x)
    for op in (0, 1, True):
        with pytest.raises(symmpool.InvalidArgumentError, match="op: "):
            comm.all_reduce(torch.ones(2), op)
    comm.all_reduce(torch.ones(2), dist.ReduceOp(dist.ReduceOp.MAX))
    with pytest.raises(TypeError, match="address.*data_ptr"):
        pool.owns(torch.ones(1, dtype=torch.int64))
    if not torch.cuda.is_available():
        for call in (symmpool.memory_stats, symmpool.memory_summary, symmpool.reset_peak_memory_stats):
            with pytest.raises(symmpool.UnsupportedError, match="no CUDA device"):
                call()
