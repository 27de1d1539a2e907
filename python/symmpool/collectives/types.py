"""The types of calls' arguments, for readers and type checkers. Programs import nothing of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    import numpy
    import torch
    import torch.distributed

    from symmpool._symmpool import Block
    from symmpool.collectives.reduce_op import ReduceOp

    #: A tensor of torch, an array of numpy, or memory of a pool.
    Tensor: TypeAlias = torch.Tensor | numpy.ndarray[Any, Any] | Block
    #: A reduction: one of ours, its name, or torch's constant.
    Op: TypeAlias = ReduceOp | str | torch.distributed.ReduceOp
    #: Rows for each rank.
    SplitSizes: TypeAlias = Sequence[int] | None
