"""How a call is timed.

A call takes another time in each of several forms: on a GPU, in CUDA graphs of 1, 10, 20 and 100 calls, which
are replayed without a pause, and outside of graphs. Which form suits a library best differs: NCCL's small
calls take about twice as long in graphs of 100 as in graphs of 20. So everybody is tried in all forms, and
what counts is each one's best.

On a GPU events are recorded between spans of calls. Ranks run in step after the first span, which is not
counted, so no rank's figure holds the time that another came late; what counts is the median of the rest.

On the CPU there is one form, calls in a loop, which a clock times.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

#: Calls in a graph, each number of which is a form.
GRAPHS = (1, 10, 20, 100)
#: About as many bytes a span moves, so that spans of large calls are not endless.
SPAN_BYTES = 256 << 20
#: Calls outside of graphs between two looks at the clock, where the host's time is measured too.
EAGER_CALLS = 50

EAGER, LOOP = "eager", "loop"


def calls_for(size):
    """Calls between two events or two looks at the clock."""
    return max(5, min(max(GRAPHS), SPAN_BYTES // size))


def graphs_for(size, asked=None):
    """Numbers of calls in graphs, from the smallest on: those that were asked for, else all that are worth
    their time at a size."""
    if asked:
        return sorted(set(asked))
    return sorted({min(each, calls_for(size)) for each in GRAPHS})


def graph_name(calls):
    return f"graph of {calls}"


def short(form):
    """A form's name as it stands behind a figure, in brackets; nothing where there is no choice."""
    if form is None or form == LOOP:
        return ""
    return f" ({form.removeprefix('graph of ')})"


@dataclass
class Form:
    """One way to give calls to a device, or to make them on the CPU."""

    name: str
    #: Calls of one `run`.
    calls: int
    run: Callable[[], None]
    #: How often it runs between two events.
    runs: int = 1

    def time(self, torch, repeats):
        """Microseconds a call, the median of `repeats` spans."""
        if self.name == LOOP:
            return time_loop(self.run, self.calls, repeats)

        def span():
            for _ in range(self.runs):
                self.run()

        return time_spans(torch, span, repeats) / (self.calls * self.runs)


def forms(ranks, call, size, options):
    """All forms of a call of so many bytes; raises ValueError on every rank if one fails on any."""
    if not ranks.on_cuda:
        return [Form(LOOP, max(options.calls or [calls_for(size)]), call)]
    found, most = [], calls_for(size)
    for calls in graphs_for(size, options.calls):
        graph = ranks.insist(lambda calls=calls: capture(ranks.torch, call, calls))
        found.append(Form(graph_name(calls), calls, graph.replay, max(1, most // calls)))
    if options.eager:
        # The first call outside of graphs may set something up, which a trial is not to pay for.
        ranks.insist(call)
        found.append(Form(EAGER, 1, call, most))
    return found


def order(names, number):
    """The order in which contenders take their turns in a round: another goes first each time."""
    at = number % len(names) if names else 0
    return names[at:] + names[:at]


def capture(torch, call, calls):
    """A CUDA graph of `calls` calls, after some outside of it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads, NCCL's watchdog among them, may look at events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    return graph


def time_spans(torch, span, repeats):
    """Microseconds that the device takes for what `span` puts on the current stream."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 2)]
    events[0].record()
    for event in events[1:]:
        span()
        event.record()
    torch.cuda.synchronize()
    # The first span is where ranks meet.
    spans = [a.elapsed_time(b) for a, b in zip(events[1:], events[2:])]
    return median(spans) * 1e3


def time_loop(call, calls, repeats):
    """Microseconds a call that returns when it is done."""
    spans = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        spans.append(time.perf_counter() - begin)
    return median(spans[1:]) * 1e6 / calls


def time_eager(call, calls, repeats, synchronize):
    """Microseconds of host time a call, and until all are done, divided by their number."""
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
