"""Devices by name and by number: a CUDA device's number, or -1 for the CPU."""

from __future__ import annotations

import sys
from typing import Any

from symmpool.errors import InvalidArgumentError, UnsupportedError

__all__ = ["name_of", "number_of", "number_of_tensor"]


def number_of(device: str) -> int:
    """The number of the device of a name ("cpu", "cuda", "cuda:N"). "cuda" is torch's current device."""
    if device in ("cpu", "cpu:0"):
        return -1
    kind, _, number = device.partition(":")
    if kind == "cpu":
        raise InvalidArgumentError(f'device: {device!r}: the CPU is one device here; pass "cpu"')
    if device == "cuda" and "torch" in sys.modules:
        try:
            return sys.modules["torch"].cuda.current_device()
        except (AssertionError, RuntimeError) as error:
            raise UnsupportedError(f"device: 'cuda': torch has none ({error})") from error
    if kind != "cuda" or not (number.isascii() and number.isdigit()):
        raise InvalidArgumentError(f"device: {device!r} is neither cpu nor cuda:N")
    return int(number)


def name_of(number: int) -> str:
    """The name of the device of a number."""
    return f"cuda:{number}" if number >= 0 else "cpu"


def number_of_tensor(tensor: Any) -> int:
    """The number of the device that a tensor of torch, numpy or this package is on."""
    try:
        return tensor.get_device()
    except AttributeError:
        return number_of(str(getattr(tensor, "device", "cpu")))
