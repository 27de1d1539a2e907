"""Programs of symmpool.language: what they compute in real ranks, and how wrong ones are refused."""

import inspect
import json
import linecache
import pathlib
import threading
import time

import numpy as np
import pytest
from ranks import values

import symmpool
from symmpool import language as sl
from symmpool.language import library


def test_programs_are_short():
    for program in library.ALL.values():
        body = inspect.getsource(program._function).split('"""', 2)[2]
        lines = [line for line in body.splitlines() if line.strip() and not line.strip().startswith("#")]
        assert len(lines) <= 30, f"{program.name}: {len(lines)} lines"


def inputs(rank, count):
    return (np.arange(count) * 7 + rank * 131) % 1009 - 300


def compute(group):
    """Every program over odd and even numbers of elements, of several types; how many are wrong."""
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=60)
    rank, world = comm.rank, comm.world
    wrong = []
    for name, program in library.ALL.items():
        if (name.startswith("halving") and world & (world - 1)) or (name.startswith("hier") and world % 2):
            continue
        algorithm = program.compile(world)
        comm.register(algorithm)
        for count in (1, 999, 100_000):
            for dtype in (np.float32, np.int64):
                parts = world if algorithm.collective in ("reduce_scatter", "all_to_all") else 1
                total = np.stack([inputs(of, parts * count) for of in range(world)])
                x = pool.empty(parts * count, dtype)
                np.asarray(x)[:] = total[rank]
                outs = world if algorithm.collective in ("all_gather", "all_to_all") else 1
                out = pool.empty(outs * count, dtype)
                np.asarray(out)[:] = 77
                mine = slice(rank * count, (rank + 1) * count)
                match algorithm.collective:
                    case "all_reduce":
                        comm.all_reduce(x, out=out, algorithm=name)
                        expected = total.sum(0)
                    case "reduce_scatter":
                        comm.reduce_scatter_tensor(out, x, algorithm=name)
                        expected = total.sum(0)[mine]
                    case "all_gather":
                        comm.all_gather_into_tensor(out, x, algorithm=name)
                        expected = total.reshape(-1)
                    case "all_to_all":
                        comm.all_to_all_single(out, x, algorithm=name)
                        expected = total[:, mine].reshape(-1)
                    case _:
                        root = count % world
                        np.asarray(out)[:] = total[rank]
                        comm.broadcast(out, root, algorithm=name)
                        expected = total[root]
                if not np.array_equal(np.asarray(out), expected):
                    wrong.append((name, count, np.dtype(dtype).name))
    mine = [each for each in comm.algorithms("all_gather") if each.origin == "plan"]
    return wrong, sorted(each.name for each in mine)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_programs_compute_in_processes_what_was_proved(world):
    gathers = ["direct_all_gather", "ring_all_gather"]
    assert values(world, compute) == [([], gathers)] * world


def executes(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=30)
    peer = 1 - comm.rank

    swap = sl.Collective(
        "swap", lambda rank, world: [[((rank + 1) % world, 0)], [(r, 1) for r in range(world)]]
    )

    @sl.algorithm(swap, chunks=2)
    def swapped(me):
        me.barrier()
        for other in me.peers():
            me.get(me.output[0], other.input[0])
            pair = [me.input[1], other.input[1]]
            me.reduce(me.output[1], pair if me.rank == 0 else pair[::-1])
        me.barrier()

    algorithm = swapped.compile(2)
    x, y = pool.empty(10, np.float64), pool.empty(10, np.float64)
    np.asarray(x)[:] = np.arange(10) + 100 * comm.rank
    algorithm.execute(comm, x, y, op="max")
    expected = [*(np.arange(5) + 100 * peer), *(np.arange(5, 10) + 100)]
    right = np.array_equal(np.asarray(y), expected)
    # An algorithm that takes ordinary memory is called by addresses.
    one_shot = library.one_shot_all_reduce.compile(2)
    data = np.full(7, comm.rank + 1, np.int32)
    one_shot.execute(comm, data.ctypes.data, count=7, dtype="int32")
    right &= bool((data == 3).all())
    # A built-in algorithm that one call names.
    comm.all_reduce(data, algorithm="two_shot")
    return right and bool((data == 6).all())


