"""An all-reduce in the shape of the `CustomAllreduce` that vLLM and SGLang have."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from symmpool import groups
from symmpool._symmpool import Communicator, Pool
from symmpool.errors import Error

logger = logging.getLogger("symmpool.engines")

_DTYPES = (
    "float32 float64 float16 bfloat16 int32 int64 uint8 int8 float8_e4m3fn float8_e5m2".split()
)


class CustomAllreduce:
    """Sums between the ranks of a process group, out of place.

    Making one is collective. Where a rank cannot take part, `disabled` is true on every rank and
    nothing is served. `max_size` is the largest input in bytes. Calls can be captured from the first
    on; there are no buffers to be registered, so `capture` has little to do."""

    def __init__(
        self,
        group: Any,
        device: Any,
        max_size: int = 8 << 20,
        symm_mem_enabled: bool = False,
        *,
        timeout: float = 60.0,
    ):
        self.disabled = True
        self.group = group
        self.max_size = max_size
        self._comm: Communicator | None = None
        self._capturing = False
        name = f"cuda:{device}" if isinstance(device, int) else str(device)
        why = None
        try:
            own = groups.resolve(group, timeout)
            self.rank, self.world_size = own.rank, own.world
            pool = Pool(group, name, timeout=timeout)
            self.device = pool.device
            self._comm = Communicator(pool, timeout=timeout)
        except Error as error:
            why = str(error)
        # Where one failed at once the others come from waiting for it.
        making = "the making of a CustomAllreduce"
        refusals = groups.agree(group, "custom_allreduce", why, 2 * timeout, making)
        if refusals:
            self._comm = None
            if refusals.get(0) is not None or why is not None:
                logger.warning("symmpool's all-reduce is disabled: %s", refusals)
            return
        import torch

        self._torch = torch
        self._dtypes = {getattr(torch, each) for each in _DTYPES if hasattr(torch, each)}
        self.disabled = self.world_size == 1

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Around the capture of graphs."""
        self._capturing = True
        try:
            yield
        finally:
            self._capturing = False

    def should_custom_ar(self, inp: Any) -> bool:
        """Whether an input is served: by its type and size, which are the same on every rank."""
        return (
            not self.disabled
            and 0 < inp.numel() * inp.element_size() <= self.max_size
            and inp.dtype in self._dtypes
            and inp.is_contiguous()
        )

    def should_use(self, inp: Any) -> bool:
        """As `should_custom_ar`."""
        return self.should_custom_ar(inp)

    def all_reduce(self, inp: Any, *, out: Any = None, registered: bool = False) -> Any:
        """The sum of every rank's `inp`, in `out` or a new tensor, on the current stream."""
        if self._comm is None:
            raise RuntimeError("symmpool's all-reduce is disabled, or closed")
        if out is None:
            out = self._torch.empty_like(inp)
        self._comm.all_reduce(inp, "sum", out)
        return out

    def custom_all_reduce(self, input: Any) -> Any:
        """The sum, or None where the input is not served."""
        return self.all_reduce(input) if self.should_custom_ar(input) else None

    def register_graph_buffers(self) -> None:
        """Nothing has to be registered."""

    def finalize_p2p(self) -> None:
        """Nothing has to be checked later."""

    def close(self) -> None:
        """Lets go of the memory. Nothing is served any more."""
        self.disabled = True
        self._comm = None
