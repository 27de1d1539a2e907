"""Tests that engines run: `make test-engines` makes a virtual environment for each engine. Elsewhere none is
collected."""

import importlib.util
import pathlib

import pytest

FOLDER = pathlib.Path(__file__).parent


def _is_here(name):
    return importlib.util.find_spec(name) is not None


# Not in the ordinary environment, whose torch is another one.
collect_ignore_glob = [] if _is_here("vllm") else ["test_vllm_*.py"]
collect_ignore_glob += [] if _is_here("sglang") else ["test_sglang_*.py"]


@pytest.fixture
def small_model(tmp_path):
    import small_model

    return small_model.write(tmp_path / "model")