def test_collectives_of_ones_own_and_addresses():
    assert values(2, executes) == [True, True]


def disagrees(group):
    comm = symmpool.Communicator(symmpool.Pool(group, "cpu"), timeout=30)
    program = library.two_shot_pull_all_reduce if comm.rank == 1 else library.one_shot_all_reduce
    plan = json.loads(program.trace(3))
    plan["name"] = "mine"
    comm.register(sl.Algorithm(json.dumps(plan)))
    x = comm.all_reduce
    tensor = np.ones(6, np.float32)
    if comm.rank == 1:
        # A program that reaches windows refuses ordinary memory before it comes to the others.
        with pytest.raises(symmpool.UnsupportedError, match="must lie in a window"):
            x(tensor, algorithm="mine")
    else:
        with pytest.raises(symmpool.DivergedError) as caught:
            x(tensor, algorithm="mine")
        assert caught.value.ranks == (1,)
    for nonsense in ("yours", "", "one_shot "):
        with pytest.raises(symmpool.InvalidArgumentError, match="there are"):
            x(tensor, algorithm=nonsense)
    other = library.one_shot_all_reduce.compile(3)
    comm.register(other)
    comm.register(library.one_shot_all_reduce.compile(3))
    changed = json.loads(other.to_json())
    changed["scratch"] += 1
    with pytest.raises(symmpool.InvalidArgumentError, match="a name of its own"):
        comm.register(sl.Algorithm(json.dumps(changed)))
    with pytest.raises(symmpool.InvalidArgumentError, match="the communicator has 3 ranks"):
        comm.register(library.one_shot_all_reduce.compile(2))
    for call in (
        lambda: other.execute(comm, tensor, np.ones(5, np.float32)),
        lambda: other.execute(comm, tensor, np.ones(6, np.float64)),
        lambda: other.execute(comm, tensor, op="median"),
        lambda: other.execute(comm, 64, count=3),
        lambda: other.execute(comm, tensor, src=1),
        lambda: comm.all_to_all_single(tensor, tensor, [2, 2, 2], algorithm="mine"),
    ):
        with pytest.raises(symmpool.InvalidArgumentError):
            call()
    # All of that was refused on all ranks alike, and the communicator stays usable.
    comm.all_reduce(tensor, algorithm="one_shot_all_reduce")
    return float(tensor[0])


def test_ranks_that_registered_something_else_are_named():
    assert values(3, disagrees) == [3.0, 3.0, 3.0]


collected = sl.Collective(
    "collected", lambda rank, world: [[(of, 0)] for of in range(world)] if rank == 0 else []
)


@sl.algorithm(collected)
def collected_in_scratch(me):
    inbox = me.scratch(me.world)
    if me.rank > 0:
        me.put(me.peer(0).at(inbox)[me.rank], me.input[0])
        me.signal(0)
        return
    me.copy(me.output[0], me.input[0])
    for peer in me.peers():
        me.wait(peer)
        me.copy(me.output[peer.rank], inbox[peer.rank])


@sl.algorithm(collected)
def collected_in_output(me):
    me.barrier()
    if me.rank > 0:
        me.put(me.peer(0).output[me.rank], me.input[0])
    else:
        me.copy(me.output[0], me.input[0])
    me.barrier()


