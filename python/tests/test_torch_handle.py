"""The handle of symmetric memory, between processes on the CPU."""

import ctypes
import gc
import time

import numpy
import pytest
import torch
import torch.distributed as dist
from ranks import run, values
from test_torch_distributed import begin

import symmpool


def by_pointers(group):
    me, world = group.rank, group.world
    pool = symmpool.Pool(group, "cpu")
    x = pool.empty((4, 8), torch.float32).fill_(me)
    handle = symmpool.rendezvous(x[1:], group)
    right = [(handle.rank, handle.world_size, handle.buffer_size) == (me, world, 128)]
    right.append(handle.offset == 32 and handle.signal_pad_size == 2048)
    right.append(handle.buffer_ptrs[me] == x.data_ptr() and handle.multicast_ptr == 0)
    for name in ("buffer_ptrs", "signal_pad_ptrs"):
        there = ctypes.cast(getattr(handle, f"{name}_dev"), ctypes.POINTER(ctypes.c_uint64))
        right.append([there[rank] for rank in range(world)] == getattr(handle, name))
    for rank in range(world):
        buffer = handle.get_buffer(rank, (2, 8), torch.float32, 16)
        right.append(buffer.tolist() == [[rank] * 8] * 2)
        right.append(buffer.data_ptr() == handle.buffer_ptrs[rank] + 64)
        right.append(handle.get_remote_tensor(rank, (24,), torch.float32)[0].item() == rank)
        right.append(handle.get_buffer(rank, (0, 3), torch.int64).shape == (0, 3))
    handle.barrier()
    # Everyone writes into the next one's copy, and into its pad.
    after = (me + 1) % world
    handle.get_buffer(after, (32,), torch.float32)[me] = 100 + me
    pad = handle.get_signal_pad(after, dtype=torch.int32)
    right.append(pad.shape == (512,) and pad.tolist() == [0] * 512)
    pad[me] = 7
    handle.barrier(channel=3)
    before = (me - 1) % world
    right.append(x[0, before].item() == 100 + before)
    mine = handle.get_signal_pad(me, (world,), torch.int32).tolist()
    right.append(mine == [7 * (rank == before) for rank in range(world)])
    handle.barrier(1, timeout_ms=5000)
    return right


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_is_reached_by_pointers(world):
    for right in values(world, by_pointers):
        assert all(right), right


def signals(group):
    pool = symmpool.Pool(group, "cpu")
    x = pool.empty(1, torch.int64).fill_(-1)
    handle = symmpool.rendezvous(x)
    if group.rank == 0:
        # Ahead of the waits: nothing is lost.
        for _ in range(3):
            handle.put_signal(1, channel=2)
        handle.get_buffer(1, (1,), torch.int64).fill_(5)
        handle.put_signal(1, 0)
        handle.wait_signal(1, 15)
        return None
    for _ in range(3):
        handle.wait_signal(0, channel=2, timeout_ms=20_000)
    handle.wait_signal(0)
    seen = x.item()
    try:
        handle.wait_signal(0, 2, timeout_ms=30)
        late = None
    except symmpool.TimeoutError as error:
        late = error.ranks
    handle.put_signal(0, 15)
    return seen, late


def test_signals_are_counted_and_waits_end():
    assert values(2, signals) == [None, (5, (0,))]


def pieces_live_on(group):
    pool = symmpool.Pool(group, "cpu")
    x = pool.empty(100, torch.float32).fill_(group.rank)
    handle = symmpool.rendezvous(x)
    theirs = handle.get_buffer(1 - group.rank, (100,), torch.float32)
    handle.barrier()
    del x, handle, pool
    gc.collect()
    seen = theirs.tolist() == [1 - group.rank] * 100
    symmpool.barrier(group)
    return seen


def test_a_view_of_a_peers_memory_outlives_what_it_came_from():
    assert values(2, pieces_live_on) == [True, True]


