"""PyTorch's own tests of torch.distributed, run on a backend of one's choice.

    python python/tests/torch_suite.py --backend cuda:symmpool,cpu:gloo --as nccl --world 2 --out FILE

The tests come with every install of torch (`torch.testing._internal.distributed.distributed_test`). torch
starts new processes for each of them, which import torch again; here two processes or more run one test
after the other, each in a process group of its own, and are started anew only behind a test that did not
end, or failed on some of the ranks. `--as` is the backend that the tests see, which
decides what they test; `--backend` is the one that their process groups have. The file has a line of JSON a
test: what became of it on each rank.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

#: Tests that cannot run so, and why.
LEFT_OUT = {
    "test_ddp_has_finalized": "ends its process by torch's watchdog",
    "test_init_from_env": "ends the process's default group for others",
}
#: Longest time of a test, in seconds.
LIMIT = 60


def names():
    """The tests' names, in torch's own process-free order."""
    base = module().DistributedTest._DistTestBase
    return sorted(name for name in dir(base) if name.startswith("test_") and name not in LEFT_OUT)


def module():
    from torch.testing._internal.distributed import distributed_test

    return distributed_test


def patch(backend, presented_backend):
    """Makes groups of the backend under test where tests ask for the backend that they see."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if backend == presented_backend:
        return
    for place in ("init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration"):
        inner = getattr(distributed_c10d, place)

        def call(*arguments, _inner=inner, **options):
            if str(options.get("backend", "")).lower() == presented_backend:
                options["backend"] = backend
            return _inner(*arguments, **options)

        for owner in (dist, distributed_c10d, module().dist):
            setattr(owner, place, call)


def test_class():
    suite = module()

    class Suite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        pass

    return Suite


def run_one(kind, name, folder, options):
    """Returns the outcome of a test in this process: "ok", "skipped", or how it failed."""
    import unittest

    import torch
    import torch.distributed as dist
    from torch.testing._internal import common_utils

    suite = module()
    environment = dict(os.environ)
    os.environ["TEMP_DIR"] = str(folder)
    test = kind(name)
    test.rank = options.rank
    test.file_name = str(folder / "init")
    seconds = suite.CUSTOM_PG_TIMEOUT.get(name, suite.default_pg_timeout)
    if torch.cuda.is_available():
        torch.cuda.set_device(options.rank)
    timeout = datetime.timedelta(seconds=min(seconds, options.limit / 2))
    dist.init_process_group(
        options.backend,
        init_method=f"file://{test.file_name}",
        world_size=options.world,
        rank=options.rank,
        timeout=timeout,
    )
    try:
        # The folder is new: to remove what others may have put there already would lose them.
        suite.Barrier.barrier_id = 0
        suite.Barrier.sync()
        common_utils.set_rng_seed()
        getattr(test, name)()
        suite.Barrier.sync()
    except unittest.SkipTest as why:
        return "skipped", str(why)
    except SystemExit as ended:
        return ("skipped", str(ended.code)) if ended.code else ("ok", "")
    except BaseException:
        return "failed", traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        # Variables that a test has set would change what others find.
        os.environ.clear()
        os.environ.update(environment)
        dist.set_debug_level_from_env()
    return "ok", ""


