"""Errors between processes: typed, on every rank, soon, and naming who is to blame."""

import os
import signal
import socket
import sys
import time

import numpy as np
import pytest
from ranks import run, values

import symmpool


def failure(call):
    """How a call failed: the class, the ranks it names, its message and the seconds it took."""
    begin = time.monotonic()
    try:
        call()
    except Exception as error:
        ranks = getattr(error, "ranks", None)
        return type(error).__name__, ranks, str(error), time.monotonic() - begin
    return None


def refused_arguments(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=20)
    good = pool.empty((4, 6), np.float32)
    good[...] = 1
    read_only = np.ones((4, 6), np.float32)
    read_only.flags.writeable = False
    wrong = [
        ("tensor", lambda: comm.all_reduce(np.ones((6, 4), np.float32).T)),
        ("tensor: elements of complex64", lambda: comm.all_reduce(np.ones(4, np.complex64))),
        ("input: elements of bool", lambda: comm.reduce_scatter_tensor(np.ones(2, bool), np.ones(4, bool))),
        ("objects", lambda: comm.broadcast(np.array([{}, 1], object), 0)),
        ("tensor", lambda: comm.all_reduce(read_only)),
        ("tensor", lambda: comm.all_reduce([1, 2, 3])),
        ("tensor", lambda: comm.all_reduce(None)),
        ("op", lambda: comm.all_reduce(good, "median")),
        ("op", lambda: comm.all_reduce(good, 1)),
        ("out", lambda: comm.all_reduce(good, "sum", pool.empty(23, np.float32))),
        ("out", lambda: comm.all_reduce(good, "sum", pool.empty(24, np.int32))),
        ("overlap", lambda: comm.all_reduce(good[:2], "sum", good[1:3])),
        ("output", lambda: comm.all_gather_into_tensor(good, good)),
        ("input", lambda: comm.reduce_scatter_tensor(good, good)),
        ("input", lambda: comm.all_to_all_single(good[:1, :5], good[:1, :5])),
        ("input_split_sizes", lambda: comm.all_to_all_single(good, good, [2, 2], [2, 3])),
        ("input_split_sizes", lambda: comm.all_to_all_single(good, good, [2, 2], [4])),
        ("output_split_sizes", lambda: comm.all_to_all_single(good, good, [-1, 5], [2, 2])),
        ("output_split_sizes: none", lambda: comm.all_to_all_single(good, good, None, [3, 1])),
        ("input_splits", lambda: comm.all_to_all_v(good, good, np.zeros(3, np.int64))),
        ("splits of f32", lambda: comm.all_to_all_v(good, good, np.zeros(2, np.float32))),
        ("output: rows", lambda: comm.all_to_all_v(good, good[:, :1].copy(), np.zeros(2, int))),
        ("output_offsets", lambda: comm.all_to_all_v(good, good, *(np.zeros(2, t) for t in "iil"))),
        ("output_split_sizes", lambda: comm.all_to_all_single(good, good, "ab", [2, 2])),
        ("root 7", lambda: comm.broadcast(good, 7)),
        ("src: -1", lambda: comm.broadcast(good, -1)),
        ("src: 1180591620717411303424", lambda: comm.broadcast(good, 1 << 70)),
        ("src: 'float'", lambda: comm.broadcast(good, 1.0)),
    ]
    bad = []
    for name, call in wrong:
        # Each rank is wrong in turn, and the other one gets an error that names it.
        for culprit in (0, 1):
            found = failure(call if pool.rank == culprit else comm.barrier)
            if pool.rank == culprit:
                right = found and found[0] in ("InvalidArgumentError", "TypeError")
                right = right and name in found[2]
            else:
                right = found and found[0] == "DivergedError" and found[3] < 10
            if not right:
                bad.append((name, culprit, found))
    comm.all_reduce(good)
    return bad, float(good[0, 0]), comm.failure


def test_wrong_arguments_are_named_and_are_errors_on_the_other_ranks():
    assert values(2, refused_arguments) == [([], 2.0, None)] * 2


