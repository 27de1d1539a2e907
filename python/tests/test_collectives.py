"""Collectives between processes, against numpy."""

import ml_dtypes
import numpy as np
import pytest
from ranks import values

import symmpool

DTYPES = ["float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "int8"]
DTYPES += ["float8_e4m3fn", "float8_e5m2"]
OPS = ["sum", "prod", "min", "max", "avg"]


def numpy_dtype(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def data(dtype, rank, count):
    """Values of a rank, that every rank can make."""
    random = np.random.default_rng([rank, count])
    if dtype.kind in "iu":
        low, high = (0, 256) if dtype.kind == "u" else (-128, 128)
        return random.integers(low, high, count).astype(dtype)
    return random.uniform(-2, 2, count).astype(np.float32).astype(dtype)


def reduced(op, parts):
    """The parts' reduction, in rank order, in the type that is documented."""
    dtype = parts[0].dtype
    small = dtype.kind not in "iu" and dtype.itemsize < 4
    wide = np.dtype(np.float32) if small else dtype
    if op == "avg" and dtype.kind in "iu":
        total = sum(int_array(part) for part in parts)
        return (np.sign(total) * (np.abs(total) // len(parts))).astype(dtype)
    fold = {"sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum}.get(op, np.maximum)
    total = parts[0].astype(wide)
    with np.errstate(over="ignore"):
        for part in parts[1:]:
            total = fold(total, part.astype(wide), dtype=wide)
    if op == "avg":
        total = total / wide.type(len(parts))
    return total.astype(dtype)


def int_array(part):
    return part.astype(object)


def same(found, expected, op):
    if op == "avg" and expected.dtype.kind not in "iu":
        # A division or a product with the reciprocal: both are right to within a unit.
        unit = float(ml_dtypes.finfo(expected.dtype).eps)
        found, expected = found.astype(np.float64), expected.astype(np.float64)
        return bool(np.all(np.abs(found - expected) <= unit * np.abs(expected)))
    return found.tobytes() == expected.tobytes()


def memory(pool, kind, values):
    """Values in memory of the pool, or in numpy's own."""
    if kind == "plain":
        return values.copy()
    array = pool.empty(values.shape, values.dtype)
    array[...] = values
    return array


def every_reduction(group, counts):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=20)
    me, world = pool.rank, pool.world
    wrong = []
    for name in DTYPES:
        dtype = numpy_dtype(name)
        for count in counts:
            parts = [data(dtype, rank, count) for rank in range(world)]
            wide = [np.resize(part, count * world) for part in parts]
            for op in OPS:
                expected = reduced(op, parts)
                scattered = reduced(op, wide)[me * count : (me + 1) * count]
                for kind in ("window", "plain"):
                    x = memory(pool, kind, parts[me])
                    out = memory(pool, kind, np.zeros_like(parts[me]))
                    comm.all_reduce(x, op, out)
                    if not same(out, expected, op) or not same(x, parts[me], "sum"):
                        wrong.append(("all_reduce out", name, count, op, kind))
                    comm.all_reduce(x, op)
                    if not same(x, expected, op):
                        wrong.append(("all_reduce", name, count, op, kind))
                    comm.reduce_scatter_tensor(out, memory(pool, kind, wide[me]), op)
                    if not same(out, scattered, op):
                        wrong.append(("reduce_scatter", name, count, op, kind))
    return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_every_type_and_operation_is_what_numpy_says(world):
    assert values(world, every_reduction, [1, 1000]) == [[]] * world


def every_copy(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=20)
    me, world = pool.rank, pool.world
    wrong = []

    def check(what, found, expected):
        if found.tobytes() != expected.tobytes():
            wrong.append(what)

    for name in DTYPES:
        dtype = numpy_dtype(name)
        for rows in (1, 500):
            shape = (world * rows, 3)
            parts = [data(dtype, rank, world * rows * 3).reshape(shape) for rank in range(world)]
            for kind in ("window", "plain"):
                case = (name, rows, kind)
                x = memory(pool, kind, parts[me])
                out = memory(pool, kind, np.zeros((world, *shape), dtype))
                comm.all_gather_into_tensor(out, x)
                check(("all_gather", case), out, np.stack(parts))
                out = memory(pool, kind, np.zeros(shape, dtype))
                comm.all_to_all_single(out, x)
                mine = [part[me * rows : (me + 1) * rows] for part in parts]
                check(("all_to_all_single", case), out, np.concatenate(mine))
                # Rank s sends s + 1 rows to each rank but to itself none.
                send = [[0 if s == r else min(s + 1, rows) for r in range(world)] for s in range(world)]
                receive = [send[s][me] for s in range(world)]
                out = memory(pool, kind, np.zeros(shape, dtype))
                comm.all_to_all_single(out, x, receive, send[me])
                begins = [sum(send[s][:me]) for s in range(world)]
                mine = [parts[s][begins[s] : begins[s] + receive[s]] for s in range(world)]
                check(("all_to_all_single split", case), out[: sum(receive)], np.concatenate(mine))
                for src in range(world):
                    x = memory(pool, kind, parts[me])
                    comm.broadcast(x, src)
                    check(("broadcast", src, case), x, parts[src])
    comm.barrier()
    return wrong


def test_copies_are_what_numpy_says():
    assert values(3, every_copy) == [[]] * 3


def exchanges_by_splits(group):
    pool = symmpool.Pool(group, "cpu")
    me, world = pool.rank, pool.world
    wrong = []
    for all_to_all in ("auto", "lamport", "direct", "copy", "ring"):
        comm = symmpool.Communicator(pool, timeout=20, all_to_all=all_to_all)
        for name in DTYPES:
            for call, count in enumerate((np.int32, np.int64)):
                dtype = numpy_dtype(name)
                # Rank s sends r + s rows to rank r in one call, fewer and none in others.
                send = [[max(s + r - call, 0) for r in range(world)] for s in range(world)]
                rows = max(map(sum, send))
                parts = [data(dtype, rank, rows * 3).reshape(rows, 3) for rank in range(world)]
                begins = [sum(send[s][:me]) for s in range(world)]
                mine = [parts[s][begins[s] : begins[s] + send[s][me]] for s in range(world)]
                expected = np.concatenate(mine)
                x = memory(pool, "window" if call else "plain", parts[me])
                out = memory(pool, "window" if call else "plain", np.zeros((99, 3), dtype))
                splits = np.array(send[me], count)
                came, offsets = np.zeros(world, count), np.zeros(world, count)
                comm.all_to_all_v(out, x, splits, came, offsets)
                if out[: len(expected)].tobytes() != expected.tobytes():
                    wrong.append((all_to_all, name, call))
                assert came.tolist() == [row[me] for row in send]
                assert offsets.tolist() == [sum(row[me] for row in send[:s]) for s in range(world)]
    return wrong


def test_splits_lie_in_memory():
    assert values(3, exchanges_by_splits) == [[]] * 3


def too_much(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=20)
    # Rank 1 has room for three rows of four.
    out = np.full((4 - pool.rank, 2), -1, np.int32)
    x = np.full((4, 2), pool.rank, np.int32)
    splits = np.array([2, 2])
    try:
        comm.all_to_all_v(out, x, splits)
        observed = None
    except symmpool.OverflowError as error:
        observed = "rank 1 was sent 4 rows, and its output holds 3" in str(error)
    try:
        comm.all_to_all_v(out, x, np.array([2, -1 if pool.rank else 1]))
        nonsense = None
    except symmpool.InvalidArgumentError as error:
        nonsense = "splits of rank 1 are negative" in str(error)
    comm.barrier()
    return observed, nonsense, out.tolist()


def test_an_output_that_is_too_short_is_an_error_on_all_ranks():
    rows = [[0, 0], [0, 0], [1, 1], [1, 1]]
    assert values(2, too_much) == [(True, True, rows), (True, True, rows[:3])]


def every_algorithm(group):
    pool = symmpool.Pool(group, "cpu")
    results = {}
    for algorithm in symmpool.algorithms():
        comm = symmpool.Communicator(pool, algorithm=algorithm)
        assert comm.algorithm == algorithm
        x = memory(pool, "window", data(numpy_dtype("float32"), pool.rank, 10_000))
        try:
            comm.all_reduce(x)
        except symmpool.UnsupportedError:
            continue  # one of devices
        results[algorithm] = x.tobytes()
    assert set(results) == {"auto", "one_shot", "two_shot", "cube_mesh"}
    return len(set(results.values())), results["auto"]


def test_algorithms_and_ranks_agree_to_the_bit():
    found = values(3, every_algorithm)
    assert [different for different, _ in found] == [1] * 3
    assert len({bits for _, bits in found}) == 1


def empty_calls(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool)
    x, out = pool.empty((0, 4), np.float32), pool.empty((6, 4), np.float32)
    comm.all_reduce(x)
    comm.all_gather_into_tensor(x, x)
    comm.broadcast(x, 0)
    # Rank 0 has nothing to send, rank 1 sends it all: the same kind of memory all the same.
    rows = pool.empty((6, 4), np.float32)
    rows[...] = pool.rank
    out[...] = 9
    send = [0, 0] if pool.rank == 0 else [4, 2]
    mine = rows[:0] if pool.rank == 0 else rows
    comm.all_to_all_single(out, mine, [0, 4 - 2 * pool.rank], send)
    return out[:, 0].tolist()


def test_nothing_is_a_size_too():
    assert values(2, empty_calls) == [[1, 1, 1, 1, 9, 9], [1, 1, 9, 9, 9, 9]]


def even_for_one(group):
    """Rank 1's row and column are even, so that it may leave its splits out, as in torch.distributed."""
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=20)
    matrix, me = [[3, 1, 2], [1, 1, 1], [2, 1, 3]], pool.rank
    x, out = np.full(sum(matrix[me]), me, np.int32), np.empty(sum(row[me] for row in matrix), np.int32)
    splits = () if me == 1 else ([row[me] for row in matrix], matrix[me])
    comm.all_to_all_single(out, x, *splits)
    return out.tolist()


def test_a_rank_with_even_parts_may_leave_its_splits_out():
    assert values(3, even_for_one) == [[0, 0, 0, 1, 2, 2], [0, 1, 2], [0, 0, 1, 2, 2, 2]]


def test_one_rank_alone_needs_nobody():
    pool = symmpool.Pool(symmpool.Group.in_process(1)[0], "cpu")
    comm = symmpool.Communicator(pool)
    x = np.arange(5, dtype=np.int32)
    comm.all_reduce(x)
    comm.barrier()
    assert x.tolist() == [0, 1, 2, 3, 4] and (comm.rank, comm.world) == (0, 1)


def late_to_a_barrier(group):
    comm = symmpool.Communicator(symmpool.Pool(group, "cpu"))
    ran_out = []
    for _ in range(2):
        if group.rank == 1:
            comm.wait(0, channel=9)
        else:
            try:
                comm.barrier_on(8, timeout=0.02)
            except symmpool.TimeoutError as error:
                ran_out.append(error.ranks)
            comm.signal(1, channel=9)
        comm.barrier_on(8)
    comm.barrier()
    # Each rank has signalled once a barrier, however often it called.
    with pytest.raises(symmpool.TimeoutError, match="channel 8"):
        comm.wait(1 - group.rank, channel=8, timeout=1e-3)
    with pytest.raises(symmpool.InvalidArgumentError, match="channel"):
        comm.barrier_on(16)
    return ran_out


def test_a_barrier_on_a_channel_that_ran_out_of_time_goes_on():
    assert values(2, late_to_a_barrier) == [[(1,), (1,)], []]