def test_nonsense_is_refused():
    (group,) = symmpool.Group.in_process(1)
    pool = symmpool.Pool(group, "cpu")
    with pytest.raises(symmpool.InvalidArgumentError, match="in no pool"):
        symmpool.rendezvous(torch.ones(3), group)
    x = pool.empty(10, torch.float32)
    for size in (0, 2, -4):
        with pytest.raises(symmpool.InvalidArgumentError, match="signal_pad_size"):
            symmpool.rendezvous(x, pool, signal_pad_size=size)
    handle = symmpool.rendezvous(x, pool)
    for arguments in [
        (0, (11,), torch.float32),
        (0, (10,), torch.float32, 1),
        (0, (1,), torch.float32, -1),
        (1, (1,), torch.float32),
        (0, (-1,), torch.float32),
        (0, 3, torch.float32),
        (0, (1.5,), torch.float32),
        (0, (1,), "float32"),
        ("0", (1,), torch.float32),
    ]:
        with pytest.raises(symmpool.InvalidArgumentError):
            handle.get_buffer(*arguments)
    for wrong in ((1, 0), (0, 16)):
        with pytest.raises(symmpool.Error):
            handle.put_signal(*wrong)
    with pytest.raises(symmpool.InvalidArgumentError, match="timeout_ms"):
        handle.wait_signal(0, 0, -1)
    for wrong in ("x", float("nan")):
        with pytest.raises(symmpool.InvalidArgumentError, match="timeout_ms"):
            handle.barrier(1, wrong)
    for wrong in (16, -1, "x"):
        with pytest.raises(symmpool.InvalidArgumentError, match="channel"):
            handle.barrier(wrong)
    with pytest.raises(symmpool.InvalidArgumentError, match="sizes"):
        handle.get_signal_pad(0, 4)
    assert handle.get_buffer(numpy.int64(0), [numpy.int64(10)], torch.float32).shape == (10,)
    with pytest.raises(symmpool.InvalidArgumentError, match="not all in windows"):
        pool.peer_ptr(0, 12345, 8)


def missing(group):
    pool = symmpool.Pool(group, "cpu")
    x = pool.empty(10, torch.float32)
    handle = symmpool.rendezvous(x)
    if group.rank == 1:
        return
    handle.barrier(1, timeout_ms=100)


def test_a_rank_that_does_not_come_is_named():
    outcome, _ = run(2, missing)
    assert "TimeoutError" in outcome.error or "PeerLostError" in outcome.error
    assert "rank 1" in outcome.error


def by_name(group, folder):
    begin(group, folder)
    pool = symmpool.Pool(device="cpu")
    x = pool.empty(4, torch.float32).fill_(group.rank)
    name = dist.group.WORLD.group_name
    handle = symmpool.rendezvous(x, name)
    seen = [handle.get_buffer(rank, (4,), torch.float32)[0].item() for rank in range(2)]
    symmpool.barrier(name)
    sums = []
    for how in (name, dist.group.WORLD):
        y = torch.ones(2)
        symmpool.all_reduce(y, group=how)
        sums.append(y.tolist())
    refused = []
    for wrong in ("nobody", dist.GroupMember.NON_GROUP_MEMBER, 3, (dist.FileStore(f"{folder}/s"), 0, 2)):
        calls = [lambda: symmpool.rendezvous(x, wrong)]  # noqa: B023
        if wrong != dist.GroupMember.NON_GROUP_MEMBER:
            calls.append(lambda: symmpool.barrier(wrong))  # noqa: B023
            calls.append(lambda: symmpool.all_reduce(x, group=wrong))  # noqa: B023
            calls.append(lambda: symmpool.broadcast(x, 0, wrong))  # noqa: B023
        for call in calls:
            with pytest.raises(symmpool.InvalidArgumentError, match="group") as error:
                call()
            refused.append(str(error.value))
    dist.destroy_process_group()
    return seen, sums, refused


def test_torchs_names_of_groups_are_known_and_others_refused(tmp_path):
    for seen, sums, refused in values(2, by_name, str(tmp_path)):
        assert seen == [0, 1] and sums == [[2.0, 2.0]] * 2
        assert all("'nobody'" in text for text in refused[:4]), refused
        assert "no member" in refused[4] and "Store" in refused[-1], refused


