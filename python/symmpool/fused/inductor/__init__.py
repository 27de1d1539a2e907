"""A pass of torch's compiler that finds what is fused here in the graphs of compiled programs.

| module | what it finds |
| --- | --- |
| `norms` | all-reduces with the residual and the norm behind them |
| `gathers` | all-gathers with the matmuls of what they gather |
| `scatters` | reduce-scatters of matrix products and of sums of them |
| `graphs` | what passes over graphs have in common |
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph

from symmpool.fused import operators, tensor_cores
from symmpool.fused.inductor import gathers, graphs, norms, scatters

__all__ = ["FusionPass", "inductor_pass"]


class FusionPass(CustomGraphPass):
    """Replaces what `inductor_pass` says. `replaced` counts what was replaced so far, without graphs that
    come from the compiler's cache, where they lie as this pass has made them."""

    def __init__(self) -> None:
        self.replaced = 0

    def uuid(self) -> Any:
        """Identifies the pass, and the groups that it fuses calls of, in the compiler's cache of graphs."""
        modules = (norms, gathers, scatters, graphs, operators, tensor_cores)
        files = (__file__, *(module.__file__ for module in modules))
        return get_hash_for_files(files, extra=" ".join(_groups_of_ours()))

    def __call__(self, graph: Graph) -> None:
        """Replaces what it finds in a graph."""
        # A node that nobody needs would count as a user of its arguments.
        graph.eliminate_dead_code()
        for find in (norms.fuse_norms, gathers.fuse_gathers, scatters.fuse_scatters):
            self.replaced += find(graph)


def _groups_of_ours() -> list[str]:
    """The names of torch's groups that have a pool, or symmpool for a backend."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    names = torch.distributed.distributed_c10d._world.pg_names.values()
    return sorted(name for name in names if operators.has_ours(name))


def inductor_pass() -> FusionPass:
    """A pass for `torch.compile(model, options={"post_grad_custom_pre_pass": fused.inductor_pass()})`, or for
    `torch._inductor.config.post_grad_custom_pre_pass`, which replaces calls of functional collectives, as
    DTensor and compiled `torch.distributed` calls become:

    - `norm(all_reduce(x) + residual) * weight`, and the same without a residual, by
      `torch.ops.symmpool.all_reduce_rms_norm`, where the norm keeps nothing for a gradient;
    - `A = all_gather(shard)` and up to four of the matmuls `A @ B` by
      `torch.ops.symmpool.fused_all_gather_matmul`, and `reduce_scatter(A @ B)` and
      `reduce_scatter(A @ B + C @ D + ...)` by `torch.ops.symmpool.fused_matmuls_reduce_scatter`: of float16
      or bfloat16, along any dimension but the last one, with at least 256 rows of or for each rank. Sums of
      more than four matmuls stay as they are.

    All on groups that have a pool, or symmpool for a backend, when the program is compiled; other groups may
    have ranks that symmpool cannot serve. Every rank has to use it. A group's communicator is made by its
    first call, so that must not be captured. Results differ from separate operations by
    roundings: norms are rounded once, and so are sums of matmuls where one kernel makes them. All ranks have
    the same bits."""
    return FusionPass()
