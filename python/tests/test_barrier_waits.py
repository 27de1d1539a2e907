"""Barriers that add up how long a rank waits for each other one."""

import time

import numpy as np
import pytest
from ranks import values

import symmpool


def waits(group):
    comm = symmpool.Communicator(symmpool.Pool(group, "cpu"), timeout=20)
    me, world = group.rank, group.world
    found = np.zeros(world, np.int64)
    for _ in range(2):
        time.sleep(0.3 if me == 1 else 0)
        comm.barrier(waits=found)
    said = []
    for wrong in (found[:1], found.astype(np.int32), "text"):
        try:
            comm.barrier(waits=wrong if me == 0 else found)
        except (symmpool.Error, TypeError) as error:
            said.append((type(error).__name__, str(error)))
    comm.barrier()
    return found.tolist(), said


@pytest.mark.parametrize("world", [2, 3])
def test_who_is_late_is_seen(world):
    for rank, (found, said) in enumerate(values(world, waits)):
        assert found[rank] == 0
        if rank != 1:
            assert found[1] > 0.4e9 and found[1] == max(found)
        kinds = [kind for kind, _ in said]
        if rank == 0:
            assert kinds == ["InvalidArgumentError", "InvalidArgumentError", "TypeError"]
            assert f"an int64 for each of {world} ranks" in said[0][1]
        else:
            assert kinds == ["DivergedError"] * 3
