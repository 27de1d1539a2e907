"""Tests of calls that only move data, with elements that no reduction takes, on one GPU.

python -m pytest python/tests/gpu/test_copy_only_types_cuda.py -q
"""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1]))

from any_bits import data  # noqa: E402
from ranks import values  # noqa: E402

import symmpool  # noqa: E402

pytestmark = pytest.mark.gpu

NAMES = "bool int16 uint16 uint32 uint64 complex64 complex128 complex32".split()
NAMES += "float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 bits8 bits16".split()
DTYPES = [getattr(torch, name) for name in NAMES if hasattr(torch, name)]


def same(found, expected):
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def every_move(group):
    pool = symmpool.Pool(group, "cuda:0", allow_shared_device=True, timeout=60)
    comm = symmpool.Communicator(pool, timeout=60)
    me, world = group.rank, group.world
    wrong = []
    for dtype in DTYPES:
        for count in (1, 5000, 1 << 18):
            parts = [data(dtype, rank, world * count, "cuda") for rank in range(world)]
            whole = torch.cat([part.view(torch.uint8) for part in parts])
            swapped = torch.cat([part.view(torch.uint8).chunk(world)[me] for part in parts])
            for window in (True, False):

                def like(bytes, window=window, dtype=dtype):
                    if window:
                        return pool.empty(bytes.numel(), torch.uint8).copy_(bytes).view(dtype)
                    return bytes.clone().view(dtype)

                mine = like(parts[me].view(torch.uint8))
                every, out = like(torch.zeros_like(whole)), like(torch.zeros_like(swapped))
                comm.all_gather_into_tensor(every, mine)
                comm.all_to_all_single(out, mine)
                right = [same(every, whole), same(out, swapped)]
                there = like(torch.zeros_like(swapped))
                splits = torch.full((world,), count, device="cuda")
                comm.all_to_all_v(there, mine, splits)
                right.append(same(there, swapped))
                comm.broadcast(mine, world - 1)
                right.append(same(mine, parts[-1]))
                if not all(right):
                    wrong.append((dtype, count, window, right))
    comm.synchronize()
    return wrong


@pytest.mark.parametrize("world", [1, 2])
def test_every_type_arrives_as_it_was(world):
    assert values(world, every_move, limit=300) == [[]] * world


def refused(group):
    pool = symmpool.Pool(group, "cuda:0", allow_shared_device=True, timeout=60)
    observed = []
    for first, second in [("int16", "bfloat16"), ("complex64", "float64")]:
        comm = symmpool.Communicator(pool, timeout=20)
        dtype = getattr(torch, second if group.rank else first)
        x = torch.zeros(100, dtype=dtype, device="cuda")
        try:
            comm.broadcast(x, 0)
            comm.synchronize()
        except symmpool.DivergedError as error:
            observed.append(str(error))
    comm = symmpool.Communicator(pool, timeout=20)
    try:
        comm.all_reduce(torch.ones(3, dtype=torch.bool, device="cuda"))
    except symmpool.InvalidArgumentError as error:
        observed.append(str(error))
    return observed


def test_what_differs_and_what_is_not_reduced_is_named():
    for observed in values(2, refused, limit=300):
        assert len(observed) == 3, observed
        assert (
            "rank 0: broadcast of 100 i16" in observed[0] and "rank 1: broadcast of 100 bf16" in observed[0]
        )
        assert "100 complex64" in observed[1] and "100 f64" in observed[1]
        assert "elements of bool are moved, not reduced" in observed[2] and "float32" in observed[2]
