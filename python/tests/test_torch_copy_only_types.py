"""Tests of calls that only move data, with elements that no reduction takes: torch's, between processes."""

import pytest
import torch
import torch.distributed as dist
from any_bits import data
from ranks import values
from test_torch_distributed import begin

import symmpool
from symmpool import backend, ops

# complex32 is torch's alone, and the last three have no name in calls but their size.
NAMES = "bool int16 uint16 uint32 uint64 complex64 complex128 complex32".split()
NAMES += "float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 uint4 bits8 bits16".split()
DTYPES = [getattr(torch, name) for name in NAMES if hasattr(torch, name)]


def memory(dtype, count, pool=None):
    bytes = count * dtype.itemsize
    found = pool.empty(bytes, torch.uint8) if pool else torch.empty(bytes, dtype=torch.uint8)
    return found.view(dtype)


def same(found, expected):
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def swap(parts, me, count):
    return torch.cat([part.view(torch.uint8).chunk(len(parts))[me] for part in parts])


def every_move(group, folder):
    me, world = begin(group, folder)
    pool = symmpool.Pool(device="cpu")
    wrong = []
    for dtype in DTYPES:
        for count in (1, 3000):
            parts = [data(dtype, rank, world * count) for rank in range(world)]
            everything = torch.cat([part.view(torch.uint8) for part in parts])
            swapped = swap(parts, me, count)
            for window in (pool, None):
                mine = memory(dtype, world * count, window)
                mine.view(torch.uint8).copy_(parts[me].view(torch.uint8))
                for async_op in (False, True):
                    calls = []
                    whole = memory(dtype, world * world * count, window)
                    other = memory(dtype, world * count, window)
                    calls.append(symmpool.all_gather_into_tensor(whole, mine, async_op=async_op))
                    calls.append(symmpool.all_to_all_single(other, mine, async_op=async_op))
                    for work in calls:
                        assert (work is not None) == async_op
                        if work is not None:
                            work.wait()
                    if not same(whole, everything):
                        wrong.append(("all_gather", dtype, count, window, async_op))
                    if not same(other, swapped):
                        wrong.append(("all_to_all", dtype, count, window, async_op))
                symmpool.broadcast(mine, world - 1)
                if not same(mine, parts[-1]):
                    wrong.append(("broadcast", dtype, count, window))
    dist.destroy_process_group()
    return wrong


def test_every_type_arrives_as_it_was(tmp_path):
    assert values(3, every_move, str(tmp_path)) == [[]] * 3


def over_the_backend(group, folder):
    me, world = begin(group, folder, "symmpool")
    right = []
    for dtype in (torch.bool, torch.uint16, torch.complex128, torch.float8_e4m3fnuz):
        parts = [data(dtype, rank, world * 5) for rank in range(world)]
        whole = memory(dtype, world * world * 5)
        dist.all_gather_into_tensor(whole, parts[me])
        right.append(same(whole, torch.cat([part.view(torch.uint8) for part in parts])))
        other = torch.empty_like(parts[me])
        dist.all_to_all_single(other, parts[me], async_op=True).wait()
        right.append(same(other, swap(parts, me, 5)))
        dist.broadcast(other.copy_(parts[me]), 1)
        right.append(same(other, parts[1]))
    moved = {each: set(where) for each, where in backend.backend_counts().items()}
    dist.destroy_process_group()
    return all(right), moved


def test_the_backend_moves_them_itself(tmp_path):
    names = ("all_gather_into_tensor", "all_to_all_single", "broadcast")
    moved = {name: {"symmpool"} for name in names}
    assert values(2, over_the_backend, str(tmp_path)) == [(True, moved)] * 2


def as_operators(group, folder):
    me, world = begin(group, folder)

    def step(flags, numbers):
        gathered = ops.all_gather_tensor(flags)
        swapped = ops.all_to_all_single(numbers.repeat(world))
        symmpool.broadcast(numbers, world - 1)
        return gathered.sum(), swapped, numbers * 2

    flags = torch.tensor([True, me == 1])
    right = []
    for run in (step, torch.compile(step, backend="aot_eager", fullgraph=False)):
        total, swapped, last = run(flags, torch.tensor([complex(me, 1)]))
        right.append(total.item() == world + 1)
        right.append(swapped.tolist() == [complex(rank, 1) for rank in range(world)])
        right.append(last.tolist() == [complex(2 * world - 2, 2)])
    # Through complex numbers gradients flow, as through pairs of real ones.
    grads = []
    for complex_numbers in (True, False):
        torch.manual_seed(me)
        x = torch.randn(3, 2, requires_grad=True)
        if complex_numbers:
            y = torch.view_as_real(ops.all_gather_tensor(torch.view_as_complex(x)))
        else:
            y = ops.all_gather_tensor(x)
        (y * (me + 1) * torch.arange(6.0 * world).reshape(-1, 2)).square().sum().backward()
        grads.append(x.grad)
    right.append(torch.allclose(*grads))
    dist.destroy_process_group()
    return right


def test_operators_and_gradients(tmp_path):
    assert values(2, as_operators, str(tmp_path)) == [[True] * 7] * 2


@pytest.fixture
def pool():
    return symmpool.Pool(symmpool.Group.in_process(1)[0], "cpu")


def test_reductions_name_what_they_refuse(pool):
    comm = symmpool.Communicator(pool)
    for dtype in DTYPES:
        if str(dtype) == "torch.uint4":
            continue  # which torch's DLPack shows as bytes, as which it has sums
        x = data(dtype, 0, 4)
        name = str(dtype).removeprefix("torch.")
        for call in (lambda x=x: comm.all_reduce(x), lambda x=x: comm.reduce_scatter_tensor(x.clone(), x)):
            why = f"{name} are moved, not reduced.*float32"
            with pytest.raises(symmpool.InvalidArgumentError, match=why):
                call()


def test_memory_that_is_not_what_it_shows_is_refused(pool):
    comm = symmpool.Communicator(pool)
    z = torch.tensor([1 + 2j])
    for wrong, why in [
        (z.conj(), r"tensor.resolve_conj\(\)"),
        (z.conj().imag, r"tensor.resolve_neg\(\)"),
        (torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), r"int_repr\(\)"),
    ]:
        with pytest.raises(symmpool.InvalidArgumentError, match=why):
            comm.broadcast(wrong, 0)
    comm.broadcast(z.conj().resolve_conj(), 0)


@pytest.mark.parametrize(
    "dtype", [each for each in DTYPES if str(each)[6:11] not in ("uint4", "bits8", "bits1")]
)
def test_memory_of_every_type(pool, dtype):
    x = pool.zeros((2, 3), dtype)
    assert (x.dtype, x.shape) == (dtype, (2, 3))
    assert x.view(torch.uint8).tolist() == torch.zeros(2, 3 * dtype.itemsize).tolist()
