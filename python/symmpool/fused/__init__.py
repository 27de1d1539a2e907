"""Collectives together with what layers compute next to them, in one kernel.

    from symmpool import fused

    x, residual, _ = fused.all_reduce_rms_norm(x, residual, norm.weight, norm.eps)

docs/fused.md has the layouts of quantised outputs, and matrix products that hide their communication.
Importing this module also registers `torch.ops.symmpool.all_reduce_rms_norm`, `all_reduce_rms_norm_` and
`fused_*`, which compiled code uses. It needs torch."""

from typing import Any

from symmpool.fused.low_contention import low_contention_all_gather, low_contention_reduce_scatter
from symmpool.fused.matmul_gather import fused_all_gather_matmul, fused_all_gather_scaled_matmul
from symmpool.fused.matmul_scatter import (
    fused_matmul_reduce_scatter,
    fused_matmuls_reduce_scatter,
    fused_scaled_matmul_reduce_scatter,
)
from symmpool.fused.matmul_sum import matmul_all_reduce
from symmpool.fused.norm import all_reduce_rms_norm
from symmpool.fused.operators import install, uninstall
from symmpool.fused.quantization import Fused, Quantization, fp8_per_group, fp8_per_token, fp8_static

__all__ = [
    "Fused",
    "Quantization",
    "all_reduce_rms_norm",
    "fp8_per_group",
    "fp8_per_token",
    "fp8_static",
    "inductor_pass",
    "fused_all_gather_matmul",
    "fused_all_gather_scaled_matmul",
    "fused_matmul_reduce_scatter",
    "fused_matmuls_reduce_scatter",
    "fused_scaled_matmul_reduce_scatter",
    "install",
    "low_contention_all_gather",
    "low_contention_reduce_scatter",
    "matmul_all_reduce",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    # torch's compiler takes a second to import, and most programs do without.
    if name == "inductor_pass":
        from symmpool.fused.inductor import inductor_pass

        return inductor_pass
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
