"""`python -m symmpool`: what the package can run by itself."""

import argparse
import os
import sys


def main(arguments=None):
    """Runs `python -m symmpool`: `bench`, `doctor` or `tune`. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m symmpool", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("bench", help="measure collectives and those of other libraries", add_help=False)
    commands.add_parser("doctor", help="what this machine has, and what will work", add_help=False)
    commands.add_parser("tune", help="time all algorithms, and write a table of the fastest", add_help=False)
    given, rest = parser.parse_known_args(arguments)
    if given.command == "bench":
        from symmpool.bench import cli

        return cli.main(rest)
    if given.command == "doctor":
        from symmpool import doctor

        return doctor.main(rest)
    if given.command == "tune":
        from symmpool import tune

        return tune.main(rest)
    return 2


def until_nobody_reads():
    """Runs `main`; the reader of what is printed may stop, as `head` does."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # The rest of the output is printed nowhere, also not at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 128 + 13  # the status that a shell gives to SIGPIPE
    return status


if __name__ == "__main__":
    sys.exit(until_nobody_reads())
