"""What options may be: types for argparse, which say what they expect."""

import argparse
import math

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
