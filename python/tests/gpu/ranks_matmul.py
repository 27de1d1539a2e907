"""Matrix products that hide their communication, compared with separate operations in float64.

    python -m torch.distributed.run --nproc-per-node N python/tests/gpu/ranks_matmul.py

Every operator is called for dimensions, types and shapes; eagerly, repeatedly, on a side stream, and captured
in a graph that is replayed. With `--installed` the operators of torch are called, which are symmpool's then.
Exits with 1 if anything was wrong. `--device cpu` runs it on the CPU.
"""

import itertools
import sys

import ranks_start
import torch
import torch.distributed as dist

import symmpool
from symmpool import fused

FP8 = torch.float8_e4m3fn


def numbers(shape, seed, dtype, device):
    generator = torch.Generator(device=device).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=device) / 4).to(dtype)


def gathered(x, dim):
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather([part.view(torch.uint8) for part in parts], x.contiguous().view(torch.uint8))
    return torch.cat([part.double() for part in parts], dim=dim)


def summed(x, dim, op):
    me, world = dist.get_rank(), dist.get_world_size()
    total = x.contiguous()
    dist.all_reduce(total)
    total = total / world if op == "avg" else total
    return total.chunk(world, dim=dim)[me]


def near(found, wanted, dtype):
    """Whether numbers are within what products of this type lose."""
    step = {torch.float32: 1e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2, FP8: 3e-2}[dtype]
    wide = found.double()
    if tuple(wide.shape) != tuple(wanted.shape):
        return False
    return (
        bool((wide - wanted).abs().max() <= step * max(1.0, float(wanted.abs().max())))
        if wide.numel()
        else True
    )


