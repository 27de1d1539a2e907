"""`python -m symmpool doctor`: what this machine has, and what works on it."""

from symmpool.doctor.cli import main

__all__ = ["main"]
