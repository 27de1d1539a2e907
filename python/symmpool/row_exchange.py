"""`RowExchange` and `RowLayout`, of earlier programs: rows that each go to a rank of their own, and back.

They are all-to-alls with splits in memory and what sorts rows for these, of numpy or torch. New programs take
`symmpool.experts.Buffer` with `top_k=1`, which writes rows where they belong at once."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from symmpool.errors import InvalidArgumentError

if TYPE_CHECKING:
    from symmpool._symmpool import Communicator

__all__ = ["RowExchange", "RowLayout"]

_MOST_ROWS, _MOST_BYTES = (1 << 31) - 1, 1 << 31


class RowExchange:
    """An all-to-all of rows with a destination each, and the way back; deprecated. Made by
    `Communicator.row_exchange`, on whose communicator its calls are.

    `send` takes rows to the ranks that `destinations` name. What comes lies by source rank, and of one source
    in that one's order; a layout has `counts`, `offsets` and `source_index` of it. `send_back` takes as many
    rows, in that place, to where they came from. Several layouts may be kept, and sent back in any order that
    is the same on every rank."""

    def __init__(
        self, comm: Communicator, device: str, rows: int, row_shape: Sequence[int], dtype: Any, name: str
    ):
        self._comm, self._device = comm, device
        self.rows_per_rank, self.row_shape, self.dtype = rows, tuple(row_shape), name
        self._torch = isinstance(dtype, str) or type(dtype).__module__ == "torch"
        if self._torch:
            import torch as library

            self._dtype = getattr(library, name)
        else:
            import numpy as library

            self._dtype = library.dtype(dtype)
        self._library: Any = library
        self._row_bytes = math.prod(self.row_shape) * self._dtype.itemsize
        if rows > _MOST_ROWS or not 1 <= self._row_bytes <= _MOST_BYTES:
            raise InvalidArgumentError(
                f"a row exchange on rank {comm.rank} of up to {rows} rows of {list(row_shape)} {name}: pass "
                "less than 2^31 rows, of 1 byte to 2 GiB each"
            )
        # What goes nowhere is sorted behind all ranks.
        self._ranks = self._full(comm.world, 0)
        self._ranks[...] = self._arange(comm.world)
        self._wait_for_fills()

    def layout(self) -> RowLayout:
        """A layout that says that nothing came. On CUDA it waits for the current stream."""
        made = RowLayout(self)
        self._wait_for_fills()
        return made

    def send(self, output: Any, input: Any, destinations: Any, layout: RowLayout, stream: Any = None) -> None:
        """Sends row i of `input` to rank `destinations[i]`; nowhere where that is -1.

        `destinations` is a tensor of int32 or int64, of at most as many elements as the exchange was made
        for. They are read when the call runs, on CUDA when `stream` comes to it. Rows of `input` behind the
        last one's are not looked at. `output` holds what its length says, which may differ from rank to rank;
        it may be `input`.

        What `output` has no room for is not written, and counted in `layout.counts` all the same. Then
        OverflowError is raised on every rank, and if a rank has a destination that is no rank,
        InvalidArgumentError, and that rank sent nothing; on the CPU by the call, on CUDA by the next
        `Communicator.synchronize`. All other rows are where they should be."""
        with self._on(stream):
            to, rows = self._refusing(self._check, output, input, layout)
            wanted = self._refusing(self._check_destinations, destinations, rows)
            xp, world, count = self._library, self._comm.world, wanted.shape[0]
            wrong = (wanted < -1) | (wanted >= world)
            refused = wrong.any()
            ranks = xp.where(wrong | (wanted < 0) | refused, world, wanted)
            order = self._sorted(ranks)
            splits = (ranks[:, None] == self._ranks[None, :]).sum(0)
            places, sent = self._arange(count), splits.sum()
            layout._place[...] = -1
            layout._place[order] = xp.where(places < sent, places, -1)
            layout._ends[...] = xp.cumsum(splits, 0)
            layout._room[...] = to.shape[0]
            call = self._comm.all_to_all_v
            # Numbers of rows always have room, so what goes wrong ends the second call, on every rank.
            numbers = self._integers(order, "int32").reshape(count, 1)
            call(layout.source_index.reshape(-1, 1), numbers, splits)
            splits = xp.where(refused, -1, splits)
            packed = rows[order]
            try:
                call(to, packed, splits, layout.counts, layout.offsets)
            except InvalidArgumentError as error:
                if self._device != "cpu" or not refused:
                    raise
                raise InvalidArgumentError(self._why(wanted, wrong)) from error

    def send_back(self, output: Any, input: Any, layout: RowLayout, stream: Any = None) -> None:
        """Sends the first rows of `input`, as many as `send` wrote with `layout`, back to the ranks they came
        from; each comes to where it was in that rank's input. Rows of `output` of which none comes are zeros:
        those that went nowhere, that had no room, and whatever is behind those that were sent. `output` has
        at most as many rows as the exchange was made for; it may be `input`. All ranks name the layout of the
        same send.

        A rank whose `input` is shorter than what came to it sends nothing, and every rank raises
        InvalidArgumentError, as in `send`."""
        with self._on(stream):
            to, rows = self._refusing(self._check, output, input, layout)
            self._refusing(self._check_length, to)
            xp, world, most = self._library, self._comm.world, self.rows_per_rank
            # Rows that had no room are not there to be sent.
            left = layout._room - layout.offsets
            left = xp.where(left > 0, left, 0)
            splits = xp.where(layout.counts < left, layout.counts, left)
            came, came_at = self._full(world, 0), self._full(world, 0)
            # Behind them is a row of zeros, for all that do not come.
            packed = self._full((most + 1, self._row_bytes), 0, "uint8")
            try:
                self._comm.all_to_all_v(packed[:most], rows, splits, came, came_at)
            finally:
                places = layout._place[: to.shape[0]]
                rank = (places[:, None] >= layout._ends[None, :]).sum(1)
                rank = xp.where(rank < world, rank, world - 1)
                before = xp.where(rank > 0, layout._ends[rank - 1], 0)
                there = (places >= 0) & (places - before < came[rank])
                to[...] = packed[xp.where(there, came_at[rank] + places - before, most)]

    def __repr__(self) -> str:
        shape = list(self.row_shape)
        return f"symmpool.RowExchange(rows={self.rows_per_rank}, row_shape={shape}, dtype={self.dtype!r})"

    # --- what is the same of numpy and torch by another name

    def _wait_for_fills(self) -> None:
        """Calls may run on other streams than the current one, which fills new tensors."""
        if self._torch and self._device != "cpu":
            self._library.cuda.current_stream(self._device).synchronize()

    def _full(self, shape: Any, value: int, dtype: str = "int64") -> Any:
        if self._torch:
            shape = (shape,) if isinstance(shape, int) else shape
            return self._library.full(shape, value, dtype=getattr(self._library, dtype), device=self._device)
        return self._library.full(shape, value, dtype)

    def _arange(self, count: int) -> Any:
        return (
            self._library.arange(count, device=self._device) if self._torch else self._library.arange(count)
        )

    def _sorted(self, ranks: Any) -> Any:
        """The numbers of rows in the order of their ranks, of one rank in their own order."""
        if self._torch:
            return self._library.argsort(ranks, stable=True)
        return self._library.argsort(ranks, kind="stable")

    def _integers(self, tensor: Any, dtype: str) -> Any:
        return tensor.to(getattr(self._library, dtype)) if self._torch else tensor.astype(dtype)

    def _bytes(self, tensor: Any) -> Any:
        """Rows as bytes, where they lie."""
        if self._torch:
            tensor = tensor.detach()
        rows = tensor.reshape(tensor.shape[0], math.prod(self.row_shape))
        return rows.view(self._library.uint8)

    @contextlib.contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        """Makes a stream the current one, for what sorts rows and for the calls."""
        if stream is None or not self._torch or self._device == "cpu":
            yield
            return
        cuda = self._library.cuda
        if not isinstance(stream, cuda.Stream):
            stream = cuda.ExternalStream(int(getattr(stream, "cuda_stream", stream)), device=self._device)
        with cuda.stream(stream):
            yield

    # --- arguments

    def _refusing(self, check: Callable[..., Any], *arguments: Any) -> Any:
        """Checks arguments. What is refused is reported to the other ranks."""
        try:
            return check(*arguments)
        except (InvalidArgumentError, TypeError) as why:
            with contextlib.suppress(InvalidArgumentError):
                self._comm._refuse(str(why))
            raise

    def _check(self, output: Any, input: Any, layout: Any) -> tuple[Any, Any]:
        """The rows of both, as bytes."""
        if not isinstance(layout, RowLayout):
            raise TypeError(f"layout: a RowLayout is needed, not {type(layout)}")
        key = self._key()
        if layout._of != key:
            raise InvalidArgumentError(
                f"layout: of {layout._of}, where the exchange has {key} (ranks, device, rows, shape, type)"
            )
        found = []
        for name, tensor in (("output", output), ("input", input)):
            self._check_kind(name, tensor)
            if tensor.dtype != self._dtype:
                raise InvalidArgumentError(
                    f"{name}: elements of {tensor.dtype} where the exchange moves {self.dtype}"
                )
            contiguous = tensor.is_contiguous() if self._torch else tensor.flags.c_contiguous
            if not contiguous or tensor.ndim == 0:
                raise InvalidArgumentError(f"{name}: contiguous rows are needed, of one dimension at least")
            row = math.prod(tensor.shape[1:])
            if row * self._dtype.itemsize != self._row_bytes:
                wanted = math.prod(self.row_shape)
                raise InvalidArgumentError(
                    f"{name}: rows of {row} elements where the exchange moves rows of {wanted}"
                )
            found.append(self._bytes(tensor))
        return found[0], found[1]

    def _check_kind(self, name: str, tensor: Any) -> None:
        kind = self._library.Tensor if self._torch else self._library.ndarray
        if not isinstance(tensor, kind):
            raise TypeError(f"{name}: a {kind.__module__}.{kind.__name__} is needed, not {type(tensor)}")

    def _check_destinations(self, destinations: Any, rows: Any) -> Any:
        self._check_kind("destinations", destinations)
        count, most = len(destinations), self.rows_per_rank
        integers = destinations.dtype in (self._library.int32, self._library.int64)
        if not integers or destinations.ndim != 1 or count > most or count > rows.shape[0]:
            raise InvalidArgumentError(
                f"row exchange on rank {self._comm.rank}: {count} destinations of {destinations.dtype} for "
                f"an input of {rows.shape[0]} rows: they are i32 or i64, and no more than the input has "
                f"rows, nor than the {most} that the exchange was made for"
            )
        return self._integers(destinations, "int64")

    def _check_length(self, output: Any) -> None:
        if output.shape[0] > self.rows_per_rank:
            raise InvalidArgumentError(
                f"row exchange on rank {self._comm.rank}: an output of {output.shape[0]} rows on the way "
                f"back, of an exchange made for {self.rows_per_rank}"
            )

    def _why(self, wanted: Any, wrong: Any) -> str:
        """Which destination is none."""
        row = wrong.tolist().index(True)
        return (
            f"row exchange on rank {self._comm.rank}: row {row} has destination {int(wanted[row])}; there "
            f"are ranks 0 to {self._comm.world - 1}, and -1 for nowhere. This rank sent nothing, and the "
            "communicator stays usable"
        )

    def _key(self) -> tuple[Any, ...]:
        """What a layout is for."""
        return self._comm.world, self._device, self.rows_per_rank, self.row_shape, self.dtype


class RowLayout:
    """How the rows of a `RowExchange.send` lie, for whoever reads them and for the way back. A send
    overwrites what it holds."""

    def __init__(self, exchange: RowExchange):
        world, rows = exchange._comm.world, exchange.rows_per_rank
        self._of = exchange._key()
        #: Rows that each rank sent, int64, those that had no room included.
        self.counts = exchange._full(world, 0)
        #: The row of the output at which each rank's begin, int64.
        self.offsets = exchange._full(world, 0)
        #: Which row of its source each row is, int32; as many as all ranks may send, of which the first
        #: `counts.sum()` mean something.
        self.source_index = exchange._full(rows * world, 0, "int32")
        # Of this rank's rows: where each is in the order of ranks, or -1, and where those of each rank end.
        self._place = exchange._full(rows, -1)
        self._ends = exchange._full(world, 0)
        # How many rows the output had.
        self._room = exchange._full(1, 0)

    def __repr__(self) -> str:
        _, _, rows, row_shape, dtype = self._of
        return f"symmpool.RowLayout(rows={rows}, row_shape={list(row_shape)}, dtype={dtype!r})"