class Checks:
    def __init__(self, device, operators):
        self.device, self.operators = device, operators
        self.cases, self.wrong = 0, 0
        self.name = dist.group.WORLD.group_name

    def judge(self, what, right):
        self.cases += 1
        if not right:
            self.wrong += 1
            print(f"rank {dist.get_rank()}: {what}", flush=True)

    def variants(self, call):
        """Yields the results of a call, made in every way that it can be made."""
        yield "eager", call()
        yield "again", call()
        if self.device.type == "cpu":
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            made = call()
        torch.cuda.current_stream().wait_stream(side)
        yield "side stream", made
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
            made = call()
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        yield "captured", made

    def gather(self, shape, dim, dtype, columns, seed):
        world, me = dist.get_world_size(), dist.get_rank()
        x = numbers(shape, seed + me, dtype, self.device)
        inner = shape[-1] * (world if dim == len(shape) - 1 else 1)
        rights = [numbers((inner, each), seed + 90 + each, dtype, self.device) for each in columns]
        whole = gathered(x, dim)
        for how, (A, found) in self.variants(
            lambda: self.operators.fused_all_gather_matmul(x, rights, dim, self.name)
        ):
            what = f"all-gather, {dtype} {shape} along {dim}, {how}"
            self.judge(f"{what}: A", torch.equal(A.double(), whole))
            for right, one in zip(rights, found, strict=True):
                self.judge(f"{what}: product", near(one, whole @ right.double(), dtype))
        for how, (A, found) in self.variants(
            lambda: self.operators.fused_all_gather_matmul(x, rights, dim, self.name, return_A=False)
        ):
            right = A is None and near(found[0], whole @ rights[0].double(), dtype)
            self.judge(f"all-gather without A, {dtype} {shape} along {dim}, {how}", right)

    def scatter(self, shape, dim, dtype, columns, op, seed):
        me = dist.get_rank()
        left = numbers(shape, seed + me, dtype, self.device)
        right = numbers((shape[-1], columns), seed + 50 + me, dtype, self.device)
        wanted = summed(left.double() @ right.double(), dim, op)
        first = None
        for how, found in self.variants(
            lambda: self.operators.fused_matmul_reduce_scatter(left, right, op, dim, self.name)
        ):
            what = f"reduce-scatter {op}, {dtype} {shape} x {columns} along {dim}, {how}"
            self.judge(what, near(found, wanted, dtype))
            first = found if first is None else first
            self.judge(f"{what}: other bits", torch.equal(found, first))

    def sums(self, shape, dim, dtype, inner, columns, seed):
        """A sum of products, with as many inner dimensions, of left matrices that lie as they are, or with
        the dimension that is scattered in front."""
        me = dist.get_rank()
        lefts = [numbers((*shape, k), seed + me + 7 * nth, dtype, self.device) for nth, k in enumerate(inner)]
        rights = [numbers((k, columns), seed + 50 + me, dtype, self.device) for k in inner]
        total = sum(a.double() @ b.double() for a, b in zip(lefts, rights, strict=True))
        wanted, first = summed(total, dim, "avg"), None
        moved = [left.movedim(dim, 0).contiguous().movedim(0, dim) for left in lefts]
        for lies, given in (("as it is", lefts), ("moved", moved)):
            for how, found in self.variants(
                lambda given=given: fused.fused_matmuls_reduce_scatter(given, rights, "avg", dim, self.name)
            ):
                what = f"sum of {dtype} {shape} x {inner} x {columns} along {dim}, {lies}, {how}"
                self.judge(what, near(found, wanted, dtype) and found.is_contiguous())
                first = found if first is None else first
                self.judge(f"{what}: other bits", torch.equal(found, first))

    def fp8(self, rows, inner, columns, rowwise, seed):
        world, me = dist.get_world_size(), dist.get_rank()
        x = numbers((rows, inner), seed + me, torch.float32, self.device).to(FP8)
        right = numbers((columns, inner), seed + 50, torch.float32, self.device).to(FP8).t()
        one = torch.full((), 0.5, device=self.device)
        a_scale, b_scale = one, one
        if rowwise:
            generator = torch.Generator(device=self.device).manual_seed(seed + me)
            a_scale = torch.rand((rows, 1), generator=generator, device=self.device) + 0.5
            b_scale = torch.rand((1, columns), generator=generator.manual_seed(3), device=self.device) + 0.5
        scales = gathered(a_scale, 0) if rowwise else one.double()
        whole = gathered(x, 0)
        wanted = (whole * scales) @ (right.double() * b_scale.double())
        for how, (A, (found,)) in self.variants(
            lambda: self.operators.fused_all_gather_scaled_matmul(
                x, [right], a_scale, [b_scale], 0, self.name, [None], [None], [torch.bfloat16], [True]
            )
        ):
            what = f"scaled all-gather, {rows} x {inner} x {columns}, by row {rowwise}, {how}"
            self.judge(f"{what}: A", torch.equal(A.double(), whole))
            self.judge(f"{what}: product", near(found, wanted, FP8))
        mine = (x.double() * a_scale.double()) @ (right.double() * b_scale.double())
        wanted = summed(mine, 0, "sum")
        for how, found in self.variants(
            lambda: self.operators.fused_scaled_matmul_reduce_scatter(
                x,
                right,
                a_scale,
                b_scale,
                "sum",
                0,
                0,
                self.name,
                [rows, columns],
                None,
                None,
                torch.bfloat16,
                True,
            )
        ):
            what = f"scaled reduce-scatter, {rows} x {inner} x {columns}, by row {rowwise}, {how}"
            self.judge(what, near(found, wanted, FP8))
        assert world > 0

    def gathered_layouts(self, seed):
        """Right matrices that lie in memory in other ways, several at once, with other columns on each rank;
        rows that are no multiple of what memory is addressed by."""
        me, inner = dist.get_rank(), 70
        for dtype in (torch.bfloat16, torch.float16):
            x = numbers((300, inner), seed + me, dtype, self.device)
            whole = gathered(x, 0)
            rows = numbers((inner, 264 + 8 * me), seed + 90 + me, dtype, self.device)
            odd = numbers((inner, 37), seed + 91 + me, dtype, self.device)
            columns = numbers((520, inner), seed + 92 + me, dtype, self.device).t()
            for how, rights in {
                "rows": [rows, odd],
                "columns": [columns, columns[:, 8:72], columns],
                "both": [rows, columns],
                "many": [rows, odd] * 3,
            }.items():
                A, found = self.operators.fused_all_gather_matmul(x, rights, 0, self.name)
                self.judge(f"{dtype}, right by {how}: A", torch.equal(A.double(), whole))
                for right, one in zip(rights, found, strict=True):
                    fits = one.is_contiguous() and near(one, whole @ right.double(), dtype)
                    self.judge(f"{dtype}, right by {how}", fits)

    def layouts(self, seed):
        """Matrices that lie in memory in other ways, with another inner dimension on each rank, which rows of
        memory do not divide."""
        me, world = dist.get_rank(), dist.get_world_size()
        inner = 70 + 3 * me
        for dtype in (torch.bfloat16, torch.float16):
            left = numbers((300 * world, inner), seed + me, dtype, self.device)
            right = numbers((inner, 264), seed + 50 + me, dtype, self.device)
            wide = numbers((300 * world, 2 * inner), seed + me, dtype, self.device)
            shifted = numbers((300 * world * inner + 1,), seed + me, dtype, self.device)[1:].view(left.shape)
            lefts = {
                "rows": left,
                "columns": left.t().contiguous().t(),
                "part": wide[:, :inner],
                "odd": shifted,
            }
            rights = {"rows": right, "columns": right.t().contiguous().t()}
            for (how_left, a), (how_right, b) in itertools.product(lefts.items(), rights.items()):
                wanted = summed(a.double() @ b.double(), 0, "avg")
                found = self.operators.fused_matmul_reduce_scatter(a, b, "avg", 0, self.name)
                self.judge(f"{dtype}, left by {how_left}, right by {how_right}", near(found, wanted, dtype))
            total = left.double() @ right.double()
            dist.all_reduce(total)
            found = fused.matmul_all_reduce(left, right, "sum", self.name)
            self.judge(f"all-reduce of {dtype} with unequal inner dimensions", near(found, total, dtype))

    def rest(self, seed):
        me, world = dist.get_rank(), dist.get_world_size()
        left = numbers((64 * world, 128), seed + me, torch.bfloat16, self.device)
        right = numbers((128, 256), seed + 50 + me, torch.bfloat16, self.device)
        total = left.double() @ right.double()
        dist.all_reduce(total)
        for how, found in self.variants(lambda: fused.matmul_all_reduce(left, right, "sum", self.name)):
            self.judge(f"all-reduce, {how}", near(found, total, torch.bfloat16))
        self.few(seed)
        self.chosen(seed)
        x = numbers((64 * world, 8), seed + me, torch.bfloat16, self.device)
        whole = gathered(x, 0)
        for how, found in self.variants(lambda: fused.low_contention_all_gather(x, self.name)):
            self.judge(f"low contention, {how}", torch.equal(found.double(), whole))
        wanted = summed(x.double(), 0, "sum")
        for how, found in self.variants(lambda: fused.low_contention_reduce_scatter(x, "sum", self.name)):
            self.judge(f"low contention, scattered, {how}", near(found, wanted, torch.bfloat16))

    def few(self, seed):
        """Products of few rows, which one kernel makes and adds up."""
        if self.device.type != "cuda" or torch.cuda.get_device_capability(self.device) != (9, 0):
            return
        me = dist.get_rank()
        for rows, inner, columns in (
            (1, 64, 8),
            (3, 4096, 8192),
            (8, 200, 264),
            (32, 1000, 4096),
            (64, 2048, 8192),
        ):
            for dtype in (torch.bfloat16, torch.float16):
                left = numbers((rows, inner), seed + me, dtype, self.device)
                right = numbers((inner, columns), seed + 50 + me, dtype, self.device)
                total = left.double() @ right.double()
                dist.all_reduce(total)
                for layout, b in (("rows", right), ("columns", right.t().contiguous().t())):

                    def call(b=b, left=left):
                        return fused.matmul_all_reduce(left, b, "sum", self.name, algorithm="one_kernel")

                    for how, found in self.variants(call):
                        what = f"one kernel, {dtype}, {rows} x {inner} x {columns}, right by {layout}, {how}"
                        self.judge(what, near(found, total, dtype))
                        self.judge(f"{what}, bits", torch.equal(found, first_rank_s(found)))

    def chosen(self, seed):
        """Sums of few rows as they are chosen, on both sides of each limit, and of batches."""
        me = dist.get_rank()
        for rows, inner, columns in (
            ((16,), 512, 1024),
            ((17,), 512, 1024),
            ((17,), 512, 3072),
            ((64,), 512, 3072),
            ((65,), 512, 3072),
            ((8,), 512, 8448),
            ((8,), 512, 8456),
            ((2, 3), 200, 264),
            ((3,), 201, 264),
        ):
            left = numbers((*rows, inner), seed + me, torch.bfloat16, self.device)
            right = numbers((inner, columns), seed + 50 + me, torch.bfloat16, self.device)
            total = left.double() @ right.double()
            dist.all_reduce(total)
            for layout, b in (("rows", right), ("columns", right.t().contiguous().t())):
                for op, wanted in (("sum", total), ("avg", total / dist.get_world_size())):

                    def call(b=b, left=left, op=op):
                        return fused.matmul_all_reduce(left, b, op, self.name)

                    for how, found in self.variants(call):
                        what = f"{op} as chosen, {rows} x {inner} x {columns}, right by {layout}, {how}"
                        self.judge(what, near(found, wanted, torch.bfloat16))


