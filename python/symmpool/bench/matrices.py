"""Traffic matrices, generated or read from a file; the same on every rank.

A matrix is a list of rows. Row r has what rank r sends to each rank. Generated matrices are weights, which
are scaled so that ranks send `size` bytes each on average.
"""

import json
import random
from pathlib import Path

#: Experts per rank, and to how many experts a token is sent, in `moe`.
EXPERTS_PER_RANK = 8
TOP_K = 8


def even(world, _generator, _imbalance):
    return [[1.0] * world for _ in range(world)]


def zipf(world, _generator, imbalance):
    """Every rank sends most to rank 0, half as much to rank 1, a third to rank 2, and so on."""
    weights = [1 / (place + 1) ** imbalance for place in range(world)]
    return [weights[:] for _ in range(world)]


def one_hot(world, _generator, _imbalance):
    """Every rank sends only to rank 0."""
    return [[1.0] + [0.0] * (world - 1) for _ in range(world)]


def half_empty(world, _generator, _imbalance):
    """Every other pair of ranks exchanges nothing."""
    return [[float((a + b) % 2 == 0) for b in range(world)] for a in range(world)]


def moe(world, generator, imbalance):
    """The dispatch of a mixture of experts: 4096 tokens per rank, each to `TOP_K` different experts. The
    popularity of experts falls with the exponent `imbalance` (0: all are equal), in random order."""
    experts = world * EXPERTS_PER_RANK
    popularity = [1 / (place + 1) ** imbalance for place in range(experts)]
    generator.shuffle(popularity)
    matrix = [[0.0] * world for _ in range(world)]
    for row in matrix:
        for _ in range(4096):
            # Weighted sampling without replacement: the largest keys, each a random number to the power
            # of 1 / weight.
            keys = [generator.random() ** (1 / weight) for weight in popularity]
            chosen = sorted(range(experts), key=keys.__getitem__)[-min(TOP_K, experts) :]
            # A token is sent once to a rank, even if several of its experts take it.
            for rank in {expert // EXPERTS_PER_RANK for expert in chosen}:
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
    """A matrix from a file: JSON, or one line per row."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{path}: no matrix of numbers: {error}") from error
    try:
        rows = json.loads(text)
    except ValueError:
        rows = None
    # One line with one number, the matrix of one rank, is also valid JSON.
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
    """Elements by pair of ranks, for `size` bytes per rank on average. Counts of at least one granule are
    rounded down to a multiple of it."""
    total = sum(map(sum, matrix))
    return elements(matrix, itemsize, granule, size * len(matrix) / total if total else 0.0)


def elements(matrix, itemsize, granule=1, factor=1.0):
    """Elements by pair of ranks, from a matrix of bytes times `factor`, rounded in the same way."""

    def whole(number):
        count = int(number * factor / itemsize)
        return count // granule * granule if count >= granule else count

    return [[whole(number) for number in row] for row in matrix]


def heaviest(counts):
    """The largest number of elements that any rank sends to others, or receives from them."""
    ranks = range(len(counts))
    sent = [sum(counts[a][b] for b in ranks if b != a) for a in ranks]
    came = [sum(counts[b][a] for b in ranks if b != a) for a in ranks]
    return max(sent + came)
