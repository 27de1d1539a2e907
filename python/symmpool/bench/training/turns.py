"""Turns of contenders, each in processes of its own.

A program has one library, and what another one has left behind in its processes costs it: on two H200s, steps
of FSDP2 on symmpool's backend made 48,000, 46,000 and 42,000 tokens a second in rounds between those of NCCL
in the same processes, and 47,500 to 48,000 in each of six rounds without them. So every rank starts a new
process for each turn, in which a contender runs each kind once. The first rank's leaves a file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["Found", "take"]


class Found:
    """Results of a turn: the facts of the run, and of each kind a report or why there is none."""

    def __init__(self, facts: dict[str, Any]):
        self.facts = facts
        self.kinds: dict[str, tuple[Any, str | None]] = {}
        #: Why there is nothing of a kind that the turn did not come to.
        self.why_missing = "its turn did not come to it"

    def add(self, kind: str, report: Any, why: str | None) -> None:
        self.kinds[kind] = (report, why)

    def of(self, kind: str) -> tuple[Any, str | None]:
        """A kind's report, and None; or None and why there is none."""
        return self.kinds.get(kind, (None, self.why_missing))

    def write(self, file: Path) -> None:
        """Writes all of it, or nothing."""
        part = file.with_suffix(".part")
        part.write_text(json.dumps({"facts": self.facts, "kinds": self.kinds}))
        part.replace(file)

    @classmethod
    def read(cls, file: Path) -> Found:
        """Reads the results from a file; they are empty where there is none."""
        if not file.exists():
            return cls({})
        whole = json.loads(file.read_text())
        found = cls(whole["facts"])
        for kind, (report, why) in whole["kinds"].items():
            found.add(kind, report, why)
        return found


def take(
    arguments: Sequence[str], turn: tuple[int, str], kinds: Sequence[str], threads: int | None = None
) -> Found:
    """Has a contender take a turn, in a new process of this rank. `arguments` are those of the benchmark,
    `turn` is the round's number and the contender's name, and `threads` the process's OMP_NUM_THREADS, if it
    has one of its own. On the first rank it returns what was found, on others nothing."""
    number, name = turn
    with tempfile.TemporaryDirectory(prefix="symmpool-bench-") as folder:
        file = Path(folder) / "found.json"
        more = ["--kinds", ",".join(kinds), "--turn", str(number), name, str(file)]
        given = {}
        if threads is not None:
            more += ["--threads", str(threads)]
            given["OMP_NUM_THREADS"] = str(threads)
        command = [sys.executable, "-m", "symmpool", "bench", *arguments, *more]
        with subprocess.Popen(command, env={**os.environ, **given}) as process:
            try:
                status = process.wait()
            except BaseException:
                process.kill()
                raise
        found = Found.read(file)
    if status != 0:
        found.why_missing = f"the process of its turn ended with status {status}"
    return found
