"""Checks of torch's own tests of fused matmuls and of Inductor's micro-pipelining, made of ours.

The cases are those of torch 2.11's tests of asynchronous tensor parallelism: shapes, types, dimensions,
layouts and scales. Results are compared with float64: no element may be further from it than separate
operations are, but for what another order of additions costs. `test_torch_async_tp.py` runs them on the CPU,
where torch has products of 8-bit floats with one scale only, and `gpu/ranks_async_tp.py` on GPUs, where they
are captured in graphs too.
"""

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as theirs

FP8 = torch.float8_e4m3fn
BATCH, ROWS = 8, 64


def drawn(device, *shape, dtype=torch.float32, each_rank=True):
    """Numbers from 0 to 1, of this rank or of all."""
    seed = 42 + (dist.get_rank() if each_rank else 100) + 7 * len(shape) + shape[-1]
    made = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(device).to(dtype)


def gathered(x, dim):
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather([part.view(torch.uint8) for part in parts], x.contiguous().view(torch.uint8))
    return torch.cat(parts, dim=dim)


def summed(x, dim, op):
    """This rank's part of every rank's float64 tensor."""
    x = x.contiguous()
    dist.all_reduce(x)
    part = x.chunk(dist.get_world_size(), dim=dim)[dist.get_rank()]
    return part / dist.get_world_size() if op == "avg" else part


def too_far(found, separate, exact, allowed):
    """Returns how much further from the exact result an element is than that of separate operations; 0 or
    less is right."""
    if found.shape != exact.shape:
        return float("inf")
    errors = [(each.double() - exact).abs() for each in (found, separate)]
    return float((errors[0] - errors[1] - allowed).max()) if exact.numel() else 0.0


def rounding(left, right):
    """Returns how much another order of additions in float32 may change a product."""
    slack = left.shape[-1] ** 0.5 * torch.finfo(torch.float32).eps
    return slack * (left.double().abs() @ right.double().abs())


