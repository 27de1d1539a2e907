"""DeepEP V1's names on `symmpool.experts`, for programs that were written for `deep_ep`.

    import symmpool.deep_ep
    symmpool.deep_ep.install()      # from now on `import deep_ep` finds this module

Normal and low-latency mode are one engine here, without NVSHMEM. A `Buffer` holds nothing when it is made:
the first call of a shape makes the memory that this shape needs. Waits are bounded by the group's timeout,
and errors name the rank. docs/experts.md says what else is different."""

from __future__ import annotations

import sys

import torch

from symmpool.deep_ep import buffer, utils
from symmpool.deep_ep.buffer import Buffer
from symmpool.deep_ep.config import Config
from symmpool.deep_ep.utils import EventHandle, EventOverlap
from symmpool.errors import InvalidStateError

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "install", "topk_idx_t", "utils"]

#: The type of experts' numbers in `topk_idx`.
topk_idx_t = torch.int64


def install() -> None:
    """Makes `import deep_ep` find this module, and `deep_ep.utils` and `deep_ep.buffer` its own, in this
    process. Raises InvalidStateError if another `deep_ep` was imported already. Programs that start processes
    which import `deep_ep` add the folder that `python -m symmpool.deep_ep` prints to PYTHONPATH instead."""
    names = {"deep_ep": sys.modules[__name__], "deep_ep.utils": utils, "deep_ep.buffer": buffer}
    for name, module in names.items():
        found = sys.modules.get(name)
        if found is not None and found is not module and not hasattr(found, "_IS_SYMMPOOL"):
            where = getattr(found, "__file__", "?")
            raise InvalidStateError(f"install: {name} was imported from {where} already; call install first")
    sys.modules.update(names)
