"""Examples that need a GPU to run compile without one."""

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_triton_example_compiles(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    sys.modules.pop("triton_all_reduce", None)
    import triton_all_reduce as example

    constants = {"WORLD": 4, "BLOCK": example.BLOCK, "PROGRAMS": 64, "TRIES": 100}
    signature = {"buffers": "*i64", "pads": "*i64", "out": "*bf16", "count": "i32", "rank": "i32"}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=example.sum_of_all, signature=signature, constexprs=constants, attrs={})
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert "atom.global.release.sys.cas" in text and "atom.global.acquire.sys.cas" in text
