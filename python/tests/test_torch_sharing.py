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
    assert sharing.at_once(ON_CUDA) == 3
    assert sharing.at_once(Pool("cpu")) == 1
    for nonsense in ("0", "17", "-1", "2.0", " 2", "two", "²"):
        monkeypatch.setenv("SYMMPOOL_CONCURRENT", nonsense)
        with pytest.raises(symmpool.InvalidArgumentError, match="SYMMPOOL_CONCURRENT="):
            sharing.at_once(ON_CUDA)
    monkeypatch.setenv("SYMMPOOL_CONCURRENT", "")
    assert sharing.at_once(ON_CUDA) == 1, "a pool on no group of torch"


def agreed(group, folder):
    me, _ = begin(group, folder)
    groups.key_holding = lambda _: dist.group.WORLD
    found = [sharing.at_once(ON_CUDA)]
    dist.new_group()  # of gloo, which has no calls on CUDA
    found.append(sharing.at_once(ON_CUDA))
    # As where a rank has two groups on CUDA, and the others have one.
    sharing._several_groups = lambda _: me == 1
    found.append(sharing.at_once(ON_CUDA))
    dist.destroy_process_group()
    return found


def test_ranks_agree_whether_one_has_several_groups(tmp_path):
    assert values(3, agreed, str(tmp_path)) == [[1, 1, 2]] * 3


def counted(group, folder):
    begin(group, folder)
    kinds = []
    # As of NCCL.
    groups.backends_of = lambda _: {"cuda": "nccl"}
    kinds.append(sharing._several_groups(dist))
    dist.new_group([group.rank], use_local_synchronization=True)  # of one rank
    kinds.append(sharing._several_groups(dist))
    dist.new_group()
    kinds.append(sharing._several_groups(dist))
    dist.destroy_process_group()
    return kinds


def test_groups_of_one_rank_do_not_count(tmp_path):
    assert values(2, counted, str(tmp_path)) == [[False, False, True]] * 2
