"""Matrix products that hide their communication, on the CPU: eager, compiled, installed, refused."""

import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch import torchrun
from test_torch_distributed import begin

import symmpool
from symmpool import fused
from symmpool.errors import DivergedError, InvalidArgumentError, UnsupportedError
from symmpool.fused import tensor_cores
from symmpool.fused.matmuls import Matmul


def numbers(shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def gathered(x, dim):
    """Every rank's tensor along a dimension, by torch's own collective."""
    parts = [torch.empty_like(x.contiguous()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim=dim)


def summed(x, dim, op):
    """This rank's part of every rank's tensor added up: with symmpool's bits."""
    me, world = dist.get_rank(), dist.get_world_size()
    total = x.clone()
    symmpool.all_reduce(total, op)
    return total.chunk(world, dim=dim)[me].contiguous()


def shards(me):
    """Left matrices, a dimension, and how many rows right matrices have."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shape in ((4, 6), (2, 3, 6), (2, 3, 4, 6)):
            for dim in range(len(shape)):
                yield numbers(shape, 10 * len(shape) + me, dtype), dim
    yield numbers((6, 4), me).t(), 1
    yield numbers((6, 4), me).t(), 0
    yield numbers((0, 6), me), 0


def gathers(group, folder):
    me, world = begin(group, folder)
    name, wrong = dist.group.WORLD.group_name, []
    for nth, (shard, dim) in enumerate(shards(me)):
        inner = shard.shape[-1] * (world if dim == shard.dim() - 1 else 1)
        rights = [numbers((inner, columns), columns, shard.dtype) for columns in (5, 8)]
        whole = gathered(shard, dim)
        front = whole if dim == shard.dim() - 1 else whole.movedim(dim, 0)

        def matmul(right, front=front, dim=dim, shard=shard):
            made = (front.reshape(-1, front.shape[-1]) @ right).view(*front.shape[:-1], right.shape[1])
            return made if dim == shard.dim() - 1 else made.movedim(0, dim)

        for way in (fused.fused_all_gather_matmul, torch.ops.symmpool.fused_all_gather_matmul):
            A, found = way(shard, rights, dim, name)
            right = torch.equal(A, whole) and all(
                torch.equal(one, matmul(each)) for one, each in zip(found, rights, strict=True)
            )
            none, again = way(shard, rights, dim, name, return_A=False)
            right &= none is None and all(map(torch.equal, found, again))
            if not right:
                wrong.append((nth, tuple(shard.shape), dim, way.__name__))
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gathered_products_are_those_of_separate_operations(world, tmp_path):
    assert values(world, gathers, str(tmp_path)) == [[]] * world


def scatters(group, folder):
    me, world = begin(group, folder)
    name, wrong = dist.group.WORLD.group_name, []
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((6, 5), (6, 12, 5), (12, 6, 6, 5)):
            for dim in range(len(shape)):
                for op in ("sum", "avg"):
                    left, right = numbers(shape, me, dtype), numbers((5, 18), me + 7, dtype)
                    wanted = summed((left.reshape(-1, 5) @ right).view(*shape[:-1], 18), dim, op)
                    for way in (
                        fused.fused_matmul_reduce_scatter,
                        torch.ops.symmpool.fused_matmul_reduce_scatter,
                    ):
                        found = way(left, right, op, dim, name)
                        if not (torch.allclose(found, wanted, 1e-2, 1e-2) and found.is_contiguous()):
                            wrong.append((str(dtype), shape, dim, op))
                    if dim == 0 and not torch.equal(found, wanted):
                        wrong.append((str(dtype), shape, dim, op, "bits"))
                    # A sum of products, whose inner dimensions differ.
                    lefts = [numbers((*shape[:-1], 5 + nth), me + nth, dtype) for nth in range(3)]
                    rights = [numbers((5 + nth, 18), me + 7 + nth, dtype) for nth in range(3)]
                    each = [(a.reshape(-1, a.shape[-1]) @ b) for a, b in zip(lefts, rights, strict=True)]
                    wanted = summed(((each[0] + each[1]) + each[2]).view(*shape[:-1], 18), dim, op)
                    for way in (
                        fused.fused_matmuls_reduce_scatter,
                        torch.ops.symmpool.fused_matmuls_reduce_scatter,
                    ):
                        found = way(lefts, rights, op, dim, name)
                        if not (torch.allclose(found, wanted, 1e-2, 1e-2) and found.is_contiguous()):
                            wrong.append((str(dtype), shape, dim, op, "a sum"))
                    if dim == 0 and not torch.equal(found, wanted):
                        wrong.append((str(dtype), shape, dim, op, "bits of a sum"))
    left, right = numbers((3, 4, 5), me), numbers((5, 6), me + 7)
    total = (left.reshape(-1, 5) @ right).view(3, 4, 6)
    symmpool.all_reduce(total)
    for way in (fused.matmul_all_reduce, torch.ops.symmpool.matmul_all_reduce):
        for algorithm in ("auto", "separate"):
            if not torch.equal(way(left, right, "sum", name, algorithm=algorithm), total):
                wrong.append(f"all-reduce, {algorithm}")
    if (
        fused.matmul_all_reduce(torch.ones(2, 3, 0), torch.ones(0, 5), "sum", name).tolist()
        != [[[0] * 5] * 3] * 2
    ):
        wrong.append("all-reduce without an inner dimension")
    x = numbers((6, 4), me)
    if not torch.equal(torch.ops.symmpool._low_contention_all_gather(x, name), gathered(x, 0)):
        wrong.append("low contention")
    if not torch.equal(
        torch.ops.symmpool._low_contention_reduce_scatter(x, "avg", name), summed(x, 0, "avg")
    ):
        wrong.append("low contention, scattered")
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_scattered_products_are_those_of_separate_operations(world, tmp_path):
    assert values(world, scatters, str(tmp_path)) == [[]] * world


def compiled(group, folder):
    me, world = begin(group, folder)
    name = dist.group.WORLD.group_name
    x, right, back = numbers((4, 2, 6), me), numbers((6, 8), 2), numbers((8, 6), 3)

    def step(x):
        A, (hidden,) = torch.ops.symmpool.fused_all_gather_matmul(x * 2, [right], 1, name)
        out = torch.ops.symmpool.fused_matmul_reduce_scatter(hidden.relu(), back, "sum", 1, name)
        return A.sum() + out.sum(), out, torch.ops.symmpool.matmul_all_reduce(out, right, "avg", name)

    wanted, same = step(x), []
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        found = torch.compile(step, backend=backend, fullgraph=True)(x)
        same.append(all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)))
    arguments = (x, [right, right], 1, name)
    torch.library.opcheck(
        torch.ops.symmpool.fused_all_gather_matmul.default, arguments, test_utils="test_faketensor"
    )
    arguments = (numbers((4, 2 * world, 8), 1), back, "sum", 1, name)
    torch.library.opcheck(
        torch.ops.symmpool.fused_matmul_reduce_scatter.default, arguments, test_utils="test_faketensor"
    )
    left = numbers((4, 2 * world, 8), 1)
    arguments = ([left, left + 1], [back, back], "avg", 1, name)
    torch.library.opcheck(
        torch.ops.symmpool.fused_matmuls_reduce_scatter.default, arguments, test_utils="test_faketensor"
    )
    dist.destroy_process_group()
    return same


def test_compiled_products_are_what_eager_ones_are(tmp_path):
    assert values(2, compiled, str(tmp_path)) == [[True] * 2] * 2


def installed(group, folder):
    me, _ = begin(group, folder)
    name = dist.group.WORLD.group_name
    x, right = numbers((4, 6), me), numbers((6, 8), 2)
    wanted = gathered(x, 0)
    said = []
    fused.install()
    fused.install()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # No pool yet, so torch's own definition is run.
        for _ in range(2):
            A, (found,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [right], 0, name)
            said.append(torch.equal(A, wanted) and torch.equal(found, wanted @ right))
        reports = [str(each.message) for each in caught if "has no pool" in str(each.message)]
        said.append(len(reports) == 1)
        enabled = torch.distributed._symmetric_memory.is_symm_mem_enabled_for_group
        said.append(not enabled(name) and not enabled("no group"))
        pool = symmpool.Pool(device="cpu")
        said.append(enabled(name))
        A, (found,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [right], 0, name)
        said.append(torch.equal(A, wanted) and torch.equal(found, wanted @ right))
        # Only ours refuses this by its name.
        try:
            torch.ops.symm_mem.fused_matmul_reduce_scatter(x, right, "max", 0, name)
        except InvalidArgumentError as error:
            said.append("reduce_op: 'max'" in str(error) and pool.world == 2)
    fused.uninstall()
    said.append(not torch.distributed._symmetric_memory.is_symm_mem_enabled_for_group(name))
    try:
        torch.ops.symm_mem.fused_all_gather_matmul(x, [right], 0, name)
    except NotImplementedError:
        said.append(True)
    fused.uninstall()
    dist.destroy_process_group()
    return said


def test_operators_of_torch_are_ours_where_there_is_a_pool(tmp_path):
    assert values(2, installed, str(tmp_path)) == [[True] * 9] * 2


def refused(group, folder):
    me, _ = begin(group, folder)
    name = dist.group.WORLD.group_name
    x, right = torch.ones(4, 6), torch.ones(6, 8)
    symmpool.all_reduce(torch.ones(1))
    gather, scatter = fused.fused_all_gather_matmul, fused.fused_matmul_reduce_scatter
    scaled, sums = fused.fused_all_gather_scaled_matmul, fused.fused_matmuls_reduce_scatter
    one = torch.ones(())
    x8, right8 = x.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn)

    def total(*given):
        return fused.matmul_all_reduce(*given[:-1], algorithm=given[-1])

    texts = []
    for nth, (call, arguments) in enumerate(
        (
            (gather, (x[0], [right], 0, name)),
            (gather, (x.long(), [right], 0, name)),
            (gather, (x, [right], 2, name)),
            (gather, (x, [right[:5]], 0, name)),
            (gather, (x, [right, right.half()], 0, name)),
            (gather, (x.clone().requires_grad_(), [right], 0, name)),
            (scatter, (x, right, "max", 0, name)),
            (scatter, (x[:3], right, "sum", 0, name)),
            (scatter, (x, right.unsqueeze(0), "sum", 0, name)),
            (scaled, (x8, [right8], torch.ones(3), [one], 0, name, [None], [None], [None], [False])),
            (sums, ([x, x[:2]], [right, right], "sum", 0, name)),
            (sums, ([x, x], [right, right[:, :4]], "sum", 0, name)),
            (sums, ([x, x.half()], [right, right.half()], "sum", 0, name)),
            (sums, ([x, x], [right, right[:5]], "sum", 0, name)),
            (sums, ([x, None], [right, right], "sum", 0, name)),
            (sums, ([x], [], "sum", 0, name)),
            (sums, ([x, x], [right], "sum", 0, name)),
            (scaled, (x, [right], one, [], 0, name, [None], [None], [None], [False])),
            (gather, ("x", [right], 0, name)),
            (scatter, (None, right, "sum", 0, name)),
            (gather, (x, None, 0, name)),
            (sums, (None, [right], "sum", 0, name)),
            (sums, (x, [right], "sum", 0, name)),
            (sums, ([x], right, "sum", 0, name)),
            (scaled, (x8, [right8], one, [None], 0, name, [None], [None], [None], [False])),
            (scaled, (x8, [right8], None, [one], 0, name, [None], [None], [None], [False])),
            (scaled, (x8, [right8], 2.0, [one], 0, name, [None], [None], [None], [False])),
            (scaled, (x, [right], one, [one], 0, name, [None], [None], [None], [False])),
            (fused.fused_scaled_matmul_reduce_scatter, (x8, right8, one, None, "sum", 0, 0, name, None)),
            # Arguments that nothing else reads are refused all the same.
            (scaled, (x8, [right8], one, [one], 0, name, [3], [None], [None], [False])),
            (total, (x, right, "sum", name, "fast")),
            (total, (x.bfloat16(), right.bfloat16(), "sum", name, "one_kernel")),
        )
    ):
        # One of the ranks is wrong, in turn, and the other one learns of it.
        is_wrong = nth % 2 == me
        try:
            if is_wrong:
                call(*arguments)
            else:
                gather(x, [right], 0, name)
            texts.append("nothing")
        except (InvalidArgumentError, UnsupportedError) as error:
            texts.append(str(error) if is_wrong else f"unexpected {error}")
        except DivergedError as error:
            texts.append("diverged" if not is_wrong else f"unexpected {error}")
    with pytest.raises(DivergedError, match="fused_all_gather_matmul of a shard of 5 x 6 f32"):
        gather(torch.ones(4 + me, 6), [right], 0, name)
    with pytest.raises(DivergedError, match="fused_matmul_reduce_scatter of a product of 4 x 8 f32"):
        scatter(x, right, "avg" if me else "sum", 0, name)
    with pytest.raises(InvalidArgumentError, match="As: an empty list"):
        sums([], [], "sum", 0, name)
    # The communicator is still there, and ranks may have products of their own.
    A, found = gather(x, [right[:, : me + 1]], 0, name)
    texts.append([tuple(A.shape), tuple(found[0].shape)] == [(8, 6), (8, me + 1)])
    dist.destroy_process_group()
    return texts


def test_what_does_not_fit_is_refused_by_name_on_all_ranks(tmp_path):
    words = [
        "A_shard: torch.float32 of shape (6,)",
        "torch.int64",
        "gather_dim: 2",
        "Bs[0]: torch.float32 of shape (5, 8)",
        "Bs[1]: torch.float16",
        "requires grad",
        "'max'",
        "not for 2 ranks",
        "B: torch.float32 of shape (1, 6, 8)",
        "A_scale: shape (3,)",
        "As[1]: ((2,), torch.float32), and ((4,), torch.float32) in the first product",
        "Bs[1]: 4, and 8 in the first product",
        "As[1]: ((4,), torch.float16)",
        "Bs[1]: torch.float32 of shape (5, 8)",
        "As[1]: None",
        "1 As and 0 Bs",
        "2 As and 1 Bs",
        "B_scales: 0 for 1 matrices",
        "A_shard: an object of type str",
        "A: None",
        "Bs: None; it must be a list",
        "fused_matmuls_reduce_scatter on rank 1: As: None; it must be a list",
        "As: torch.float32 of shape (4, 6); it must be a list",
        "Bs: torch.float32 of shape (6, 8); it must be a list",
        "scale of Bs[0]: None; it must be a tensor",
        "scale of A_shard: None; it must be a tensor",
        "scale of A_shard: an object of type float",
        "A_shard: torch.float32 of shape (4, 6); with scales it must be of 8-bit floats",
        "scale of B: None; it must be a tensor",
        "fused_all_gather_scaled_matmul on rank 1: bias of Bs[0]: an object of type int; it must be a tensor",
        "algorithm: 'fast' is none of auto, separate, one_kernel",
        "one kernel does not serve 4 rows of torch.bfloat16 and 8 columns on cpu",
    ]
    for me, texts in enumerate(values(2, refused, str(tmp_path))):
        for nth, (text, word) in enumerate(zip(texts[:-1], words, strict=True)):
            assert word in text if nth % 2 == me else text == "diverged", (me, nth, text)
        assert texts[-1] is True


def without_inner(group, folder):
    """Products whose inner dimension is empty: on all ranks they are zeros, on one what the others have."""
    me, world = begin(group, folder)
    name = dist.group.WORLD.group_name
    left, right = torch.ones(6, 0), torch.ones(0, 10)
    found = [
        fused.fused_all_gather_matmul(left, [right], 0, name)[1][0],
        fused.fused_all_gather_matmul(left, [right], 1, name)[1][0],
        fused.fused_matmul_reduce_scatter(left, right, "sum", 0, name),
        fused.matmul_all_reduce(left, right, "sum", name),
    ]
    inner = 0 if me == 0 else 4
    part = fused.fused_matmul_reduce_scatter(torch.ones(6, inner), torch.ones(inner, 10), "sum", 0, name)
    dist.destroy_process_group()
    zeros = [(tuple(each.shape), bool((each == 0).all())) for each in found]
    return [*zeros, bool((part == 4 * (world - 1)).all())]


def test_an_inner_dimension_may_be_empty(tmp_path):
    shapes = [(12, 10), (6, 10), (3, 10), (6, 10)]
    assert values(2, without_inner, str(tmp_path)) == [[*((shape, True) for shape in shapes), True]] * 2


class Multiplied(torch.autograd.Function):
    """A product that is added up, with a gradient that the program gives it."""

    @staticmethod
    def forward(ctx, left, right):
        ctx.save_for_backward(left, right)
        return torch.ops.symmpool.matmul_all_reduce(left, right, "sum", dist.group.WORLD.group_name)

    @staticmethod
    def backward(ctx, gradient):
        left, right = ctx.saved_tensors
        return gradient @ right.t(), left.t() @ gradient


def with_own_gradients(group, folder):
    me, _ = begin(group, folder)
    left, right = numbers((4, 8), me).requires_grad_(), numbers((8, 6), 9).requires_grad_()

    def step():
        return (Multiplied.apply(left * 2, right) * right.sum()).sum()

    wanted, found = torch.autograd.grad(step(), (left, right)), []
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        made = torch.autograd.grad(torch.compile(step, backend=backend)(), (left, right))
        found.append(all(torch.allclose(*each) for each in zip(made, wanted, strict=True)))
    dist.destroy_process_group()
    return found


def test_functions_with_gradients_of_their_own_compile(tmp_path):
    assert values(2, with_own_gradients, str(tmp_path)) == [[True, True]] * 2


def scaled_by_rows(group, folder):
    """Scales of rows and columns on the CPU, where torch's own product has none."""
    me, world = begin(group, folder)
    name = dist.group.WORLD.group_name
    left, right = numbers((6, 32), me, torch.float32), numbers((32, 8), 7, torch.float32)
    lefts = [numbers((6, 32), rank, torch.float32).to(torch.float8_e4m3fn) for rank in range(world)]
    left8, right8 = left.to(torch.float8_e4m3fn), right.t().contiguous().to(torch.float8_e4m3fn).t()
    rows, columns = torch.arange(1.0, 7).view(6, 1), torch.arange(1.0, 9).view(1, 8) / 4
    bf16, more = torch.bfloat16, ([None], [None], [torch.bfloat16], [False])
    made = fused.fused_all_gather_scaled_matmul(left8, [right8], rows, [columns], 0, name, *more)[1][0]
    wanted = [((each.float() * rows) @ (right8.float() * columns)).to(bf16) for each in lefts]
    rest = ("sum", 0, 0, name, None)
    part = fused.fused_scaled_matmul_reduce_scatter(left8, right8, rows, columns, *rest, out_dtype=bf16)
    total = sum(each.float() for each in wanted).chunk(world)[me]
    dist.destroy_process_group()
    return [torch.equal(made, torch.cat(wanted)), torch.allclose(part.float(), total, rtol=1e-2, atol=1e-2)]


def test_rows_may_have_scales_on_the_cpu(tmp_path):
    assert values(2, scaled_by_rows, str(tmp_path)) == [[True, True]] * 2


def test_the_benchmark_compares_and_measures_products():
    few = ["--what", "matmul", "--device", "cpu", "--dtype", "f32", "--rows", "64", "--gather", "32x64"]
    few += ["--scatter", "64x32", "--kinds", "all_gather,reduce_scatter", "--calls", "2", "--rounds", "1"]
    status, output, errors = torchrun(2, *few, "--replays", "1", benchmark="fused")
    assert status == 0, errors
    lines = [line.split() for line in output.splitlines()]
    assert ["all_gather", "64", "32", "64"] in [line[:4] for line in lines], output
    assert ["reduce_scatter", "64", "64", "32"] in [line[:4] for line in lines], output
    assert "wrong" not in output, output


def test_matrices_that_the_kernel_cannot_address_are_copied():
    wide = numbers((6, 40), 1, torch.bfloat16)
    for matrix in (wide, wide[:, :24], wide[2:3], wide[1:, 8:17], wide[:1, :3]):
        assert tensor_cores._aligned(matrix) is matrix
        assert tensor_cores._pitch(matrix) % 16 == 0
    odd = numbers((6, 35), 1, torch.bfloat16)
    for matrix in (odd, wide[:, 1:20], wide.t(), odd[:1].t(), numbers((4, 3), 1, torch.float16)):
        copied = tensor_cores._aligned(matrix)
        assert copied is not matrix and torch.equal(copied, matrix)
        assert copied.data_ptr() % 16 == 0 and tensor_cores._pitch(copied) % 16 == 0
        assert tensor_cores._pitch(copied) >= copied.shape[1] * copied.itemsize
        assert copied.stride(1) == 1


def test_batches_are_copied_only_where_they_must():
    whole = numbers((3, 4, 16), 1, torch.bfloat16)
    for batches in (whole, whole[:, 1:], whole[:, :, :8], whole.transpose(0, 1), whole[:1, :, 8:]):
        assert tensor_cores._aligned_batches(batches) is batches
    odd = numbers((3, 4, 15), 1, torch.bfloat16)
    expanded = whole[:1].expand(3, 4, 16)
    for batches in (odd, whole[:, :, 1:], whole.transpose(1, 2), odd.transpose(0, 1), odd[:, :1], expanded):
        copied = tensor_cores._aligned_batches(batches)
        assert torch.equal(copied, batches) and copied.stride(2) == 1
        assert copied.stride(0) * 2 % 16 == 0 and tensor_cores._pitch(copied[0]) % 16 == 0


def test_what_has_no_elements_is_filled_with_zeros():
    left, right = numbers((1, 4, 6), 1, torch.bfloat16), numbers((6, 8), 2, torch.bfloat16)
    same, matmul = tensor_cores._filled(Matmul(right), left)
    assert same is left and matmul.right is right
    for given in (right[:, :0], right.t().contiguous().t()[:, :0]):
        same, matmul = tensor_cores._filled(Matmul(given), left)
        assert same is left and matmul.right.shape == (6, 16) and not matmul.right.any()
        assert tensor_cores._is_by_rows(matmul) == tensor_cores._is_by_rows(Matmul(given))
    filled, matmul = tensor_cores._filled(Matmul(right[:0]), left[:, :, :0])
    assert filled.shape == (1, 4, 16) and not filled.any() and matmul.right.shape == (16, 8)


def test_the_kernel_serves_devices_only():
    left, right = numbers((1024, 64), 1, torch.bfloat16), numbers((64, 64), 2, torch.bfloat16)
    assert not tensor_cores.serves_sum(None, [left], None, [Matmul(right)], 512, torch.bfloat16)
