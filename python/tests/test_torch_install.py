"""torch's memory statistics over the numbers of `symmpool.install()`, without a GPU."""

import types

import pytest
import torch

import symmpool
from symmpool.memory import install
from symmpool.memory.torch_stats import TorchStats

MIB = 1 << 20
NUMBERS = {
    "allocated": 3 * MIB,
    "peak_allocated": 5 * MIB,
    "reserved": 8 * MIB,
    "peak_reserved": 10 * MIB,
    "allocs": 7,
    "frees": 4,
    "ooms": 1,
    "retries": 2,
    "graphs": 0,
    "segments": 2,
}


@pytest.fixture
def answers(monkeypatch):
    """torch's functions in Python over ours in C, on a device that is not there; what was reset, as well."""
    reset = []
    stats = TorchStats(lambda device: dict(NUMBERS), reset.append)
    stand_in = types.SimpleNamespace(**{name: None for name in dir(torch._C) if name.startswith("_cuda_")})
    fractions = []
    stand_in._cuda_setMemoryFraction = lambda *given: fractions.append(given)
    stats.replace(stand_in)
    for name, function in vars(stand_in).items():
        if function is not None:
            monkeypatch.setattr(torch._C, name, function, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda.memory, "_get_device_index", lambda device, optional=False: 0)
    monkeypatch.setattr(torch.cuda.memory, "mem_get_info", lambda device=None: (0, 80 << 30), raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return reset, fractions


def test_torch_tells_of_memory(answers):
    reset, fractions = answers
    cuda = torch.cuda
    assert cuda.memory_allocated() == 3 * MIB and cuda.max_memory_allocated() == 5 * MIB
    assert cuda.memory_reserved() == 8 * MIB and cuda.max_memory_reserved() == 10 * MIB
    found = cuda.memory_stats()
    assert found["num_ooms"] == 1 and found["num_alloc_retries"] == 2
    assert found["allocation.all.current"] == 3 and found["allocation.all.allocated"] == 7
    assert found["inactive_split_bytes.all.current"] == 5 * MIB and found["segment.all.current"] == 2
    for abbreviated in (False, True):
        table = cuda.memory_summary(abbreviated=abbreviated)
        assert "3072 KiB" in table and "cudaMalloc retries: 2" in table
    cuda.reset_peak_memory_stats()
    assert reset == [0]
    cuda.reset_accumulated_memory_stats()
    found = cuda.memory_stats()
    assert found["num_ooms"] == 0 and found["allocation.all.allocated"] == 0
    # Memory that is in use still counts.
    assert found["allocation.all.current"] == 3 and found["allocated_bytes.all.current"] == 3 * MIB
    cuda.set_per_process_memory_fraction(0.5)
    assert fractions == [(0.5, 0)] and torch._C._cuda_getMemoryFraction(0) == 0.5


def test_a_snapshot_has_a_segment_for_each_device(answers):
    (segment,) = torch.cuda.memory_snapshot()
    assert (segment["total_size"], segment["allocated_size"]) == (8 * MIB, 3 * MIB)


def test_only_names_that_torch_has_are_replaced():
    theirs = types.SimpleNamespace(_cuda_memoryStats=None)
    TorchStats(lambda device: dict(NUMBERS), lambda device: None).replace(theirs)
    assert list(vars(theirs)) == ["_cuda_memoryStats"]
    assert theirs._cuda_memoryStats(0)["reserved_bytes"]["all"]["peak"] == 10 * MIB


def test_a_child_of_a_process_that_has_used_cuda_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    # Also where the process that it was forked from had installed it.
    for before in (None, object()):
        monkeypatch.setattr(install, "_installed", before)
        with pytest.raises(symmpool.InvalidStateError, match="forked from one that has used CUDA"):
            symmpool.install()
