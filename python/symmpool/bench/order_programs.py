"""Programs that `bench order` times: they make calls of a library in some order, anew each time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from symmpool import Communicator
from symmpool._symmpool import ExpertBufferCore
from symmpool.bench import peers

if TYPE_CHECKING:
    from types import ModuleType

    import torch
    import torch.distributed

    from symmpool._symmpool import Pool
    from symmpool.groups.types import GroupLike

#: Bytes of a small call: decoding's.
SMALL = 4 << 10
#: Calls in a graph at most, and about how many bytes they move.
MAX_CALLS, GRAPH_BYTES = 20, 128 << 20

FRESH = "fresh"
#: A kernel of the program stands before each call: alone, and beside communicators that rest.
KERNELS, KERNELS_RESTING = "kernels between", "kernels and 3 rest"
#: Elements that such a kernel adds a number to.
KERNEL_ELEMENTS = 16 << 10
#: A dispatch and a combine: no collective of its own, so that nothing explains it.
EXPERTS = "experts"
#: Elements of a token, how many experts it has, and how many a rank has.
HIDDEN, TOP_K, LOCAL_EXPERTS = 1024, 2, 2


@dataclass
class Library:
    """One library's calls: `make` gives a new communicator, and `calls` the collectives of one, by name."""

    name: str
    make: Callable[[int], Any]
    calls: Callable[[Any], dict[str, Callable[[Any, Any], None]]]
    empty: Callable[[int], Any]
    send: Callable[[Any, Any, Any], None]
    #: A dispatch of tokens to experts and the combine behind it, for a communicator, tokens and their sums.
    experts: Callable[[Any, Any, Any], Callable[[], None]] | None = None
    #: How a call would be made, in words.
    explain: Callable[[Any, str, Any, Any], str | None] = lambda *call: None
    #: Ends a round: what it has given back may be used again.
    end: Callable[[], object] = lambda: None


@dataclass
class Made:
    """Result of an order: the replay that is timed, and what must live meanwhile."""

    replay: Callable[[], None]
    calls: int
    #: Made between two replays, and not timed.
    between: Callable[[], None] | None = None
    #: A replay whose time is taken off.
    without: Callable[[], None] | None = None
    #: How the call is made, in words, once it was captured.
    explained: list[str | None] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)

    def forget(self) -> None:
        """Lets go of everything: graphs before the communicators whose calls they hold."""
        self.replay, self.between, self.without = _nothing, None, None
        self.kept.clear()


def _nothing() -> None:
    pass


