"""Tests of calls that only move data, with elements that no reduction takes: numpy's, between processes."""

import ml_dtypes
import numpy as np
import pytest
from ranks import values
from test_errors import failure

import symmpool

NAMED = ["bool", "int16", "uint16", "uint32", "uint64", "complex64", "complex128"]
NAMED += ["float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
# These have no name in calls but their size.
NAMELESS = ["int4", "float8_e3m4", "float128", "datetime64[s]", "S2", "S4", "U1", "V16"]


def numpy_dtype(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def data(dtype, rank, count):
    """Any bits at all: they are to arrive as they are."""
    drawn = np.random.default_rng([rank, count]).bytes(dtype.itemsize * count)
    return np.frombuffer(drawn, dtype).copy()


def memory(pool, kind, array):
    if kind == "plain":
        return array.copy()
    window = pool.empty(array.nbytes, np.uint8)
    window[...] = array.view(np.uint8) if array.size else []
    return window.view(array.dtype)


def every_move(group, counts):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=20)
    me, world = pool.rank, pool.world
    wrong = []

    def compare(what, found, expected):
        if found.tobytes() != expected.tobytes():
            wrong.append((*what, str(expected.dtype)))

    for name in NAMED + NAMELESS:
        dtype = numpy_dtype(name)
        for count in counts:
            parts = [data(dtype, rank, world * count) for rank in range(world)]
            swapped = np.concatenate([part[me * count : (me + 1) * count] for part in parts])
            for kind in ("window", "plain"):
                mine = memory(pool, kind, parts[me])
                out = memory(pool, kind, np.zeros(world * world * count, dtype))
                comm.all_gather_into_tensor(out, mine)
                compare(("all_gather", count, kind), out, np.concatenate(parts))
                out = memory(pool, kind, np.zeros(world * count, dtype))
                comm.all_to_all_single(out, mine)
                compare(("all_to_all_single", count, kind), out, swapped)
                out = memory(pool, kind, np.zeros(world * count, dtype))
                splits, there = np.full(world, count), np.zeros(world, np.int64)
                comm.all_to_all_v(out, mine, splits, there)
                compare(("all_to_all_v", count, kind), out, swapped)
                # To the next rank, all of it.
                send, receive = [0] * world, [0] * world
                send[(me + 1) % world] = receive[me - 1] = count
                out = memory(pool, kind, np.zeros(count, dtype))
                comm.all_to_all_single(out, mine[:count].copy(), receive, send)
                compare(("uneven", count, kind), out, parts[me - 1][:count])
                comm.broadcast(mine, world - 1)
                compare(("broadcast", count, kind), mine, parts[-1])
    return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_every_type_arrives_as_it_was(world):
    assert values(world, every_move, [1, 2000]) == [[]] * world


def of_two_types(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=20)
    found = []
    for first, second in [
        ("int16", "bfloat16"),
        ("bool", "uint8"),
        ("complex64", "float64"),
        ("S4", "float32"),
    ]:
        x = np.zeros(8, numpy_dtype(second if pool.rank else first))
        out = np.zeros(16, x.dtype)
        for call in (
            lambda x=x: comm.broadcast(x, 0),
            lambda x=x, out=out: comm.all_gather_into_tensor(out, x),
            lambda x=x: comm.all_to_all_single(x.copy(), x),
            lambda x=x: comm.all_to_all_single(x.copy(), x, [4, 4], [4, 4]),
        ):
            kind, _, text, seconds = failure(call)
            found.append((kind, text.splitlines()[1:3], seconds < 10))
    comm.barrier()
    return found


def test_ranks_with_different_types_are_both_named():
    first, second = values(2, of_two_types)
    assert first == second
    names = [("i16", "bf16"), ("bool", "u8"), ("complex64", "f64"), ("bytes4", "f32")]
    assert len(first) == 4 * len(names)
    for nth, (kind, (ours, theirs), soon) in enumerate(first):
        one, other = names[nth // 4]
        assert kind == "DivergedError" and soon
        assert "rank 0" in ours and f" {one}" in ours, ours
        assert "rank 1" in theirs and f" {other}" in theirs, theirs


@pytest.fixture
def pool():
    return symmpool.Pool(symmpool.Group.in_process(1)[0], "cpu")


def test_reductions_name_what_they_refuse_and_what_they_take(pool):
    comm = symmpool.Communicator(pool)
    for name in [*NAMED, "int4", "datetime64[s]", "S4"]:
        x = np.zeros(4, numpy_dtype(name))
        for call in (lambda x=x: comm.all_reduce(x), lambda x=x: comm.reduce_scatter_tensor(x.copy(), x)):
            with pytest.raises(symmpool.InvalidArgumentError) as error:
                call()
            assert str(x.dtype) in str(error.value) and "not reduced" in str(error.value)
            assert "float32, float64, float16, bfloat16" in str(error.value)


def test_what_cannot_travel_says_why(pool):
    comm = symmpool.Communicator(pool)
    # Text of any length, of newer numpy.
    text = getattr(np.dtypes, "StringDType", lambda: object)()
    for array, why in [
        (np.array([{}, []], object), "objects"),
        (np.array(["a", "b"], text), "objects"),
        (np.zeros(2, [("key", "i8"), ("value", "f8")]), 'view."V16".'),
        (np.zeros(2, "S3"), "3 bytes"),
        (np.zeros(2, "complex256"), "32 bytes"),
        (np.zeros(2, ">u2"), "byte order"),
    ]:
        with pytest.raises(symmpool.InvalidArgumentError, match=why):
            comm.broadcast(array, 0)


@pytest.mark.parametrize("name", [*NAMED, "bfloat16", "float8_e4m3fn"])
def test_memory_of_every_type(pool, name):
    dtype = numpy_dtype(name)
    array = pool.zeros((3, 4), dtype)
    assert (array.dtype, array.shape, array.tobytes()) == (dtype, (3, 4), bytes(12 * dtype.itemsize))
    block = pool.block(5, name)
    assert (block.dtype, block.nbytes) == (name, 5 * dtype.itemsize)
    assert block.numpy().dtype == dtype
    if hasattr(np, name):
        assert np.from_dlpack(block).dtype == dtype
