"""Events, under the names of `deep_ep.utils`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from symmpool.groups.types import GroupLike

__all__ = ["EventHandle", "EventOverlap", "check_nvlink_connections"]


class EventHandle:
    """An event that was recorded on the current stream when this was made, or `event`. Where the program does
    not use CUDA there is nothing to record and nothing to wait for."""

    def __init__(self, event: torch.cuda.Event | None = None):
        if event is None and torch.cuda.is_available() and torch.cuda.is_initialized():
            event = torch.cuda.current_stream().record_event()
        self.event = event

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for the event; the host goes on."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class EventOverlap:
    """An event behind a call. As a context, what stands inside runs beside the call, and the current stream
    waits for the event at the end. `event` is None where the call is not asynchronous: then there is nothing
    to wait for. `extra_tensors` are kept as long as this is."""

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: Sequence[torch.Tensor | None] | None = None
    ):
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for the event; the host goes on."""
        if self.event is not None:
            self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *error: object) -> None:
        self.current_stream_wait()


def check_nvlink_connections(group: GroupLike) -> None:
    """Does nothing: the pool that the first call makes finds out by itself how devices are linked."""
