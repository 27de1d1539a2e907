"""Exchanges of rows with a destination each, between processes, against numpy."""

import gc

import ml_dtypes
import numpy as np
import pytest
from ranks import values

import symmpool

SHAPES = [((3,), "float32"), ((2, 4), "float16"), (7, "uint8"), ((), "int64"), ((64,), "bfloat16")]


def numpy_dtype(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def rows_of(rank, call, count, shape, dtype):
    """Rows of a rank, that every rank can make."""
    random = np.random.default_rng([rank, call, count])
    shape = (shape,) if isinstance(shape, int) else shape
    return random.integers(0, 100, (count, *shape)).astype(dtype)


def destinations_of(rank, call, world, most):
    random = np.random.default_rng([77, rank, call])
    count = [most, 0, most // 2, most][(rank + call) % 4]
    low = [-1, -1, 0, world - 1][call % 4]
    return random.integers(low, world, count)


def comes(me, call, world, most, capacity):
    """What comes to a rank: (source, row of it), and how many have room."""
    found = []
    for source in range(world):
        to = destinations_of(source, call, world, most)
        found += [(source, row) for row in np.flatnonzero(to == me).tolist()]
    return found, found[:capacity]


def capacity_of(rank, call, most, world):
    return most * world if call % 3 else most // 2 + rank


def there_and_back(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=20)
    me, world, most = pool.rank, pool.world, 30
    overflows = 0
    for shape, name in SHAPES:
        dtype = numpy_dtype(name)
        exchange = comm.row_exchange(most, shape, dtype)
        layout = exchange.layout()
        for call in range(8):
            capacity = capacity_of(me, call, most, world)
            found, fitting = comes(me, call, world, most, capacity)
            to = destinations_of(me, call, world, most).astype([np.int32, np.int64][call % 2])
            x = rows_of(me, call, len(to), shape, dtype)
            out = np.full((capacity, *x.shape[1:]), 101, dtype)
            if call % 2:
                # Of a length that is the same on every rank, as all that is symmetric.
                window = pool.empty((most * world, *x.shape[1:]), dtype)[:capacity]
                window[...] = out
                out = window
            too_much = any(
                len(comes(rank, call, world, most, 0)[0]) > capacity_of(rank, call, most, world)
                for rank in range(world)
            )
            try:
                exchange.send(out, x, to, layout)
                assert not too_much
            except symmpool.OverflowError:
                assert too_much
                overflows += 1
            parts = [
                rows_of(rank, call, len(destinations_of(rank, call, world, most)), shape, dtype)
                for rank in range(world)
            ]
            for at, (source, row) in enumerate(fitting):
                assert out[at].tobytes() == parts[source][row].tobytes()
            assert np.all(out[len(fitting) :] == 101)
            counts = [sum(source == rank for source, _ in found) for rank in range(world)]
            assert layout.counts.tolist() == counts
            assert layout.offsets.tolist() == [sum(counts[:rank]) for rank in range(world)]
            assert layout.source_index[: len(found)].tolist() == [row for _, row in found]
            # What the ranks make of the rows comes back to where they were.
            out[: len(fitting)] += np.ones((), dtype)
            back = np.full((most, *x.shape[1:]), 101, dtype)
            exchange.send_back(back, out, layout)
            arrived = [
                row
                for rank in range(world)
                for source, row in comes(rank, call, world, most, capacity_of(rank, call, most, world))[1]
                if source == me
            ]
            expected = np.zeros_like(back)
            expected[arrived] = x[arrived] + np.ones((), dtype)
            assert back.tobytes() == expected.tobytes()
    return overflows


@pytest.mark.parametrize("world", [1, 3])
def test_rows_go_where_they_are_sent_and_come_back(world):
    overflows = values(world, there_and_back)
    assert len(set(overflows)) == 1 and overflows[0] > 0


def nonsense(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=20)
    me = pool.rank
    with pytest.warns(DeprecationWarning, match="use symmpool.experts.Buffer with top_k=1"):
        exchange = comm.row_exchange(4, 2, np.float32)
    layout, other = exchange.layout(), comm.row_exchange(5, 2, np.float32).layout()
    assert exchange.rows_per_rank == 4 and exchange.row_shape == (2,) and exchange.dtype == "float32"
    x, out = pool.empty((4, 2), np.float32), pool.empty((8, 2), np.float32)
    x[...] = me + 1
    to = np.array([0, 1, -1, 1])
    said = []
    # Rank 1 is wrong, and the error on rank 0 says so.
    long = np.zeros((5, 2), np.float32)
    for wrong in [
        (out, x, np.array([0.0]), layout),
        (out, x, to, other),
        (out, x, to, None),
        (out, x.reshape(2, 4), to, layout),
        (out.astype(np.float16), x, to, layout),
        (out, long, np.zeros(5, np.int64), layout),
    ]:
        try:
            exchange.send(*(wrong if me else (out, x, to, layout)))
        except (symmpool.DivergedError, symmpool.InvalidArgumentError, TypeError) as error:
            said.append((type(error).__name__, str(error)))
    # A destination that is none is found when the call runs.
    out[...] = 0
    try:
        exchange.send(out, x, np.array([0, 1, 2 if me else -1, 1]), layout)
    except symmpool.InvalidArgumentError as error:
        said.append((type(error).__name__, str(error)))
    came = out[:, 0].tolist(), layout.counts.tolist()
    exchange.send(out, x, to, layout)
    exchange.send_back(x, out, layout)
    for rows, shape in [(1 << 31, 1), (1, 0), (1, (1 << 40, 1 << 40))]:
        with pytest.raises(symmpool.InvalidArgumentError):
            comm.row_exchange(rows, shape, np.uint8)
    assert x.tolist() == [[me + 1] * 2, [me + 1] * 2, [0, 0], [me + 1] * 2]
    return said, came


def test_nonsense_is_an_error_on_all_ranks_and_the_communicator_stays_usable():
    (observed, came), (said, came_to_it) = values(2, nonsense)
    assert [kind for kind, _ in observed] == ["DivergedError"] * 6 + ["InvalidArgumentError"]
    kinds = ["InvalidArgumentError"] * 7
    kinds[2] = "TypeError"
    assert [kind for kind, _ in said] == kinds
    for (_, text), part in zip(
        said,
        [
            "i32 or i64",
            "the exchange has",
            "RowLayout",
            "rows of 4",
            "float16",
            "5 destinations",
            "row 2 has",
        ],
        strict=True,
    ):
        assert part in text, text
    assert "destination 2; there are ranks 0 to 1, and -1" in said[-1][1]
    assert "of rank 1" in observed[-1][1]
    # Rank 1 sent nothing.
    assert came == ([1.0] + [0.0] * 7, [1, 0]) and came_to_it == ([1.0, 1.0] + [0.0] * 6, [2, 0])


def outlives(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=20)
    exchange = comm.row_exchange(2, 1, np.int32)
    layout = exchange.layout()
    out = np.zeros((4, 1), np.int32)
    exchange.send(out, np.array([[5], [6]], np.int32), np.array([1, 0]), layout)
    counts, index = layout.counts, layout.source_index
    assert "rows=2" in repr(exchange) and "rows=2" in repr(layout)
    del comm, exchange, layout
    gc.collect()
    pool.commit()
    return counts.tolist(), index.tolist()[:2], out.ravel().tolist()


def test_what_a_layout_has_outlives_it():
    assert values(2, outlives) == [([1, 1], [1, 1], [6, 6, 0, 0]), ([1, 1], [0, 0], [5, 5, 0, 0])]
