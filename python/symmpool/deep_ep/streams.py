"""Calls on the communication stream, beside the current one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from symmpool._symmpool import Pool
from symmpool.deep_ep.utils import EventHandle, EventOverlap
from symmpool.errors import InvalidArgumentError

__all__ = ["CommStream", "overlap"]


class CommStream:
    """The stream of a `Buffer` on a device. On the CPU there is none: calls are done when they return."""

    def __init__(self, device: torch.device):
        self.device = device
        self._stream: torch.cuda.Stream | None = None

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream, made when it is first needed."""
        if self._stream is None:
            if self.device.type != "cuda":
                raise InvalidArgumentError("get_comm_stream: there are no streams on the CPU")
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    def run(
        self, call: Callable[[], Iterable[Any]], inputs: Iterable[Any], previous: object, asynchronous: bool
    ) -> tuple[Any, EventHandle | None]:
        """Makes a call that returns new tensors, among other things. With `asynchronous` it runs on this
        stream, and there is an event behind it. `previous`, an EventOverlap or None, says what it waits for;
        without one, it waits for all that is on the current stream."""
        after = getattr(previous, "event", None)
        if self.device.type != "cuda":
            return call(), EventHandle() if asynchronous else None
        if after is None and not asynchronous:
            return call(), None
        current, stream = torch.cuda.current_stream(self.device), self.stream
        if after is None:
            stream.wait_stream(current)
        elif after.event is not None:
            stream.wait_event(after.event)
        with torch.cuda.stream(stream):
            found = call()
            event = stream.record_event()
        # The inputs are used on this stream, and the results on the current one.
        for tensor in inputs:
            _record(tensor, stream)
        for tensor in found:
            _record(tensor, current)
        if asynchronous:
            return found, EventHandle(event)
        current.wait_event(event)
        return found, None

    def hook(self, event: EventHandle | None, tensors: Iterable[object]) -> Callable[[], None]:
        """Returns the function that makes the current stream wait for a call. Tensors belong to that stream
        as well then."""
        kept = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]

        def wait() -> None:
            if event is None or event.event is None:
                return
            event.current_stream_wait()
            for tensor in kept:
                _record(tensor, torch.cuda.current_stream(self.device))

        return wait


def overlap(event: EventHandle | None, tensors: Iterable[torch.Tensor | None] = ()) -> EventOverlap:
    """The event of a call, as programs get it."""
    return EventOverlap(event, None if event is None else tuple(tensors))


def _record(tensor: object, stream: torch.cuda.Stream) -> None:
    if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
        Pool.record_stream(tensor, stream)