def collects(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=30)
    data = np.full(5, comm.rank + 1, np.float32)
    whole, none = pool.empty(10, np.float32), pool.empty(0, np.float32)
    for program in (collected_in_scratch, collected_in_output):
        algorithm = program.compile(2)
        for output in (np.empty(0, np.float32), none, None, whole):
            np.asarray(whole)[:] = -1
            # Peers find outputs at the offset of their own.
            if "output" in algorithm.windows and output is not whole:
                error = symmpool.DivergedError if comm.rank == 0 else symmpool.InvalidArgumentError
                if output is not none and comm.rank == 1:
                    error = symmpool.UnsupportedError
                with pytest.raises((error, symmpool.DivergedError)):
                    algorithm.execute(comm, data, whole if comm.rank == 0 else output)
                continue
            algorithm.execute(comm, data, whole if comm.rank == 0 else output)
            wanted = [1] * 5 + [2] * 5 if comm.rank == 0 else [-1] * 10
            assert np.asarray(whole).tolist() == wanted, (program.name, output)
    return True


def test_ranks_without_an_output_pass_an_empty_one():
    assert values(2, collects) == [True, True]


@sl.algorithm("all_reduce", chunks=2)
def parks_a_chunk(me):
    me.copy(me.output[1], me.input[0])
    inbox = me.scratch(2 * me.world)
    for peer in me.peers():
        me.put(peer.at(inbox)[2 * me.rank], me.output[1])
        me.put(peer.at(inbox)[2 * me.rank + 1], me.input[1])
    me.copy(inbox[2 * me.rank], me.output[1])
    me.copy(inbox[2 * me.rank + 1], me.input[1])
    for peer in me.peers():
        me.signal(peer)
    for peer in me.peers():
        me.wait(peer)
    for chunk in range(2):
        me.reduce(me.output[chunk], [inbox[2 * rank + chunk] for rank in range(me.world)])


def divides(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=30)
    parks = parks_a_chunk.compile(2)
    assert parks.constraints["multiple_of"] == 2
    pair = sl.Collective("pair", lambda rank, world: [[(rank, 1)], [(rank, 0)]])
    swaps = sl.algorithm(pair, chunks=2)(
        lambda me: [me.copy(me.output[chunk], me.input[1 - chunk]) for chunk in range(2)]
    )
    swaps = swaps.compile(2)
    assert swaps.constraints["multiple_of"] == 2
    for algorithm in (parks, swaps):
        with pytest.raises(symmpool.InvalidArgumentError, match="17 elements do not divide"):
            algorithm.execute(comm, np.ones(17, np.float32), np.ones(17, np.float32))
    x = np.arange(34, dtype=np.float32)
    y = np.zeros(34, np.float32)
    parks.execute(comm, x, y)
    assert (y == 2 * x).all()
    swaps.execute(comm, x, y)
    assert (y == np.roll(x, 17)).all()
    # Only the root of a broadcast has an input.
    broadcast = library.binomial_broadcast.compile(2)
    out = pool.empty(4, np.int32)
    for root in range(2):
        data = np.full(4, 7 + root, np.int32)
        at = data.ctypes.data if comm.rank == root else 0
        to = np.asarray(out).ctypes.data
        broadcast.execute(comm, at, to, src=root, count=4, dtype="int32")
        assert (np.asarray(out) == 7 + root).all()
    return True


def test_counts_divide_where_they_must_and_inputs_are_where_they_are_read():
    assert values(2, divides) == [True, True]


def lost(group):
    comm = symmpool.Communicator(symmpool.Pool(group, "cpu"), timeout=1)
    if comm.rank == 1:
        return None
    tensor = np.ones(6, np.float32)
    with pytest.raises((symmpool.TimeoutError, symmpool.PeerLostError)) as caught:
        library.one_shot_all_reduce.compile(2).execute(comm, tensor)
    return caught.value.ranks


def test_a_rank_that_does_not_come_is_named_in_time():
    began = time.monotonic()
    assert values(2, lost)[0] == (1,)
    assert time.monotonic() - began < 30


@sl.algorithm("all_reduce", chunks="world")
def waits_in_a_circle(me):
    for peer in me.peers():
        me.wait(peer)
    for peer in me.peers():
        me.signal(peer)