def calls_for(size: int) -> int:
    return max(5, min(MAX_CALLS, GRAPH_BYTES // size))


class Program:
    """A program that makes calls of one library in some order. The small calls are all-reduces."""

    def __init__(
        self, ranks: peers.Ranks, library: Library, operation: str, read: torch.Tensor, written: torch.Tensor
    ):
        self.ranks, self.torch, self.library = ranks, ranks.torch, library
        self.operation, self.read, self.written = operation, read, written
        self.small = library.empty(SMALL // 2).zero_()
        self.received = library.empty(SMALL // 2).zero_()
        self.side = self.torch.cuda.Stream() if ranks.on_cuda else None
        self.count = 0

    def communicator(self) -> Any:
        self.count += 1
        return self.library.make(self.count - 1)

    def small_call(self, comm: Any) -> Callable[[], None]:
        call = self.library.calls(comm)["all_reduce"]
        return lambda: call(self.small, self.small)

    def call(self, comm: Any) -> Callable[[], None]:
        if self.operation == EXPERTS:
            assert self.library.experts is not None
            return self.library.experts(comm, self.read, self.written)
        call = self.library.calls(comm)[self.operation]
        return lambda: call(self.written, self.read)

    def captured(self, calls: list[Callable[[], None]], times: int = 1) -> Callable[[], None]:
        """A graph of calls, none of which need have been made before; on the CPU a loop."""
        if not self.ranks.on_cuda:

            def made() -> None:
                for _ in range(times):
                    for call in calls:
                        call()

            return made
        torch = self.torch
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # The other steps of `torch.cuda.graph`, such as emptying torch's cache, would take most of the time.
        with torch.cuda.stream(self.side):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for _ in range(times):
                    for call in calls:
                        call()
            finally:
                graph.capture_end()
        return graph.replay

    def timed(
        self, comm: Any, calls: int, before: list[Callable[[], None]] | None = None, warm: bool = True
    ) -> Made:
        """The call in a graph; where it is `warm`, once it was made outside of one, as programs warm up."""
        call = self.call(comm)
        if warm:
            call()
        self.ranks.synchronize()
        explained: list[str | None] = []

        def say() -> None:
            if not explained:
                explained.append(self.library.explain(comm, self.operation, self.read, self.written))

        replay = self.captured([*(before or []), say, call], calls)
        return Made(replay, calls, explained=explained, kept=[comm])

    def make(self, order: str, calls: int) -> Made:
        resting = {"1 rests": 1, "3 rest": 3, "7 rest": 7, KERNELS_RESTING: 3}.get(order, 0)
        if order in (FRESH, "eager between"):
            comm = self.communicator()
            made = self.timed(comm, calls)
            made.between = self.small_call(comm) if order == "eager between" else None
            return made
        if order == KERNELS:
            return self.between_kernels(self.communicator(), calls)
        if order == "all captured":
            return self.timed(self.communicator(), calls, warm=False)
        if order == "small first":
            comm = self.communicator()
            first = self.captured([self.small_call(comm)])
            first()
            made = self.timed(comm, calls)
            made.kept.append(first)
            return made
        if resting:
            # The call's communicator is the first one, as NCCL's are made once.
            comm = self.communicator()
            others = [self.communicator() for _ in range(resting)]
            graphs = [self.captured([self.small_call(other)]) for other in others]
            for graph in graphs:
                graph()
            timed = self.between_kernels if order == KERNELS_RESTING else self.timed
            made = timed(comm, calls)
            made.kept += [*others, *graphs]
            return made
        if order == "same graph":
            comm, other = self.communicator(), self.communicator()
            small = self.small_call(other)
            small()
            made = self.timed(comm, calls, [small])
            made.without = self.captured([small], calls)
            made.kept.append(other)
            return made
        if order == "after tp":
            return self.after_tensor_parallelism(calls)
        if order == "messages":
            comm = self.communicator()
            self.library.send(comm, self.small, self.received)
            self.ranks.synchronize()
            return self.timed(comm, calls)
        raise ValueError(f"no order is called {order!r}")

    def between_kernels(self, comm: Any, calls: int) -> Made:
        """The call behind a kernel of the program, as often as there are calls."""
        data = self.torch.ones(KERNEL_ELEMENTS, device=self.ranks.device)

        def kernel() -> None:
            data.add_(1)

        made = self.timed(comm, calls, [kernel])
        made.without = self.captured([kernel], calls)
        made.kept.append(data)
        return made

    def after_tensor_parallelism(self, calls: int) -> Made:
        """Decoding with sums between layers, eager and in a graph; then FSDP2's steps: gathers ahead on a
        stream of their own, products, and reduce-scatters behind them on another one."""
        torch = self.torch
        tensor_parallel, comm = self.communicator(), self.communicator()
        width = 256
        weight = torch.ones((width, width), device=self.ranks.device)
        rows = torch.ones((8, width), device=self.ranks.device)
        add_up = self.small_call(tensor_parallel)

        def layers(count: int = 2) -> None:
            for _ in range(count):
                torch.mm(rows, weight)
                add_up()

        layers()
        decode = self.captured([layers])
        for _ in range(3):
            decode()
        ours = self.library.calls(comm)
        part = self.library.empty(max(SMALL // 2 // self.ranks.world, 1)).zero_()
        whole = self.library.empty(part.numel() * self.ranks.world).zero_()
        streams = [torch.cuda.Stream() for _ in range(2)] if self.ranks.on_cuda else [None, None]
        gathers, scatters = (on_stream(torch, stream) for stream in streams)
        for _ in range(2):
            with gathers():
                ours["all_gather"](whole, part)
            layers(0)
            torch.mm(rows, weight)
            with scatters():
                ours["reduce_scatter"](part, whole)
        self.ranks.synchronize()
        made = self.timed(comm, calls)
        made.kept += [tensor_parallel, streams, decode]
        return made


def on_stream(
    torch: ModuleType, stream: torch.cuda.Stream | None
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context in which calls are made on a stream, behind what the current one was given, and before what
    that is given next."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)

    return context


def time_replays(ranks: peers.Ranks, made: Made, replays: int) -> float:
    """Microseconds of a call: the median over replays."""

    def spans(replay: Callable[[], None]) -> float:
        found = []
        if not ranks.on_cuda:
            for _ in range(replays + 1):
                begun = time.perf_counter()
                replay()
                found.append((time.perf_counter() - begun) * 1e6)
                if made.between is not None:
                    made.between()
            return median(found[1:])
        event = partial(ranks.torch.cuda.Event, enable_timing=True)
        pairs = [(event(), event()) for _ in range(replays + 1)]
        for begin, end in pairs:
            begin.record()
            replay()
            end.record()
            if made.between is not None:
                made.between()
        ranks.torch.cuda.synchronize()
        # In the first one ranks wait for each other.
        return median(begin.elapsed_time(end) * 1e3 for begin, end in pairs[1:])

    ranks.meet()
    took = spans(made.replay)
    if made.without is not None:
        ranks.meet()
        took -= spans(made.without)
    return took / made.calls


def ours(ranks: peers.Ranks, pool: Pool, dtype: torch.dtype, memory: str) -> Library:
    def make(_: int) -> Communicator:
        return Communicator(pool, timeout=ranks.timeout, device_memory_grows=True)

    def calls(comm: Any) -> dict[str, Callable[[Any, Any], None]]:
        return {
            "all_reduce": lambda out, x: comm.all_reduce(x),
            "all_gather": comm.all_gather_into_tensor,
            "reduce_scatter": comm.reduce_scatter_tensor,
            "all_to_all": comm.all_to_all_single,
        }

    def empty(count: int) -> torch.Tensor:
        if memory == "windows":
            return pool.empty(count, dtype)
        return ranks.torch.empty(count, dtype=dtype, device=ranks.device)

    def send(comm: Any, x: torch.Tensor, out: torch.Tensor) -> None:
        following, former = (ranks.rank + 1) % ranks.world, (ranks.rank - 1) % ranks.world
        comm.send(x, following)
        comm.recv(out, former)

    def experts(comm: Any, x: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        torch, count = ranks.torch, x.numel() // HIDDEN
        tokens, sums = (each[: count * HIDDEN].view(count, HIDDEN) for each in (x, out))
        everyone = LOCAL_EXPERTS * ranks.world
        shape = {"hidden": HIDDEN, "experts": everyone, "top_k": TOP_K, "max_tokens": count}
        buffer = ExpertBufferCore(comm, **shape, dtype=dtype)
        handle = torch.empty(buffer.handle_parts()["elements"], dtype=torch.int32, device=ranks.device)
        ids = torch.arange(count * TOP_K, device=ranks.device).view(count, TOP_K) % everyone
        rows = buffer.capacity(False, 1)
        received = torch.from_dlpack(buffer.received("rows", [rows, HIDDEN], dtype))

        def call() -> None:
            buffer.dispatch(handle, tokens, ids)
            buffer.combine(handle, sums, received, rows)

        return call

    def explain(comm: Any, operation: str, x: torch.Tensor, out: torch.Tensor) -> str | None:
        if operation == EXPERTS:
            return None
        given = None if operation == "all_reduce" else out
        return str(comm.explain(operation, x, given))

    return Library("ours", make, calls, empty, send, experts, explain, pool.commit)


def of_nccl(ranks: peers.Ranks, groups: list[torch.distributed.ProcessGroup], dtype: torch.dtype) -> Library:
    dist = ranks.dist

    def calls(group: GroupLike) -> dict[str, Callable[[Any, Any], None]]:
        return {
            "all_reduce": lambda out, x: dist.all_reduce(x, group=group),
            "all_gather": partial(dist.all_gather_into_tensor, group=group),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, group=group),
            "all_to_all": partial(dist.all_to_all_single, group=group),
        }

    def empty(count: int) -> torch.Tensor:
        return ranks.torch.empty(count, dtype=dtype, device=ranks.device)

    def send(group: GroupLike, x: torch.Tensor, out: torch.Tensor) -> None:
        following, former = (ranks.rank + 1) % ranks.world, (ranks.rank - 1) % ranks.world
        both = [dist.P2POp(dist.isend, x, following, group), dist.P2POp(dist.irecv, out, former, group)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return Library("NCCL", lambda nth: groups[nth], calls, empty, send)


def buffers(library: Library, operation: str, count: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An input and an output of a collective whose whole tensor has `count` elements. Zeros stay zeros
    when they are summed."""
    whole = library.empty(count).zero_()
    if operation == "all_reduce":
        return whole, whole
    if operation in ("all_to_all", EXPERTS):
        return whole, library.empty(count)
    part = library.empty(count // world).zero_()
    return (part, whole) if operation == "all_gather" else (whole, part)
