"""Algorithms of one's own by their names: which names they may have, and how they are called and compared."""

import json

import numpy as np
import pytest
from ranks import values

import symmpool
from symmpool import language as sl
from symmpool.language import library

#: Rank 1 gets the input of the next rank; the others have no output.
shift = sl.Collective("shift", lambda rank, world: [[(2 % world, 0)]] if rank == 1 else [])


@sl.algorithm(shift)
def shifted(me):
    inbox = me.scratch(1)
    if me.rank == 2 % me.world:
        me.put(me.peer(1).at(inbox)[0], me.input[0])
        me.signal(1)
    if me.rank == 1:
        me.wait(2 % me.world)
        me.copy(me.output[0], inbox[0])


def named(program, world, name):
    plan = json.loads(program.trace(world))
    return sl.Algorithm(json.dumps({**plan, "name": name}))


#: A built-in name of each collective, and one that only devices have.
BUILT_IN = [
    ("one_shot_all_reduce", "two_shot"),
    ("one_shot_all_reduce", "one_shot_ll"),
    ("direct_reduce_scatter", "scratch"),
    ("direct_all_gather", "ring"),
    ("binomial_broadcast", "direct"),
    ("direct_all_to_all", "copy"),
]


def registers(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=30)
    for program, name in BUILT_IN:
        algorithm = named(library.ALL[program], comm.world, name)
        with pytest.raises(
            symmpool.InvalidArgumentError, match=f"{name}.*rank {comm.rank}.*built-in"
        ) as caught:
            comm.register(algorithm)
        assert "name of its own" in str(caught.value)
    kernel = symmpool.native("\n", "two_shot", "all_reduce")
    with pytest.raises(symmpool.InvalidArgumentError, match="built-in"):
        comm.register(kernel)
    # A built-in algorithm keeps its name, on ordinary memory too.
    x = np.full(6, comm.rank + 1, np.float32)
    comm.all_reduce(x, algorithm="two_shot")
    return float(x[0])


def test_built_in_names_are_not_taken():
    assert values(2, registers) == [3.0, 3.0]


def calls_by_name(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=30)
    world = comm.world
    algorithm = shifted.compile(world)
    comm.register(algorithm)
    comm.register(library.one_shot_all_reduce.compile(world))
    x, out = np.full(5, comm.rank + 1, np.float32), np.zeros(5, np.float32)
    comm.execute("shifted", x, out if comm.rank == 1 else None)
    assert out.tolist() == ([2 % world + 1] * 5 if comm.rank == 1 else [0] * 5)
    # One that is given, and a standard collective, in place.
    comm.execute(algorithm, x, out if comm.rank == 1 else None)
    comm.execute("one_shot_all_reduce", x, op="max")
    assert x.tolist() == [world] * 5
    for wrong in ("nothing", 3):
        with pytest.raises(
            symmpool.InvalidArgumentError, match="nothing.*one_shot_all_reduce, shifted|a name or an"
        ):
            comm.execute(wrong, x)
    # One rank's mistake is told to the others.
    error = symmpool.InvalidArgumentError if comm.rank == 0 else symmpool.DivergedError
    with pytest.raises(error):
        comm.execute("nothing" if comm.rank == 0 else "one_shot_all_reduce", x)
    # A rank with an output of another length than the input passes it.
    pair = sl.algorithm(sl.Collective("pair", lambda rank, world: [[(rank, 0)], [(rank, 0)]]))(
        lambda me: [me.copy(me.output[chunk], me.input[0]) for chunk in range(2)]
    )
    with pytest.raises(symmpool.InvalidArgumentError, match="pass an output of 10 elements"):
        comm.execute(pair.compile(world), x)
    comm.barrier()
    return True


def test_registered_algorithms_are_called_by_name():
    assert values(3, calls_by_name) == [True] * 3
    assert values(2, calls_by_name) == [True] * 2


def diverges(group):
    comm = symmpool.Communicator(symmpool.Pool(group, "cpu"), timeout=30)
    comm.register(shifted.compile(2))
    comm.register(library.one_shot_all_reduce.compile(2))
    x = np.ones(4, np.float32)
    with pytest.raises(symmpool.DivergedError) as caught:
        if comm.rank == 0:
            comm.execute("shifted", x)
        else:
            comm.execute("one_shot_all_reduce", x)
    return str(caught.value)


def test_diverged_calls_name_collective_and_algorithm():
    for text in values(2, diverges):
        assert "custom collective" not in text, text
        assert "shift" in text and '"shifted"' in text and '"one_shot_all_reduce"' in text, text


def test_algorithms_are_equal_by_content(tmp_path):
    algorithm = library.ring_all_reduce.compile(3)
    algorithm.save(tmp_path / "ring.json")
    again = sl.load(tmp_path / "ring.json")
    assert again == algorithm == library.ring_all_reduce.compile(3) and hash(again) == hash(algorithm)
    assert {algorithm: 1}[again] == 1
    others = [
        library.ring_all_reduce.compile(2),
        library.ring_all_reduce.compile(3, blocks=3),
        library.one_shot_all_reduce.compile(3),
        named(library.ring_all_reduce, 3, "mine"),
        symmpool.native("\n", "ring_all_reduce", "all_reduce"),
        "ring_all_reduce",
        None,
    ]
    assert all(algorithm != other for other in others)
    kernel = symmpool.native("\n", "mine", "all_reduce")
    assert (
        kernel == symmpool.native("\n", "mine", "all_reduce") != symmpool.native("\n\n", "mine", "all_reduce")
    )