def test_numbers_that_an_argument_cannot_be_are_named():
    (group,) = symmpool.Group.in_process(1)
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool)
    block = pool.block(2, "float32")
    for name, call in [
        ("rank", lambda n: symmpool.Group(n, 2, "127.0.0.1:1")),
        ("world", lambda n: symmpool.Group(0, n, "127.0.0.1:1")),
        ("world", symmpool.Group.in_process),
        ("rank", lambda n: symmpool.Group.from_store(_Dummy(), n, 2)),
        ("world", lambda n: symmpool.Group.from_store(_Dummy(), 0, n)),
        ("rank", lambda n: symmpool.Pool((_Dummy(), n, 2), "cpu")),
        ("world", lambda n: symmpool.Pool((_Dummy(), 0, n), "cpu")),
        ("stride", lambda n: symmpool.Pool(group, "cpu", stride=n)),
        ("bytes", pool.reserve),
        ("address", pool.owns),
        ("rank", lambda n: pool.peer_ptr(n, block.data_ptr, 8)),
        ("address", lambda n: pool.peer_ptr(0, n, 8)),
        ("bytes", lambda n: pool.peer_ptr(0, block.data_ptr, n)),
        ("bytes", lambda n: pool.peer_bytes(0, block.data_ptr, n, None)),
        ("rank", block.peer_ptr),
        ("peer", comm.signal),
        ("channel", lambda n: comm.signal(0, n)),
        ("peer", comm.wait),
        ("channel", lambda n: comm.wait(0, n)),
        ("scratch_bytes", lambda n: symmpool.Communicator(pool, scratch_bytes=n)),
        ("concurrent", lambda n: symmpool.Communicator(pool, concurrent=n)),
        ("device", symmpool.memory_stats),
        ("device", symmpool.reset_peak_memory_stats),
    ]:
        for number in (-1, 1 << 70, -(10**6000)):
            text = "huge number" if number < -1 else str(number)
            with pytest.raises(symmpool.InvalidArgumentError, match=f"{name}.*{text}"):
                call(number)
        if name != "device":  # for which text may do
            with pytest.raises((TypeError, symmpool.InvalidArgumentError), match=f"{name}: 'str'"):
                call("x")
    for call in (symmpool.Group.in_process, lambda *_, timeout: comm.wait(0, timeout=timeout)):
        with pytest.raises(symmpool.InvalidArgumentError, match="timeout=.*too long"):
            call(1, timeout=10**38 * 10**300)
    with pytest.raises(TypeError, match="timeout.*str"):
        symmpool.Communicator(pool, timeout="x")


def refused_communicator(group, culprit, wrong):
    pool = symmpool.Pool(group, "cpu")
    found = failure(lambda: symmpool.Communicator(pool, **(wrong if pool.rank == culprit else {})))
    # The resources that the other ranks were given go back.
    pool.resync()
    x = np.ones(3)
    symmpool.Communicator(pool, timeout=20).all_reduce(x)
    return found[0], found[2], found[3] < 10, x.tolist()


@pytest.mark.parametrize(
    ("culprit", "wrong", "name"),
    [
        (0, {"algorithm": "fastest"}, "algorithm"),
        (1, {"all_to_all": "fastest"}, "all_to_all"),
        (0, {"timeout": 0}, "timeout"),
        (1, {"concurrent": -1}, "concurrent"),
        (0, {"scratch_bytes": 1 << 70}, "scratch_bytes"),
        (1, {"scratch_bytes": 1}, "scratch"),
    ],
)
def test_a_communicator_that_one_rank_refuses_no_rank_has(culprit, wrong, name):
    found = values(2, refused_communicator, culprit, wrong)
    for rank, (kind, text, soon, sums) in enumerate(found):
        assert (kind, soon, sums) == ("InvalidArgumentError", True, [2.0] * 3), found
        assert name in text and (rank == culprit or f"rank {culprit} failed" in text), found


class _Dummy:
    """Nobody asks a store for anything before it is known who is there."""

    set = get = add = check = delete_key = print


def different_calls(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=20)
    x = pool.empty(64, np.float32)
    x[...] = pool.rank
    calls = [
        lambda: comm.all_reduce(x, "sum" if pool.rank else "max"),
        lambda: comm.all_reduce(x[: 32 + pool.rank]),
        lambda: comm.all_reduce(x if pool.rank else np.ones(64, np.float32)),
        lambda: comm.all_reduce(x.view(np.int32) if pool.rank else x),
    ]
    found = [failure(call) for call in calls]
    return [kind for kind, *_ in found], float(x[0])


def test_different_calls_are_an_error_everywhere_and_nothing_is_written():
    assert values(2, different_calls) == [(["DivergedError"] * 4, float(rank)) for rank in (0, 1)]


