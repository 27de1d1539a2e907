"""Memory of the pool through which fused matmuls pass their data."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from symmpool.errors import InvalidStateError

if TYPE_CHECKING:
    from symmpool.communicators.entry import CommunicatorEntry

__all__ = ["control_of", "forget", "in_turn", "is_enough", "refuse_in_capture", "reserve", "stream_of"]

# Memory is made in whole numbers of so many bytes.
_GRAIN = 2 << 20


class _Workspace:
    """A group's memory, and what graphs still use of earlier memory."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        self.is_captured = False
        #: What calls keep from one to the next; None before the first one that does.
        self.control: torch.Tensor | None = None
        self.kept: list[torch.Tensor] = []
        #: Held by a call until all of it is on streams.
        self.turn = threading.RLock()
        self.streams: dict[int, torch.cuda.Stream] = {}


_workspaces: weakref.WeakKeyDictionary[Any, _Workspace] = weakref.WeakKeyDictionary()


def in_turn(function: Callable[..., Any]) -> Callable[..., Any]:
    """Has a group's calls come one after the other, whole, also those of several threads: they have steps and
    memory in common."""

    @functools.wraps(function)
    def made(call: Any, *arguments: object) -> Any:
        with _workspace_of(call.entry).turn:
            return function(call, *arguments)

    return made


def stream_of(entry: CommunicatorEntry, device: torch.device, which: int) -> torch.cuda.Stream:
    """A stream of a group's, by number. No group has another one's: a call waits there for its peers, and
    calls of two groups may come in another order on these."""
    streams = _workspace_of(entry).streams
    if which not in streams:
        streams[which] = torch.cuda.Stream(device)
    return streams[which]


def _workspace_of(entry: CommunicatorEntry) -> _Workspace:
    found = _workspaces.get(entry)
    return _workspaces.setdefault(entry, _Workspace()) if found is None else found


def is_enough(entry: CommunicatorEntry, bytes: int, control: int = 0) -> bool:
    """Whether a group has so many bytes, and control memory if that is needed."""
    found = _workspaces.get(entry)
    if control and (found is None or found.control is None):
        return False
    return bytes == 0 or (found is not None and found.memory is not None and found.memory.numel() >= bytes)


def refuse_in_capture(name: str, entry: CommunicatorEntry, bytes: int, control: int = 0) -> None:
    """Refuses a call that needs more memory than there is while a graph is captured."""
    if not is_enough(entry, bytes, control) and torch.cuda.is_current_stream_capturing():
        raise InvalidStateError(
            f"{name}: it needs {bytes} bytes of the pool's memory, more than its group has yet, and none can "
            "be made while a graph is captured; make the same call once before the capture, on all ranks"
        )


def reserve(entry: CommunicatorEntry, bytes: int, control: int = 0) -> torch.Tensor:
    """Bytes at one offset on all ranks, which have the same; collective where there are too few. Their
    handshake has begun the call, so nobody uses what an earlier call left there. With `control`, there are
    as many bytes afterwards that no other call uses, which were zeros at first."""
    workspace = _workspace_of(entry)
    if not is_enough(entry, bytes, control):
        # Ranks that passed something else would not make memory: this raises what the handshake has found.
        entry.comm.synchronize()
        pool, memory, controls = entry._pool(), workspace.memory, workspace.control
        assert pool is not None  # it lives as long as its communicator
        if not is_enough(entry, bytes):
            if memory is not None and workspace.is_captured:
                workspace.kept.append(memory)
            memory = workspace.memory = None
            workspace.is_captured = False
            # Half as much again: lengths that grow step by step make memory a few times only.
            grown = -(-(bytes + bytes // 2) // _GRAIN) * _GRAIN
            memory = pool.empty(grown, dtype=torch.uint8)
        if control and controls is None:
            controls = pool.empty(control, dtype=torch.uint8).zero_()
        pool.commit()
        # Only what has been committed is there for later calls.
        workspace.memory, workspace.control = memory, controls
    workspace.is_captured = workspace.is_captured or torch.cuda.is_current_stream_capturing()
    memory = workspace.memory
    assert memory is not None
    return memory


def control_of(entry: CommunicatorEntry) -> torch.Tensor:
    """The bytes that `reserve` has made with `control`."""
    control = _workspaces[entry].control
    assert control is not None
    return control


def forget(entry: CommunicatorEntry) -> None:
    """Gives back a group's memory."""
    _workspaces.pop(entry, None)
