"""Fused matmuls on CUDA: copy engines carry data while matmuls of other data are made.

Every call begins with a handshake on the current stream, in which ranks compare what they call; it also
says that nobody uses the workspace any more. Then data goes by copy engines, on a stream of its own, and
flags say what has arrived, for which streams wait by memory operations. Nothing but the matmuls occupies
SMs.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from symmpool._symmpool import _begin_matmul, _end_watching, _fail_matmul, _pull, _push_step, _step
from symmpool.communicators.work import reason_of
from symmpool.fused import workspace
from symmpool.fused.matmuls import DTYPES, Matmul

if TYPE_CHECKING:
    from symmpool.communicators.entry import CommunicatorEntry

__all__ = ["MatmulCall", "gather_multiply", "multiply_scatter", "pull_all"]

# A matmul of fewer elements leaves SMs idle, so it is not divided: a wave of tiles of 128 x 256 on 128 SMs.
_WAVE = 128 * 128 * 256
#: Steps that a matmul is divided into at most: waits cost some microseconds each.
_MAX_STEPS = 4
# Whether a stream waits for a peer's step, or tells the peer of its own.
_SIGNAL, _WAIT = False, True


@functools.cache
def _end_watching_at_exit() -> None:
    """A process may end with open communicators, whose threads would look at memory that the driver takes
    away."""
    atexit.register(_end_watching)


class MatmulCall:
    """A fused matmul on a communicator: what it is called, and what ranks compare."""

    def __init__(
        self, entry: CommunicatorEntry, name: str, left: torch.Tensor, sizes: tuple[int, int, int], rest: int
    ):
        self.entry, self.comm, self.name = entry, entry.comm, name
        self.described = (name, DTYPES[left.dtype], sizes, rest)
        self.rank, self.world = self.comm.rank, self.comm.world
        self.device = left.device
        # Whether peers may be in the middle of the matmul.
        self.is_open = False

    def peers(self, sign: int) -> list[int]:
        """The other ranks: from the next one up (1), or down (-1)."""
        return [(self.rank + sign * step) % self.world for step in range(1, self.world)]

    def stream(self, which: int) -> torch.cuda.Stream:
        """A stream of the group's: 0 for copies, 1 for matmuls beside the current stream's, 2 for flags."""
        return workspace.stream_of(self.entry, self.device, which)

    def reserve(self, bytes: int, control: int) -> torch.Tensor:
        """Memory of so many bytes, and control memory, for a kernel that makes the handshake itself: another
        one comes before it only where memory must be made."""
        _end_watching_at_exit()
        workspace.refuse_in_capture(self.name, self.entry, bytes, control)
        if self.entry.pending is not None:
            self.entry.join_pending()
        if not workspace.is_enough(self.entry, bytes, control):
            self._open()
        return workspace.reserve(self.entry, bytes, control)

    def _open(self) -> None:
        self.entry.run_function(_begin_matmul, *self.described)

    def begin(self, bytes: int) -> torch.Tensor | None:
        """The handshake, and then memory of so many bytes that all ranks can access."""
        if self.device.type == "cuda":
            _end_watching_at_exit()
            workspace.refuse_in_capture(self.name, self.entry, bytes)
        self._open()
        if self.device.type != "cuda" or bytes == 0:
            return None
        memory = workspace.reserve(self.entry, bytes)
        self.is_open = True
        return memory

    def fail(self, error: BaseException) -> None:
        """Fails the communicator if peers may be in the middle of the matmul, and notifies them."""
        if self.is_open:
            _fail_matmul(self.comm, f"{self.name}: {reason_of(error)}")


def _or_fail(matmul: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a matmul of a call. What it raises behind the handshake fails the
    communicator: peers wait for data that does not come, and this rank's next call must not stand for it."""

    @functools.wraps(matmul)
    def made(call: MatmulCall, *arguments: object) -> Any:
        try:
            found = matmul(call, *arguments)
        except BaseException as error:
            call.fail(error)
            raise
        call.is_open = False
        return found

    return made


