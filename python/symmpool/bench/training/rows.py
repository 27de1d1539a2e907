"""What was found of each kind of program, and how it is shown."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from symmpool.bench import table

__all__ = ["Row", "cells"]

OURS = "ours"
#: What torch's allocator gave out and held at most, and what was in use of the device, by whomever.
MEMORY = ("peak_bytes", "reserved_bytes", "device_bytes")


class Row:
    """All turns of one kind."""

    def __init__(self, kind: str, peer: str):
        self.kind, self.peer = kind, peer
        #: What each turn found, by contender, in the order of the rounds.
        self.turns: dict[str, list[dict[str, Any]]] = {}
        #: Why a contender has no figure.
        self.missing: dict[str, str] = {}

    def rate(self, name: str) -> float | None:
        """Tokens a second, the median of turns; None where there is none."""
        turns = self.turns.get(name)
        return median(turn["tokens_a_second"] for turn in turns) if turns else None

    def ratio(self, name: str) -> float | None:
        """A contender's tokens a second over the peer's."""
        own, theirs = self.rate(name), self.rate(self.peer)
        return own / theirs if own and theirs else None

    def apart(self, name: str) -> float | None:
        """The largest relative difference of a number of a contender's from the one that the peer's first
        turn found, over all turns, ranks and steps: 0 where all are equal, bit by bit. None where one is
        missing."""
        first = next(iter(self.turns.get(self.peer, [])), None)
        mine = self.turns.get(name)
        if first is None or not mine:
            return None
        return max(difference(turn["numbers"], first["numbers"]) for turn in mine)

    def most(self, name: str, what: str) -> int | None:
        found = [turn[what] for turn in self.turns.get(name, []) if turn[what] is not None]
        return max(found, default=None)

    def to_json(self) -> dict[str, Any]:
        figures = {}
        for name, turns in self.turns.items():
            if turns:
                figures[name] = {
                    "tokens_a_second": self.rate(name),
                    "rounds": [turn["tokens_a_second"] for turn in turns],
                    "ratio": self.ratio(name),
                    "apart": self.apart(name),
                    # The first rank's, of the first turn.
                    "numbers": turns[0]["numbers"][0],
                    "calls": turns[0]["calls"],
                    **{what: self.most(name, what) for what in MEMORY},
                }
        return {"kind": self.kind, "peer": self.peer, "figures": figures, "missing": self.missing}


def difference(ranks: list[list[float]], others: list[list[float]]) -> float:
    """The largest relative difference between two turns' numbers, which are a list for each rank."""
    pairs = [pair for one, other in zip(ranks, others, strict=True) for pair in zip(one, other, strict=True)]
    apart = [0.0 if a == b else abs(a - b) / max(abs(a), abs(b)) for a, b in pairs]
    # A number that is none differs from everything.
    return math.inf if any(math.isnan(each) for each in apart) else max(apart, default=0.0)


def cells(rows: list[Row], names: list[str], peer: str) -> tuple[list[str], list[list[str]]]:
    """The table's heading and lines: of each contender tokens a second of every turn, then the ratio."""
    heading = ["kind", "contender", "tokens/s", "turns", f"of {peer}", "apart", "peak MiB", "reserved MiB"]
    heading += ["device MiB"]
    lines = []
    for row in rows:
        for name in names:
            turns = row.turns.get(name, [])
            each = " ".join(f"{turn['tokens_a_second']:,.0f}" for turn in turns)
            rate, ratio, apart = row.rate(name), row.ratio(name), row.apart(name)
            lines.append(
                [
                    row.kind,
                    name,
                    "-" if rate is None else f"{rate:,.0f}",
                    each or "-",
                    "-" if ratio is None else f"{ratio:.3f}",
                    "-" if apart is None else f"{apart:.1e}" if apart else "0",
                    *[
                        table.figure(None if (count := row.most(name, what)) is None else count / 2**20)
                        for what in MEMORY
                    ],
                ]
            )
    return heading, lines
