"""Ranks that are processes, for tests.

`run(2, function, ...)` calls `function(group, ...)` in two processes, whose rendezvous is a file
store, and returns the outcome of each. A function is found by its module and name, so it must be
at the top level of a test file; its arguments and its result are pickled.

Importing torch and its compiler takes seconds. So a fork server imports them once, and ranks of test
files that import torch are forked from it. The fork server has used neither torch nor the package.

No rank outlives the call. Ranks are killed only by their own process id.
"""

import atexit
import functools
import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Outcome:
    """The outcome of a rank: what its function returned, or its error."""

    rank: int
    status: int
    value: object = None
    error: str | None = None


def run(world, function, *arguments, limit=120, silent=(), environment=None):
    """Runs the ranks. Ranks in `silent` do not end by themselves: they are killed when the others
    have ended. If another rank has not ended after `limit` seconds, all are killed and this fails."""
    with tempfile.TemporaryDirectory(prefix="symmpool-test-") as folder:
        here = Path(folder)
        (here / "store").mkdir()
        # The folder of the function's file, which may be another one than this file's.
        folder_of_file = str(Path(function.__code__.co_filename).resolve().parent)
        with (here / "task").open("wb") as task:
            pickle.dump([folder_of_file], task)
            pickle.dump((function.__module__, function.__name__, world, arguments), task)
        processes = []
        try:
            variables = {**os.environ, **(environment or {})}
            # Libraries in the fork server have already read its environment. CUDA's may have begun to work
            # there, which no child can go on with.
            on_devices = Path(folder_of_file).name == "gpu"
            forked = environment is None and "torch" in function.__globals__ and not on_devices
            for rank in range(world):
                if forked:
                    processes.append(fork_server().rank(folder, rank, variables))
                else:
                    command = [sys.executable, __file__, folder, str(rank)]
                    processes.append(subprocess.Popen(command, env=variables))
            for rank, process in enumerate(processes):
                if rank not in silent:
                    process.wait(limit)
        finally:
            for process in processes:
                # A process id is not reused before the process is waited for.
                process.kill()
                process.wait()
        return [outcome(here, rank, process) for rank, process in enumerate(processes)]


def values(world, function, *arguments, **options):
    """Returns the results of every rank. Fails if a rank did not return."""
    outcomes = run(world, function, *arguments, **options)
    failed = [found for found in outcomes if found.error is not None or found.status != 0]
    # All errors are shown, because one rank's error is often the cause of another's.
    assert not failed, "\n".join(f"rank {found.rank}: {found.error}" for found in failed)
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
        # The path comes first, because arguments may need modules in that folder to be unpickled.
        sys.path.extend(pickle.load(task))
        module, name, world, arguments = pickle.load(task)
    value, error = None, None
    if hosts := os.environ.get("SYMMPOOL_TEST_HOSTS"):
        # A letter for each rank, which names the host that it pretends to be on.
        os.environ["SYMMPOOL_HOST_ID"] = hosts[rank % len(hosts)]
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


class ForkServer:
    """The client of the fork server. It sends one request at a time, and gets one reply to each."""

    def __init__(self):
        command = [sys.executable, __file__, "fork server"]
        pipe = subprocess.PIPE
        # It ends when its input is closed, at the latest when this process ends.
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe)

    def request(self, *request):
        pickle.dump(request, self.process.stdin)
        self.process.stdin.flush()
        return pickle.load(self.process.stdout)

    def rank(self, folder, rank, variables):
        return Forked(self, self.request("fork", folder, rank, variables))


class Forked:
    """The part of the interface of `subprocess.Popen` that is needed here."""

    def __init__(self, server, pid):
        self.server, self.pid, self.returncode = server, pid, None

    def wait(self, limit=None):
        if self.returncode is None:
            self.returncode = self.server.request("wait", self.pid, limit)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"rank, process {self.pid}", limit)
        return self.returncode

    def kill(self):
        if self.returncode is None:
            self.server.request("kill", self.pid)


@functools.cache
def fork_server():
    return ForkServer()


def serve_forks():
    """The loop of the fork server. In a forked rank it returns that rank's task."""
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch._inductor.compile_fx
    import torch.distributed  # noqa: F401

    import symmpool  # noqa: F401

    # Collections in ranks need not look at all of that again.
    gc.collect()
    gc.freeze()
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # Output of ranks goes elsewhere than the replies.
    os.dup2(2, 1)
    # The exit status by process id; None while the process has not been waited for.
    statuses = {}
    while True:
        try:
            kind, *arguments = pickle.load(requests)
        except EOFError:
            return None
        if kind == "fork":
            folder, rank, variables = arguments
            reply = os.fork()
            if reply == 0:
                replies.close()
                nothing = os.open(os.devnull, os.O_RDONLY)
                os.dup2(nothing, 0)
                os.close(nothing)
                os.environ.clear()
                os.environ.update(variables)
                return folder, rank
            statuses[reply] = None
        elif kind == "wait":
            pid, limit = arguments
            end = None if limit is None else time.monotonic() + limit
            reply = statuses[pid]
            while reply is None and (end is None or time.monotonic() < end):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    reply = statuses[pid] = os.waitstatus_to_exitcode(status)
                else:
                    time.sleep(0.002)
        else:
            (pid,) = arguments
            reply = None
            if statuses[pid] is None:
                os.kill(pid, signal.SIGKILL)
        pickle.dump(reply, replies)
        replies.flush()


def end(status):
    """Ends a forked rank as the interpreter would, but for taking apart what it has of its fork server:
    torch's tables and the interpreter's modules, which takes longer than most ranks run."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    task = sys.argv[1:]
    forked = task == ["fork server"]
    if forked:
        task = serve_forks()
    if task is not None:
        # Ctrl-C raises KeyboardInterrupt, even if the tests run in the background of a script.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        status = main(task[0], int(task[1]))
        if forked:
            end(status)
        sys.exit(status)