def _window(memory: torch.Tensor, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    bytes = dtype.itemsize
    for size in shape:
        bytes *= size
    return memory[begin : begin + bytes].view(dtype).view(shape)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _aligned(bytes: int) -> int:
    return -(-bytes // 512) * 512


@workspace.in_turn
@_or_fail
def gather_multiply(
    call: MatmulCall,
    rows: torch.Tensor,
    scales: torch.Tensor | None,
    multiply: Any,
    gathered: torch.Tensor | None,
) -> None:
    """Sends this rank's rows, and their scales, to all ranks, and calls `multiply(rows, scales, rank)` for
    each rank's as they come, its own first: with this rank's own on the current stream, and in turn with it
    on another one. With `gathered`, of world x rows, the rows are left there too."""
    world, rank = call.world, call.rank
    size = _aligned(_bytes(rows))
    scale_size = 0 if scales is None else _aligned(_bytes(scales))
    memory = call.begin(world * (size + scale_size))
    assert memory is not None
    shape = tuple(rows.shape)
    slots = [_window(memory, each * size, shape, rows.dtype) for each in range(world)]
    scale_slots: list[torch.Tensor | None] = [None] * world
    if scales is not None:
        first = world * size
        scale_slots = [
            _window(memory, first + each * scale_size, tuple(scales.shape), scales.dtype)
            for each in range(world)
        ]
    current = torch.cuda.current_stream(call.device)
    copies, beside = call.stream(0), call.stream(1)
    copies.wait_stream(current)
    beside.wait_stream(current)
    for peer in call.peers(1):
        place = scale_slots[rank]
        if scales is not None and place is not None:
            ends = (place.data_ptr(), scales.data_ptr(), _bytes(scales))
            _push_step(call.comm, ends, (peer, None), copies.cuda_stream)
        ends = (slots[rank].data_ptr(), rows.data_ptr(), _bytes(rows))
        _push_step(call.comm, ends, (peer, 0), copies.cuda_stream)
    multiply(rows, scales, rank)
    if gathered is not None:
        with torch.cuda.stream(copies):
            gathered[rank].copy_(rows)
    for nth, source in enumerate(call.peers(-1)):
        stream = beside if nth % 2 == 0 else current
        with torch.cuda.stream(stream):
            _step(call.comm, _WAIT, (source, 0), stream.cuda_stream)
            if gathered is not None:
                copies.wait_stream(stream)
            multiply(slots[source], scale_slots[source], source)
        if gathered is not None:
            with torch.cuda.stream(copies):
                gathered[source].copy_(slots[source])
    current.wait_stream(copies)
    current.wait_stream(beside)
    # The slots have been read, and the flags are taken: the next call, on whatever stream, comes behind that.
    call.entry.extend_order()


def _steps_of(call: MatmulCall, rows: int, columns: int, matmul: Matmul) -> int:
    """Into how many steps a rank's rows are divided."""
    if call.world != 2:
        return 1
    # Matmuls of 8-bit floats take half as long, so what a step costs is more of it.
    least = 2 * _WAVE if matmul.is_scaled else _WAVE
    for steps in range(_MAX_STEPS, 1, -1):
        if rows % steps == 0 and rows // steps * columns >= least:
            return steps
    return 1


@workspace.in_turn
@_or_fail
def multiply_scatter(
    call: MatmulCall,
    parts: list[tuple[torch.Tensor, torch.Tensor | None, Matmul]],
    dtype: torch.dtype,
    reduce_op: str,
) -> torch.Tensor:
    """Makes the matmul of each rank's part, left rows with their scales and a right matrix, and adds up
    those that all ranks have made for this one. Others' parts come first, and this rank's own last, while
    theirs arrive."""
    rank, world = call.rank, call.world
    left, _, matmul = parts[rank]
    rows, columns = left.shape[0], matmul.right.shape[1]
    shape = (rows, columns)
    size = _aligned(rows * columns * dtype.itemsize)
    steps = _steps_of(call, rows, columns, matmul)
    # In steps, matmuls with a C operand add what has come to it. Matmuls of 8-bit floats have none, and a
    # single matmul does not wait for what comes. Results of more than two ranks are added up in one pass, in
    # float32.
    accumulates = steps > 1 and not matmul.is_scaled and reduce_op != "avg"
    with call.entry.preparing():
        out = torch.empty(shape, dtype=dtype, device=call.device)
        others = None
        if not accumulates:
            others = torch.empty((world if world > 2 else 1, *shape), dtype=dtype, device=call.device)
        copies, flags = call.stream(0), call.stream(2)
    memory = call.begin(world * size)
    assert memory is not None
    slots = [_window(memory, each * size, shape, dtype) for each in range(world)]
    current = torch.cuda.current_stream(call.device)
    copies.wait_stream(current)
    length = rows // steps
    for step in range(steps):
        here = slice(step * length, (step + 1) * length)
        for peer in call.peers(1):
            given, scale, matmul = parts[peer]
            scale = scale if scale is None or scale.numel() == 1 else scale[here]
            matmul.make(given[here], scale, slots[peer][here])
            # A flag waits for its matmul only.
            flags.wait_stream(current)
            _step(call.comm, _SIGNAL, (peer, step), flags.cuda_stream)
    arrived = []
    for step in range(steps):
        here = slice(step * length, (step + 1) * length)
        for source in call.peers(-1):
            to = out[here] if others is None else others[source if world > 2 else 0][here]
            _step(call.comm, _WAIT, (source, step), copies.cuda_stream)
            ends = (to.data_ptr(), slots[rank][here].data_ptr(), _bytes(to))
            _pull(call.comm, ends, source, copies.cuda_stream)
        arrived.append(copies.record_event())
    given, scale, matmul = parts[rank]
    if world == 2:
        for step in range(steps):
            here = slice(step * length, (step + 1) * length)
            if others is None:
                current.wait_event(arrived[step])
                out[here].addmm_(given[here], matmul.right)
                continue
            rows_scale = scale if scale is None or scale.numel() == 1 else scale[here]
            matmul.make(given[here], rows_scale, out[here])
            current.wait_event(arrived[step])
            if reduce_op == "avg":
                # In float32, as the sum of two numbers of a smaller type may be too large for it.
                out[here].copy_(out[here].float().add_(others[0][here]).div_(world))
            else:
                out[here].add_(others[0][here])
    else:
        assert others is not None
        matmul.make(given, scale, others[rank])
        current.wait_event(arrived[0])
        if reduce_op == "avg":
            torch.mean(others, dim=0, out=out)
        else:
            torch.sum(others, dim=0, out=out)
    current.wait_stream(copies)
    current.wait_stream(flags)
    call.entry.extend_order()
    return out


@workspace.in_turn
@_or_fail
def pull_all(call: MatmulCall, parts: list[torch.Tensor], found: torch.Tensor) -> None:
    """Part `r` of each rank goes to rank `r`, where it becomes part `rank` of `found`, by copy engines;
    parts are of one size. Where all parts are one tensor, that is gathered."""
    rank = call.rank
    size = _aligned(_bytes(parts[0]))
    is_same = all(part is parts[0] for part in parts)
    memory = call.begin(size if is_same else call.world * size)
    assert memory is not None
    shape, dtype = tuple(parts[0].shape), parts[0].dtype
    slots = [_window(memory, 0 if is_same else each * size, shape, dtype) for each in range(call.world)]
    for peer in call.peers(1):
        slots[peer].copy_(parts[peer])
        if is_same:
            break
    current = torch.cuda.current_stream(call.device)
    for peer in call.peers(1):
        _step(call.comm, _SIGNAL, (peer, 0), current.cuda_stream)
    found[rank].copy_(parts[rank])
    for source in call.peers(-1):
        _step(call.comm, _WAIT, (source, 0), current.cuda_stream)
        ends = (found[source].data_ptr(), slots[rank].data_ptr(), _bytes(parts[0]))
        _pull(call.comm, ends, source, current.cuda_stream)
    call.entry.extend_order()
