"""The package's own collectives: which communicator serves a call, and in which order they run."""

import contextlib
import gc
import threading
import types
import weakref

import numpy as np
import pytest
from ranks import values

import symmpool
from symmpool.communicators import cache
from symmpool.communicators.stream_work import SideStream


def every_call(group):
    me, world = group.rank, group.world
    right = []
    x = np.full(5, me + 1, np.float32)
    assert symmpool.all_reduce(x, group=group) is None
    right.append(x.tolist() == [world * (world + 1) / 2] * 5)
    out = np.zeros(5, np.float32)
    symmpool.all_reduce(np.full(5, me, np.float32), "max", group, out=out)
    right.append(out.tolist() == [world - 1] * 5)
    gathered = np.zeros(2 * world, np.int32)
    symmpool.all_gather_into_tensor(gathered, np.array([me, -me], np.int32), group)
    right.append(gathered.tolist() == [v for rank in range(world) for v in (rank, -rank)])
    part = np.zeros(2, np.int64)
    symmpool.reduce_scatter_tensor(part, np.arange(2 * world, dtype=np.int64), "sum", group)
    right.append(part.tolist() == [world * 2 * me, world * (2 * me + 1)])
    shared = np.full(3, me, np.uint8)
    symmpool.broadcast(shared, 1, group)
    right.append(shared.tolist() == [1, 1, 1])
    swapped = np.zeros(world, np.int32)
    symmpool.all_to_all_single(swapped, np.full(world, me, np.int32), group=group)
    right.append(swapped.tolist() == list(range(world)))
    # Rank r sends r rows to each: empty lists are torch's word for even parts, none of them here.
    rows = np.full((me * world, 2), me, np.float64)
    uneven = np.zeros((sum(range(world)), 2))
    symmpool.all_to_all_single(uneven, rows, list(range(world)), [me] * world, group)
    right.append(uneven[:, 0].tolist() == [r for r in range(world) for _ in range(r)])
    symmpool.barrier(group)
    return right


@pytest.mark.parametrize("world", [1 + 1, 4])
def test_every_call_gives_what_it_says(world):
    assert values(world, every_call) == [[True] * 7] * world


def many_at_once(group):
    work, order = [], []
    total = np.zeros(1, np.int64)
    for step in range(50):
        x = np.full(64, step, np.int64)
        work.append((step, x, symmpool.all_reduce(x, group=group, async_op=True)))
        if step % 10 == 9:
            # Comes after those that are under way, here and on the other ranks.
            symmpool.all_reduce(total, group=group)
            order.append(all(each.is_completed() for _, _, each in work))
    for step, x, each in work:
        assert each.wait() and each.is_success() and each.exception() is None
        assert each.result()[0] is x
        if not (x == step * group.world).all():
            return step
    return order


def test_calls_that_are_not_waited_for_keep_their_order():
    assert values(3, many_at_once) == [[True] * 5] * 3


def refused(group):
    x = np.ones(4, np.float32)
    op = "no such operation" if group.rank == 0 else "sum"
    # In a group's first call it would be raised by the call itself.
    symmpool.barrier(group)
    work = symmpool.all_reduce(x, op, group, async_op=True)
    try:
        work.wait(20)
    except symmpool.Error as error:
        return type(error).__name__, work.is_success(), work.exception() is error
    return None


def test_what_goes_wrong_is_raised_by_wait():
    own, others = "InvalidArgumentError", "DivergedError"
    assert values(2, refused) == [(own, False, True), (others, False, True)]


def two_pools(group):
    first, second = symmpool.Pool(group, "cpu"), symmpool.Pool(group, "cpu")
    symmpool.barrier(group)
    x = second.block(3, "int32")
    x.numpy()[:] = group.rank
    symmpool.all_reduce(x, "sum", group)
    symmpool.all_reduce(x, "sum", second)  # a pool says which group and which pool
    elsewhere = np.full(3, 1, np.int32)
    symmpool.all_reduce(elsewhere, "sum", group)
    served = [pool for pool in (first, second) if cache.cache.of_pool(pool)]
    return x.numpy().tolist(), elsewhere.tolist(), served == [first, second]


def test_a_tensor_is_served_by_the_pool_that_holds_it():
    assert values(2, two_pools) == [([2] * 3, [2] * 3, True)] * 2


