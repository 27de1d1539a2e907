"""The result of `Communicator.explain`."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Explanation"]


@dataclass(frozen=True)
class Explanation:
    """Explanation of a call on this rank, as it would be made when `Communicator.explain` was called. It
    prints as a sentence."""

    #: The collective, as "all_reduce".
    collective: str
    #: Bytes of the larger one of input and output.
    bytes: int
    #: The type of the elements, as "bfloat16".
    dtype: str
    #: The name of the algorithm.
    algorithm: str
    #: What chose it: "call", "selector", "requested" (by options), a variable of the environment,
    #: "loaded table", "measured on such devices", "beside compute" or "rule".
    chosen_by: str
    #: Blocks of its largest kernel. None on the CPU, and where a kernel is not loaded yet: the first
    #: call loads it.
    blocks: int | None
    #: SMs that the call takes at most. None as for `blocks`.
    sms: int | None
    #: SMs of the device. None on the CPU.
    device_sms: int | None
    #: Blocks and threads of each kernel that is known, in the order of launches.
    launches: tuple[tuple[int, int], ...]
    #: How many copies copy engines make.
    copies: int
    #: Whether each kernel may start while the one before it on its stream still waits for peers, or works.
    starts_early: bool
    #: Where data lies on its way: in the memory for "small" or "large" calls, in the "whole" of one that
    #: does not grow, or "host" on the CPU.
    memory: str
    #: Bytes of memory that the call takes first, if every rank has room.
    takes: int
    #: Which of "input" and "output" lie in windows.
    windows: tuple[str, ...]
    #: The algorithm in the best case: alone on the device, between windows, with all of the memory.
    best_algorithm: str
    #: Blocks of its largest kernel then.
    best_blocks: int | None
    #: What keeps the call from its best case, in words. Empty if nothing does.
    kept_by: tuple[str, ...]
    #: All of it as a sentence.
    text: str = field(repr=False, compare=False)

    @property
    def is_best(self) -> bool:
        """Whether nothing keeps the call from its best case."""
        return not self.kept_by

    def __str__(self) -> str:
        return self.text
