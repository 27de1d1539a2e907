"""Ranks that are processes, for tests.

`run(2, function, ...)` calls `function(group, ...)` in two processes, which meet in a store of
files, and returns what became of each. A function is named by its module and name, so it stands at
the top of a test file; what it is given and what it returns travels pickled.

No process outlives the call, and none is killed but by its own number.
"""

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Outcome:
    """What became of a rank: what its function returned, or how it failed."""

    rank: int
    status: int
    value: object = None
    error: str | None = None


def run(world, function, *arguments, limit=60, silent=(), environment=None):
    """Runs the ranks. Ranks in `silent` do not end by themselves: they are killed when the others
    have ended. Fails, after ending all, if another has not ended after `limit` seconds."""
    with tempfile.TemporaryDirectory(prefix="symmpool-test-") as folder:
        here = Path(folder)
        (here / "store").mkdir()
        # Where the function's file lies, for files in folders beside this one's.
        folder_of_file = str(Path(function.__code__.co_filename).resolve().parent)
        with (here / "task").open("wb") as task:
            pickle.dump([folder_of_file], task)
            pickle.dump((function.__module__, function.__name__, world, arguments), task)
        processes = []
        try:
            for rank in range(world):
                command = [sys.executable, __file__, folder, str(rank)]
                variables = {**os.environ, **(environment or {})}
                processes.append(subprocess.Popen(command, env=variables))
            for rank, process in enumerate(processes):
                if rank not in silent:
                    process.wait(limit)
        finally:
            for process in processes:
                # By its own number, which is not reused before it is waited for.
                process.kill()
                process.wait()
        return [outcome(here, rank, process) for rank, process in enumerate(processes)]


def values(world, function, *arguments, **options):
    """What every rank returned, when all must have."""
    outcomes = run(world, function, *arguments, **options)
    for found in outcomes:
        assert found.error is None and found.status == 0, f"rank {found.rank}: {found.error}"
    return [found.value for found in outcomes]


def outcome(here, rank, process):
    try:
        value, error = pickle.loads((here / f"result.{rank}").read_bytes())
    except FileNotFoundError:
        value, error = None, f"ended without a result, status {process.returncode}"
    return Outcome(rank, process.returncode, value, error)


def main(folder, rank):
    import symmpool

    here = Path(folder)
    with (here / "task").open("rb") as task:
        # First, as what comes after may be made of what is there.
        sys.path.extend(pickle.load(task))
        module, name, world, arguments = pickle.load(task)
    value, error = None, None
    try:
        function = getattr(importlib.import_module(module), name)
        group = symmpool.Group(rank, world, f"file://{here}/store", timeout=20)
        value = function(group, *arguments)
    except BaseException:
        error = traceback.format_exc()
    part = here / f"part.{rank}"
    part.write_bytes(pickle.dumps((value, error)))
    part.rename(here / f"result.{rank}")
    return 0 if error is None else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
