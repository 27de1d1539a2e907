"""Pictures of benchmarks, which matplotlib draws. `test_bench_tool.py` tests what is said without it."""

import pytest
import torch
from launcher import torchrun

from symmpool.bench import cli


@pytest.mark.parametrize("benchmark", ["allreduce", "alltoallv", "collectives"])
def test_pictures_are_drawn(tmp_path, benchmark):
    picture = tmp_path / "x.svg"
    few = ["--device", "cpu", "--sizes", "4K,8K", "--rounds", "1", "--calls", "2"]
    status, output, errors = torchrun(2, *few, "--plot", str(picture), benchmark=benchmark)
    assert status == 0, output + errors
    drawn = picture.read_text()
    for said in ("symmpool", "gloo", "best contender / symmpool", f"torch {torch.__version__}", "; 20"):
        assert said in drawn, said
    assert ">ours" not in drawn


@pytest.mark.parametrize("name", ["x.foo", "x", "x."])
def test_a_picture_of_an_unknown_kind_is_refused_before_anything_runs(name):
    with pytest.raises(SystemExit, match=r"there are .*\.png"):
        cli.main(["allreduce", "--plot", name])
