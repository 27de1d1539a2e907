"""With the real torch; collected only where it is installed."""

import gc
import json

import pytest
import torch
from launcher import torchrun
from ranks import values

import symmpool
from symmpool.bench import check

DTYPES = ["float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "int8"]
DTYPES += ["float8_e4m3fn", "float8_e5m2"]


def every_reduction(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=20)
    wrong = []
    for name in DTYPES:
        dtype = getattr(torch, name)
        for op in ("sum", "prod", "min", "max", "avg"):
            for kind in ("window", "plain"):
                x = pool.empty(1000, dtype) if kind == "window" else torch.empty(1000, dtype=dtype)
                check.fill(torch, x, pool.rank, op)
                comm.all_reduce(x, op)
                if check.count_wrong(torch, x, pool.world, op):
                    wrong.append((name, op, kind))
    return wrong


def test_every_type_and_operation_is_what_torch_says():
    assert values(3, every_reduction) == [[]] * 3


def test_tensors_are_symmetric_memory():
    pool = symmpool.Pool(symmpool.Group.in_process(1)[0], "cpu")
    x = pool.empty((3, 5), torch.bfloat16)
    assert (x.shape, x.dtype, x.is_contiguous()) == ((3, 5), torch.bfloat16, True)
    pool.commit()
    assert pool.is_window(x) and not pool.is_window(torch.ones(3))
    view = x[1:]
    del x
    gc.collect()
    assert pool.stats()["lanes"]["default"]["deferred"] == 0
    del view
    assert pool.stats()["lanes"]["default"]["deferred"] > 0
    assert pool.empty(4).dtype == torch.get_default_dtype()
    assert pool.empty(4, "half").dtype == torch.float16


def test_what_cannot_be_reduced_is_named():
    comm = symmpool.Communicator(symmpool.Pool(symmpool.Group.in_process(1)[0], "cpu"))
    for wrong, word in [
        (torch.ones(4, 6).T, "contiguous"),
        (torch.ones(3, dtype=torch.complex64), "complex64"),
        (torch.ones(3, device="meta"), "meta"),
    ]:
        with pytest.raises(symmpool.InvalidArgumentError, match=word):
            comm.all_reduce(wrong)
    comm.all_reduce(torch.nn.Parameter(torch.ones(3)))


def nothing_to_send(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=20)
    rows, out = pool.empty((4, 2), torch.int32), pool.empty((4, 2), torch.int32)
    rows.fill_(pool.rank)
    # torch gives an empty tensor no address; it is in a window all the same.
    mine = rows[:0] if pool.rank == 0 else rows
    comm.all_to_all_single(out, mine, [0, 2], [0, 0] if pool.rank == 0 else [2, 2])
    return out[:2].flatten().tolist()


def test_an_empty_tensor_of_a_window_is_in_it():
    assert values(2, nothing_to_send) == [[1] * 4] * 2


def test_wrong_results_are_counted():
    parts = [torch.empty(1000, dtype=torch.bfloat16) for _ in range(3)]
    for rank, part in enumerate(parts):
        check.fill(torch, part, rank, "sum")
    total = sum(part.float() for part in parts).bfloat16()
    assert check.count_wrong(torch, total, 3, "sum") == 0
    total[[3, 500]] += 0.25
    total[7] = float("nan")
    assert check.count_wrong(torch, total, 3, "sum") == 3
    check.poison(total)
    assert check.count_wrong(torch, total, 3, "sum") == 1000
    again = sum(part.float() for part in parts).bfloat16() * 9
    assert check.count_wrong(torch, again, 3, "sum", calls=3) == 0


def test_the_benchmark_runs_beside_gloo(tmp_path):
    report = tmp_path / "report.json"
    status, output, errors = torchrun(
        2, "--device", "cpu", "--sizes", "4K,64K", "--dtype", "f32", "--calls", "5", "--rounds",
        "2", "--eager", "--algorithm", "all", "--json", str(report),
    )  # fmt: skip
    assert status == 0, errors
    assert "gloo" in output and "64 KiB" in output
    found = json.loads(report.read_text())
    assert "gloo" not in found["missing"]
    assert [row["bytes"] for row in found["results"]] == [4096, 65536]
    for row in found["results"]:
        assert {"ours", "ours one_shot", "gloo"} <= set(row["figures"])
        assert all(len(each["rounds_us"]) == 2 for each in row["figures"].values())


def test_a_peer_that_lacks_an_operation_is_missing():
    few = ["--device", "cpu", "--sizes", "4K", "--rounds", "1", "--calls", "2"]
    status, output, errors = torchrun(2, *few, "--dtype", "i32", "--op", "avg")
    assert status == 0, errors
    assert "missing: gloo: on 2 of 2 ranks" in output
