"""Types of options for argparse. Their errors say what is expected."""

import argparse
import math
from pathlib import Path

from symmpool.bench import table


def size(text):
    try:
        return table.parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def comma_separated(text):
    return [part.strip() for part in text.split(",") if part.strip()]


def size_list(text):
    sizes = [size(part) for part in comma_separated(text)]
    if not sizes:
        raise argparse.ArgumentTypeError(f"{text!r} has no size; write 4K,16K,1M")
    return sizes


def positive(text):
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def _number(text, is_right, what):
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not is_right(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a {what}")
    return number


def factor(text):
    return _number(text, lambda number: 1 < number < math.inf, "number above 1")


def bandwidth(text):
    return _number(text, lambda number: 0 < number < math.inf, "number above 0")


def imbalance(text):
    # Larger exponents overflow.
    return _number(text, lambda number: 0 <= number <= 50, "number from 0 to 50")


def seconds(text):
    # torch counts milliseconds with 32 bits.
    return _number(text, lambda number: 0.001 <= number <= 1e6, "time from 0.001 to 1,000,000 seconds")


def count_list(text):
    """Whole numbers above 0."""
    found = [positive(each) for each in comma_separated(text)]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names no number")
    return found


def add_measuring(command, calls=None):
    """Adds the options of every benchmark: how often contenders are timed and in which forms, the timeout,
    and where results go. `calls` is the default of `--calls`."""
    several = "each is tried, and the best counts; several: 1,10,20,100"
    default = ",".join(map(str, calls)) if calls else "1,10,20,100, fewer of large ones"
    command.add_argument(
        "--rounds", type=positive, default=3, help="rounds, after a trial of all forms (default 3)"
    )
    command.add_argument(
        "--calls",
        type=count_list,
        default=calls,
        help=f"calls in a CUDA graph; {several} (default {default})",
    )
    command.add_argument("--replays", type=positive, default=9, help="spans of calls per round (default 9)")
    command.add_argument("--eager", action="store_true", help="also try calls outside of graphs")
    command.add_argument("--timeout", type=seconds, default=120, help="longest wait in seconds")
    command.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    command.add_argument("--plot", type=Path, metavar="FILE", help="write a picture: .png, .svg")
