"""What options may be: types for argparse, which say what they expect."""

import argparse
import math
from pathlib import Path

from symmpool.bench import table


def size(text):
    try:
        return table.parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def listed(text):
    return [part.strip() for part in text.split(",") if part.strip()]


def size_list(text):
    sizes = [size(part) for part in listed(text)]
    if not sizes:
        raise argparse.ArgumentTypeError(f"{text!r} has no size; write 4K,16K,1M")
    return sizes


def positive(text):
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def _number(text, is_right, what):
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not is_right(number):
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}")
    return number


def factor(text):
    return _number(text, lambda it: 1 < it < math.inf, "number above 1")


def bandwidth(text):
    return _number(text, lambda it: 0 < it < math.inf, "number above 0")


def imbalance(text):
    # Above that, powers of places leave the range of numbers.
    return _number(text, lambda it: 0 <= it <= 50, "number from 0 to 50")


def seconds(text):
    # torch counts milliseconds with 32 bits.
    return _number(text, lambda it: 0.001 <= it <= 1e6, "time from 0.001 to 1,000,000 seconds")


def count_list(text):
    """Whole numbers above 0."""
    found = [positive(each) for each in listed(text)]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names no number")
    return found


def add_measuring(it, calls=None):
    """What every benchmark has: how often everybody is timed and in which forms, how long it may wait, and
    where the figures go. `calls` are the numbers in graphs unless others are given."""
    told = "each is tried, and the best counts; several: 1,10,20,100"
    default = ",".join(map(str, calls)) if calls else "1,10,20,100, fewer of large ones"
    it.add_argument("--rounds", type=positive, default=3, help="in alternation, after a trial (default 3)")
    it.add_argument("--calls", type=count_list, default=calls, help=f"in a graph; {told} (default {default})")
    it.add_argument("--replays", type=positive, default=9, help="spans of calls a round (default 9)")
    it.add_argument("--eager", action="store_true", help="also try calls outside of graphs")
    it.add_argument("--timeout", type=seconds, default=120, help="longest wait in seconds")
    it.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    it.add_argument("--plot", type=Path, metavar="FILE", help="write a picture: .png, .svg")
