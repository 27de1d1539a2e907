"""Random traffic matrices compared with gloo: `gpu/ranks_matrices.py` on the CPU."""

import datetime
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import values

sys.path.insert(0, str(Path(__file__).parent / "gpu"))

import ranks_matrices


class Spoiled(ranks_matrices.Runner):
    """Changes one byte of what came of one matrix."""

    def single(self, case, output, input, receive, send):
        super().single(case, output, input, receive, send)
        if case.nth == 11 and self.rank == 1:
            output.reshape(-1).view(torch.uint8)[-1] ^= 1


def matrices(group, folder, count, spoiled):
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/torch",
        rank=group.rank,
        world_size=group.world,
        timeout=datetime.timedelta(seconds=30),
    )
    kind = Spoiled if spoiled else ranks_matrices.Runner
    device, most_bytes = torch.device("cpu"), 1 << 18
    right = ranks_matrices.exchange(device, count, most_bytes=most_bytes, batch=20, kind=kind)
    dist.destroy_process_group()
    return right


@pytest.mark.parametrize("world", [2, 3])
def test_random_matrices_arrive_as_torchs_do(world, tmp_path):
    assert values(world, matrices, str(tmp_path), 200, False) == [True] * world


def test_one_wrong_byte_is_found(tmp_path):
    assert values(2, matrices, str(tmp_path), 20, True) == [False] * 2