def test_what_is_no_tensor_of_torch_is_named():
    (group,) = symmpool.Group.in_process(1)
    pool = symmpool.Pool(group, "cpu")
    for wrong, name in (
        (None, "None"),
        ("x", "'x'"),
        ([1], "list"),
        (torch.ones(3).numpy(), "ndarray"),
        (pool.block(4, "float32"), "Block"),
    ):
        with pytest.raises(symmpool.InvalidArgumentError, match=f"{name}.*no tensor of torch"):
            symmpool.rendezvous(wrong, pool)
    with pytest.raises(symmpool.InvalidArgumentError, match="no memory"):
        symmpool.rendezvous(torch.ones(3).to_sparse(), pool)
    assert symmpool.rendezvous(pool.empty(0), pool).offset == 0


def different(group, kind):
    pool = symmpool.Pool(group, "cpu")
    x, y = pool.empty(16, torch.float32), pool.empty(16, torch.float32)
    mine, theirs = {
        "other tensor": (x, y),
        "other place in it": (x[:8], x[8:]),
        "fewer elements": (x, x[:15]),
        "other type": (x, x.view(torch.int32)),
    }[kind]
    try:
        symmpool.rendezvous(theirs if group.rank == 2 else mine, pool)
    except symmpool.DivergedError as error:
        observed = error.ranks, str(error)
    else:
        observed = None
    # All ranks got the error, so they are still in step.
    handle = symmpool.rendezvous(y, pool)
    handle.barrier()
    return observed


@pytest.mark.parametrize("kind", ["other tensor", "other place in it", "fewer elements", "other type"])
def test_ranks_that_bring_different_tensors_all_hear_of_it(kind):
    found = values(3, different, kind)
    assert len(set(found)) == 1, found
    ranks, text = found[0]
    assert ranks == (2,) and all(f"rank {rank}: " in text for rank in range(3)), found


def refused_by_one(group, culprit, how):
    pool = symmpool.Pool(group, "cpu")
    x = pool.empty(16, torch.float32)
    wrong = {
        "elsewhere": (torch.ones(3), 2048),
        "no tensor": (None, 2048),
        "no memory": (torch.ones(3).to_sparse(), 2048),
        "pad": (x, 3),
    }[how]
    tensor, size = wrong if group.rank == culprit else (x, 2048)
    start = time.monotonic()
    try:
        symmpool.rendezvous(tensor, group, signal_pad_size=size)
    except symmpool.Error as error:
        observed = type(error).__name__, error.ranks, str(error), time.monotonic() - start < 10
    else:
        observed = None
    # All of them are in step still.
    symmpool.rendezvous(x, pool).barrier()
    return observed


@pytest.mark.parametrize(
    "culprit, how, what",
    [
        (0, "elsewhere", "in no pool"),
        (1, "elsewhere", "in no pool"),
        (0, "no tensor", "no tensor of torch"),
        (1, "no memory", "no memory"),
        (0, "pad", "signal_pad_size: 3"),
    ],
)
def test_what_one_rank_refuses_the_others_hear_of(culprit, how, what):
    found = values(2, refused_by_one, culprit, how)
    kind, ranks, text, soon = found.pop(culprit)
    assert (kind, ranks, soon) == ("InvalidArgumentError", (), True) and what in text
    kind, ranks, text, soon = found.pop()
    assert (kind, ranks, soon) == ("DivergedError", (culprit,), True)
    assert f"rank {culprit} refuses" in text and what in text


def test_a_pool_on_a_store_is_found_without_being_named():
    pool = symmpool.Pool((dist.HashStore(), 0, 1), "cpu")
    assert symmpool.rendezvous(pool.empty(3, torch.int32)).buffer_size == 12


def test_a_tensor_of_no_dimensions_and_a_transposed_one_have_handles():
    (group,) = symmpool.Group.in_process(1)
    pool = symmpool.Pool(group, "cpu")
    x = pool.empty((4, 6), torch.float64)
    assert symmpool.rendezvous(x.t(), pool).buffer_size == 192
    assert symmpool.rendezvous(x[2, 3], pool).offset == 15 * 8


def late(wait):
    """Whether a wait runs out of time, so that no signal was there."""
    try:
        wait()
    except symmpool.TimeoutError:
        return True
    return False


