"""Point-to-point calls of a group of the backend, and which way each goes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from symmpool.errors import InvalidArgumentError, UnsupportedError
from symmpool.torch_backend.counts import note
from symmpool.torch_backend.group_state import GroupState
from symmpool.torch_backend.served_devices import NAME
from symmpool.torch_backend.work import TorchWork, joined, opaque

__all__ = ["Messages", "message_tag"]

_CPU = torch.device("cpu")


# Types of elements, whose places here are a part of a message's tag.
_TYPES = (
    "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool uint16 uint32 uint64 complex32 "
    "complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
).split()
# Gloo's tags have 31 bits.
_TAG_BITS = 26


def message_tag(tag: int, name: str) -> int:
    """The tag by which gloo finds a message of a type, the same on both ranks. Tags that leave no room for
    the type stay as they are."""
    if not 0 <= tag < 1 << _TAG_BITS:
        return tag
    return (_TYPES.index(name) + 1 if name in _TYPES else 0) << _TAG_BITS | tag


@opaque
class Messages(GroupState):
    """Sends and receives, and batches of calls."""

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> dist.Work:
        """Sends a list of one tensor to a rank of the group."""
        self._check_peer("send", to)
        if self._messages.fits(tensors, to, tag) and self._has_mailbox():
            return self._host_message("send", tensors[0], to, tag)
        if not self._p2p.carries(tensors, to):
            return self._message("send", f"to rank {to}", tensors, (to,), tag)
        return self._point_to_point("send", tensors[0], to)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work:
        """Receives a list of one tensor from a rank of the group."""
        self._check_peer("recv", source)
        if self._messages.fits(tensors, source, tag) and self._has_mailbox():
            return self._host_message("recv", tensors[0], source, tag)
        if not self._p2p.carries(tensors, source):
            return self._message("recv", f"from rank {source}", tensors, (source,), tag)
        return self._point_to_point("recv", tensors[0], source)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> dist.Work:
        """Receives a list of one tensor from whichever rank sends first."""
        if self._messages.fits(tensors, None, tag) and self._has_mailbox():
            return self._host_message("recv", tensors[0], None, tag)
        return self._message("recv_anysource", "from any rank", tensors, (), tag)

    def _check_peer(self, operation: str, peer: int) -> None:
        """Refuses what is no rank of the group: gloo would read memory that is not its own."""
        if not 0 <= peer < self._size:
            raise InvalidArgumentError(
                f"symmpool: {operation} on rank {self._rank} with rank {peer}: the group has ranks 0 to "
                f"{self._size - 1}; you must name one of them"
            )

    def _has_mailbox(self) -> bool:
        """Whether a mailbox carries messages of CPU tensors. All ranks answer alike at any time, so whether
        collectives are served, which ranks learn one after the other, is not asked."""
        used = self._messages.is_used
        if used is None:
            self._served.raise_at_end(self)
            # A group within the default one has no gloo for messages, whatever is named for it.
            is_ours = self.within is not None or self._served.is_named(self, _CPU)
            used = is_ours and self._messages.meet()
        return used

    def _host_message(self, operation: str, tensor: torch.Tensor, peer: int | None, tag: int) -> dist.Work:
        """A message that the group's mailbox carries."""
        self._served.raise_at_end(self)
        if operation == "send":
            assert peer is not None
            work = self._messages.send(tensor, peer, tag)
        else:
            work = self._messages.recv(tensor, peer, tag)
        note(operation, NAME)
        self._keep(work, [tensor])
        return self._begun(work)

    def _message(
        self, method: str, between: str, tensors: list[torch.Tensor], peer: tuple[int, ...], tag: int
    ) -> dist.Work:
        """A message that a fallback backend carries. Gloo's are bytes, which are found by their tag: with the
        elements' type in it, a message of another type is none that was waited for."""
        if not self._fallbacks.is_made:
            raise UnsupportedError(
                f"symmpool: {method} on rank {self._rank} {between}, tag {tag}: messages of a group within "
                "the default one are single tensors of the CPU, strided ones, with a tag of 0 or more, and "
                "the process needs a mailbox (a warning says why it has none); make the group with "
                "new_group(backend='gloo')"
            )
        if len(tensors) != 1 or self._names.get(tensors[0].device.type) != "gloo":
            return self._pass(method, method, tensors, *peer, tag)
        name = str(tensors[0].dtype).removeprefix("torch.")

        def late() -> str:
            return (
                f"{method}: rank {self._rank} waited in vain for a message of {name}, tag {tag}, {between}; "
                "the other rank has made no such call, or one with another type of elements or another tag"
            )

        return self._pass(method, method, tensors, *peer, message_tag(tag, name), late=late)

    def _point_to_point(self, operation: str, tensor: torch.Tensor, peer: int) -> dist.Work:
        """Tags are not looked at, as NCCL does not look at them."""
        self._served.raise_at_end(self)
        work, ours = self._p2p.begin(tensor, peer, operation == "send")
        if ours:
            note(operation, NAME)
            if isinstance(work, TorchWork):
                self._keep(work, [tensor])
        else:
            self._count_fallback(operation, tensor.device)
        return self._begun(work)

    # torch's batches (`_coalescing_manager`; before 2.6 or so `batch_isend_irecv`, too): calls are begun as
    # always, and one Work stands for theirs. The fallback backends get no batch. To NCCL that is a state of
    # the thread: its point-to-point calls, which have communicators of their own here, would be begun at the
    # batch's end, and be waited for before that.

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._served.raise_at_end(self)
        self._batch = []

    def _end_coalescing(self, device: torch.device | None = None) -> dist.Work | None:
        works, self._batch = self._batch, None
        return joined(works) if works else None

    def _begun(self, work: dist.Work) -> dist.Work:
        if self._batch is not None:
            self._batch.append(work)
        return work
