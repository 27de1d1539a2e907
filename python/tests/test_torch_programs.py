"""Random programs of calls on the backend: what `gpu/ranks_programs.py` runs on GPUs."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin

sys.path.insert(0, str(Path(__file__).parent / "gpu"))

import ranks_programs


class Spoiled(ranks_programs.Runner):
    """Changes one element of what came of one call."""

    def judge(self, made):
        if self.nth == 3 and self.me == 1 and made.step.nth == 2:
            made.pairs.append((torch.tensor([1]), torch.tensor([2])))
        super().judge(made)


def programs(group, folder, count, spoiled):
    begin(group, folder, "symmpool")
    kind = Spoiled if spoiled else ranks_programs.Runner
    right = ranks_programs.programs(torch.device("cpu"), count, kind=kind)
    dist.destroy_process_group()
    return right


@pytest.mark.parametrize("world", [2, 3])
def test_random_programs_do_what_their_calls_say(world, tmp_path):
    assert values(world, programs, str(tmp_path), 60, False) == [True] * world


def test_one_wrong_element_is_found(tmp_path):
    assert values(2, programs, str(tmp_path), 5, True) == [False] * 2
