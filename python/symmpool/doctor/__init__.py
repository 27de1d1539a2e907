"""`python -m symmpool doctor`: what this machine has, and what will work on it."""

from symmpool.doctor.cli import main

__all__ = ["main"]
