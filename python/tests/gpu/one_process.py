"""Runs programs in processes of their own: `symmpool.install()` can only be done first."""

import subprocess
import sys
import textwrap


def run_program(program, folder=None):
    """Output and errors of a program in Python that ends well."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr
