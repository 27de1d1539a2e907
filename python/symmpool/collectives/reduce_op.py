"""Names of reductions."""

from __future__ import annotations

import enum
import sys
from typing import TYPE_CHECKING

from symmpool.errors import InvalidArgumentError

if TYPE_CHECKING:
    from symmpool.collectives.types import Op

__all__ = ["BITWISE", "NATIVE", "ReduceOp", "op_name"]


class ReduceOp(str, enum.Enum):
    """Operation of a reduction. Its members have the names of torch.distributed.ReduceOp; each is equal to
    the text that calls take as well: `ReduceOp.SUM == "sum"`. torch's own constants are taken, too."""

    SUM = "sum"
    PRODUCT = "prod"
    MIN = "min"
    MAX = "max"
    #: The sum, divided by the number of ranks.
    AVG = "avg"
    #: Bitwise, of integers and bool.
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"


# Operations that communicators have.
NATIVE = ("sum", "prod", "min", "max", "avg")
BITWISE = ("band", "bor", "bxor")
_NAMES = frozenset((*NATIVE, *BITWISE))


def op_name(op: Op) -> str:
    """The name of a reduction that is given by its name or by a constant of torch.distributed.ReduceOp."""
    if op is None:
        return "sum"
    if isinstance(op, str):
        name = str.__str__(op)
        if name in _NAMES:
            return name
    else:
        dist = sys.modules.get("torch.distributed")
        theirs = getattr(dist, "ReduceOp", None)
        # Numbers are equal to some of torch's constants, and are none.
        if theirs is not None and not isinstance(op, int):
            for ours in ReduceOp:
                if op == getattr(theirs, ours.name, None):
                    return ours.value
    raise InvalidArgumentError(f"op: {op!r} is none of {', '.join(each.value for each in ReduceOp)}")
