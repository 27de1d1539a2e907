"""Programs of what works better than on gloo, as the documents say: jobs that come back after a rank died,
tensors with strides, calls that ranks make differently. `packages` has tests with libraries for training."""

import datetime
import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from ranks import values

from symmpool import DivergedError, InvalidArgumentError

#: A job whose rank 1 ends in its first life, in a way that is given, in the middle of training.
JOB = """
import os, signal, sys
import torch
import torch.distributed as dist

life, way, folder = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), sys.argv[1], sys.argv[2]
dist.init_process_group("symmpool")
rank, world = dist.get_rank(), dist.get_world_size()
x = torch.ones(1 << 16)
for step in range(20):
    dist.all_reduce(x)
    x /= world
    if life == 0 and rank == 1 and step == 7:
        if way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "exits":
            os._exit(3)
        raise RuntimeError("on purpose")
assert (x == 1).all()
open(os.path.join(folder, f"{life}-{rank}"), "w").close()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("way", ["killed", "exits", "raises"])
def test_a_job_whose_rank_died_comes_back_under_torchrun(way, tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command += [
        "--max-restarts",
        "1",
        "--monitor-interval",
        "0.2",
        str(tmp_path / "job.py"),
        way,
        str(tmp_path),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    ended = sorted(path.name for path in tmp_path.iterdir() if path.name[0].isdigit())
    assert ended == ["1-0", "1-1", "1-2"]


def begin(group, folder, backend="symmpool", seconds=30):
    store = dist.FileStore(os.path.join(folder, "store"), group.world)
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group(backend, store=store, rank=group.rank, world_size=group.world, timeout=timeout)
    return group.rank, group.world


def strided(group, folder, backend="symmpool"):
    me, world = begin(group, folder, backend)
    whole = torch.full((4, 6), 10.0 + me)
    dist.all_reduce(whole[:, 1::3])
    expected = torch.full((4, 6), 10.0 + me)
    expected[:, 1::3] = sum(10.0 + rank for rank in range(world))
    dist.destroy_process_group()
    return torch.equal(whole, expected)


#: What is said of gloo holds for this version of torch; others may have mended it.
GLOO = torch.__version__.startswith("2.11.")


def test_a_reduction_of_a_tensor_with_strides_leaves_its_neighbours_alone(tmp_path):
    assert values(3, strided, str(tmp_path)) == [True] * 3
    if GLOO:
        (tmp_path / "gloo").mkdir()
        assert values(3, strided, str(tmp_path / "gloo"), "gloo") == [False] * 3, "the documents say so"


def wrong_calls(group, folder):
    me, world = begin(group, folder)
    found = []
    x, out = torch.ones(4), torch.zeros(4 * world)
    for call in (
        lambda: dist.all_reduce(torch.ones(4 + (me == 1))),
        lambda: dist.all_reduce(torch.ones(4, dtype=torch.float64 if me == 1 else torch.float32)),
        lambda: dist.all_reduce(x) if me == 1 else dist.all_gather_into_tensor(out, x),
        lambda: dist.broadcast(x, 1 if me == 1 else 0),
    ):
        began = time.monotonic()
        with pytest.raises(DivergedError) as caught:
            call()
        found.append(
            (caught.value.ranks == (1,), "rank 1" in str(caught.value), time.monotonic() - began < 10)
        )
    # Arguments that one rank refuses.
    with pytest.raises(InvalidArgumentError if me == 1 else DivergedError):
        dist.all_gather_into_tensor(torch.zeros(5) if me == 1 else out, x)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return all(all(each) for each in found) and x[0].item() == world


def test_a_call_that_ranks_make_differently_is_named_on_all_at_once(tmp_path):
    assert values(3, wrong_calls, str(tmp_path)) == [True] * 3


def waits(group, folder):
    """How long gloo waits where one rank makes another call, with a timeout of two seconds, and its error."""
    me, world = begin(group, folder, "gloo", 2)
    x, began = torch.ones(4), time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(x) if me == 1 else dist.all_gather_into_tensor(torch.zeros(4 * world), x)
    took = time.monotonic() - began
    # gloo aborts a process that ends its group then.
    print(caught.value, flush=True)
    return took, "Timed out" in str(caught.value)


@pytest.mark.skipif(not GLOO, reason="the documents speak of torch 2.11's gloo")
def test_gloo_waits_for_its_timeout_where_a_call_differs(tmp_path):
    waited = values(3, waits, str(tmp_path))
    # A rank whose time runs out closes its connections, which others may see before their own time runs out.
    assert all(took > 1.8 for took, _ in waited) and any(timed_out for _, timed_out in waited), waited
