"""`symmpool.install()` as far as it goes without a GPU."""

import ctypes
import subprocess
import sys
import types

import pytest

import symmpool
from symmpool.memory import install


def test_numbers_before_any_use():
    assert not symmpool.is_installed()
    stats = symmpool.memory_stats(63)
    assert stats["allocs"] == 0 and stats["peak_reserved"] == 0
    symmpool.reset_peak_memory_stats(63)
    assert "device 63" in symmpool.memory_summary(63) and "0 graphs" in symmpool.memory_summary(63)


def test_a_torch_without_cuda_is_reported(monkeypatch):
    torch = types.ModuleType("torch")
    torch._C, torch.__version__ = types.SimpleNamespace(), "2.11.0+cpu"
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(symmpool.UnsupportedError, match="without CUDA"):
        symmpool.install()


def test_a_torch_that_has_used_cuda_is_too_late(monkeypatch):
    torch = types.ModuleType("torch")
    torch._C = types.SimpleNamespace(_cuda_customAllocator=None)
    torch.cuda = types.SimpleNamespace(is_initialized=lambda: True, _is_in_bad_fork=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(symmpool.InvalidStateError, match="start"):
        symmpool.install()


def test_every_hook_is_exported():
    library = ctypes.CDLL(symmpool._symmpool.__file__)
    for name in ("symmpool_process_alloc", "symmpool_process_free", *install._HOOKS.values()):
        assert install._address(library, name)


def test_the_real_torch_takes_it_where_it_was_built_with_cuda():
    torch = pytest.importorskip("torch")
    if not hasattr(torch._C, "_cuda_customAllocator"):
        pytest.skip("skipped: this torch was built without CUDA")
    program = """
import symmpool, torch
symmpool.install()
symmpool.install()
print(symmpool.is_installed(), type(torch._C._cuda_getAllocator()).__name__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "_CUDAPluggableAllocator"]


def test_a_program_that_has_another_allocator_is_told():
    torch = pytest.importorskip("torch")
    if not hasattr(torch._C, "_cuda_customAllocator"):
        pytest.skip("skipped: this torch was built without CUDA")
    program = """
import symmpool, torch
names = symmpool._symmpool.__file__, "symmpool_process_alloc", "symmpool_process_free"
torch.cuda.memory.change_current_allocator(torch.cuda.memory.CUDAPluggableAllocator(*names))
try:
    symmpool.install()
except symmpool.InvalidStateError as error:
    print(error)
print(symmpool.is_installed())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("install: torch refuses another allocator: Can't swap") and last == "False"


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(symmpool._symmpool.__file__), "symmpool_process_runs_out_of_memory"),
    reason="skipped: the extension was built without what tests call",
)
def test_running_out_of_memory_is_torchs_error():
    torch = pytest.importorskip("torch")
    if not hasattr(torch._C, "_cuda_customAllocator"):
        pytest.skip("skipped: this torch was built without CUDA")
    # torch calls the function in the place of one that empties its cache, which needs no device.
    program = """
import ctypes, symmpool, torch
from symmpool.memory import install
library = ctypes.CDLL(symmpool._symmpool.__file__)
assert install._throw_out_of_memory_by(torch, library)
allocator = torch.cuda.memory.CUDAPluggableAllocator(
    symmpool._symmpool.__file__, "symmpool_process_alloc", "symmpool_process_free"
)
address = install._address(library, "symmpool_process_runs_out_of_memory")
allocator.allocator().set_reset_fn(address)
torch.cuda.memory.change_current_allocator(allocator)
for _ in range(1000):
    try:
        torch._C._cuda_emptyCache()
    except torch.OutOfMemoryError as error:
        text = str(error)
    else:
        raise SystemExit("no error")
print(text.splitlines()[0])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("CUDA out of memory. ") and "a test asked for too much" in done.stdout
