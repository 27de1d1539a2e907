"""Where a step loses its time, computed from the events of a trace of torch's profiler.

A trace is a list of events as Chrome's trace format has them, times in microseconds. The compute stream is
the one that most matrix products run on; whatever NCCL or this package runs on a device counts as
communication. A kernel that communicates also waits for other ranks, so its time is not that of the transfer
alone.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

__all__ = ["ROWS", "compare", "summarize"]

Interval = tuple[float, float]
Event = dict[str, Any]

#: What a summary has, all in microseconds a step but for what says otherwise.
ROWS = {
    "step_us": "step, from the first thing on the device to the last",
    "communication_us": "kernels and copies that communicate",
    "exposed_us": "of these, with nothing else on the device",
    "matmul_us": "matrix products and attention",
    "matmul_overlapped_us": "of these, overlapped with communication",
    "matmul_excess_us": "what they take longer there than the same ones alone",
    "matmul_ratio": "how many times as long as alone they take there",
    "other_us": "other kernels, but for copies",
    "copies_us": "copies within a device, by copy engines and by kernels",
    "gaps_us": "gaps on the compute stream",
    "idle_us": "of these, with nothing on the device at all",
    "launches": "launches (number)",
    "launch_us": "host time in launches",
    "collective_calls": "calls of collectives (number)",
    "collective_host_us": "host time in calls of collectives",
}

_MATMUL = ("gemm", "cutlass", "nvjet", "xmma", "flash", "fmha")
_COPY = ("copy", "chunk_cat", "catarray")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_RUNTIME = ("cuda_runtime", "cuda_driver")
_HOST = ("cpu_op", "user_annotation")
_STEP = "ProfilerStep#"


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns these times without overlaps, in their order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif end > begin:
            found.append((begin, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def common(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """The times that are in both; each is a `union`."""
    found, i, k = [], 0, 0
    while i < len(one) and k < len(other):
        begin, end = max(one[i][0], other[k][0]), min(one[i][1], other[k][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[k][1]:
            i += 1
        else:
            k += 1
    return found


def without(window: Interval, busy: list[Interval]) -> list[Interval]:
    """The times of a window that are not in `busy`, which is a `union`."""
    found, at = [], window[0]
    for begin, end in busy:
        if begin > at:
            found.append((at, min(begin, window[1])))
        at = max(at, end)
    if at < window[1]:
        found.append((at, window[1]))
    return [each for each in found if each[1] > each[0]]


def summarize(events: Iterable[Event]) -> dict[str, float]:
    """The figures of `ROWS`, of the steps that the trace has. Raises ValueError for a trace without a step,
    or without anything on a device."""
    whole = [each for each in events if each.get("ph") == "X"]
    steps = {each["name"] for each in whole if str(each["name"]).startswith(_STEP)}
    device = [each for each in whole if each.get("cat") in _ON_DEVICE]
    if not steps or not device:
        missing = "nothing that ran on a device" if steps else "no step of the profiler's"
        raise ValueError(f"the trace has {missing}")
    found = {**_of_device(device), **_of_host(whole)}
    return {name: value if name == "matmul_ratio" else value / len(steps) for name, value in found.items()}


def _of_device(events: list[Event]) -> dict[str, float]:
    matmuls = [each for each in events if _is_matmul(each)]
    compute = _compute_stream(matmuls or events)
    communicating = [each for each in events if _communicates(each)]
    # Copies on a collective's own stream are parts of it: those of copy engines, and those to staging.
    streams = {_stream(each) for each in communicating} - {compute}
    communicating += [each for each in events if _is_engine_copy(each) and _stream(each) in streams]
    marked = {id(each) for each in communicating}
    rest = [each for each in events if id(each) not in marked]
    copies = [each for each in rest if _is_copy(each)]
    marked |= {id(each) for each in (*matmuls, *copies)}
    window = min(map(_begin, events)), max(map(_end, events))
    communication = union(map(_interval, communicating))
    gaps = without(window, union(_interval(each) for each in events if _stream(each) == compute))
    overlapped = common(communication, union(map(_interval, rest)))
    return {
        "step_us": window[1] - window[0],
        "communication_us": length(map(_interval, communicating)),
        "exposed_us": length(communication) - length(overlapped),
        "matmul_us": length(map(_interval, matmuls)),
        **_overlapped(matmuls, communication),
        "other_us": length(_interval(each) for each in events if id(each) not in marked),
        "copies_us": length(map(_interval, copies)),
        "gaps_us": length(gaps),
        "idle_us": length(without(window, union(map(_interval, events)))),
    }


def _overlapped(matmuls: list[Event], communication: list[Interval]) -> dict[str, float]:
    """Products that overlap with communication, each compared with the mean of the same ones alone: those of
    one kernel and one shape of the launch."""
    alone: dict[Any, list[float]] = defaultdict(list)
    overlapped: list[Event] = []
    begins = [begin for begin, _ in communication]
    for each in matmuls:
        shared = _shared(_interval(each), communication, begins)
        if shared >= each["dur"] / 2:
            overlapped.append(each)
        elif shared == 0:
            alone[_same(each)].append(each["dur"])
    known = [each for each in overlapped if _same(each) in alone]
    took = sum(each["dur"] for each in known)
    usual = sum(sum(alone[_same(each)]) / len(alone[_same(each)]) for each in known)
    return {
        "matmul_overlapped_us": sum(each["dur"] for each in overlapped),
        "matmul_excess_us": took - usual,
        "matmul_ratio": took / usual if usual else 1.0,
    }


def _shared(one: Interval, others: list[Interval], begins: list[float]) -> float:
    """How long an interval lies in the others, which are a `union` with these beginnings."""
    at, total = max(bisect.bisect_right(begins, one[0]) - 1, 0), 0.0
    while at < len(others) and others[at][0] < one[1]:
        total += max(0.0, min(one[1], others[at][1]) - max(one[0], others[at][0]))
        at += 1
    return total


def _of_host(events: list[Event]) -> dict[str, float]:
    launches = [each for each in events if each.get("cat") in _RUNTIME and "Launch" in each["name"]]
    calls = [each for each in events if each.get("cat") in _HOST and _is_collective(each["name"])]
    by_thread = defaultdict(list)
    for each in calls:
        by_thread[each.get("tid")].append(_interval(each))
    # A call within a call counts once.
    outermost = [union(intervals) for intervals in by_thread.values()]
    return {
        "launches": len(launches),
        "launch_us": length(map(_interval, launches)),
        "collective_calls": sum(map(len, outermost)),
        "collective_host_us": sum(map(length, outermost)),
    }


def compare(summaries: dict[str, dict[str, float]]) -> str:
    """A table of summaries by contender, and in which rows the last loses most to the first."""
    names = list(summaries)
    wide = max(map(len, ROWS.values()))
    lines = [" " * wide + "".join(f"{name:>14}" for name in names)]
    for key, what in ROWS.items():
        shown = [f"{summaries[name][key]:14,.2f}" for name in names]
        lines.append(f"{what:<{wide}}" + "".join(shown))
    if len(names) > 1:
        first, last = summaries[names[0]], summaries[names[-1]]
        parts = ("exposed_us", "matmul_us", "other_us", "copies_us", "idle_us", "collective_host_us")
        more = sorted(((last[key] - first[key], key) for key in parts), reverse=True)
        lost = [f"{ROWS[key]} (+{by:,.0f} us)" for by, key in more if by > 0]
        whole = last["step_us"] - first["step_us"]
        lines.append(
            f"{names[-1]}'s step takes {whole:+,.0f} us compared with {names[0]}'s; it loses most in: "
            f"{'; '.join(lost[:3]) or 'nothing'}"
        )
    return "\n".join(lines)


def _begin(event: Event) -> float:
    return float(event["ts"])


def _end(event: Event) -> float:
    return float(event["ts"]) + float(event["dur"])


def _interval(event: Event) -> Interval:
    return _begin(event), _end(event)


def _stream(event: Event) -> Any:
    return event.get("args", {}).get("stream", event.get("tid"))


def _same(event: Event) -> Any:
    arguments = event.get("args", {})
    return event["name"], str(arguments.get("grid")), str(arguments.get("block"))


def _communicates(event: Event) -> bool:
    name = str(event["name"]).lower()
    if event.get("cat") == "gpu_memcpy":
        return "ptop" in name
    return name.startswith("symmpool_") or "nccl" in name


def _is_matmul(event: Event) -> bool:
    name = str(event["name"]).lower()
    return event.get("cat") == "kernel" and not _communicates(event) and any(part in name for part in _MATMUL)


def _is_engine_copy(event: Event) -> bool:
    return event.get("cat") == "gpu_memcpy" and "DtoD" in event["name"]


def _is_copy(event: Event) -> bool:
    if _is_engine_copy(event):
        return True
    name = str(event["name"]).lower()
    return event.get("cat") == "kernel" and not _communicates(event) and any(part in name for part in _COPY)


def _is_collective(name: str) -> bool:
    return name.startswith(("c10d::", "_c10d_functional::", "symmpool::", "symmpool:", "nccl:"))


def _compute_stream(events: list[Event]) -> Any:
    by_stream: dict[Any, float] = defaultdict(float)
    for each in events:
        by_stream[_stream(each)] += float(each["dur"])
    return max(by_stream, key=lambda stream: by_stream[stream])
