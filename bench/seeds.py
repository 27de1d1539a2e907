"""Replays one synthetic trace under many address seeds and says whether all placements agree.

    seeds.py REPLAY EVENTS RANKS SEEDS OUT

REPLAY is the built program `replay`. Every replay runs RANKS simulated ranks, whose base addresses
depend on the seed and the rank; the lane's digest stands for all placements.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from collect import machine


def main(replay, events, ranks, seeds, out):
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.csv"
        subprocess.run([replay, "--generate", f"{events}:1", "--out", trace], check=True)
        runs = []
        for seed in range(int(seeds)):
            command = [replay, "--trace", trace, "--ranks", ranks, "--driver", "sim"]
            command += ["--permute-addresses", str(seed), "--json"]
            runs.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
    digests = sorted({run["digest"] for run in runs})
    report = {
        "measured_on": machine(),
        "command": f"bench/seeds.py REPLAY {events} {ranks} {seeds} OUT",
        "results": {
            "events": runs[0]["events"],
            "ranks": runs[0]["ranks"],
            "seeds": len(runs),
            "digests": digests,
            "all_equal": len(digests) == 1 and all(run["digests_equal"] for run in runs),
            "ns_per_event_median": sorted(run["ns_per_event"] for run in runs)[len(runs) // 2],
        },
    }
    Path(out).write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["results"]))
    return 0 if report["results"]["all_equal"] else 1


if __name__ == "__main__":
    if len(sys.argv) != 6:
        raise SystemExit(__doc__)
    sys.exit(main(*sys.argv[1:]))
