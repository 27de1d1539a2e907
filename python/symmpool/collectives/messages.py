"""Point-to-point messages with torch.distributed's names, signatures and meaning.

Messages from one rank to another come in the order in which they were begun; tags make no difference, as with
NCCL. On the CPU `isend` and `irecv` are made by a thread for each direction between two ranks, so a rank may
begin any number of them in any order. A message that one of the two ranks refuses is an error on both.

Before a process group of torch has a communicator, which the group's first collective makes, torch's own
backends of the group carry its messages. A message is begun on both sides before that collective, or on both
sides after it.
"""

from __future__ import annotations

import operator
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from symmpool._symmpool import _count_versions, _waiting_senders
from symmpool.collectives.calls import needs_plan
from symmpool.communicators import cache, torch_state
from symmpool.communicators.entry import CommunicatorEntry, explainer
from symmpool.communicators.forks import renew_in_children
from symmpool.communicators.gradients import watch
from symmpool.communicators.host_work import HostWork, Worker
from symmpool.communicators.work import Work
from symmpool.errors import InvalidArgumentError, InvalidStateError, TimeoutError, UnsupportedError
from symmpool.groups import process_groups
from symmpool.groups.names import group_of, rank_in, rank_of_default

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import SupportsIndex

    import torch.distributed

    from symmpool.collectives.types import Tensor
    from symmpool.groups.types import GroupLike

