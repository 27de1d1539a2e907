"""Objects of serving engines, as the adapters use them, for type checkers. Programs import nothing of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from typing import TypeAlias

    import torch
    import torch.distributed

    #: What vLLM and SGLang call a device.
    EngineDevice: TypeAlias = torch.device | str | int
    #: torch's name of a graph's memory pool.
    GraphPool: TypeAlias = tuple[int, int]


class StatelessGroup(Protocol):
    """A group of an engine that is none of torch's: a store, and the ranks that meet in it."""

    @property
    def store(self) -> torch.distributed.Store:
        """Where the ranks meet."""

    @property
    def rank(self) -> int:
        """This process's rank."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""


class EngineCommunicator(Protocol):
    """An engine's communicator of NCCL: `PyNcclCommunicator` of vLLM and of SGLang."""

    @property
    def group(self) -> torch.distributed.ProcessGroup | StatelessGroup:
        """The group whose ranks it connects."""

    @property
    def device(self) -> torch.device:
        """The device of this rank."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    @property
    def comm(self) -> object:
        """NCCL's communicator: its address, or a C pointer."""


class GroupCoordinator(Protocol):
    """A group of SGLang's ranks."""

    @property
    def unique_name(self) -> str:
        """The name of the group."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    @property
    def is_first_rank(self) -> bool:
        """Whether this process is the group's first rank."""

    @property
    def device(self) -> torch.device:
        """The device of this rank."""

    @property
    def device_group(self) -> torch.distributed.ProcessGroup:
        """The group as torch knows it."""

    @property
    def pynccl_comm(self) -> EngineCommunicator | None:
        """The group's communicator of NCCL, if it has one."""


class QuantConfig(Protocol):
    """How experts of vLLM take their tokens: `FusedMoEQuantConfig`."""

    @property
    def quant_dtype(self) -> torch.dtype | str | None:
        """The type of quantised elements, or None."""

    @property
    def a1_scale(self) -> torch.Tensor | None:
        """The scale of all tokens, if it is known before."""

    @property
    def per_act_token_quant(self) -> bool:
        """Whether each token has a scale."""

    @property
    def block_shape(self) -> list[int] | None:
        """Rows and columns that have a scale together."""
