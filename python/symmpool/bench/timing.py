"""How a call is timed.

On a GPU: a CUDA graph of many calls is replayed several times without a pause, with events between
the replays. Ranks run in step after the first replay, which is not counted, so no rank's figure
holds the time that another came late; what counts is the median of the rest.

On the CPU: the same with a clock, and calls in a loop.
"""

import time
from statistics import median

# About as many bytes a graph moves, so that graphs of large calls are not endless.
GRAPH_BYTES = 256 << 20


def calls_for(size, asked=None):
    """Calls in a graph, or between two looks at the clock."""
    if asked:
        return asked
    return max(5, min(100, GRAPH_BYTES // size))


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


def time_graph(torch, graph, calls, replays):
    """Microseconds a call."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 2)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    # The first replay is where ranks meet.
    spans = [a.elapsed_time(b) for a, b in zip(events[1:], events[2:])]
    return median(spans) * 1e3 / calls


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