def different_sizes(group):
    pool = symmpool.Pool(group, "cpu")
    x = pool.empty(1000 * (pool.rank + 1), np.float32)
    found = failure(pool.commit)
    del x
    pool.resync()
    y = pool.empty(10, np.float32)
    y[...] = 1
    symmpool.Communicator(pool).all_reduce(y)
    return found[:3], float(y[0])


def test_different_sizes_are_found_at_the_commit_and_mended():
    for (kind, _, message), mended in values(2, different_sizes):
        assert kind == "DivergedError" and mended == 2.0
        assert "default" in message and "rank 0" in message and "rank 1" in message


def missing_rank(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool)
    for wrong in (0, -1, float("nan")):
        with pytest.raises(symmpool.InvalidArgumentError, match="timeout"):
            comm.timeout = wrong
    assert comm.timeout == 30
    comm.timeout = 0.3
    if pool.rank == 1:
        time.sleep(2)
        return None
    first, second = failure(comm.barrier), failure(comm.barrier)
    return first[:2], first[3] < 2, second[0], second[3] < 0.1, type(comm.failure).__name__


def test_a_rank_that_does_not_come_is_named_in_time():
    expected = (("TimeoutError", (1,)), True, "TimeoutError", True, "TimeoutError")
    assert values(2, missing_rank)[0] == expected


def dies(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=20)
    x = pool.empty(1 << 16, np.float32)
    comm.all_reduce(x)
    if pool.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    found = failure(lambda: [comm.all_reduce(x) for _ in range(1000)])
    return found[0], found[1], found[3] < 10, isinstance(comm.failure, ConnectionError)


def test_a_rank_that_is_killed_is_named_long_before_the_deadline():
    outcomes = run(3, dies)
    assert outcomes[1].status == -signal.SIGKILL
    assert [outcomes[rank].value for rank in (0, 2)] == [("PeerLostError", (1,), True, True)] * 2


def never_calls(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=0.5)
    if pool.rank == 1:
        time.sleep(600)
    return failure(comm.barrier)[:2]


def test_a_rank_that_hangs_is_named():
    outcomes = run(2, never_calls, silent=[1])
    assert outcomes[0].value == ("TimeoutError", (1,))
    assert outcomes[1].status == -signal.SIGKILL


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_nobody_at_the_store_is_a_timeout():
    found = failure(lambda: symmpool.Group(1, 2, f"127.0.0.1:{free_port()}", timeout=0.3))
    assert found[0] == "TimeoutError" and found[3] < 5


def over_tcp(group, port, secret):
    own = symmpool.Group(group.rank, 2, f"127.0.0.1:{port}", secret=secret, timeout=20)
    pool = symmpool.Pool(own, "cpu")
    x = np.full(4, pool.rank + 1, np.float32)
    symmpool.Communicator(pool).all_reduce(x)
    return x.tolist()


def test_groups_meet_over_tcp_too():
    port = free_port()
    assert values(2, over_tcp, port, "a secret of this test") == [[3.0] * 4] * 2


def test_a_wrong_secret_is_refused():
    address = f"127.0.0.1:{free_port()}"
    server = symmpool.Group(0, 2, address, secret="the right secret")
    with pytest.raises(symmpool.RefusedError) as error:
        symmpool.Group(1, 2, address, secret="the wrong secret", timeout=5)
    assert isinstance(error.value, PermissionError)
    assert "right" not in str(error.value) and server.rank == 0


def no_partner(group):
    if group.rank == 1:
        time.sleep(2)
        return None
    return failure(lambda: symmpool.Pool(group, "cpu", timeout=0.3))[:2]


def test_a_pool_waits_no_longer_than_its_timeout():
    assert values(2, no_partner)[0] == ("TimeoutError", (1,))


class Unnamed:
    """A device whose name cannot be had."""

    def __str__(self):
        raise RuntimeError("no name today")


REFUSED = {
    "device": ({"device": "tpu"}, "InvalidArgumentError"),
    "no device": ({"device": "cuda:1000"}, None),
    "policy": ({"device": "cpu", "window_policy": "round"}, "InvalidArgumentError"),
    "timeout": ({"device": "cpu", "timeout": -1.0}, "InvalidArgumentError"),
    "stride": ({"device": "cpu", "stride": 1}, "InvalidArgumentError"),
    "foreign": ({"device": Unnamed()}, "RuntimeError"),
}


