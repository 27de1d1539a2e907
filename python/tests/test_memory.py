"""Memory: what tensors of a pool are, how long they live, and how they pass to others."""

import gc
import os
import signal
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
from ranks import values

import symmpool


@pytest.fixture
def pool():
    return symmpool.Pool(symmpool.Group.in_process(1)[0], "cpu")


def lane(pool):
    return pool.stats()["lanes"]["default"]


def test_arrays_are_what_was_asked_for(pool):
    for dtype in (np.float32, "int8", np.dtype("uint8"), np.int64, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2):
        array = pool.empty((3, 4), np.dtype(dtype))
        assert array.shape == (3, 4) and array.dtype == dtype
        assert array.flags.c_contiguous and array.flags.writeable
        assert array.ctypes.data % 512 == 0
        array[...] = 3
        assert (array == 3).all()
    assert pool.empty(7, np.float32).shape == (7,)
    assert pool.empty((), np.float32).shape == ()
    assert pool.empty((2, 0), np.float32).size == 0
    # The steps from one index to the next would overflow; there is none to be taken.
    assert pool.block((0, 1 << 61, 8), "f32").__dlpack__() is not None


@pytest.mark.parametrize("shape", [-1, (2, -3), "four", 2.5, None, (2**40, 2**40)])
def test_impossible_shapes_are_refused(pool, shape):
    with pytest.raises(symmpool.InvalidArgumentError, match="shape"):
        pool.empty(shape, np.float32)


@pytest.mark.parametrize("dtype", [float, complex, np.longdouble, np.dtype("datetime64[s]"), "bytes8"])
def test_types_that_collectives_do_not_know_are_refused(pool, dtype):
    with pytest.raises(symmpool.InvalidArgumentError, match="dtype"):
        pool.empty(4, dtype)
    with pytest.raises(symmpool.InvalidArgumentError, match="dtype"):
        pool.block(4, dtype)


def test_byte_orders_that_are_not_the_machines_are_refused(pool):
    comm = symmpool.Communicator(pool)
    with pytest.raises(symmpool.InvalidArgumentError, match="byte order"):
        comm.all_reduce(np.ones(3, ">f4"))


def test_more_than_there_is_is_out_of_memory(pool):
    with pytest.raises(symmpool.OutOfMemoryError) as error:
        pool.block(1 << 45, "uint8")
    assert isinstance(error.value, MemoryError)


