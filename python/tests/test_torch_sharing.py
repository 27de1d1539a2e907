"""How much of a device communicators take that calls make by themselves."""

import pytest
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin

import symmpool
from symmpool import groups, sharing


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


def counted(group, folder):
    begin(group, folder)
    told = []
    sharing.leave_room = told.append

    def is_told():
        sharing.leave_room_for_groups(3)
        found = told == [3]
        told.clear()
        return found

    of_gloo = dist.new_group()  # which has no calls on CUDA
    kinds = [is_told()]
    dist.destroy_process_group(of_gloo)
    # As of NCCL.
    groups.backends_of = lambda _: {"cuda": "nccl"}
    kinds.append(is_told())
    dist.new_group([group.rank], use_local_synchronization=True)  # of one rank
    kinds.append(is_told())
    dist.new_group()
    kinds.append(is_told())
    dist.destroy_process_group()
    return kinds


def test_several_groups_on_cuda_leave_nccl_room(tmp_path):
    assert values(2, counted, str(tmp_path)) == [[False, False, False, True]] * 2