def refused_by_one(group):
    began, observed = time.monotonic(), {}
    for name, (options, _) in REFUSED.items():
        options = options if group.rank == 1 else {"device": "cpu"}
        try:
            symmpool.Pool(group, **options)
        except Exception as error:
            observed[name] = type(error).__name__, str(error)
    seconds = time.monotonic() - began
    # One on which all agree: every rank has counted those before.
    return observed, seconds, symmpool.Pool(group, "cpu").world


def test_options_of_a_pool_that_one_rank_refuses_are_an_error_on_all_ranks_at_once():
    for rank, (observed, seconds, world) in enumerate(values(3, refused_by_one)):
        assert world == 3
        assert seconds < 10
        for name, (_, kind) in REFUSED.items():
            found, text = observed[name]
            if rank != 1:
                assert "rank 1 failed in the handshake" in text, (name, text)
                assert text.count("symmpool: ") == 1, text
                kind = kind and "InvalidArgumentError"
            assert kind is None or found == kind, (name, found, text)


def helper(pool, kib):
    return pool.empty(kib << 8, "float32"), sys._getframe().f_lineno


def other_lines(group):
    pool = symmpool.Pool(group, "cpu")
    kept, line = helper(pool, 8 if group.rank == 2 else 4)
    try:
        pool.commit()
    except symmpool.DivergedError as error:
        return str(error), line, kept is not None
    return None


def test_errors_about_differing_allocations_have_lines_of_the_program():
    for text, line, _ in values(3, other_lines):
        place = f"   (called from {__file__}:{line})"
        assert f"ranks 0, 1: alloc 4 KiB on stream 0{place}" in text, text
        assert f"rank 2: alloc 8 KiB on stream 0{place}" in text, text


def different_settings(group):
    return failure(lambda: symmpool.Pool(group, "cpu", stride=(1 + group.rank) << 34))[0]


def test_different_settings_are_found():
    assert values(2, different_settings) == ["DivergedError"] * 2


def test_algorithms_that_are_none_are_refused():
    pool = symmpool.Pool(symmpool.Group.in_process(1)[0], "cpu")
    with pytest.raises(symmpool.InvalidArgumentError, match="auto"):
        symmpool.Communicator(pool, algorithm="fastest")


def refused_while_the_others_are_elsewhere(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=30)
    comm.barrier()
    found = []
    if pool.rank == 1:
        # Memory that makes a commit due, which waits for the others, and plain memory.
        y = pool.empty((4, 4), np.float32)
        for call in (
            lambda: comm.all_reduce(y[:, ::2]),
            lambda: comm.broadcast(y, 9),
            lambda: comm.all_reduce(np.ones(4), "median"),
        ):
            found.append(failure(call))
    else:
        time.sleep(2)
        y = pool.empty((4, 4), np.float32)
        found = [failure(lambda: comm.all_reduce(y)) for _ in range(3)]
    y[...] = 1
    comm.all_reduce(y)
    return [(kind, ranks, took < 1) for kind, ranks, _, took in found], [each[2] for each in found], y[0, 0]


def test_a_wrong_argument_on_one_rank_raises_there_at_once():
    (observed, _, zero), (own, texts, one) = values(2, refused_while_the_others_are_elsewhere)
    assert [each[:2] for each in observed] == [("DivergedError", (1,))] * 3
    assert own == [("InvalidArgumentError", (), True)] * 3
    assert "not contiguous" in texts[0] and "root 9" in texts[1] and "median" in texts[2]
    assert zero == one == 2


def never_comes_after_a_refusal(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=0.5)
    if pool.rank == 1:
        time.sleep(2)
        return None
    x = np.ones((4, 4))
    first, second = failure(lambda: comm.all_reduce(x[:, ::2])), failure(comm.barrier)
    return first[0], first[3] < 0.4, second[:2], "not contiguous" in second[2]


def test_a_call_behind_a_refused_one_says_why_that_was_refused():
    found = values(2, never_comes_after_a_refusal)[0]
    assert found == ("InvalidArgumentError", True, ("TimeoutError", (1,)), True)


def who_is_to_blame(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=20)
    me = pool.rank
    x, y = np.ones(6, np.float32), np.ones(6, np.float32)
    splits = np.array([2, 2, 2 if me != 1 else -1])
    calls = {
        "counts": lambda: comm.all_reduce(x if me != 1 else x[:4].copy()),
        "parts": lambda: comm.all_to_all_single(y, x, [2, 2, 2], [2, 2, 2] if me != 2 else [2, 1, 2]),
        "overflow": lambda: comm.all_to_all_v(y if me != 2 else y[:4], x, np.full(3, 2)),
        "splits": lambda: comm.all_to_all_v(y, x, splits),
        "refused": lambda: comm.all_reduce(x if me != 1 else np.ones((2, 2), np.float32).T),
        "options": lambda: symmpool.Communicator(pool, timeout=1 if me != 2 else -1),
    }
    return {name: failure(call)[:2] for name, call in calls.items()}


