"""How a call is timed.

On a GPU a call can be timed in several forms: in CUDA graphs of 1, 10, 20 and 100 calls, which are replayed
without a pause, and eagerly. Which form is the fastest depends on the library: NCCL's small calls take about
twice as long in graphs of 100 as in graphs of 20. So every contender is tried in all forms, and its fastest
one counts.

Events are recorded between spans of calls. The first span is not counted, as it contains the time for which
ranks wait for the one that started last. The median of the other spans counts.

On the CPU there is one form: calls in a loop, timed by a clock. A contender's calls take about 2 seconds a
round at most, unless one call takes longer.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

#: Numbers of calls in a graph. Each is a form.
GRAPHS = (1, 10, 20, 100)
#: About how many bytes a span moves, so that spans of large calls are not too long.
SPAN_BYTES = 256 << 20
#: About how many seconds a contender's spans take at most in a round on the CPU. A call that takes longer is
#: timed once.
ROUND_SECONDS = 2.0
#: Eager calls between two readings of the clock, when host time is measured.
EAGER_CALLS = 50

EAGER, LOOP = "eager", "loop"


def calls_for(size):
    """Calls between two events, or two readings of the clock."""
    return max(5, min(max(GRAPHS), SPAN_BYTES // size))


def graphs_for(size, requested=None):
    """Numbers of calls in graphs in ascending order: the requested ones, or by default those of `GRAPHS`, as
    far as a span of this size is not too long."""
    if requested:
        return sorted(set(requested))
    return sorted({min(each, calls_for(size)) for each in GRAPHS})


def graph_name(calls):
    return f"graph of {calls}"


def short(form):
    """A form's short name in brackets, for tables; empty for calls in a loop."""
    if form is None or form == LOOP:
        return ""
    return f" ({form.removeprefix('graph of ')})"


@dataclass
class Form:
    """One way to make calls: in a graph, eagerly, or in a loop on the CPU."""

    name: str
    #: Calls in one `run`.
    calls: int
    run: Callable[[], None]
    #: How often it runs between two events.
    runs: int = 1
    #: The most spans that are timed; None for as many as are asked for.
    most: int | None = None

    def time(self, torch, repeats):
        """Microseconds per call: the median of `repeats` spans."""
        if self.name == LOOP:
            return time_loop(self.run, self.calls, min(repeats, self.most or repeats))

        def span():
            for _ in range(self.runs):
                self.run()

        return time_spans(torch, span, repeats) / (self.calls * self.runs)


def forms(ranks, call, size, options, captured=lambda: None):
    """All forms of a call that moves `size` bytes. Raises ValueError on every rank if one fails on any.
    `captured` is called after each capture."""
    if not ranks.on_cuda:
        return [loop(ranks, call, size, options.calls)]
    found, most = [], calls_for(size)
    for calls in graphs_for(size, options.calls):
        graph = ranks.insist(lambda calls=calls: capture(ranks.torch, call, calls))
        captured()
        found.append(Form(graph_name(calls), calls, graph.replay, max(1, most // calls)))
    if options.eager:
        found.append(eager(ranks, call, size))
    return found


def loop(ranks, call, size, requested=None):
    """The form on the CPU of a call that moves `size` bytes. Where the slowest rank's call takes long, it has
    fewer calls a span, and fewer spans than asked for."""

    def once():
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    # The first call may make something.
    ranks.insist(once)
    took = max(ranks.gather(ranks.insist(once)))
    affordable = max(1, int(ROUND_SECONDS / max(took, 1e-9)))
    calls = max(requested) if requested else max(1, min(calls_for(size), affordable // 4))
    return Form(LOOP, calls, call, most=max(1, affordable // calls - 1))


def eager(ranks, call, size):
    """The eager form of a call that moves `size` bytes."""
    # The first eager call may initialize something, which must not be timed.
    ranks.insist(call)
    return Form(EAGER, 1, call, calls_for(size))


def order(names, number):
    """The order of contenders in a round: each round starts with another one."""
    at = number % len(names) if names else 0
    return names[at:] + names[:at]


def capture(torch, call, calls):
    """A CUDA graph of `calls` calls. Some calls are made eagerly before it is captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as NCCL's watchdog, may query events during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    return graph


def time_spans(torch, span, repeats):
    """Microseconds of device time of what `span` enqueues on the current stream."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 2)]
    events[0].record()
    for event in events[1:]:
        span()
        event.record()
    torch.cuda.synchronize()
    # In the first span ranks wait for each other.
    spans = [a.elapsed_time(b) for a, b in zip(events[1:], events[2:])]
    return median(spans) * 1e3


def time_loop(call, calls, repeats):
    """Microseconds per call, for calls that return when they are done."""
    spans = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        spans.append(time.perf_counter() - begin)
    return median(spans[1:]) * 1e6 / calls


def time_eager(call, calls, repeats, synchronize):
    """Microseconds per call: of host time, and until all calls are done."""
    hosts, totals = [], []
    for _ in range(repeats + 1):
        synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        queued = time.perf_counter()
        synchronize()
        done = time.perf_counter()
        hosts.append(queued - begin)
        totals.append(done - begin)
    return median(hosts[1:]) * 1e6 / calls, median(totals[1:]) * 1e6 / calls
