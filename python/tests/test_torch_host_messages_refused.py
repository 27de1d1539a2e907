"""Tests of other messages of CPU tensors on the backend where one is refused, given up, or early."""

import datetime

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin

import symmpool
from symmpool.groups.process_groups import ours
from symmpool.torch_backend import served_devices


def refused_beside_large(group, folder):
    """A small message that is refused leaves the large one alone that is waited for."""
    me, _ = begin(group, folder, "symmpool")
    count, got = 8_000_000, torch.zeros(4)
    if me == 0:
        dist.send(torch.ones(4), 1, tag=1)
        large = torch.zeros(count)
        work = dist.irecv(large, 1, tag=2)
        with pytest.raises(symmpool.DivergedError, match="stays usable"):
            work.wait()
        assert large.eq(3).all()
        dist.send(torch.full((4,), 5.0), 1, tag=3)
    else:
        work = dist.isend(torch.full((count,), 3.0), 0, tag=2)
        with pytest.raises(symmpool.DivergedError):
            dist.recv(torch.zeros(4, dtype=torch.int32), 0, tag=1)
        work.wait()
        dist.recv(got, 0, tag=3)
    dist.destroy_process_group()
    return got.tolist()


def test_a_refused_message_leaves_a_large_one_alone(tmp_path):
    assert values(2, refused_beside_large, str(tmp_path))[1] == [5.0] * 4


def given_up(group, folder):
    """A large message that was given up is not received in the place of the next one."""
    me, _ = begin(group, folder, "symmpool")
    beside = dist.new_group(backend="gloo")
    got = torch.zeros(1 << 18)
    if me == 0:
        ours(dist.group.WORLD).timeout_is(datetime.timedelta(seconds=1))
        with pytest.raises(symmpool.TimeoutError):
            dist.send(torch.ones(1 << 18), 1)
        ours(dist.group.WORLD).timeout_is(datetime.timedelta(seconds=60))
    dist.barrier(group=beside)
    if me == 0:
        dist.send(torch.full((1 << 18,), 2.0), 1)
    else:
        dist.recv(got, 0)
    dist.destroy_process_group()
    return got[0].item()


def test_a_given_up_message_is_not_received(tmp_path):
    assert values(2, given_up, str(tmp_path))[1] == 2.0


def wrong_ranks(group, folder):
    begin(group, folder, "symmpool")
    x, world = torch.ones(2), dist.group.WORLD
    calls = [
        lambda: dist.send(x, 7),
        lambda: dist.isend(x, 7),
        lambda: dist.recv(x, 7),
        lambda: dist.irecv(x, 7),
    ]
    calls += [lambda: world.send([x], 7, 0), lambda: world.recv([x], 2, 0), lambda: world.send([x], -1, 0)]
    # Gloo carries these.
    calls += [
        lambda: world.send([x], 7, -3),
        lambda: world.send([x, x], 7, 0),
        lambda: world.recv([x], 7, -3),
    ]
    for call in calls:
        with pytest.raises((symmpool.InvalidArgumentError, ValueError), match="rank"):
            call()
    dist.destroy_process_group()
    return True


def test_a_rank_that_is_none_is_refused(tmp_path):
    assert values(2, wrong_ranks, str(tmp_path)) == [True] * 2


def unserved(group, folder):
    """Rank 0 sends before the ranks agree that collectives are not served, and rank 1 receives afterwards."""
    me, _ = begin(group, folder, "symmpool", timeout=datetime.timedelta(seconds=20))
    if me == 0:

        def missing(*_):
            raise symmpool.OutOfMemoryError("no memory is left")

        served_devices.cache.communicator = missing
    x, got = torch.ones(3), torch.zeros(3)
    work = dist.isend(torch.full((3,), 4.0), 1) if me == 0 else None
    dist.all_reduce(x)
    if me == 0:
        work.wait()
    else:
        dist.recv(got, 0)
    counts = symmpool.backend.backend_counts()
    dist.destroy_process_group()
    return got.tolist(), x.tolist(), list(counts["all_reduce"])


def test_ranks_choose_one_carrier(tmp_path):
    found = values(2, unserved, str(tmp_path))
    assert found == [([0.0] * 3, [2.0] * 3, ["gloo"]), ([4.0] * 3, [2.0] * 3, ["gloo"])]


def without_store(group, folder):
    """A first message asks no store for anything."""
    me, _ = begin(group, folder, "symmpool")
    asked = []
    store = ours(dist.group.WORLD)._messages._store

    class Gone:
        def __getattr__(self, name):
            asked.append(name)
            return getattr(store, name)

    ours(dist.group.WORLD)._messages._store = Gone()
    got = torch.zeros(3)
    if me == 0:
        dist.send(torch.ones(3), 1)
    else:
        dist.recv(got, 0)
    dist.destroy_process_group()
    return got.tolist(), asked


def test_a_first_message_needs_no_store(tmp_path):
    assert values(2, without_store, str(tmp_path)) == [([0.0] * 3, []), ([1.0] * 3, [])]