def signals_of_two_handles(group):
    pool = symmpool.Pool(group, "cpu")
    me, other = group.rank, 1 - group.rank
    a, b = (symmpool.rendezvous(pool.zeros(4), pool) for _ in range(2))
    comm = symmpool.communicator(pool, "cpu")
    observed = {}
    # Signals of one handle, of a communicator, and by the pad, and then a wait of another handle.
    a.put_signal(other, 3)
    comm.signal(other, 3)
    comm.signal(other, 3, engine="memory")
    comm.barrier()
    observed["another handle's"] = late(lambda: b.wait_signal(other, 3, timeout_ms=50))
    observed["a communicator's"] = not late(lambda: a.wait_signal(other, 3, timeout_ms=5000))
    observed["both"] = late(lambda: a.wait_signal(other, 3, timeout_ms=50))
    comm.wait(other, 3)
    comm.wait(other, 3, engine="memory")
    # A handle's, and then a wait of the communicator.
    b.put_signal(other, 3)
    comm.barrier()
    observed["a handle's for a communicator"] = late(lambda: comm.wait(other, 3, timeout=0.05))
    # Signals of a handle that is gone, in whatever memory the next one has.
    for _ in range(3):
        b.put_signal(other, 3)
    del b
    gc.collect()
    for nth in range(3):
        pool.commit()
        c = symmpool.rendezvous(pool.zeros(4), pool)
        observed[f"a dead handle's, {nth}"] = late(lambda: c.wait_signal(other, 3, timeout_ms=20))  # noqa: B023
        comm.barrier()
        c.put_signal(other, 3)
        c.wait_signal(other, 3)
        c.put_signal(other, 3)
        comm.barrier()
        del c
        gc.collect()
    # Barriers: one rank's second one on a handle does not let it pass the first one on another.
    d, e = (symmpool.rendezvous(pool.zeros(4), pool) for _ in range(2))
    if me == 0:
        observed["barrier"] = late(lambda: d.barrier(1, timeout_ms=50))
        observed["barrier again"] = late(lambda: d.barrier(1, timeout_ms=50))
    comm.barrier()
    observed["barrier of another"] = late(lambda: e.barrier(1, timeout_ms=50)) if me == 1 else True
    comm.barrier()
    # A handle whose wait ran out of time goes on.
    d.barrier(1)
    e.barrier(1)
    return observed


def test_signals_of_one_handle_complete_no_waits_of_another():
    for observed in values(2, signals_of_two_handles):
        assert all(observed.values()), observed


def as_torchs(group):
    """Checks what torch's handles promise of signals: a pad for each, zeros at first, and a channel for each
    use."""
    pool = symmpool.Pool(group, "cpu")
    me, world = group.rank, group.world
    handle = symmpool.rendezvous(pool.zeros(4), pool, signal_pad_size=1000)
    right = [handle.signal_pad_size == 1000]
    right.append(all(handle.get_signal_pad(rank).tolist() == [0] * 250 for rank in range(world)))
    after, before = (me + 1) % world, (me - 1) % world
    # Whatever channels are used, the pad is the caller's own.
    for channel in range(16):
        handle.put_signal(after, channel)
        handle.wait_signal(before, channel)
        handle.barrier(channel, timeout_ms=5000)
    right.append(handle.get_signal_pad(me).tolist() == [0] * 250)
    handle.barrier()
    # Whatever is in the pad, signals are not.
    handle.get_signal_pad(after).fill_(2**32 - 1)
    handle.barrier()
    right.append(late(lambda: handle.wait_signal(before, 0, timeout_ms=20)))
    handle.barrier()
    # Data that was written before a signal is there after the wait.
    for turn in range(200):
        handle.get_buffer(after, (4,), torch.float32).fill_(turn)
        handle.put_signal(after, turn % 16)
        handle.wait_signal(before, turn % 16)
        right.append(handle.get_buffer(me, (4,), torch.float32).tolist() == [turn] * 4)
        handle.barrier(turn % 15 + 1)
    # To itself, too.
    handle.put_signal(me, 5)
    handle.wait_signal(me, 5)
    for wrong in (16, -1, 2**32, "x", None, 1.5):
        for call in (lambda: handle.put_signal(after, wrong), lambda: handle.wait_signal(before, wrong)):  # noqa: B023
            with pytest.raises((symmpool.InvalidArgumentError, TypeError), match="channel"):
                call()
    handle.barrier()
    return right


@pytest.mark.parametrize("world", [1, 2, 4])
def test_signals_are_as_those_of_torchs_handles(world):
    for right in values(world, as_torchs):
        assert all(right), right
