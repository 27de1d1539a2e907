"""Tests that need torch and a GPU. Without either they are skipped, and say so.

On one GPU:           python -m pytest python/tests/gpu -q
On several of them:   python -m torch.distributed.run --nproc-per-node N python/tests/gpu/ranks_*.py
"""

import importlib.util

import pytest


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs torch and a CUDA device")


def missing():
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "there is no CUDA device"


def pytest_collection_modifyitems(items):
    here = [item for item in items if "tests/gpu" in str(item.path)]
    why = missing() if here else None
    for item in here:
        item.add_marker(pytest.mark.gpu)
        # One worker runs them, as they share the devices.
        item.add_marker(pytest.mark.xdist_group("gpu"))
        if why:
            item.add_marker(pytest.mark.skip(reason=f"skipped: {why}"))