def first_rank_s(tensor):
    """The first rank's tensor."""
    found = tensor.contiguous().clone()
    dist.broadcast(found, 0)
    return found


def main():
    parser = ranks_start.parser(__doc__, 1, "rounds")
    parser.add_argument("--installed", action="store_true", help="torch's operators, which are ours then")
    options = parser.parse_args()
    device = ranks_start.device_of(options.device)
    if device is None:
        return 0
    dist.init_process_group("gloo" if device.type == "cpu" else ranks_start.PEER)
    world = dist.get_world_size()
    pool = symmpool.Pool(device=str(device))
    if options.installed:
        fused.install()
    checks = Checks(device, torch.ops.symm_mem if options.installed else torch.ops.symmpool)
    large = device.type == "cuda"
    for nth in range(options.count):
        seed = 1000 * (options.seed + nth)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for shape in ((64, 32), (2, 16, 32), (4, 8, 6, 16)):
                for dim in range(len(shape)):
                    checks.gather(shape, dim, dtype, (48, 8), seed)
                    scattered = tuple(size * world for size in shape[:-1]) + shape[-1:]
                    for op in ("sum", "avg"):
                        checks.scatter(scattered, dim, dtype, 16 * world, op, seed)
        if large:
            for rows, inner, columns in ((1024, 512, 4096), (2048, 1024, 8192), (100, 64, 264)):
                checks.gather((rows, inner), 0, torch.bfloat16, (columns,), seed)
                checks.scatter((rows * world, inner), 0, torch.bfloat16, columns, "sum", seed)
                checks.scatter((rows * world, inner), 0, torch.bfloat16, columns, "avg", seed)
            # Parts of a tensor of several batches, each of which has whole tiles of rows, or has not.
            for dtype in (torch.bfloat16, torch.float16):
                checks.sums((2, 256 * world), 1, dtype, (72, 1000, 8), 264, seed)
                checks.sums((3, 100 * world), 1, dtype, (72, 64), 264, seed)
                checks.sums((2, 128 * world, 3), 1, dtype, (64,), 512, seed)
                checks.sums((1024 * world,), 0, dtype, (512, 128, 128, 40), 4096, seed)
                checks.sums((256 * world,), 0, dtype, (64,) * 5, 512, seed)
                for shape in ((2, 256, 512), (3, 100, 64), (2, 128, 3, 72), (4, 1024, 1000)):
                    checks.gather(shape, 1, dtype, (264, 512), seed)
            # Blocks that share the last tiles: one helps with two of them, or with one.
            for rows, inner, columns in ((256, 8192, 14080), (256, 4096, 20224)):
                checks.gather((rows, inner), 0, torch.bfloat16, (columns,), seed)
                checks.scatter((rows * world, inner), 0, torch.bfloat16, columns, "sum", seed)
            if torch.cuda.get_device_capability() >= (8, 9):
                for rowwise in (False, True):
                    checks.fp8(64 * world, 64, 128, rowwise, seed)
                    checks.fp8(512 * world, 1024, 2048, rowwise, seed)
        checks.sums((2, 4 * world), 1, torch.float32, (16, 8), 48, seed)
        checks.gathered_layouts(seed)
        checks.layouts(seed)
        checks.rest(seed)
    print(f"rank {dist.get_rank()}: {checks.cases} cases, {checks.wrong} wrong", flush=True)
    fused.uninstall()
    del pool
    dist.destroy_process_group()
    return 1 if checks.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
