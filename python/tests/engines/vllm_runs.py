"""Runs of vLLM in processes of their own."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

FOLDER = pathlib.Path(__file__).parent
LINE = "serves vLLM"


def environment(ranks, **variables):
    """Ranks are bound to cores, as vLLM asks for."""
    cores = sorted(os.sched_getaffinity(0))
    bound = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    return {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": bound,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **variables,
    }


def shared_memory():
    """Returns the shared memory that vLLM's own communicators have made."""
    return set(pathlib.Path("/dev/shm").glob("vllm_dist_*"))


def generate(model, ranks=2, variables=None, timeout=900, **options):
    """The result of `generate.py`, and what it wrote besides."""
    options = {"tensor_parallel_size": ranks, "enforce_eager": True, **options}
    before = shared_memory()
    # vLLM leaves its sockets behind, and its own communicator shared memory.
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(
            [sys.executable, str(FOLDER / "generate.py"), model, json.dumps(options)],
            env=environment(ranks, TMPDIR=folder, **(variables or {})),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    left = shared_memory() - before
    for path in left:
        path.unlink()
    log = ran.stdout + ran.stderr
    found = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
    assert found, log[-6000:]
    return json.loads(found[0].removeprefix("RESULT ")), log