@sl.algorithm("all_reduce")
def reduces_too_early(me):
    inbox = me.scratch(me.world)
    for peer in me.peers():
        me.put(peer.at(inbox)[me.rank], me.input[0])
        me.signal(peer)
    me.reduce(me.output[0], [me.input[0] if r == me.rank else inbox[r] for r in range(me.world)])
    for peer in me.peers():
        me.wait(peer)


@sl.algorithm("all_gather")
def forgets_itself(me):
    me.barrier()
    for peer in me.peers():
        me.put(peer.output[me.rank], me.input[0])
    me.barrier()


@sl.algorithm("all_reduce")
def reduces_in_rings(me):
    inbox = me.scratch(me.world)
    for peer in me.peers():
        me.put(peer.at(inbox)[me.rank], me.input[0])
        me.signal(peer)
    for peer in me.peers():
        me.wait(peer)
    me.reduce(me.output[0], [me.input[0], *(inbox[peer.rank] for peer in me.peers())])


@sl.algorithm("all_reduce")
def writes_its_input(me):
    me.reduce(me.input[0], [me.input[0], me.input[0]])


@sl.algorithm("broadcast")
def signals_nobody(me):
    me.barrier()
    for peer in me.peers():
        me.signal(peer)


@sl.algorithm("all_gather")
def reaches_too_far(me):
    me.copy(me.output[me.world], me.input[0])


@pytest.mark.parametrize(
    ("program", "kind", "text"),
    [
        (waits_in_a_circle, "deadlock", "me.wait(peer)"),
        (reduces_too_early, "race", "me.reduce("),
        (forgets_itself, "wrong_result", "me.barrier()"),
        (reduces_in_rings, "not_reproducible", "me.reduce("),
        (signals_nobody, "unmatched_signal", "me.signal(peer)"),
        (reaches_too_far, "out_of_range", "me.copy("),
        (writes_its_input, "read_only", "me.reduce("),
    ],
)
def test_errors_name_kind_rank_and_line(program, kind, text):
    with pytest.raises(sl.PlanError) as caught:
        program.check(4)
    error = caught.value
    assert (error.kind, error.rank in range(4)) == (kind, True), str(error)
    lines, first = inspect.getsourcelines(program._function)
    marked = [number for number, line in enumerate(lines, first) if text in line]
    # A race has two sides, and either may be the one to mend.
    other_side = kind == "race" and f"line {marked[0]} on rank" in str(error)
    assert error.line in marked or other_side, str(error)
    assert f"test_language.py:{error.line}: {kind}" in str(error)
    assert isinstance(error, ValueError)


def test_unordered_sums_can_be_allowed():
    allowed = sl.algorithm("all_reduce", reproducible=False)(reduces_in_rings._function)
    allowed.check(4)


def nested_groups(me):
    with me.block_group(0), me.block_group(1):
        me.copy(me.output[0], me.input[0])


