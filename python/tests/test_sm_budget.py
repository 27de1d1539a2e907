"""How much of a device communicators take that calls make by themselves: what the environment says."""

from types import SimpleNamespace

import pytest

import symmpool
from symmpool.communicators import sm_budget


class Pool:
    """Stand-in for a pool, as far as it is asked."""

    def __init__(self, device):
        self.device = device


ON_CUDA = Pool("cuda:0")


def test_the_environment_says_how_many(monkeypatch):
    monkeypatch.setenv("SYMMPOOL_CONCURRENT", "3")
    assert sm_budget.concurrent(ON_CUDA) == 3
    assert sm_budget.concurrent(Pool("cpu")) is None
    for nonsense in ("0", "17", "-1", "2.0", " 2", "two", "²"):
        monkeypatch.setenv("SYMMPOOL_CONCURRENT", nonsense)
        with pytest.raises(symmpool.InvalidArgumentError, match="SYMMPOOL_CONCURRENT="):
            sm_budget.concurrent(ON_CUDA)
    monkeypatch.setenv("SYMMPOOL_CONCURRENT", "")
    assert sm_budget.concurrent(ON_CUDA) is None


def test_the_environment_says_how_many_sms(monkeypatch):
    assert sm_budget.options(ON_CUDA) == {"concurrent": None, "sm_budget": None, "beside_compute": True}
    monkeypatch.setenv("SYMMPOOL_SM_BUDGET", "16")
    assert sm_budget.options(ON_CUDA)["sm_budget"] == 16
    assert sm_budget.options(Pool("cpu"))["sm_budget"] is None
    for nonsense in ("0", "1", "-2", "16.0", "some", str(1 << 32)):
        monkeypatch.setenv("SYMMPOOL_SM_BUDGET", nonsense)
        with pytest.raises(symmpool.InvalidArgumentError, match="SYMMPOOL_SM_BUDGET="):
            sm_budget.sm_budget(ON_CUDA)
    monkeypatch.setenv("SYMMPOOL_SM_BUDGET", "")
    assert sm_budget.sm_budget(ON_CUDA) is None


def test_options_that_make_no_sense_are_refused():
    (group,) = symmpool.Group.in_process(1)
    pool = symmpool.Pool(group, "cpu")
    for nonsense, text in ((1, "SM budget 1"), (-1, "sm_budget"), ("many", "sm_budget")):
        with pytest.raises((symmpool.InvalidArgumentError, TypeError), match=text):
            symmpool.Communicator(pool, sm_budget=nonsense)
    comm = symmpool.Communicator(pool, sm_budget=2, beside_compute=True)
    for good in (2, 1 << 31, None):
        comm.set_sm_budget(good)
    for nonsense in (0, 1, -3, 2.5, "all"):
        with pytest.raises((symmpool.InvalidArgumentError, TypeError), match="SM budget|sms"):
            comm.set_sm_budget(nonsense)


def test_room_is_left_on_devices_that_there_may_be():
    for leave_room in (symmpool.share_sms, sm_budget.share_sms_of_several):
        leave_room(0)
        for nonsense in (-1, 2**32, 0.5, "cuda"):
            with pytest.raises((symmpool.InvalidArgumentError, TypeError), match="device|integer"):
                leave_room(nonsense)


def test_groups_of_nccl_are_left_room(monkeypatch):
    class Group:
        def __init__(self, backends, size=2):
            self.backends, self.size = backends, lambda: size

    def observed(*made):
        """The devices that are shared with these groups, and those on which whole SMs are left to them."""
        devices, whole = [], []
        dist = SimpleNamespace(distributed_c10d=SimpleNamespace(_world=SimpleNamespace(pg_map=made)))
        monkeypatch.setattr(sm_budget.process_groups, "distributed", lambda: dist)
        monkeypatch.setattr(sm_budget.process_groups, "backends_of", lambda group: group.backends)
        monkeypatch.setattr(sm_budget, "share_sms", devices.append)
        monkeypatch.setattr(sm_budget, "share_sms_of_several", whole.append)
        for device in (3, -1):
            sm_budget.share_with_other_groups(device)
        return devices, whole

    nccl, ours, gloo = {"cpu": "gloo", "cuda": "nccl"}, {"cuda": "symmpool"}, {"cpu": "gloo", "cuda": "gloo"}
    assert observed(Group(nccl), Group(nccl)) == ([3], [])
    assert observed(Group(nccl), Group({"cuda": "nccl"}), Group(ours)) == ([3], [])
    assert observed(Group(nccl), Group(nccl, size=1)) == ([], [3])
    assert observed(Group(nccl), Group(ours), Group(gloo), Group({})) == ([], [3])
    assert observed(Group(ours), Group(gloo)) == ([], [])
    monkeypatch.setattr(sm_budget.process_groups, "distributed", lambda: None)
    sm_budget.share_with_other_groups(0)
