"""The ways to communicate of `tensor_parallel_fused.py`: NCCL, symmpool, and symmpool's fused calls."""

import argparse
import contextlib

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from tensor_parallel_llama import EPS
from torch._inductor.custom_graph_pass import CustomGraphPass

import symmpool
from symmpool import fused

#: Other threads, such as NCCL's watchdog, may query events during a capture.
CAPTURE_ERROR_MODE = "thread_local"


class Distributed:
    """torch.distributed: NCCL, or gloo on the CPU. Compiled code calls its functional collectives."""

    def __init__(self, device, pool):
        self.name = "NCCL" if device.type == "cuda" else "gloo"
        self.pool = pool if device.type == "cuda" else None

    def options_for(self, program):
        """Returns the compiler's options for a program."""
        return {"_micro_pipeline_tp": False}

    def scope(self):
        """Where what is summed or gathered is allocated; any memory will do."""
        return contextlib.nullcontext()

    def all_reduce(self, y):
        if torch.compiler.is_compiling():
            return funcol.all_reduce(y, "sum", dist.group.WORLD)
        dist.all_reduce(y)
        return y

    def gather(self, x):
        if torch.compiler.is_compiling():
            return funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
        whole = x.new_empty(dist.get_world_size() * len(x), x.shape[1])
        dist.all_gather_into_tensor(whole, x)
        return whole

    def scatter(self, y):
        if torch.compiler.is_compiling():
            return funcol.reduce_scatter_tensor_autograd(y, "sum", 0, dist.group.WORLD)
        part = y.new_empty(len(y) // dist.get_world_size(), y.shape[1])
        dist.reduce_scatter_tensor(part, y)
        return part

    def reduce_norm(self, left, weight, residual, norm):
        """Every rank's `left @ weight.T` and the residual added up, normed and as it is."""
        with self.scope():
            y = left @ weight.t()
        residual = self.all_reduce(y) + residual
        return F.rms_norm(residual, residual.shape[-1:], norm, EPS), residual

    def gather_multiply(self, x, right):
        """Every rank's rows, and their product."""
        with self.scope():
            whole = self.gather(x)
        return whole, whole @ right

    def multiply_scatter(self, left, right):
        """This rank's rows of the sum of every rank's product."""
        with self.scope():
            y = left @ right
        return self.scatter(y)

    def column(self, x, weight):
        """The product of all ranks' rows with this rank's rows of a weight, transposed."""
        if torch.compiler.is_compiling():
            return self.gather_multiply(x, weight.t())[1]
        return GatherMultiply.apply(x, weight, self)

    def row(self, x, weight):
        """This rank's rows of the sum over ranks, each of which has some columns of a weight and of `x`."""
        if torch.compiler.is_compiling():
            return self.multiply_scatter(x, weight.t())
        return MultiplyScatter.apply(x, weight, self)

    def graph(self, graph, stream):
        return torch.cuda.graph(graph, stream=stream, capture_error_mode=CAPTURE_ERROR_MODE)


class Symmpool(Distributed):
    """symmpool without fused calls. What is summed or gathered lies in the pool, where peers read it."""

    def __init__(self, device, pool):
        super().__init__(device, pool)
        self.name = "symmpool"

    def scope(self):
        # On the CPU torch has no hook that places tensors. Compiled code runs in the scope as a whole.
        if torch.compiler.is_compiling() or self.pool is None:
            return contextlib.nullcontext()
        return self.pool

    def all_reduce(self, y):
        if torch.compiler.is_compiling():
            return symmpool.ops.all_reduce(y, "sum", dist.group.WORLD)
        symmpool.all_reduce(y)
        return y

    def gather(self, x):
        if torch.compiler.is_compiling():
            return symmpool.ops.all_gather_tensor(x, 0, dist.group.WORLD)
        whole = x.new_empty(dist.get_world_size() * len(x), x.shape[1])
        symmpool.all_gather_into_tensor(whole, x)
        return whole

    def scatter(self, y):
        if torch.compiler.is_compiling():
            return symmpool.ops.reduce_scatter_tensor(y, "sum", 0, dist.group.WORLD)
        part = y.new_empty(len(y) // dist.get_world_size(), y.shape[1])
        symmpool.reduce_scatter_tensor(part, y)
        return part

    def graph(self, graph, stream):
        return symmpool.graph(graph, stream=stream, capture_error_mode=CAPTURE_ERROR_MODE)


class Fused(Distributed):
    """symmpool's fused calls. Compiled code is torch's, in which the compiler finds what they can do."""

    def __init__(self, device, pool):
        super().__init__(device, pool)
        self.name, self.found = "fused", Found()

    def options_for(self, program):
        # Graphs from the compiler's cache pass no pass, so nothing would be counted.
        options = {"post_grad_custom_post_pass": self.found, "fx_graph_cache": False}
        options["post_grad_custom_pre_pass"] = fused.inductor_pass()
        return options if program == "decode" else {"_micro_pipeline_tp": True, **options}

    def reduce_norm(self, left, weight, residual, norm):
        if torch.compiler.is_compiling():
            return super().reduce_norm(left, weight, residual, norm)
        out, residual, _ = fused.all_reduce_rms_norm(left @ weight.t(), residual, norm, EPS)
        return out, residual

    def gather_multiply(self, x, right):
        if torch.compiler.is_compiling():
            return super().gather_multiply(x, right)
        whole, (product,) = fused.fused_all_gather_matmul(x, [right], 0, dist.group.WORLD)
        return whole, product

    def multiply_scatter(self, left, right):
        if torch.compiler.is_compiling():
            return super().multiply_scatter(left, right)
        return fused.fused_matmul_reduce_scatter(left, right, "sum", 0, dist.group.WORLD)

    graph = Symmpool.graph


class Found(CustomGraphPass):
    """Counts fused calls in the graphs of a program, and changes nothing."""

    def __init__(self):
        self.calls = 0

    def uuid(self):
        return "counts fused calls"

    def __call__(self, graph):
        # Not their names alone: the nodes of results have names made of them.
        targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        ours = ("symmpool.all_reduce_rms_norm", "symmpool.fused_", "symm_mem.fused_")
        self.calls += sum(target.startswith(ours) for target in targets)


class GatherMultiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, way):
        whole, product = way.gather_multiply(x, weight.t())
        ctx.save_for_backward(whole, weight)
        ctx.way = way
        return product

    @staticmethod
    def backward(ctx, gradient):
        whole, weight = ctx.saved_tensors
        return ctx.way.multiply_scatter(gradient, weight), gradient.t() @ whole, None


class MultiplyScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, way):
        ctx.save_for_backward(x, weight)
        ctx.way = way
        return way.multiply_scatter(x, weight.t())

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        whole, of_x = ctx.way.gather_multiply(gradient.contiguous(), weight)
        return of_x, whole.t() @ x, None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="It is a part of tensor_parallel_fused.py, which is the program to start.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args()
    parser.error("this is no program: start tensor_parallel_fused.py")
