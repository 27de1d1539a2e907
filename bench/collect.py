"""Gathers what benchmarks print into the JSON files of bench/results.

collect.py lane CRITERION_DIR OUT      criterion's estimates, nanoseconds
collect.py packing OUT                 replays' JSON objects on standard input, in the order of
                                       the traces, contiguous before per-segment
"""

import json
import platform
import sys
from pathlib import Path

TRACES = sorted(path.name for path in (Path(__file__).parent.parent / "tests/traces").glob("*.gz"))


def machine():
    """Returns a description of the machine that the figures were measured on."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    import os

    return {"cpu": cpu, "cores": os.cpu_count(), "kernel": platform.release()}


def lane(criterion):
    """Median nanoseconds of every benchmark below a criterion folder, by group/function."""
    figures = {}
    for estimates in sorted(Path(criterion).glob("**/new/estimates.json")):
        name = json.loads((estimates.parent / "benchmark.json").read_text())["full_id"]
        median = json.loads(estimates.read_text())["median"]["point_estimate"]
        figures[name] = round(median, 2)
    if not figures:
        raise SystemExit(f"{criterion}: criterion has left no estimates there")
    return figures


def packing(text):
    """One entry a trace and policy."""
    objects = []
    decoder = json.JSONDecoder()
    while text := text.strip():
        found, end = decoder.raw_decode(text)
        objects.append(found)
        text = text[end:]
    policies = ["contiguous", "per-segment"]
    keys = [(trace, policy) for trace in TRACES for policy in policies]
    if len(keys) != len(objects):
        raise SystemExit(f"{len(objects)} replays for {len(keys)} traces and policies")
    return [
        {"trace": trace.removesuffix(".csv.gz"), "policy": policy, **found}
        for (trace, policy), found in zip(keys, objects)
    ]


def main(arguments):
    match arguments:
        case ["lane", criterion, out]:
            results = lane(criterion)
        case ["packing", out]:
            results = packing(sys.stdin.read())
        case _:
            raise SystemExit(__doc__)
    command = "bench/run"
    report = {"measured_on": machine(), "command": command, "results": results}
    Path(out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
