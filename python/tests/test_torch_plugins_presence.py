"""Ranks of an engine of which some lack this package: each other rank says so before its first group."""

import datetime
import logging

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin

import symmpool
from symmpool.errors import InvalidStateError
from symmpool.plugins import presence
from symmpool.torch_backend import registration

ENGINE = logging.getLogger("an engine")


class Said(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def begins(group, folder, lacking, version=None):
    """Makes the default group, on gloo where the package is lacking. Returns the error and what was said."""
    said = Said()
    ENGINE.addHandler(said)
    presence._FIRST_WORD, presence._LIMIT = 0.5, 1.5
    if group.rank == version:
        presence.own_version = lambda: "9.9.9"
    if group.rank != lacking:
        registration.before_groups.append(presence.PresenceCheck("vLLM", ENGINE))
    backend = "gloo" if group.rank == lacking else "symmpool"
    try:
        begin(group, folder, backend, datetime.timedelta(seconds=4))
        x = torch.full((4,), 1.0)
        dist.all_reduce(x)
        if version is None and lacking is None:
            return x.tolist(), said.lines
    except InvalidStateError as error:
        return str(error), said.lines
    except RuntimeError:
        return "torch's", said.lines
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_a_rank_that_lacks_the_package_is_named_with_what_to_set(tmp_path):
    first, second, third = values(3, begins, str(tmp_path), 1)
    assert second == ("torch's", [])
    for rank, (error, said) in ((0, first), (2, third)):
        waits = (
            f"symmpool: rank {rank} of vLLM waits for rank 1, which is late, or lacks symmpool, or has "
            "SYMMPOOL_ENGINES=off; install symmpool on every rank, or set SYMMPOOL_ENGINES=off on all"
        )
        assert said == [waits] and error == f"{waits}; rank {rank} gave up"


def test_ranks_that_all_have_it_go_on_without_a_word(tmp_path):
    assert values(3, begins, str(tmp_path), None) == [([3.0] * 4, [])] * 3


def test_ranks_with_several_versions_are_told_of_them(tmp_path):
    first, second = values(2, begins, str(tmp_path), None, 1)
    own = symmpool.version()
    assert first[0] == (
        f"symmpool: rank 0 has symmpool {own}, and rank 1 9.9.9; install one version on every rank"
    )
    assert second[0].startswith("symmpool: rank 1 has symmpool 9.9.9, and rank 0 " + own)


def test_one_rank_waits_for_nobody():
    class Options:
        group_rank, group_size = 0, 1

    check = presence.PresenceCheck("vLLM", ENGINE)
    check(Options())
    with pytest.raises(AttributeError):
        Options.group_size = 2
        check(Options())
