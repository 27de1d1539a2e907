"""Options that one rank refuses: it raises its own reason before the others come, and they hear it later."""

import os
import time

import numpy as np
import pytest
from ranks import run, values
from test_errors import failure, free_port

import symmpool

# How much later than rank 1 the others come, in seconds, and within what it must have raised.
LATE, SOON = 4, 2

POOLS = {
    "stride": ({"stride": 1}, "stride"),
    "timeout": ({"timeout": -1.0}, "timeout=-1"),
    "device": ({"device": "tpu"}, "tpu"),
    "window_policy": ({"window_policy": "round"}, "round"),
}


def pool_refused_by_one(group, name):
    options, word = POOLS[name]
    if group.rank == 1:
        *found, seconds = failure(lambda: symmpool.Pool(group, **{"device": "cpu", **options}))
    else:
        time.sleep(LATE)
        *found, seconds = failure(lambda: symmpool.Pool(group, "cpu"))
    again = symmpool.Pool(group, "cpu")
    symmpool.Communicator(again).barrier()
    return found[0], found[2], word, seconds


@pytest.mark.parametrize("name", POOLS)
def test_a_rank_that_refuses_a_pool_raises_at_once_and_the_others_hear_why(name):
    for rank, (kind, text, word, seconds) in enumerate(values(3, pool_refused_by_one, name)):
        assert kind == "InvalidArgumentError" and word in text, text
        assert seconds < SOON, seconds
        assert rank == 1 or "rank 1 failed in the handshake" in text, text


COMMUNICATORS = {
    "algorithm": ({"algorithm": "fastest"}, "fastest"),
    "all_to_all": ({"all_to_all": "packets"}, "packets"),
    "timeout": ({"timeout": 0.0}, "timeout=0"),
    "concurrent": ({"concurrent": 99}, "99"),
    "scratch_bytes": ({"scratch_bytes": 100}, "100"),
}


def communicator_refused_by_one(group, name):
    options, word = COMMUNICATORS[name]
    pool = symmpool.Pool(group, "cpu")
    if group.rank == 1:
        *found, seconds = failure(lambda: symmpool.Communicator(pool, **options))
    else:
        time.sleep(LATE)
        *found, seconds = failure(lambda: symmpool.Communicator(pool))
    pool.resync()
    x = np.ones(3)
    symmpool.Communicator(pool).all_reduce(x)
    return found[0], found[2], word, seconds, x.tolist()


@pytest.mark.parametrize("name", COMMUNICATORS)
def test_a_rank_that_refuses_a_communicator_raises_at_once_and_the_others_hear_why(name):
    for rank, (kind, text, word, seconds, x) in enumerate(values(3, communicator_refused_by_one, name)):
        assert kind == "InvalidArgumentError" and word in text and x == [3.0] * 3, text
        assert seconds < SOON, seconds
        assert rank == 1 or "rank 1" in text, text


def first_of_the_environment(group, port):
    os.environ.update(
        RANK=str(group.rank), WORLD_SIZE=str(group.world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    if group.rank == 1:
        found = failure(lambda: symmpool.Pool(device="tpu"))
    else:
        time.sleep(LATE)
        found = failure(lambda: symmpool.Pool(device="cpu"))
    assert symmpool.Pool(device="cpu").world == 2
    return found


def test_a_pool_of_the_environment_is_refused_before_its_group_meets():
    zero, one = values(2, first_of_the_environment, free_port())
    assert one[0] == "InvalidArgumentError" and "tpu" in one[2] and one[3] < SOON, one
    assert "rank 1 failed in the handshake" in zero[2] and "tpu" in zero[2], zero


def refused_and_gone(group):
    if group.rank == 1:
        symmpool.Pool(group, "tpu", timeout=60)
    time.sleep(LATE)
    return failure(lambda: symmpool.Pool(group, "cpu", timeout=20))


def test_a_rank_that_refuses_a_pool_and_ends_is_named():
    zero, one = run(2, refused_and_gone)
    assert "tpu" in one.error and one.status == 1
    kind, ranks, text, _ = zero.value
    assert kind in ("InvalidArgumentError", "PeerLostError", "TimeoutError") and "rank 1" in text, text
