"""Who sends how much to whom: traffic matrices, made or read, the same on every rank.

A matrix is a list of rows, one a rank, of what it sends to each rank. Made ones are weights, scaled
so that ranks send `size` bytes each on average.
"""

import json
import random
from pathlib import Path

#: Experts of a model, and how many a token is sent to, in `moe`.
EXPERTS_A_RANK = 8
TOP_K = 8


def even(world, _generator, _imbalance):
    return [[1.0] * world for _ in range(world)]


def zipf(world, _generator, imbalance):
    """Every rank sends most to the same rank, half as much to the next, a third, ..."""
    weights = [1 / (place + 1) ** imbalance for place in range(world)]
    return [weights[:] for _ in range(world)]


def one_hot(world, _generator, _imbalance):
    """All to rank 0."""
    return [[1.0] + [0.0] * (world - 1) for _ in range(world)]


def half_empty(world, _generator, _imbalance):
    """Every other pair has nothing to say."""
    return [[float((a + b) % 2 == 0) for b in range(world)] for a in range(world)]


def moe(world, generator, imbalance):
    """What a mixture of experts dispatches: 4096 tokens a rank, each to `TOP_K` different experts by
    a popularity that falls by `imbalance` (0: none is more popular), in an order of its own."""
    experts = world * EXPERTS_A_RANK
    popularity = [1 / (place + 1) ** imbalance for place in range(experts)]
    generator.shuffle(popularity)
    matrix = [[0.0] * world for _ in range(world)]
    for row in matrix:
        for _ in range(4096):
            # The largest of so many numbers, each to the power of its weight: a draw of several
            # without putting back.
            keys = [generator.random() ** (1 / weight) for weight in popularity]
            chosen = sorted(range(experts), key=keys.__getitem__)[-min(TOP_K, experts) :]
            # A rank is sent a token once, however many of its experts want it.
            for rank in {expert // EXPERTS_A_RANK for expert in chosen}:
                row[rank] += 1
    return matrix


KINDS = {
    "even": even,
    "zipf": zipf,
    "one-hot": one_hot,
    "half-empty": half_empty,
    "moe": moe,
}


def make(kind, world, imbalance=1.0, seed=1):
    """A matrix of weights."""
    return KINDS[kind](world, random.Random(seed), imbalance)


def read(path, world):
    """A matrix of numbers from a file: JSON, or a line a row."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{path}: no matrix of numbers: {error}") from error
    try:
        rows = json.loads(text)
    except ValueError:
        rows = None
    # A line with one number, which is all that one rank has, is JSON as well.
    if rows is None or isinstance(rows, (int, float)):
        rows = [line.replace(",", " ").split() for line in text.splitlines() if line.strip()]
    try:
        if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
            raise TypeError("JSON, but no list of lists")
        rows = [[float(number) for number in row] for row in rows]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: no matrix of numbers: {error}") from error
    if len(rows) != world or any(len(row) != world for row in rows):
        raise ValueError(f"{path}: {[len(row) for row in rows]} numbers in rows; {world} of {world}")
    if any(not 0 <= number < 1e18 for row in rows for number in row):
        raise ValueError(f"{path}: numbers of bytes are 0 or more")
    return rows


def scale(matrix, size, itemsize, granule=1):
    """Elements that each rank sends to each: `size` bytes a rank on average, in whole `granule`s as
    far as there are as many."""
    total = sum(map(sum, matrix))
    return elements(matrix, itemsize, granule, size * len(matrix) / total if total else 0.0)


def elements(matrix, itemsize, granule=1, factor=1.0):
    """Elements that each rank sends to each, of a matrix of bytes times `factor`, likewise."""

    def whole(number):
        count = int(number * factor / itemsize)
        return count // granule * granule if count >= granule else count

    return [[whole(number) for number in row] for row in matrix]


def heaviest(counts):
    """The most elements that any rank sends to others, or receives from them."""
    ranks = range(len(counts))
    sent = [sum(counts[a][b] for b in ranks if b != a) for a in ranks]
    came = [sum(counts[b][a] for b in ranks if b != a) for a in ranks]
    return max(sent + came)
