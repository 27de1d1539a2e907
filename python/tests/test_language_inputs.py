"""Tests of symmpool.language with arguments that are no sensible plan: they are refused soon, in a user's
words."""

import json
import os
import threading
import time

import pytest

import symmpool
from symmpool import language as sl
from symmpool.language import library


def reduction(sources, reductions=1):
    """A plan of one rank that reduces its input's only chunk with itself so many times."""
    source = {"buffer": "input", "index": 0}
    operation = {"op": "reduce", "dst": {"buffer": "output", "index": 0}, "srcs": [source] * sources}
    plan = {"symmpool_plan": 1, "name": "many", "collective": "all_reduce", "world": 1, "chunks": 1}
    return json.dumps({**plan, "programs": [[operation] * reductions]})


def promises(sources, promised):
    """A plan that reduces so many chunks, of which the collective wants some twice."""
    chunks = [{"buffer": "input", "index": index} for index in range(sources)]
    operation = {"op": "reduce", "dst": {"buffer": "output", "index": 0}, "srcs": chunks}
    wanted = [[0, index] for index in range(promised)]
    plan = {"symmpool_plan": 1, "name": "many", "world": 1, "chunks": sources}
    return json.dumps(
        {**plan, "collective": {"name": "own", "outputs": [[wanted]]}, "programs": [[operation]]}
    )


@pytest.mark.parametrize(
    "plan",
    [reduction(40_000), reduction(200_000, 2), promises(60_000, 59_999), promises(60_000, 60_000)],
    ids=["one_chunk_40000_times", "twice_200000", "one_too_many", "right"],
)
def test_a_reduction_of_many_sources_is_checked_soon_and_named_in_short(plan):
    began = time.monotonic()
    try:
        algorithm = sl.Algorithm(plan)
        shown = algorithm.explain()
    except sl.PlanError as error:
        shown = str(error)
    assert time.monotonic() - began < 20, "in a build that is hardly optimised, beside other tests"
    assert len(shown) < 2_000, f"{len(shown)} bytes"
    assert "more" in shown, "the operation says how many sources it leaves out"


def test_a_file_that_is_too_long_is_not_read(tmp_path):
    sparse = tmp_path / "sparse.json"
    sparse.touch()
    os.truncate(sparse, 1 << 40)
    with pytest.raises(symmpool.InvalidArgumentError, match="sparse.json.*67108864"):
        sl.load(sparse)
    # A file without a size ends the reading too.
    with pytest.raises(symmpool.InvalidArgumentError, match="67108864"):
        sl.load("/dev/zero")


def test_a_pipe_can_be_loaded(tmp_path):
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    plan = library.ring_all_reduce.compile(2)
    writer = threading.Thread(target=plan.save, args=(pipe,))
    writer.start()
    assert sl.load(pipe).hash == plan.hash
    writer.join()


@pytest.mark.parametrize("blocks", [0, 1025, 2**32 - 1])
def test_a_plan_has_the_blocks_that_compile_takes(blocks):
    plan = json.loads(library.ring_all_reduce.trace(2))
    with pytest.raises(symmpool.InvalidArgumentError, match=f"{blocks} thread blocks; 1 to 1024"):
        sl.Algorithm(json.dumps({**plan, "blocks": blocks}))
    assert sl.Algorithm(json.dumps({**plan, "blocks": 1024})).blocks == 1024


def copies(me):
    if len(me.output):
        me.copy(me.output[0], me.input[0])


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ((-1, 0), r"output\[0\] of rank 0 must hold input\[0\] of rank -1, which is not there"),
        ((2**33, 0), "rank 8589934592, which is not there"),
        ((0, -1), r"input\[-1\] of rank 0, which is not there"),
        ((0, 2**33), "which is not there"),
        ((2, 0), "rank 2, which is not there"),
        ((0, 1), "which is not there"),
    ],
)
def test_a_promise_of_what_is_not_there_names_it(place, words):
    program = sl.algorithm(sl.Collective("own", lambda rank, world: [[place]]))(copies)
    with pytest.raises(sl.PlanError, match=words) as caught:
        program.compile(2)
    assert (caught.value.kind, caught.value.rank) == ("out_of_range", 0)


@pytest.mark.parametrize("outputs", [None, 3, [None], [[3]], [[(0,)]], [[(0, 0, 0)]], [[("a", 0)]]])
def test_a_promise_that_is_none_names_collective_and_rank(outputs):
    program = sl.algorithm(sl.Collective("own", lambda rank, world: [[(0, 0)]] if rank == 0 else outputs))(
        copies
    )
    with pytest.raises(TypeError, match="own.*rank 1.*chunk") as caught:
        program.compile(2)
    assert "[]" in str(caught.value), "it says what a rank without output has"


@pytest.mark.parametrize("name", [None, 3, ""])
def test_a_collective_has_a_name(name):
    with pytest.raises((TypeError, symmpool.InvalidArgumentError), match="name="):
        sl.Collective(name, lambda rank, world: [[(0, 0)]])
    with pytest.raises(TypeError, match="outputs="):
        sl.Collective("own", [[(0, 0)]])


@pytest.mark.parametrize("name", ["x" * 300, 3])
def test_a_program_has_a_name(name):
    with pytest.raises((TypeError, symmpool.InvalidArgumentError), match="name"):
        sl.algorithm("all_reduce", name=name)(copies).compile(2)


@pytest.mark.parametrize(
    ("outputs", "words"),
    [([[[[-1, 0]]]], "invalid value: integer `-1`"), ([[[[8589934592, 0]]]], "8589934592"), (3, "sequence")],
)
def test_a_file_with_another_promise_says_where(outputs, words):
    plan = {"symmpool_plan": 1, "name": "own", "world": 1, "chunks": 1, "programs": [[]]}
    plan["collective"] = {"name": "own", "outputs": outputs}
    with pytest.raises(symmpool.InvalidArgumentError, match=words) as caught:
        sl.Algorithm(json.dumps(plan))
    assert "column" in str(caught.value)


def test_every_error_names_the_file_alone():
    with pytest.raises(sl.PlanError) as caught:
        sl.algorithm("all_reduce")(lambda me: me.input[7]).compile(2)
    assert str(caught.value).startswith("test_language_inputs.py:")
