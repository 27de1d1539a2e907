"""How much of a device communicators take that calls make by themselves: what the environment says."""

import pytest

import symmpool
from symmpool import sharing


class Pool:
    """As far as it is asked."""

    def __init__(self, device):
        self.device = device


ON_CUDA = Pool("cuda:0")


def test_the_environment_says_how_many(monkeypatch):
    monkeypatch.setenv("SYMMPOOL_CONCURRENT", "3")
    assert sharing.concurrent(ON_CUDA) == 3
    assert sharing.concurrent(Pool("cpu")) is None
    for nonsense in ("0", "17", "-1", "2.0", " 2", "two", "²"):
        monkeypatch.setenv("SYMMPOOL_CONCURRENT", nonsense)
        with pytest.raises(symmpool.InvalidArgumentError, match="SYMMPOOL_CONCURRENT="):
            sharing.concurrent(ON_CUDA)
    monkeypatch.setenv("SYMMPOOL_CONCURRENT", "")
    assert sharing.concurrent(ON_CUDA) is None


def test_room_is_left_on_devices_that_there_may_be():
    symmpool.leave_room(0)
    for nonsense in (-1, 2**32, 0.5, "cuda"):
        with pytest.raises((symmpool.InvalidArgumentError, TypeError), match="device|integer"):
            symmpool.leave_room(nonsense)