class Cases:
    """The operators of `torch.ops.symm_mem`, on one device."""

    def __init__(self, device):
        self.device, self.wrong, self.count = device, [], 0
        self.name = dist.group.WORLD.group_name
        self.ours = torch.ops.symm_mem

    def judge(self, right, what):
        self.count += 1
        if not right:
            self.wrong.append(what)

    def made(self, call):
        """Yields the result of a call, made again, and captured."""
        yield "eager", call()
        if self.device.type != "cuda":
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            again = call()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        yield "captured", again

    def gather(self, shard, rights, dim, what, return_A=True):
        separate = theirs._fused_all_gather_matmul_fallback(shard, rights, dim, self.name, return_A=return_A)
        whole = gathered(shard, dim)
        for how, (A, found) in self.made(
            lambda: self.ours.fused_all_gather_matmul(shard, rights, dim, self.name, return_A=return_A)
        ):
            if return_A:
                self.judge(torch.equal(A, whole), f"{what}, {how}: A")
                self.judge(A.stride() == separate[0].stride(), f"{what}, {how}: strides of A")
            else:
                self.judge(A is None, f"{what}, {how}: there is an A")
            for right, one, other in zip(rights, found, separate[1], strict=True):
                exact = whole.double() @ right.double()
                excess = too_far(one, other, exact, rounding(whole, right))
                self.judge(excess <= 0, f"{what}, {how}: a product is too far off by {excess}")
                self.judge(one.stride() == other.stride(), f"{what}, {how}: strides of a product")

    def gathers(self):
        world, device = dist.get_world_size(), self.device
        for dim in range(3):
            shape = [BATCH, ROWS, 32]
            shape[dim] //= world
            rights = [drawn(device, 32, 16, each_rank=False) + nth for nth in range(3)]
            self.gather(drawn(device, *shape), rights, dim, f"gathered along {dim}")
        # On a GPU these are as large as the kernels of torch that overlap want them.
        rows, inner, columns = (4096, 1024, 1024) if device.type == "cuda" else (256, 128, 64)
        shard = drawn(device, rows // world, inner, dtype=torch.bfloat16)
        by_row = drawn(device, inner, columns, dtype=torch.bfloat16, each_rank=False)
        by_column = drawn(device, columns, inner, dtype=torch.bfloat16, each_rank=False).t()
        for right, lies in ((by_row, "row"), (by_column, "column")):
            self.gather(shard, [right], 0, f"bfloat16, right matrix by {lies}")
        self.gather(shard[: rows // world // 4], [by_row], 0, "bfloat16, without A", return_A=False)

    def scatter(self, left, right, dim, what):
        world = dist.get_world_size()
        separate = theirs._fused_matmul_reduce_scatter_fallback(left, right, "avg", dim, self.name)
        exact = summed(left.double() @ right.double(), dim, "avg")
        # Partial sums are rounded to the type before they are added up.
        step = torch.finfo(left.dtype).eps
        allowed = summed(
            rounding(left, right) + step * (left.double().abs() @ right.double().abs()), dim, "avg"
        )
        first = None
        for how, found in self.made(
            lambda: self.ours.fused_matmul_reduce_scatter(left, right, "avg", dim, self.name)
        ):
            excess = too_far(found, separate, exact, allowed)
            self.judge(excess <= 0, f"{what}, {how}: too far off by {excess}")
            self.judge(found.stride() == separate.stride(), f"{what}, {how}: strides")
            first = found if first is None else first
            self.judge(torch.equal(found, first), f"{what}, {how}: other bits than eagerly, {world} ranks")

    def scatters(self):
        device = self.device
        for dim in range(3):
            left, right = drawn(device, BATCH, ROWS, 1024), drawn(device, 1024, 16)
            self.scatter(left, right, dim, f"scattered along {dim}")
        left = drawn(device, ROWS, 1024, dtype=torch.bfloat16)
        self.scatter(left, drawn(device, 1024, 32, dtype=torch.bfloat16), 0, "scattered bfloat16")

    def layouts(self):
        """Left matrices that lie as the operators like them, with the dimension in front, give the same."""
        world, device = dist.get_world_size(), self.device
        for dim in range(3):
            shard = drawn(device, BATCH, ROWS, 32, 16)
            moved = theirs.restride_A_shard_for_fused_all_gather_matmul(shard, dim)
            right = drawn(device, 16, 8, each_rank=False)
            (_, (one,)), (_, (other,)) = (
                self.ours.fused_all_gather_matmul(each, [right], dim, self.name) for each in (shard, moved)
            )
            self.judge(moved.movedim(dim, 0).is_contiguous(), f"layout along {dim}")
            self.judge(torch.allclose(one, other), f"gathered along {dim} in another layout")
            moved = theirs.restride_A_for_fused_matmul_reduce_scatter(shard, dim)
            right = drawn(device, 16, 8 * world)
            one, other = (
                self.ours.fused_matmul_reduce_scatter(each, right, "sum", dim, self.name)
                for each in (shard, moved)
            )
            self.judge(torch.allclose(one, other), f"scattered along {dim} in another layout")

    def scaled_gathers(self):
        world, device, (inner, columns) = dist.get_world_size(), self.device, (32, 16)
        rights = [drawn(device, columns, inner, each_rank=False).to(FP8).t() for _ in range(3)]
        for dim in (0, 1):
            leading = [BATCH, ROWS]
            leading[dim] //= world
            shard = drawn(device, *leading, inner).to(FP8)
            for mode in ("one", "of shards", "of the whole") if device.type == "cuda" else ("one",):
                of_right = torch.full((1, columns), 0.1, device=device)
                types = [torch.bfloat16] * 3
                if mode == "one":
                    of_left = of_right = torch.tensor(0.1, device=device)
                    types = [None, torch.bfloat16, torch.float32]
                else:
                    rows = leading if mode == "of shards" else [BATCH, ROWS]
                    of_left = torch.full((*rows, 1), 0.1, device=device)
                arguments = (shard, rights, of_left, [of_right] * 3, dim, self.name)
                rest = ([None] * 3, [None] * 3, types, [False] * 3)
                separate = self.separate_scaled(arguments, rest)
                for how, (A, found) in self.made(
                    lambda arguments=arguments, rest=rest: self.ours.fused_all_gather_scaled_matmul(
                        *arguments, *rest
                    )
                ):
                    what = f"scaled, gathered along {dim}, scales {mode}, {how}"
                    self.judge(torch.equal(A.float(), separate[0].float()), f"{what}: A")
                    self.judge(A.stride() == separate[0].stride(), f"{what}: strides of A")
                    for one, other in zip(found, separate[1], strict=True):
                        self.judge(torch.allclose(one.float(), other.float()), f"{what}: product")
                        same = (one.stride(), one.dtype) == (other.stride(), other.dtype)
                        self.judge(same, f"{what}: strides and type of a product")

    def separate_scaled(self, arguments, rest):
        """Returns the result of separate operations. gloo does not gather 8-bit floats."""
        if self.device.type == "cuda":
            return theirs._fused_all_gather_scaled_matmul_fallback(*arguments, *rest)
        shard, rights, of_left, of_rights, dim, _ = arguments
        whole = gathered(shard, dim).movedim(dim, 0)
        if of_left.numel() > 1:
            is_of_shard = of_left.shape[:-1] == shard.shape[:-1]
            of_left = (gathered(of_left, dim) if is_of_shard else of_left).movedim(dim, 0).reshape(-1, 1)
        products = []
        for right, of_right, dtype in zip(rights, of_rights, rest[2], strict=True):
            rows = whole.reshape(-1, whole.shape[-1])
            made = torch._scaled_mm(rows, right, of_left, of_right, out_dtype=dtype)
            products.append(made.view(*whole.shape[:-1], -1).movedim(0, dim))
        return whole.contiguous().movedim(0, dim), products

    def scaled_scatters(self):
        device, (inner, columns) = self.device, (32, 16)
        left = drawn(device, BATCH, ROWS, inner).to(FP8)
        right = drawn(device, columns, inner).to(FP8).t()
        for dim in (0, 1):
            for is_by_row in (False, True) if device.type == "cuda" else (False,):
                scales = [torch.tensor(0.1, device=device)] * 2
                if is_by_row:
                    shapes = ((BATCH, ROWS, 1), (1, columns))
                    scales = [torch.full(shape, 0.1, device=device) for shape in shapes]
                arguments = (left, right, *scales, "avg", dim, dim, self.name, [BATCH, ROWS, columns])
                with theirs._test_mode():
                    separate = self.ours.fused_scaled_matmul_reduce_scatter(
                        *arguments, out_dtype=torch.bfloat16
                    )
                for how, found in self.made(
                    lambda arguments=arguments: self.ours.fused_scaled_matmul_reduce_scatter(
                        *arguments, out_dtype=torch.bfloat16
                    )
                ):
                    what = f"scaled, scattered along {dim}, by row {is_by_row}, {how}"
                    near = torch.allclose(found.float(), separate.float(), rtol=1.6e-2, atol=1e-5)
                    self.judge(near, what)
                    self.judge(found.stride() == separate.stride(), f"{what}: strides")