def test_programs_that_make_no_sense_are_refused_at_once():
    def of(body, collective="all_reduce", **options):
        return sl.algorithm(collective, **options)(body)

    manual = (pathlib.Path(__file__).parents[2] / "docs" / "language.md").read_text()
    for body, words, listed in [
        (lambda me: me.peer(me.rank), "is no peer", "names the rank itself"),
        (lambda me: me.peer(4), "is no peer", "a rank that is not there"),
        (lambda me: me.signal(-1), "is no peer", "a rank that is not there"),
        (lambda me: me.wait((me.rank + 1) % 2, 16), "channel 16", "16 channels"),
        (lambda me: me.input[-1], "from 0 on", "a rank or a chunk is not there"),
        (lambda me: me.input[0:0], "from 0 on", "a rank or a chunk is not there"),
        (lambda me: me.input[::2], "consecutive", "chunks are not consecutive"),
        (lambda me: me.scratch(0), "at least one chunk", "asks for no scratch"),
        (lambda me: me.scratch(me.rank + 1), "rank 0 has", "scratch that differs among ranks"),
        (lambda me: me.block_group(16).__enter__(), "0 to 15", "16 block groups"),
        (nested_groups, "do not lie in each other", "block groups lie in each other"),
        (lambda me: [me.barrier() for _ in range(1 << 19)], "operations", "262,144 operations"),
    ]:
        with pytest.raises(sl.PlanError, match=words) as caught:
            of(body).check(2)
        assert listed in manual, listed
        assert caught.value.kind == "out_of_range"
    for body in (
        lambda me: me.copy(me.output, me.input),
        lambda me: me.copy(0, 1),
        lambda me: me.reduce(me.output[0], [1]),
        lambda me: me.input["a"],
        lambda me: me.peers()[0].at(3),
        lambda me: me.scratch("many"),
    ):
        with pytest.raises(TypeError):
            of(body).check(2)
    for make in (
        lambda: sl.algorithm("all_reduse"),
        lambda: sl.algorithm("all_reduce", chunks="all"),
        lambda: of(lambda me: None, chunks=0).check(2),
        lambda: of(lambda me: None, "all_to_all", chunks=3).check(2),
        lambda: library.one_shot_all_reduce.check(0),
        lambda: library.one_shot_all_reduce.check(1 << 20),
        lambda: library.one_shot_all_reduce.compile(2, protocol="ll256"),
        lambda: library.one_shot_all_reduce.compile(2, blocks=0),
    ):
        with pytest.raises(symmpool.InvalidArgumentError):
            make()
    with pytest.raises(TypeError, match="compile"):
        library.one_shot_all_reduce(1)
    with pytest.raises(sl.PlanError) as caught:
        library.direct_all_gather.compile(2, protocol="ll")
    assert caught.value.kind == "protocol"


def test_lines_are_those_of_the_program():
    plan = json.loads(library.direct_all_gather.trace(2))
    texts = [
        linecache.getline(library.__file__, operation["line"]).strip() for operation in plan["programs"][0]
    ]
    called = [text.split("(")[0] for text in texts]
    assert called == ["me.barrier", "me.copy", "me.put", "me.signal", "me.wait"]
    assert plan["source"] == "library.py"


def test_files_keep_algorithms(tmp_path):
    algorithm = library.ring_all_reduce.compile(3)
    algorithm.save(tmp_path / "ring.json")
    again = sl.load(tmp_path / "ring.json")
    assert (again.name, again.collective, again.world, again.hash) == (
        "ring_all_reduce",
        "all_reduce",
        3,
        algorithm.hash,
    )
    with pytest.raises(FileNotFoundError):
        sl.load(tmp_path / "none.json")
    (tmp_path / "wrong.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(symmpool.InvalidArgumentError, match="not a plan"):
        sl.load(tmp_path / "wrong.json")
    with pytest.raises(OSError):
        algorithm.save(tmp_path / "no" / "folder.json")


def test_algorithms_show_themselves(tmp_path):
    algorithm = library.direct_all_to_all.compile(2)
    table = algorithm.explain()
    assert "rank 0" in table and "put input[1] > 1:output[0]" in table and "Not in place" in table
    assert (algorithm.windows, algorithm.in_place, algorithm.origin) == (["output"], False, "plan")
    algorithm.plot(tmp_path / "picture.svg")
    picture = (tmp_path / "picture.svg").read_text()
    assert picture.startswith("<svg") and picture.count("<rect") > 8 and "</svg>" in picture


def test_sixteen_ranks_are_checked_in_less_than_a_second():
    began = time.monotonic()
    library.two_shot_all_reduce.check(16)
    assert time.monotonic() - began < 5, "in a build that is hardly optimised, beside other tests"


def test_threads_check_at_once():
    errors = []

    def check():
        try:
            library.ring_all_reduce.check(8)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=check) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
