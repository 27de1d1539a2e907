"""`python -m symmpool`: what the package can run by itself."""

import argparse
import sys


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m symmpool", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("bench", help="measure collectives beside their peers", add_help=False)
    commands.add_parser("doctor", help="what this machine has, and what will work", add_help=False)
    given, rest = parser.parse_known_args(arguments)
    if given.command == "bench":
        from symmpool.bench import cli

        return cli.main(rest)
    if given.command == "doctor":
        from symmpool import doctor

        return doctor.main(rest)
    return 2


if __name__ == "__main__":
    sys.exit(main())