def test_without_a_default_group_a_pools_tensor_is_refused_by_its_reason(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (group,) = symmpool.Group.in_process(1)
    pool = symmpool.Pool(group, "cpu")
    tensor = pool.empty((4,), "float32")
    for call in (symmpool.all_reduce, lambda x: symmpool.broadcast(x, 0)):
        with pytest.raises(symmpool.InvalidArgumentError, match="no default group.*group=pool"):
            call(tensor)
        with pytest.raises(symmpool.InvalidArgumentError, match="WORLD_SIZE"):
            call(np.ones(4, np.float32))
    symmpool.all_reduce(tensor, group=pool)
    symmpool.all_reduce(tensor, group=group)


def test_what_serves_a_group_goes_with_it():
    (group,) = symmpool.Group.in_process(1)
    x = np.ones(3, np.float32)
    symmpool.all_reduce(x, group=group)
    comm = weakref.ref(symmpool.communicator(group))
    assert comm() is not None
    del group
    gc.collect()
    assert comm() is None


def test_so_does_the_error_of_a_call_that_was_not_waited_for():
    (group,) = symmpool.Group.in_process(1)

    def fail(group):
        with pytest.raises(symmpool.InvalidArgumentError, match="op"):
            symmpool.all_reduce(np.ones(3), "median", group, async_op=True).wait()

    fail(group)
    gone = weakref.ref(group)
    del group
    gc.collect()
    assert gone() is None


def test_a_pool_can_be_let_go():
    (group,) = symmpool.Group.in_process(1)
    pool = symmpool.Pool(group, "cpu")
    symmpool.barrier(group)
    gone = weakref.ref(pool)
    symmpool.forget(pool)
    del pool
    gc.collect()
    assert gone() is None
    symmpool.barrier(group)


def test_the_thread_of_calls_in_the_background_ends_with_its_communicator():
    def running():
        return sum(each.name == "symmpool collectives" for each in threading.enumerate())

    (group,) = symmpool.Group.in_process(1)
    symmpool.all_reduce(np.ones(3), group=group, async_op=True).wait()
    assert running() == 1
    del group
    gc.collect()
    for _ in range(100):
        if running() == 0:
            return
        threading.Event().wait(0.05)
    raise AssertionError("the thread is still there")


def test_calls_that_make_no_sense_are_refused():
    (group,) = symmpool.Group.in_process(1)
    x = np.ones(4, np.float32)
    for wrong in ("a name", 7, object()):
        with pytest.raises(symmpool.InvalidArgumentError, match="group"):
            symmpool.all_reduce(x, group=wrong)
    for wrong in (3, None):
        with pytest.raises(symmpool.InvalidArgumentError, match=f"{wrong} is no pool"):
            symmpool.forget(wrong)
        with pytest.raises(symmpool.InvalidArgumentError, match=f"{wrong} is no pool"):
            symmpool.use_pool(wrong)
    with pytest.raises(symmpool.InvalidArgumentError, match="input_split_sizes: 2 of them"):
        symmpool.all_to_all_single(x, x.copy(), np.array([2, 2]), np.array([2, 2]), group)
    swapped = np.zeros(4, np.float32)
    symmpool.all_to_all_single(swapped, x, np.array([4]), np.array([4]), group)
    symmpool.all_to_all_single(swapped, x, [], (), group)
    assert swapped.tolist() == x.tolist()
    with pytest.raises(symmpool.InvalidArgumentError, match="src"):
        symmpool.broadcast(x, group=group)
    with pytest.raises(symmpool.InvalidArgumentError, match="src"):
        symmpool.broadcast(x, 0, group, group_src=0)
    for device in ("tpu:0", "cpu:1", "cpu:", "cuda:x", "cuda:²"):
        for call in (symmpool.communicator, lambda group, device: symmpool.barrier(group, device=device)):
            with pytest.raises(symmpool.InvalidArgumentError, match=f"device.*{device}"):
                call(group, device)
    with pytest.raises(TypeError, match="numpy"):
        symmpool.all_reduce([1.0, 2.0], group=group)


def test_a_group_is_known_by_its_name_everywhere():
    (group,) = symmpool.Group.in_process(1)
    pool = symmpool.Pool(group, "cpu:0")
    assert pool.device == "cpu"
    for named in (group, pool):
        name = named.group_name
        assert name.startswith("symmpool:") and name == named.group_name
        comm = symmpool.communicator(name)
        assert comm is symmpool.communicator(named, "cpu:0")
        x = np.full(3, 2, np.int32)
        symmpool.all_reduce(x, group=name)
        symmpool.broadcast(x, 0, name)
        symmpool.barrier(name, device="cpu:0")
    assert group.group_name != pool.group_name
    for wrong in ("nobody", (None, 0, 1)):
        with pytest.raises(symmpool.InvalidArgumentError, match="group: "):
            symmpool.communicator(wrong)


def test_names_of_groups_are_given_once():
    groups = symmpool.Group.in_process(64)
    found = [[None] * 4 for _ in groups]

    def name(at):
        for number, group in enumerate(groups):
            found[number][at] = group.group_name

    threads = [threading.Thread(target=name, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    first = {names[0] for names in found}
    assert all(len(set(names)) == 1 for names in found) and len(first) == 64
    del groups
    gc.collect()
    with pytest.raises(symmpool.InvalidArgumentError, match="any more"):
        symmpool.communicator(found[0][0])
    (later,) = symmpool.Group.in_process(1)
    assert later.group_name not in first


def test_a_barrier_takes_torchs_device_ids_and_refuses_what_names_no_device():
    (group,) = symmpool.Group.in_process(1)
    symmpool.barrier(group)
    for wrong in ([0, 1], [], 0, ["cuda:0"], [None]):
        with pytest.raises(symmpool.InvalidArgumentError, match="device_ids"):
            symmpool.barrier(group, device_ids=wrong)
    # A number is a CUDA device's: none has this one.
    with pytest.raises(symmpool.Error, match="77|CUDA"):
        symmpool.barrier(group, device_ids=[77])


def test_on_the_cpu_there_is_nothing_to_mark():
    (group,) = symmpool.Group.in_process(1)
    comm = symmpool.Communicator(symmpool.Pool(group, "cpu"))
    mark = comm.mark()
    comm.follow(0)
    mark.wait()
    assert mark.query()


class Streams:
    """Stand-in for the parts of torch and of a communicator that calls on a stream of their own need."""

    def __init__(self):
        self.observed, self.done, self.capturing, self.failure = [], set(), False, None
        self.Tensor = list
        self.current = 1
        self._C = types.SimpleNamespace(_cuda_getCurrentRawStream=lambda device: self.current)
        self.cuda = types.SimpleNamespace(
            Stream=lambda device: types.SimpleNamespace(cuda_stream=7, device=device),
            is_current_stream_capturing=lambda: self.capturing,
        )

    def follow(self, stream):
        self.observed.append(("follow", stream))

    def call(self, *arguments, stream):
        self.observed.append(("call", stream))

    def mark(self, stream):
        number = len(self.observed)
        self.observed.append(("mark", stream))
        return types.SimpleNamespace(
            query=lambda: number in self.done, wait=lambda: self.observed.append(("wait", number))
        )


class Tensor(list):
    """Stand-in for the parts of a tensor that calls on a stream of their own need."""

    recorded = None

    def record_stream(self, stream):
        self.recorded = stream


def test_calls_on_a_stream_of_their_own_come_in_between_and_keep_their_tensors():
    torch = Streams()
    side = SideStream(torch, 0)
    tensors = [Tensor([n]) for n in range(3)]
    gone = [weakref.ref(tensor) for tensor in tensors]
    found = [side.submit(torch, torch.call, (tensor,), []) for tensor in tensors]
    assert torch.observed == [("follow", 7), ("call", 7), ("mark", 7)] * 3
    assert not found[0].is_completed()
    # A wait of another stream than that of the call says nothing of what comes behind it on that one.
    torch.current = 2
    found[0].wait()
    torch.current = 1
    assert torch.observed[-1] == ("wait", 2)
    del tensors
    torch.done |= {2, 5}
    assert found[1].is_completed() and all(tensor() is not None for tensor in gone)
    # Another call lets go of what is done, in order.
    torch.capturing, last = False, Tensor([3])
    side.submit(torch, torch.call, (last,), [])
    assert [tensor() is None for tensor in gone] == [True, True, False]
    torch.capturing, captured = True, Tensor([4])
    side.submit(torch, torch.call, (captured,), [])
    assert captured.recorded.cuda_stream == 7 and len(side._held) == 2
    # The tensors of the last call, with no other behind it, are kept until its Work goes, or is waited for.
    torch.done |= {8, 12}
    del found
    assert gone[2]() is None and not side._held


def test_what_later_calls_come_behind_keeps_no_tensors_of_a_call_whose_work_is_gone():
    torch = Streams()
    side, tensor = SideStream(torch, 0), Tensor([0])
    order = side.announce(torch)
    work = side.submit(torch, torch.call, (tensor,), [tensor], None, order)
    gone, observed = weakref.ref(tensor), []
    tensor.record_stream = lambda stream: observed.append(stream.cuda_stream)
    del tensor
    assert gone() is not None
    # The call is not done: torch's allocator waits for the side stream instead.
    del work
    assert gone() is None and observed == [7]
    order.join()
    assert torch.observed[-1] == ("wait", 2)


@pytest.mark.parametrize("when", ["in the call", "behind it"])
def test_ctrl_c_in_a_call_on_a_stream_of_its_own_leaves_its_tensors_and_the_order(when):
    torch = Streams()
    side, tensor = SideStream(torch, 0), Tensor([0])

    def stop(*arguments, stream):
        torch.call(*arguments, stream=stream)
        raise KeyboardInterrupt

    mark = torch.mark
    if when == "behind it":
        torch.mark = lambda stream: (mark(stream), stop(stream=stream))
    order = side.announce(torch)
    with pytest.raises(KeyboardInterrupt):
        side.submit(torch, torch.call if when == "behind it" else stop, (tensor,), [], None, order)
    torch.mark = mark
    assert tensor.recorded.cuda_stream == 7
    # Later work comes behind all that the side stream was given.
    order.join()
    assert torch.observed[-2:] == [("mark", 7), ("wait", len(torch.observed) - 2)]


def test_a_calls_tensors_are_let_go_of_where_its_stream_waits_for_it():
    torch = Streams()
    side = SideStream(torch, 0)
    tensors = [Tensor([n]) for n in range(2)]
    gone = [weakref.ref(tensor) for tensor in tensors]
    first, second = [side.submit(torch, torch.call, (tensor,), []) for tensor in tensors]
    del tensors
    second.wait()
    # Neither call is done, but all that the current stream gets from now on comes after the second.
    assert [tensor() is None for tensor in gone] == [False, True]
    second.wait()
    first.wait()
    assert gone[0]() is None and not torch.done
    # Nothing is asked of the device for them any more.
    side.submit(torch, torch.call, (Tensor([2]),), [])
    assert len(side._held) == 1


def average_of_the_largest(group):
    import torch

    pool = symmpool.Pool(group, "cpu")
    found = []
    for dtype, value in ((torch.bfloat16, 3e38), (torch.float16, 65504.0), (torch.float32, 3e38)):
        x = torch.full((4,), value, dtype=dtype)
        symmpool.all_reduce(x, "avg", pool)
        found.append(x[0].item())
    return found


def test_averages_overflow_as_their_sums_do():
    for bfloat16, float16, float32 in values(2, average_of_the_largest):
        assert bfloat16 == float32 == float("inf") and float16 == 65504.0


def test_copies_of_a_call_are_made_on_its_stream_behind_what_was_begun():
    @contextlib.contextmanager
    def on_stream(stream):
        torch.observed.append(("on", stream.cuda_stream))
        yield
        torch.observed.append(("off", stream.cuda_stream))

    torch = Streams()
    torch.cuda.stream = on_stream
    side = SideStream(torch, 0)
    copied, copy = Tensor([1]), Tensor([2])
    gone = weakref.ref(copied)

    def prepared(stream):
        torch.observed.append(("copy", stream))
        return (copy,), lambda: torch.observed.append(("copied back", 7))

    work = side.submit(torch, torch.call, (copied,), [], prepared)
    assert torch.observed == [
        ("follow", 7),
        ("on", 7),
        ("copy", 7),
        ("call", 7),
        ("copied back", 7),
        ("off", 7),
        ("mark", 7),
    ]
    # A copied tensor is kept until then, as the side stream reads it.
    del copied
    assert gone() is not None and not work.is_completed()
