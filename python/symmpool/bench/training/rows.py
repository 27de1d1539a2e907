"""Rows of the report: the results of each kind of program, and how they are shown."""

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
    """All rounds of one kind, with so many threads of OpenMP (None: as many as the benchmark was given)."""

    def __init__(self, kind: str, peer: str, threads: int | None = None):
        self.kind, self.peer, self.threads = kind, peer, threads
        #: What each contender's rounds found, in their order.
        self.rounds: dict[str, list[dict[str, Any]]] = {}
        #: Why a contender has no figure.
        self.missing: dict[str, str] = {}

    def add(self, name: str, found: dict[str, Any] | None, why: str | None) -> None:
        """Adds the result of a contender's next round, or why it has no figure, whatever other rounds
        find."""
        if found is None:
            self.missing.setdefault(name, why or "nothing was found")
            self.rounds.pop(name, None)
        elif name not in self.missing:
            self.rounds.setdefault(name, []).append(found)

    def rate(self, name: str) -> float | None:
        """Tokens a second, the median of rounds; None where there is none."""
        rounds = self.rounds.get(name)
        return median(each["tokens_a_second"] for each in rounds) if rounds else None

    def ratio(self, name: str) -> float | None:
        """A contender's tokens a second over the peer's."""
        own, theirs = self.rate(name), self.rate(self.peer)
        return own / theirs if own and theirs else None

    def pairs(self, name: str) -> list[float]:
        """A contender's tokens a second over the peer's, in each round."""
        own, theirs = self.rounds.get(name, []), self.rounds.get(self.peer, [])
        return [
            one["tokens_a_second"] / other["tokens_a_second"] for one, other in zip(own, theirs, strict=False)
        ]

    def loss_difference(self, name: str) -> float | None:
        """The largest relative difference of a number of a contender's from the one that the peer's first
        round found, over all rounds, ranks and steps: 0 where all are equal, bit by bit. None where one is
        missing. The numbers of training are losses, those of decoding are logits of
        some steps."""
        first = next(iter(self.rounds.get(self.peer, [])), None)
        mine = self.rounds.get(name)
        if first is None or not mine:
            return None
        return max(difference(each["numbers"], first["numbers"]) for each in mine)

    def most(self, name: str, what: str) -> int | None:
        found = [each[what] for each in self.rounds.get(name, []) if each[what] is not None]
        return max(found, default=None)

    def to_json(self) -> dict[str, Any]:
        figures = {}
        for name, rounds in self.rounds.items():
            if rounds:
                figures[name] = {
                    "tokens_a_second": self.rate(name),
                    "rounds": [each["tokens_a_second"] for each in rounds],
                    "ratio": self.ratio(name),
                    "pairs": self.pairs(name),
                    "apart": self.loss_difference(name),
                    # The first rank's, of the first round.
                    "numbers": rounds[0]["numbers"][0],
                    "calls": rounds[0]["calls"],
                    **{what: self.most(name, what) for what in MEMORY},
                }
        of = {"kind": self.kind, "peer": self.peer, "threads": self.threads}
        return {**of, "figures": figures, "missing": self.missing}


def difference(ranks: list[list[float]], others: list[list[float]]) -> float:
    """The largest relative difference between two rounds' numbers, which are a list for each rank."""
    pairs = [pair for one, other in zip(ranks, others, strict=True) for pair in zip(one, other, strict=True)]
    found = [0.0 if a == b else abs(a - b) / max(abs(a), abs(b)) for a, b in pairs]
    # A number that is none differs from everything.
    return math.inf if any(math.isnan(each) for each in found) else max(found, default=0.0)


def cells(rows: list[Row], names: list[str], peer: str) -> tuple[list[str], list[list[str]]]:
    """The table's heading and lines: of each contender tokens a second of every round, then the ratio."""
    heading = ["kind", "contender", "tokens/s", "rounds", f"of {peer}", "pairs", "loss difference"]
    heading += ["peak MiB", "reserved MiB", "device MiB"]
    lines = []
    for row in rows:
        for name in names:
            rates = " ".join(f"{each['tokens_a_second']:,.0f}" for each in row.rounds.get(name, []))
            rate, ratio, difference = row.rate(name), row.ratio(name), row.loss_difference(name)
            pairs = row.pairs(name)
            lines.append(
                [
                    row.kind if row.threads is None else f"{row.kind}, {row.threads} threads",
                    name,
                    "-" if rate is None else f"{rate:,.0f}",
                    rates or "-",
                    "-" if ratio is None else f"{ratio:.3f}",
                    f"{min(pairs):.3f}-{max(pairs):.3f}" if pairs else "-",
                    "-" if difference is None else f"{difference:.1e}" if difference else "0",
                    *[
                        table.figure(None if (count := row.most(name, what)) is None else count / 2**20)
                        for what in MEMORY
                    ],
                ]
            )
    return heading, lines
