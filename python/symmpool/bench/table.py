"""Sizes and figures for people, and the results of a run as a table and as JSON."""

import re
from statistics import median

from symmpool.bench import timing

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text):
    """Bytes of "4096", "16K", "1.5M", "2GiB"; units are powers of 1024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        raise ValueError(f"{text!r} is not a size; write 4096, 16K, 1M or 2G")
    size = float(found[1]) * UNITS[found[2].upper()]
    if size < 1 or size != int(size):
        raise ValueError(f"{text!r} is not a whole number of bytes above 0")
    return int(size)


def sizes_between(low, high, factor):
    """Sizes from `low` to at most `high`, each `factor` times the last."""
    if factor <= 1:
        raise ValueError(f"a factor of {factor}; more than 1 is needed")
    sizes, size = [], low
    while size <= high:
        sizes.append(int(size))
        size = max(size * factor, size + 1)
    if not sizes:
        raise ValueError(f"no size from {show_size(low)} to {show_size(high)}")
    return sizes


def show_size(size):
    for unit in ("GiB", "MiB", "KiB"):
        whole = UNITS[unit[0]]
        if size >= whole:
            number = size / whole
            return f"{number:.0f} {unit}" if number == int(number) else f"{number:.2f} {unit}"
    return f"{size} B"


def bus_bandwidth(size, world, microseconds):
    """Bus bandwidth in GB/s of an all-reduce of `size` bytes, as nccl-tests defines it."""
    return 2 * (world - 1) / world * size / microseconds / 1e3


class Row:
    """The results of one size."""

    def __init__(self, size, world):
        self.size = size
        self.world = world
        #: Microseconds per call of the slowest rank in each round, by contender.
        self.rounds = {}
        #: The form of these calls, by contender: the fastest in the trial.
        self.forms = {}
        #: Microseconds per call in each form that was tried, by contender.
        self.tried = {}
        #: Microseconds of host time per call, and until it was done, by contender.
        self.eager = {}
        #: Why a contender has no figure for this size.
        self.missing = {}

    def microseconds(self, name):
        """The median over rounds; None if it was not measured."""
        rounds = self.rounds.get(name)
        return median(rounds) if rounds else None

    def best(self, names):
        """The fastest of `names` and its time; (None, None) if none was measured."""
        timed = [(self.microseconds(name), name) for name in names if self.rounds.get(name)]
        return min(timed)[::-1] if timed else (None, None)

    def shown(self, name):
        """The time as in a table, with the form in which it was measured."""
        return with_form(self.microseconds(name), self.forms.get(name))

    def figures(self, more):
        """The JSON of each contender that was measured. `more` adds the entries of this kind of row."""
        found = {}
        for name, rounds in self.rounds.items():
            if rounds:
                form, tried = self.forms.get(name), self.tried.get(name)
                found[name] = {"us": self.microseconds(name), **more(name), "rounds_us": rounds}
                found[name] |= {"form": form} if form else {}
                found[name] |= {"forms_us": tried} if tried else {}
        return found

    def to_json(self):
        def more(name):
            bandwidth = bus_bandwidth(self.size, self.world, self.microseconds(name))
            host, total = self.eager.get(name, (None, None))
            eager = {} if host is None else {"eager_host_us": host, "eager_total_us": total}
            return {"busbw_gb_s": bandwidth, **eager}

        return {"bytes": self.size, "figures": self.figures(more), "missing": self.missing}


def figure(value):
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 100 else f"{value:,.1f}" if value < 10_000 else f"{value:,.0f}"


def with_form(time, form):
    return "-" if time is None else figure(time) + timing.short(form)


def cells(rows, ours, peers):
    """The table's heading and lines. `ours` and `peers` are names of contenders."""
    names = [*ours, *peers]
    heading = ["size", *names, "busbw GB/s", "best contender", "us", "peer/ours"]
    lines = []
    for row in rows:
        _, own = row.best(ours)
        rival, theirs = row.best(peers)
        bandwidth = None if own is None else bus_bandwidth(row.size, row.world, own)
        ratio = None if own is None or theirs is None else theirs / own
        times = [row.shown(name) for name in names]
        end = [figure(bandwidth), rival or "-", figure(theirs), figure(ratio)]
        lines.append([show_size(row.size), *times, *end])
    return heading, lines


def eager_cells(rows, names):
    """Host time per call and time until it is done, by contender."""
    heading = ["size", *names]
    lines = []
    for row in rows:
        pairs = [row.eager.get(name) for name in names]
        shown = ["-" if pair is None else f"{figure(pair[0])} / {figure(pair[1])}" for pair in pairs]
        lines.append([show_size(row.size), *shown])
    return heading, lines


def format_table(heading, lines):
    """The table as text, with columns aligned to the right."""
    widths = [max(len(line[at]) for line in [heading, *lines]) for at in range(len(heading))]

    def line(texts):
        return "  ".join(text.rjust(width) for text, width in zip(texts, widths)).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(heading), rule, *map(line, lines)])
