"""Programs in which Inductor's micro-pipelining is to find fused matmuls, as torch's own tests have them.

torch looks at the code that was generated for a pretended group; here the programs run on ranks, so what was
found is counted, and results are compared with those of the program as it is.
"""

import torch
import torch.distributed as dist
from async_tp import FP8, drawn, gathered
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

#: Parts of the names of operators in graphs.
FUSED_GATHER, FUSED_SCATTER = "fused_all_gather_", "fused_matmul_reduce_scatter"
FUSED_SCALED_SCATTER = "fused_scaled_matmul_reduce_scatter"
GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"


class Seen(CustomGraphPass):
    """Keeps the names of what graphs call, behind all passes."""

    def __init__(self):
        self.calls = []

    def uuid(self):
        return "names of calls"

    def __call__(self, graph):
        self.calls += [str(node.target) for node in graph.nodes if node.op == "call_function"]

    def count(self, name):
        return sum(name in call for call in self.calls)


def by_inductor(program):
    """A program compiled by Inductor, and what its graphs call."""
    seen = Seen()
    torch._dynamo.reset()
    options = {"_micro_pipeline_tp": True, "post_grad_custom_post_pass": seen, "fx_graph_cache": False}
    return torch.compile(program, options=options), seen


def by_the_pass(program):
    """Compiles without code that Inductor generates, which takes long on the CPU: graphs run as they are."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
    from torch._inductor.fx_passes.post_grad import remove_noop_ops, view_to_reshape

    seen = Seen()

    def passed(module, _):
        remove_noop_ops(module.graph)
        view_to_reshape(module)
        micro_pipeline_tp_pass(module.graph)
        seen(module.graph)
        module.recompile()
        return module

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=passed, bw_compiler=passed, decompositions=select_decomp_table())
    return torch.compile(program, backend=backend), seen


class Programs:
    """The programs, on one device; each method gives what was wrong."""

    def __init__(self, device, compile_with, has_scaled):
        self.device, self.compile_with, self.has_scaled = device, compile_with, has_scaled
        self.wrong, self.count = [], 0

    def judge(self, right, what):
        self.count += 1
        if not right:
            self.wrong.append(what)

    def run(self, program, arguments, what, expected, tolerance=1e-4, wanted=None, dim=0):
        """Compiles a program, compares its results with those that are `wanted`, or else its own, and the
        numbers of calls with those that are `expected` by name. Results of a fused gather along `dim` lie
        with that dimension in front, as torch's own do; code that Inductor generates moves it back."""
        wanted = program(*arguments) if wanted is None else wanted
        compiled, seen = self.compile_with(program)
        found = compiled(*arguments)
        for one, other in zip(found, wanted, strict=True):
            if one is None or other is None:
                self.judge(one is other, f"{what}: None")
                continue
            near = torch.allclose(one.float(), other.float(), rtol=tolerance, atol=tolerance)
            self.judge(near and one.dtype == other.dtype, f"{what}: result")
            if self.compile_with is by_the_pass and dim and seen.count(FUSED_GATHER):
                other = other.movedim(dim, 0).contiguous().movedim(0, dim)
            self.judge(one.stride() == other.stride(), f"{what}: {one.stride()} for {other.stride()}")
        for name, count in expected.items():
            found = seen.count(name)
            self.judge(found == count, f"{what}: {found} x {name} and not {count}: {seen.calls}")

    def gathers(self):
        group, world = dist.group.WORLD, dist.get_world_size()
        for shape in ([64, 32], [2, 64, 32]):
            for dim in range(len(shape)):
                mine = list(shape)
                mine[dim] //= world
                arguments = (drawn(self.device, *mine), drawn(self.device, 32, 16, each_rank=False))
                is_last = dim == len(shape) - 1
                # The pass divides no sums of products. What it recognises of gathers along dimensions between
                # differs between versions of torch.
                expected = {FUSED_GATHER: 0} if is_last else {FUSED_GATHER: 1, GATHER: 0}
                if dim == 1 and not is_last:
                    expected = {}
                for returns in (True, False):

                    def program(shard, right, dim=dim, returns=returns):
                        A = all_gather_tensor(shard, dim, group)
                        return A if returns else None, A @ right

                    what = f"gather of {mine} along {dim}, with A: {returns}"
                    self.run(program, arguments, what, expected, dim=dim)

    def scatters(self):
        for shape in ([64, 32], [2, 64, 32]):
            for dim in range(len(shape)):

                def program(left, right, dim=dim):
                    return (reduce_scatter_tensor(left @ right, "avg", dim, dist.group.WORLD),)

                arguments = (drawn(self.device, *shape), drawn(self.device, 32, 16))
                expected = {FUSED_SCATTER: 1, SCATTER: 0}
                self.run(program, arguments, f"scatter of {shape} along {dim}", expected)

    def scaled(self):
        """Products of 8-bit floats, with one scale and with one for each row."""
        if not self.has_scaled:
            return
        group, world, device = dist.group.WORLD, dist.get_world_size(), self.device
        one = torch.tensor(0.1, device=device)
        right = drawn(device, 16, 32, each_rank=False).to(FP8).t()

        def product(left, right, left_scale, right_scale):
            made = torch._scaled_mm(
                left.flatten(0, -2), right, left_scale, right_scale, out_dtype=torch.bfloat16
            )
            return made if left.dim() == 2 else made.view(*left.shape[:-1], right.shape[1])

        def gather(shard, right):
            # Float8 layers gather so: the view is there for what travels as integers.
            A = all_gather_tensor(shard, 0, group).view(shard.dtype)
            return A.float(), product(A, right, one, one)

        def scatter(left, right):
            return (reduce_scatter_tensor(product(left, right, one, one), "avg", 0, group),)

        def scatter_by_rows(left, right, left_scale, right_scale):
            scales = torch.reciprocal(left_scale.reshape(-1, 1))
            made = product(left, right, scales, right_scale)
            return (reduce_scatter_tensor(made, "sum", 0, group),)

        for shape in ([64, 32], [2, 64, 32]):
            shard = drawn(device, shape[0] // world, *shape[1:]).to(FP8)
            # gloo does not gather 8-bit floats.
            whole = gathered(shard, 0)
            wanted, expected = (whole.float(), product(whole, right, one, one)), {FUSED_GATHER: 1, GATHER: 0}
            self.run(gather, (shard, right), f"scaled gather of {shape}", expected, 2e-2, wanted)
            left, expected = drawn(device, *shape).to(FP8), {FUSED_SCALED_SCATTER: 1, SCATTER: 0}
            self.run(scatter, (left, right), f"scaled scatter of {shape}", expected, 2e-2)
        if device.type != "cuda":
            return
        left = drawn(device, 2, 16, 32).to(FP8)
        scales = (torch.full((2, 16, 1), 10.0, device=device), torch.full((1, 16), 0.1, device=device))
        expected = {FUSED_SCALED_SCATTER: 1, SCATTER: 0}
        self.run(scatter_by_rows, (left, right, *scales), "scaled scatter by rows", expected, 2e-2)

    def sequence_parallel(self):
        """Two layers that DTensor splits, whose tokens are divided between products."""
        world = dist.get_world_size()
        mesh = init_device_mesh(self.device.type, (world,))
        for dim, shape in ((0, (8, 10)), (1, (2, 8, 10))):
            torch.manual_seed(5)
            layers = [
                torch.nn.Linear(10, 16, bias=False),
                torch.nn.ReLU(),
                torch.nn.Linear(16, 10, bias=False),
            ]
            model = torch.nn.Sequential(*layers).to(self.device)
            for parameter in model.parameters():
                dist.broadcast(parameter.data, 0)
            whole = drawn(self.device, *shape, each_rank=False)
            with torch.no_grad():
                wanted = model(whole).chunk(world, dim=dim)[dist.get_rank()]
            plan = {
                "0": ColwiseParallel(input_layouts=Shard(dim)),
                "2": RowwiseParallel(output_layouts=Shard(dim)),
            }
            model = parallelize_module(model, mesh, plan)
            compiled, seen = self.compile_with(model)
            with torch.no_grad():
                found = compiled(whole.chunk(world, dim=dim)[dist.get_rank()].contiguous())
            found = found.full_tensor() if hasattr(found, "full_tensor") else found
            what = f"sequence-parallel layers, tokens along {dim}"
            self.judge(torch.allclose(found, wanted, rtol=1e-4, atol=1e-5), f"{what}: result")
            for name in (FUSED_GATHER, FUSED_SCATTER) if dim == 0 else ():
                self.judge(seen.count(name) == 1, f"{what}: {seen.count(name)} x {name}: {seen.calls}")

    def other_groups(self, of_products, other):
        """Collectives of a group that has not asked for fused matmuls stay as they are."""

        def program(x, up, down):
            hidden = all_gather_tensor(all_gather_tensor(x, 0, of_products) @ up, 0, other)
            hidden = hidden / hidden.pow(2).sum().sqrt()
            hidden = reduce_scatter_tensor(hidden, "avg", 0, other)
            return (reduce_scatter_tensor(hidden @ down, "avg", 0, of_products),)

        arguments = [drawn(self.device, *shape) for shape in ((8, 10), (10, 8), (8, 10))]
        expected = {FUSED_GATHER: 1, FUSED_SCATTER: 1, GATHER: 1, SCATTER: 1}
        self.run(program, arguments, "two groups", expected)