__all__ = ["P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "send"]


def send(
    tensor: Tensor,
    dst: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Sends `tensor` to rank `dst`, whose `recv` or `irecv` from this rank takes it: see `Communicator.send`.
    `dst` and `group_dst` are as `broadcast`'s sources. Only two ranks take part. A call that is refused, for
    whatever reason, fails the other rank's too. On a group that is none of torch's, and on CUDA, the group's
    communicator must be there already, by any collective before; else InvalidStateError."""
    _message("send", tensor, group, tag, True, dst=dst, group_dst=group_dst)


def recv(
    tensor: Tensor,
    src: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receives into `tensor` what rank `src` sends: see `send`. Returns the sender's rank, as it was given.
    On the CPU it receives from whichever rank sends first, if none is given; the rank that it returns is one
    of the default group then, as torch's. -1 where this process is no member of the group."""
    return _message("recv", tensor, group, tag, True, src=src, group_src=group_src)


def isend(
    tensor: Tensor,
    dst: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work | None:
    """Sends like `send`, and returns a Work at once. You must not write to `tensor` before that is done. For
    tensors of the CPU. None where this process is no member of the group."""
    return _message("send", tensor, group, tag, False, dst=dst, group_dst=group_dst)


def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work | None:
    """Receives like `recv`, and returns a Work at once. For tensors of the CPU."""
    return _message("recv", tensor, group, tag, False, src=src, group_src=group_src)


class P2POp:
    """A message of `batch_isend_irecv`: `isend` or `irecv`, and its arguments. Those of torch.distributed are
    taken too."""

    def __init__(
        self,
        op: Callable[..., Work | torch.distributed.Work | None],
        tensor: Tensor,
        peer: int | None = None,
        group: GroupLike = None,
        tag: int = 0,
        group_peer: int | None = None,
    ):
        if getattr(op, "__name__", "") not in ("isend", "irecv"):
            raise InvalidArgumentError(f"op: {op!r} is neither symmpool.isend nor symmpool.irecv")
        if peer is None and group_peer is None:
            raise InvalidArgumentError("peer: it is missing; pass the other rank as peer or group_peer")
        self.op, self.tensor, self.peer, self.group = op, tensor, peer, group
        self.tag, self.group_peer = tag, group_peer

    def __repr__(self) -> str:
        peer = self.peer if self.group_peer is None else self.group_peer
        return f"symmpool.P2POp({self.op.__name__}, peer={peer}, tag={self.tag})"


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Begins several messages, in the order of the list, and returns their Works."""
    if not isinstance(p2p_op_list, (list, tuple)) or not p2p_op_list:
        raise InvalidArgumentError(f"p2p_op_list: a list of P2POp is needed, not {p2p_op_list!r}")
    calls = {"isend": (isend, "dst"), "irecv": (irecv, "src")}
    checked = []
    for each in p2p_op_list:
        call = calls.get(getattr(getattr(each, "op", None), "__name__", ""))
        if call is None:
            raise InvalidArgumentError(f"p2p_op_list: {each!r} is no P2POp of isend or irecv")
        # torch's own fill in both ranks.
        group_peer = getattr(each, "group_peer", None)
        peer = (f"group_{call[1]}", group_peer) if group_peer is not None else (call[1], each.peer)
        checked.append((call[0], each, peer))
    begun = [
        function(each.tensor, group=each.group, tag=each.tag, **{name: peer})
        for function, each, (name, peer) in checked
    ]
    return [work for work in begun if work is not None]


class _MessageWork(Work):
    """Work of a message that a thread makes. Its results are the tensor and the other rank, as given."""

    __slots__ = ("_work",)

    def __init__(self, work: HostWork):
        super().__init__(work._results)
        self._work = work

    def wait(self, timeout: float | None = None) -> bool:
        return self._work.wait(timeout)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def exception(self) -> Exception | None:
        return self._work.exception()

    def join(self) -> None:
        self._work.join()

    def result(self) -> list[Tensor]:
        self.wait()
        return self._results[:1]

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._work.get_future().then(lambda future: future.value()[:1])

    def _source_rank(self) -> int:
        self.wait()
        return self._results[1]  # type: ignore[return-value]  # see `_message`


class _Lines:
    """The threads of a communicator that make messages, by direction and other rank."""

    def __init__(self, entry: CommunicatorEntry):
        self._entry = weakref.ref(entry)
        self._workers: dict[tuple[str, int | None], Worker] = {}
        # Held while a thread of the program gives a message to one of these threads: its messages keep their
        # order. A signal handler may begin a message in the middle of that.
        self._lock = threading.RLock()
        renew_in_children(self)

    def forked(self) -> None:
        """In a forked child, which has none of these threads. The communicator refuses its messages."""
        self._workers = {}
        self._lock._at_fork_reinit()  # type: ignore[attr-defined]

    def begin(
        self,
        call: str,
        peer: int | None,
        function: Callable[..., object],
        arguments: Any,
        results: list[Tensor],
    ) -> HostWork:
        """Has the thread of a direction make a message behind those that it was given before."""
        with self._lock:
            if call == "recv" and not self.is_idle(call, None):
                # Behind a receive from any rank, which may take what this one is sent.
                peer = None
            worker = self._workers.get((call, peer))
            if worker is None:
                entry = self._entry()
                assert entry is not None
                # A signal handler may have made one meanwhile.
                worker = self._workers.setdefault((call, peer), Worker(entry, explainer(entry)))
            if not worker.order.is_here():
                return worker.submit(function, arguments, results)
        # A callback makes the message itself, which may last.
        return worker.submit(function, arguments, results)

    def is_idle(self, call: str, peer: int | None) -> bool:
        """Whether nothing that was begun in a direction is under way."""
        for key in {(call, peer), (call, None)}:
            worker = self._workers.get(key)
            newest = None if worker is None else worker.order.newest()
            if newest is not None and not newest.is_set():
                return False
        return True

    def is_received(self, peer: int) -> bool:
        """Whether no receive from this rank alone is under way, which its next message is for."""
        worker = self._workers.get(("recv", peer))
        newest = None if worker is None else worker.order.newest()
        return newest is None or newest.is_set()


_lines: weakref.WeakKeyDictionary[CommunicatorEntry, _Lines] = weakref.WeakKeyDictionary()


@torch_state.opaque
def _message(call: str, tensor: Any, group: GroupLike, tag: int, waits: bool, **peers: Any) -> Any:
    """Makes a message, or begins it."""
    from symmpool.collectives.functions import _end_graph

    _end_graph(call, tensor, group)
    names = tuple(peers)
    given = peers[names[0]] if peers[names[0]] is not None else peers[names[1]]
    any_source = call == "recv" and given is None
    peer = None
    if not cache.is_outside(group):
        peer = None if any_source else rank_in(group, call, **peers)
        if not cache.is_ready(tensor, group):
            _check_tag(tag)
            return _before_a_collective(call, tensor, group, tag, waits, peers)
    entry = cache.communicator_for(tensor, group)
    if entry is None:
        return -1 if call == "recv" and waits else None
    if peer is None:
        _check_tag(tag)
    else:
        with entry.preparing_message(call, peer):
            _check_tag(tag)
    if entry.device >= 0 and (any_source or not waits):
        what = f"{call} without src" if any_source else f"i{call}"
        raise UnsupportedError(
            f"symmpool.{what} of a CUDA tensor: torch.distributed's on the backend symmpool has it"
        )
    lines = _lines.get(entry)
    if waits and peer is not None and (lines is None or lines.is_idle(call, peer)):
        _make(entry, call, tensor, peer)
        return given
    if lines is None:
        lines = _lines.setdefault(entry, _Lines(entry))
    found: list[Any] = [tensor, given]

    def run(tensor: Any, peer: int | None) -> None:
        if peer is None:
            peer = _first_sender(entry, lines)
            found[1] = rank_of_default(group, peer)
        _make(entry, call, tensor, peer)

    work = _MessageWork(lines.begin(call, peer, run, (tensor, peer), found))
    if not waits:
        return work
    work.wait()
    return found[1]


def _check_tag(tag: SupportsIndex) -> None:
    try:
        is_tag = operator.index(tag) >= 0
    except TypeError:
        is_tag = False
    if not is_tag:
        raise InvalidArgumentError(f"tag: {tag!r} is no number of 0 or more")


def _make(entry: CommunicatorEntry, call: str, tensor: Any, peer: int) -> None:
    prepare = None
    with entry.preparing_message(call, peer):
        if needs_plan(tensor):
            from symmpool.collectives import layout

            prepare = layout.message(tensor, peer, call == "send")
        if call == "recv":
            if getattr(tensor, "requires_grad", False):
                watch(tensor)
            _count_versions([tensor])
    entry.run_message(call, tensor, peer, prepare)


def _first_sender(entry: CommunicatorEntry, lines: _Lines) -> int:
    """Waits until some rank has sent what nobody has begun to receive, and returns it."""
    end, pause = time.monotonic() + entry.comm.timeout, 1e-5
    while True:
        for peer in _waiting_senders(entry.comm):
            if lines.is_received(peer):
                return peer
        failure = entry.comm.failure
        if failure is not None:
            raise failure
        if time.monotonic() > end:
            error = TimeoutError(
                f"symmpool: recv without src on rank {entry.comm.rank}: no rank has sent anything after "
                f"{entry.comm.timeout:g} s"
            )
            entry.explain(error)
            raise error
        time.sleep(pause)
        pause = min(pause * 1.5, 1e-3)


def _before_a_collective(call: str, tensor: Any, group: GroupLike, tag: int, waits: bool, peers: Any) -> Any:
    """A message on a group that has no communicator: torch carries it, on a process group of torch."""
    dist = process_groups.distributed()
    found = group_of(group) if isinstance(group, (str, tuple)) else group
    is_torchs = (
        dist is not None and dist.is_initialized() and (found is None or isinstance(found, dist.ProcessGroup))
    )
    torch = sys.modules.get("torch")
    if not is_torchs or torch is None or not isinstance(tensor, torch.Tensor) or tensor.is_cuda:
        raise InvalidStateError(
            f"symmpool.{call}: the group has no communicator yet, and all ranks take part where one is "
            "made: begin with a collective on it, such as symmpool.barrier"
        )
    function = getattr(dist, call if waits else f"i{call}")
    return function(tensor, group=found, tag=tag, **peers)