def test_what_torch_would_be_needed_for_says_so(pool, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for dtype in (None, "bf16"):
        with pytest.raises(ImportError, match="block"):
            pool.empty(4, dtype)


def test_a_view_keeps_the_memory_and_the_pool():
    pool = symmpool.Pool(symmpool.Group.in_process(1)[0], "cpu")
    array = pool.empty(1000, np.float32)
    array[...] = 5
    view = array[990:]
    del pool, array
    gc.collect()
    assert (view == 5).all()
    view[...] = 6
    assert (view == 6).all()


def test_memory_comes_back_at_the_commit_after_the_last_view(pool):
    array = pool.empty(1000, np.float32)
    place, view = array.ctypes.data, array[1:]
    del array
    assert lane(pool)["live_blocks"] == 1 and lane(pool)["deferred"] == 0
    del view
    assert lane(pool)["deferred"] > 0, "freed, but not reused before all ranks have"
    assert pool.empty(1000, np.float32).ctypes.data != place
    assert pool.commit()["blocks_returned"] == 2
    assert lane(pool)["live_blocks"] == 0
    assert pool.empty(1000, np.float32).ctypes.data == place


def drops_at_different_times(group):
    pool = symmpool.Pool(group, "cpu")
    first, second = pool.empty(1000, np.float32), pool.empty(1000, np.float32)
    offset = first.ctypes.data
    kept = first if pool.rank == 0 else None
    del first
    pool.commit()
    third = pool.empty(1000, np.float32)
    reused_early = third.ctypes.data == offset
    del kept
    pool.commit()
    fourth = pool.empty(1000, np.float32)
    comm = symmpool.Communicator(pool)
    fourth[...], second[...] = pool.rank, 7
    comm.all_reduce(fourth)
    return reused_early, fourth.ctypes.data == offset, float(fourth[0]), float(second[0])


def test_ranks_may_collect_garbage_at_different_times():
    # D5
    assert values(2, drops_at_different_times) == [(False, True, 1.0, 7.0)] * 2


def test_blocks_pass_by_dlpack(pool):
    for name in ("float32", "float64", "float16", "int32", "int64", "uint8", "int8"):
        block = pool.block((2, 3), name)
        assert block.__dlpack_device__() == (1, 0)
        array = np.from_dlpack(block)
        assert array.dtype == name and array.shape == (2, 3)
        assert array.ctypes.data == block.data_ptr
        block.numpy()[...] = 4
        assert (array == 4).all()
        del block
        assert (array == 4).all(), "the array keeps the memory"
    with pytest.raises(BufferError):
        pool.block(3, "f32").__dlpack__(copy=True)
    with pytest.raises(BufferError):
        pool.block(3, "f32").__dlpack__(dl_device=(2, 0))


def test_capsules_give_the_memory_back_whoever_has_them_last(pool):
    for version in (None, (1, 0)):
        before = lane(pool)["unordered_frees"]
        capsule = pool.block(100, "f32").__dlpack__(max_version=version)
        assert lane(pool)["unordered_frees"] == before
        del capsule
        assert lane(pool)["unordered_frees"] == before + 1
        array = np.from_dlpack(pool.block(100, "f32"))
        del array
        assert lane(pool)["unordered_frees"] == before + 2


def test_blocks_say_what_they_are(pool):
    block = pool.block((5, 2), "bf16")
    assert (block.shape, block.dtype, block.nbytes) == ((5, 2), "bfloat16", 20)
    assert block.device == pool.device == "cpu"
    assert block.numpy().dtype == ml_dtypes.bfloat16
    assert pool.block(4, "f8e4m3").numpy().dtype == ml_dtypes.float8_e4m3fn
    assert block.peer_ptr(0) == block.data_ptr
    with pytest.raises(symmpool.InvalidArgumentError, match="rank 1"):
        block.peer_ptr(1)
    assert "bfloat16" in repr(block)


def test_windows_are_known(pool):
    array, other = pool.empty(1000, np.float32), np.ones(1000, np.float32)
    assert pool.is_commit_due and not pool.is_window(array)
    report = pool.commit()
    assert report["windows_added"] == 1 and not pool.is_commit_due
    assert pool.is_window(array) and pool.is_window(array[10:]) and not pool.is_window(other)


def places(group):
    pool = symmpool.Pool(group, "cpu")
    blocks = [pool.block(size, "uint8") for size in (1, 100_000, 3_000_000)]
    pool.commit()
    blocks[1].numpy()[...] = pool.rank + 1
    symmpool.Communicator(pool).barrier()
    import ctypes

    peer = ctypes.c_uint8.from_address(blocks[1].peer_ptr(1 - pool.rank)).value
    symmpool.Communicator(pool).barrier()
    return [(block.offset, block.counter) for block in blocks], peer


def test_blocks_lie_at_the_same_place_on_every_rank():
    (first, peer_of_0), (second, peer_of_1) = values(2, places)
    assert first == second
    assert (peer_of_0, peer_of_1) == (2, 1)


def test_a_cuda_pool_without_a_device_is_unsupported():
    import glob

    if glob.glob("/dev/nvidia[0-9]*"):
        return  # there is one, and the tests on devices use it
    with pytest.raises(symmpool.UnsupportedError):
        symmpool.Pool(symmpool.Group.in_process(1)[0], "cuda")
    assert symmpool.Pool(symmpool.Group.in_process(1)[0]).device == "cpu"


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", ""])
def test_devices_that_are_none_are_refused(device):
    with pytest.raises(symmpool.InvalidArgumentError, match="device"):
        symmpool.Pool(symmpool.Group.in_process(1)[0], device)


def asks_for_numbers(pool):
    """The exit status of a forked child that calls `stats`: 0 if it gets the right error. Killed if it
    waits."""
    signal.alarm(20)
    try:
        pool.stats()
    except symmpool.InvalidStateError as error:
        os._exit(0 if "forked from it" in str(error) else 2)
    finally:
        os._exit(1)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_has_no_numbers_and_does_not_wait_for_its_parents_commit(pool):
    done = threading.Event()

    def commits():
        blocks = []
        while not done.is_set():
            blocks.append(pool.block(4 << 20, "uint8"))
            pool.commit()

    committing = threading.Thread(target=commits)
    committing.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                asks_for_numbers(pool)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        done.set()
        committing.join()
    assert pool.stats()["commits"] > 0


PARTS = ("control", "inboxes", "scratch", "staging", "wanted")


def held_by_communicators(group):
    pool = symmpool.Pool(group, "cpu")
    none = pool.stats()["communicators"]
    small = symmpool.Communicator(pool, scratch_bytes=1 << 20)
    large = symmpool.Communicator(pool, scratch_bytes=8 << 20)
    both = pool.stats()["communicators"]
    assert both == [small.memory(), large.memory()]
    reserved = pool.stats()["lanes"]["symmpool.control"]["allocated"]
    named = [each for each in symmpool.communicator_memory() if each["device"] == "cpu"]
    large.barrier()
    del large
    gc.collect()
    return none, both, reserved, named, pool.stats()["communicators"]


def test_communicators_say_what_they_hold_and_for_whom():
    for none, both, reserved, named, left in values(2, held_by_communicators):
        assert none == [] and left == both[:1]
        for memory in both:
            assert memory["total"] == sum(memory[part] for part in PARTS)
        small, large = both
        # Two halves, so that a call may begin while peers still read what the one before left.
        assert (small["scratch"], large["scratch"]) == (2 << 20, 16 << 20)
        assert small["control"] == large["control"] > 0
        assert sum(memory["total"] for memory in both) <= reserved
        assert [{part: each[part] for part in (*PARTS, "total")} for each in named] == both
        assert {each["group"] for each in named} == {named[0]["group"]} and named[0]["group"]


def test_streams_are_recorded_where_there_are_some_and_nonsense_is_refused(pool):
    block = pool.block(4, "f32")
    symmpool.Pool.record_stream(block, 0)
    with pytest.raises(TypeError, match="stream"):
        pool.record_stream(block, "none")
    for tensor in (5, None, "text", np.ones(3)):
        with pytest.raises(TypeError, match="a torch.Tensor or a Block"):
            pool.record_stream(tensor, 0)