def test_errors_name_the_ranks_that_their_messages_name():
    found = values(3, who_is_to_blame)
    for rank in (0, 1, 2):
        assert found[rank]["counts"] == ("DivergedError", (1,))
        assert found[rank]["parts"] == ("DivergedError", (1, 2))
        assert found[rank]["overflow"] == ("OverflowError", (2,))
        assert found[rank]["splits"] == ("InvalidArgumentError", (1,))
    assert [found[rank]["refused"] for rank in (0, 2)] == [("DivergedError", (1,))] * 2
    assert [found[rank]["options"] for rank in (0, 1)] == [("InvalidArgumentError", (2,))] * 2


def test_a_second_rank_0_is_named_as_such():
    address = f"127.0.0.1:{free_port()}"
    first = symmpool.Group(0, 2, address)
    found = failure(lambda: symmpool.Group(0, 2, address))
    assert found[0] == "InvalidStateError" and found[1] == (0,) and first.rank == 0
    assert "two processes say that they are rank 0" in found[2]


def leaves_because_another_did(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=20)
    comm.barrier()
    if pool.rank < 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    return failure(comm.barrier)[:2]


def test_a_rank_that_left_is_named_together_with_those_that_are_gone_too():
    outcomes = run(3, leaves_because_another_did)
    assert outcomes[2].value == ("PeerLostError", (0, 1))


def test_what_is_no_stream_no_shape_and_no_address_is_refused():
    (group,) = symmpool.Group.in_process(1)
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool)
    x = np.ones(1, np.int64)
    for shape in ((1,) * 100, b"3", bytearray(b"3")):
        with pytest.raises(symmpool.InvalidArgumentError, match="shape"):
            pool.empty(shape, np.float32)
    with pytest.raises(symmpool.InvalidArgumentError, match="split_sizes"):
        comm.all_to_all_single(x.copy(), x, b"\x01", [1])
    for stream in ("a", 1.5, [1]):
        with pytest.raises(TypeError, match="stream"):
            comm.all_reduce(x, stream=stream)
    with pytest.raises(TypeError, match="address.*data_ptr"):
        pool.owns(x)
    assert not pool.owns(np.int64(4096)) and pool.owns(pool.block(1, "int8").data_ptr)


def test_modules_are_there_under_the_packages_name():
    assert symmpool.doctor.__name__ == "symmpool.doctor"
    assert symmpool.engines.__name__ == "symmpool.engines"
    with pytest.raises(AttributeError, match="nonsense"):
        _ = symmpool.nonsense


LONG = "n" * (10 << 20)


def quoting(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool)
    native = symmpool.native
    calls = {
        "option": lambda: symmpool.Communicator(pool, algorithm=LONG),
        "all_to_all": lambda: symmpool.Communicator(pool, all_to_all=LONG),
        "collective of an option": lambda: symmpool.Communicator(pool, algorithms={LONG: "ring"}),
        "no name": lambda: symmpool.Communicator(pool, algorithms={"all_reduce": [LONG]}),
        "selected collective": lambda: comm.select(LONG, None),
        "device": lambda: symmpool.Pool(group, LONG),
        "dtype": lambda: pool.empty(4, LONG),
        "op": lambda: comm.all_reduce(np.ones(4), op=LONG),
        "kernel's collective": lambda: native("k(\n)", kernel="k", collective=LONG),
        "kernel": lambda: native("k(\n)", kernel=LONG, collective="all_reduce"),
        "kernel's name": lambda: native("k(\n)", kernel="k", collective="all_reduce", name=LONG),
    }
    errors = {name: failure(call) for name, call in calls.items()}
    named = symmpool.Communicator(pool, algorithms={"all_reduce": LONG})
    errors["named"] = failure(lambda: named.all_reduce(np.ones(4)))
    return errors


def test_errors_repeat_no_more_than_the_beginning_of_a_long_name():
    (errors,) = values(1, quoting)
    for name, error in errors.items():
        assert error is not None, name
        assert 20 < len(error[2]) < 2000, (name, len(error[2]))
    assert f"({10 << 20} bytes)" in errors["named"][2]
