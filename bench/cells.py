"""The results, and how numbers are written in tables."""

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench/results"
#: Kinds and numbers of GPUs, of which the first one that was measured counts.
ONE, TWO = (("h100", 1), ("h200", 1)), (("h100", 2), ("h200", 2))
FOUR = (("h100", 4), ("h200", 4))
ANY = (("h200", 4), *TWO)


def load(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def exists(name):
    return (RESULTS / f"{name}.json").exists()


def recorded(name, places=ANY):
    """((device, number), report) of the first of `places` where it was recorded; (None, None) if nowhere."""
    for device, world in places:
        path = RESULTS / f"gpu/{device}x{world}_{name}.json"
        if path.exists():
            return (device, world), json.loads(path.read_text())
    return None, None


#: Columns in which more than 1 says that ours is faster than the peer.
RATIOS = (
    "best contender / ours",
    "best contender / symmpool",
    "NCCL / symmpool",
    "NCCL / on torch's memory",
    "symmpool / NCCL",
)
#: Times within this part of each other count as equal.
EQUAL = 0.02


def table(head, rows):
    """A table, and below it how often its ratios say that ours is ahead of the peers, equal and behind."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    scores = [
        f"`{name}`: {score([row[column] for row in rows])}."
        for column, name in enumerate(head)
        if name in RATIOS
    ]
    return "\n".join([*lines, *([""] if scores else []), *scores])


def score(ratios):
    """How often ours is ahead, equal and behind, by ratios as they stand in a table."""
    found = [float(ratio.replace(",", "")) for ratio in ratios if ratio != "-"]
    ahead = sum(ratio > 1 + EQUAL for ratio in found)
    behind = sum(ratio < 1 - EQUAL for ratio in found)
    return (
        f"ahead in {ahead} of {len(found)} cells, equal (within {EQUAL:.0%}) in "
        f"{len(found) - ahead - behind}, behind in {behind}"
    )


def size(count):
    """Bytes as a power-of-two unit: 65536 is 64 KiB."""
    for unit in ["B", "KiB", "MiB", "GiB"]:
        if count < 1024 or unit == "GiB":
            return f"{count:g} {unit}"
        count /= 1024


def figure(value):
    """Three significant digits, or a dash where nothing was measured."""
    if value is None:
        return "-"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def exact(value):
    """Two decimals; a dash where nothing was measured."""
    return "-" if value is None else f"{value:,.2f}"
