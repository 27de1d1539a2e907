"""Ranks that are processes, for tests.

`run(2, function, ...)` calls `function(group, ...)` in two processes, which meet in a store of
files, and returns what became of each. A function is named by its module and name, so it stands at
the top of a test file; what it is given and what it returns travels pickled.

Ranks of test files that import torch are forked by a process that has done so, once: importing it
takes seconds. It has used neither torch nor the package, and its children end as processes of
Python do.

No rank outlives the call, and none is killed but by its own number.
"""

import functools
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
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
            variables = {**os.environ, **(environment or {})}
            # What a process has loaded has read its environment already.
            forked = environment is None and "torch" in function.__globals__
            for rank in range(world):
                if forked:
                    processes.append(nursery().rank(folder, rank, variables))
                else:
                    command = [sys.executable, __file__, folder, str(rank)]
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


class Nursery:
    """The process that forks, seen from here. One question at a time: it answers each."""

    def __init__(self):
        command = [sys.executable, __file__, "nursery"]
        pipe = subprocess.PIPE
        # It ends when this process does, which closes its input.
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe)

    def ask(self, *question):
        pickle.dump(question, self.process.stdin)
        self.process.stdin.flush()
        return pickle.load(self.process.stdout)

    def rank(self, folder, rank, variables):
        return Forked(self, self.ask("fork", folder, rank, variables))


class Forked:
    """As much of a `subprocess.Popen` as is needed here."""

    def __init__(self, nursery, pid):
        self.nursery, self.pid, self.returncode = nursery, pid, None

    def wait(self, limit=None):
        if self.returncode is None:
            self.returncode = self.nursery.ask("wait", self.pid, limit)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"rank, process {self.pid}", limit)
        return self.returncode

    def kill(self):
        if self.returncode is None:
            self.nursery.ask("kill", self.pid)


@functools.cache
def nursery():
    return Nursery()


def tend():
    """The process that forks. A rank's number leaves here, in the rank, with what it is to do."""
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch.distributed  # noqa: F401

    import symmpool  # noqa: F401

    asked, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # What ranks print goes elsewhere than the answers.
    os.dup2(2, 1)
    # Until it is waited for, here alone, a process's number is not used again.
    ended = {}
    while True:
        try:
            kind, *question = pickle.load(asked)
        except EOFError:
            return None
        if kind == "fork":
            folder, rank, variables = question
            answer = os.fork()
            if answer == 0:
                answers.close()
                nothing = os.open(os.devnull, os.O_RDONLY)
                os.dup2(nothing, 0)
                os.close(nothing)
                os.environ.clear()
                os.environ.update(variables)
                return folder, rank
            ended[answer] = None
        elif kind == "wait":
            pid, limit = question
            end = None if limit is None else time.monotonic() + limit
            answer = ended[pid]
            while answer is None and (end is None or time.monotonic() < end):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    answer = ended[pid] = os.waitstatus_to_exitcode(status)
                else:
                    time.sleep(0.002)
        else:
            (pid,) = question
            answer = None
            if ended[pid] is None:
                os.kill(pid, signal.SIGKILL)
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    task = sys.argv[1:]
    if task == ["nursery"]:
        task = tend()
    if task is not None:
        # As in a terminal, also where these tests are run in the background of a script.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(main(task[0], int(task[1])))