def serve(options):
    """A rank: runs the tests whose names come, a line each, and says what became of them."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch.distributed as dist

    if "symmpool" in options.backend:
        import symmpool  # noqa: F401
    patch(options.backend, options.presented_backend)
    kind = test_class()
    assert dist.is_available()
    for line in sys.stdin:
        name, folder = json.loads(line)
        found = run_one(kind, name, Path(folder), options)
        out.write(json.dumps(found) + "\n")
        out.flush()
    # Threads of a test that failed may never end.
    os._exit(0)


class Ranks:
    """Processes that run tests together."""

    def __init__(self, options):
        command = [sys.executable, __file__, "--backend", options.backend, "--as", options.presented_backend]
        command += ["--world", str(options.world), "--limit", str(options.limit)]
        environment = {
            **os.environ,
            "BACKEND": options.presented_backend,
            "WORLD_SIZE": str(options.world),
            "TEMP_DIR": tempfile.gettempdir(),
        }
        environment.setdefault("OMP_NUM_THREADS", "1")
        pipe = subprocess.PIPE

        def start(rank):
            # The first ranks are on the first host.
            own = dict(environment)
            if options.hosts > 1:
                own["SYMMPOOL_HOST_ID"] = f"host{rank * options.hosts // options.world}"
            return subprocess.Popen(
                [*command, "--rank", str(rank)], stdin=pipe, stdout=pipe, env=own, text=True
            )

        self.processes = [start(rank) for rank in range(options.world)]

    def run(self, name, limit):
        """Returns the outcome of a test on each rank."""
        import threading

        with tempfile.TemporaryDirectory(prefix="torch-suite-") as folder:
            for part in ("barrier", "test_dir"):
                (Path(folder) / part).mkdir()
            answers = [["lost", "the process ended"] for _ in self.processes]

            def ask(rank, process):
                try:
                    process.stdin.write(json.dumps([name, folder]) + "\n")
                    process.stdin.flush()
                    line = process.stdout.readline()
                except (BrokenPipeError, ValueError):
                    return
                if line:
                    answers[rank] = json.loads(line)

            threads = [threading.Thread(target=ask, args=each) for each in enumerate(self.processes)]
            for thread in threads:
                thread.start()
            end = datetime.datetime.now() + datetime.timedelta(seconds=limit)
            for thread in threads:
                thread.join(max(0.0, (end - datetime.datetime.now()).total_seconds()))
            for rank, thread in enumerate(threads):
                if thread.is_alive():
                    answers[rank] = ["hung", f"it did not end in {limit} s"]
            if any(thread.is_alive() for thread in threads):
                self.end()
            for thread in threads:
                thread.join()
        return answers

    def end(self):
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()
            # A process that has ended and left input unread takes no more of it.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def judged(answers):
    """One word of what ranks say."""
    words = {answer[0] for answer in answers}
    for word in ("hung", "lost", "failed"):
        if word in words:
            return word
    return "ok" if "ok" in words else "skipped"


def suite(options, report=None):
    """Runs the tests, or those named: what became of each, by name."""
    os.environ.setdefault("BACKEND", options.presented_backend)
    os.environ.setdefault("WORLD_SIZE", str(options.world))
    os.environ.setdefault("TEMP_DIR", tempfile.gettempdir())
    found, ranks = {}, None
    chosen = options.names or names()
    try:
        for name in chosen:
            ranks = ranks or Ranks(options)
            answers = ranks.run(name, options.limit)
            word = found[name] = judged(answers)
            if report is not None:
                report(name, word, answers)
            # Where all failed alike all are at one place.
            if word not in ("ok", "skipped") and len({answer[0] for answer in answers}) > 1 or word == "hung":
                ranks.end()
                ranks = None
    finally:
        if ranks is not None:
            ranks.end()
    return found


def parser():
    it = argparse.ArgumentParser(description="PyTorch's own tests of torch.distributed, on a backend.")
    it.add_argument("names", nargs="*", help="tests to run (default: all)")
    it.add_argument("--backend", required=True, help="of the tests' process groups")
    it.add_argument("--as", dest="presented_backend", required=True, help="the backend that the tests see")
    it.add_argument("--world", type=int, default=2)
    it.add_argument("--hosts", type=int, default=1, help="hosts that the ranks pretend to be on")
    it.add_argument("--limit", type=float, default=LIMIT, help="seconds for a test")
    it.add_argument("--out", help="a file for what became of each test, a line of JSON each")
    it.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    return it


def main():
    options = parser().parse_args()
    if options.rank is not None:
        serve(options)
    out = open(options.out, "w") if options.out else None

    def report(name, word, answers):
        print(f"{word:8} {name}", flush=True)
        if out is not None:
            out.write(json.dumps({"test": name, "found": word, "ranks": answers}) + "\n")
            out.flush()

    found = suite(options, report)
    counts = {word: list(found.values()).count(word) for word in sorted(set(found.values()))}
    print(", ".join(f"{count} {word}" for word, count in counts.items()))


if __name__ == "__main__":
    main()
