"""A class with the interface of the `CustomAllreduce` of vLLM and SGLang."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from symmpool._symmpool import Communicator, Pool
from symmpool.engines import core
from symmpool.errors import Error
from symmpool.groups import agreement, process_groups, resolution

if TYPE_CHECKING:
    import torch

    from symmpool.engines.types import EngineDevice
    from symmpool.groups.types import GroupLike

logger = logging.getLogger("symmpool.engines")

_DTYPES = "float32 float64 float16 bfloat16 int32 int64 uint8 int8 float8_e4m3fn float8_e5m2".split()


class CustomAllreduce:
    """All-reduce, all-gather and reduce-scatter between the ranks of a process group, out of place.

    Construction is collective. If a rank cannot take part, `disabled` is true on every rank and no call is
    served. Ranks wait a minute for each other there, and in a call as long as the process group says.
    `timeout`, in seconds, is for both. `max_size` is the largest input of an all-reduce in bytes; the other
    limits are those of the other collectives. Calls can be captured from the first on; there are no buffers
    to be registered, so `capture` has little to do. NVLink multicast is not used."""

    # Engines read these: whether sums must not depend on the sizes of inputs, and the state of multicast,
    # which is not used.
    batch_invariant = False
    mnnvl_only = False
    mnnvl_multicast_ptr = 0
    mnnvl_lamport_ag_multicast_ptr = 0

    def __init__(
        self,
        group: GroupLike,
        device: EngineDevice,
        max_size: int = 8 << 20,
        max_all_gather_size: int = 2 << 20,
        max_mnnvl_all_gather_size: int | None = None,
        max_reduce_scatter_size: int = 16 << 20,
        max_mnnvl_reduce_scatter_size: int | None = None,
        max_mnnvl_multimem_reduce_scatter_size: int | None = None,
        symm_mem_enabled: bool = False,
        *,
        register_graph_buffers: bool = True,
        timeout: float | None = None,
    ):
        self.disabled = self.original_disabled = True
        self.fully_connected = self.full_nvlink = False
        self.batch_invariant = core.is_enabled("vllm.envs", "VLLM_BATCH_INVARIANT")
        self.group = group
        self.max_size = max_size
        self.max_all_gather_size = max_all_gather_size
        self.max_reduce_scatter_size = max_reduce_scatter_size
        self._comm: Communicator | None = None
        self._IS_CAPTURING = False
        name = f"cuda:{device}" if isinstance(device, int) else str(device)
        why, seconds = None, 60.0 if timeout is None else timeout
        try:
            own = resolution.resolve(group, seconds)
            self.rank, self.world_size = own.rank, own.world
            pool = Pool(group, name, timeout=seconds)
            self.device = pool.device
            self._comm = Communicator(pool, timeout=seconds)
            if timeout is None:
                # A rank that compiles its kernels is late for minutes, and NCCL would wait for it.
                of_torch = process_groups.timeout_of_torch(group, name.partition(":")[0])  # type: ignore[arg-type]
                self._comm.timeout = of_torch or seconds
        except Error as error:
            why = str(error)
        # If one rank failed at once, the others may have waited for it until the timeout.
        what = "the construction of a CustomAllreduce"
        refusals = agreement.agree(group, "custom_allreduce", why, 2 * seconds, what)  # type: ignore[arg-type]
        if refusals:
            self._comm = None
            if refusals.get(0) is not None or why is not None:
                logger.warning("symmpool's all-reduce is disabled: %s", refusals)
            return
        import torch

        self._torch = torch
        self._dtypes = {getattr(torch, each) for each in _DTYPES if hasattr(torch, each)}
        self.disabled = self.original_disabled = self.world_size == 1
        # There is a communicator only if every rank can access the memory of every other.
        self.fully_connected = self.full_nvlink = not self.disabled

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """A context manager for the capture of graphs."""
        self._IS_CAPTURING = True
        try:
            yield
        finally:
            self._IS_CAPTURING = False

    def should_custom_ar(self, inp: torch.Tensor) -> bool:
        """Whether an input is served. This depends on its type and size, which are the same on every rank.
        There is no limit of size if sums must not depend on the sizes of inputs."""
        size = inp.numel() * inp.element_size()
        return (
            not self.disabled
            and size > 0
            and (self.batch_invariant or size <= self.max_size)
            and inp.dtype in self._dtypes
            and inp.is_contiguous()
        )

    def should_use(self, inp: torch.Tensor) -> bool:
        """Whether an input is served, as `should_custom_ar` says."""
        return self.should_custom_ar(inp)

    def all_reduce(
        self, inp: torch.Tensor, *, out: torch.Tensor | None = None, registered: bool = False
    ) -> torch.Tensor:
        """The sum of every rank's `inp`, in `out` or a new tensor, on the current stream."""
        if self._comm is None:
            raise RuntimeError("symmpool's all-reduce is disabled, or closed")
        if out is None:
            out = self._torch.empty_like(inp)
        self._comm.all_reduce(inp, "sum", out)
        return out

    def custom_all_reduce(self, input: torch.Tensor) -> torch.Tensor | None:
        """The sum, or None if the input is not served."""
        return self.all_reduce(input) if self.should_custom_ar(input) else None

    def should_custom_all_gather(self, inp: torch.Tensor) -> bool:
        """Whether an all-gather of an input is served."""
        return self._fits(inp, self.max_all_gather_size)

    def custom_all_gather(self, inp: torch.Tensor) -> torch.Tensor | None:
        """Every rank's `inp`, concatenated along the first dimension, or None if the input is not served."""
        if not self.should_custom_all_gather(inp):
            return None
        out = inp.new_empty((inp.shape[0] * self.world_size, *inp.shape[1:]))
        assert self._comm is not None  # it serves
        self._comm.all_gather_into_tensor(out, inp)
        return out

    def should_custom_reduce_scatter(self, inp: torch.Tensor) -> bool:
        """Whether a reduce-scatter of an input is served."""
        return (
            self._fits(inp, self.max_reduce_scatter_size)
            and not self.batch_invariant
            and inp.shape[0] % self.world_size == 0
        )

    def should_mnnvl_multimem_reduce_scatter(self, inp: torch.Tensor) -> bool:
        """Always false: multicast is not used."""
        return False

    def custom_reduce_scatter(self, inp: torch.Tensor) -> torch.Tensor | None:
        """This rank's part, along the first dimension, of the sum of every rank's `inp`, or None if the input
        is not served."""
        if not self.should_custom_reduce_scatter(inp):
            return None
        out = inp.new_empty((inp.shape[0] // self.world_size, *inp.shape[1:]))
        assert self._comm is not None  # it serves
        self._comm.reduce_scatter_tensor(out, inp, "sum")
        return out

    def _fits(self, inp: torch.Tensor, limit: int) -> bool:
        return (
            not self.disabled
            and inp.dim() > 0
            and 0 < inp.numel() * inp.element_size() <= limit
            and inp.dtype in self._dtypes
            and inp.is_contiguous()
        )

    def register_graph_buffers(self) -> None:
        """Nothing has to be registered."""

    def finalize_p2p(self) -> None:
        """Nothing has to be checked later."""

    def close(self) -> None:
        """Releases the memory. No call is served afterwards."""
        self.disabled = True
        self._comm = None
