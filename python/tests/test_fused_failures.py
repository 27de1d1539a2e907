"""Fused matmuls that fail on one rank behind their handshake fail its communicator."""

import time
import types

import pytest
import torch
from ranks import values
from test_torch_distributed import begin

import symmpool
from symmpool.fused import pipeline


def opened(comm):
    """A product whose handshake all ranks have made, without its memory."""
    entry = types.SimpleNamespace(comm=comm, run_function=lambda function, *given: function(comm, *given))
    call = pipeline.MatmulCall(entry, "fused_matmul_reduce_scatter", torch.zeros(4, 4), (4, 0, 4), 7)
    call.begin(0)
    # On devices, where there is memory that peers access, a product is open then.
    call.is_open = True
    return call


def fail_on_one_rank(group, folder, kind):
    me, world = begin(group, folder)
    pool = symmpool.Pool(device="cpu")
    comm = symmpool.Communicator(pool)
    call = opened(comm)

    @pipeline._or_fail
    def product(call):
        if me == world - 1:
            raise kind("no product")
        return me

    errors = []
    try:
        assert product(call) == me
    except kind as error:
        errors.append(error)
    began = time.monotonic()
    x = torch.ones(4)
    for _ in range(2):
        try:
            comm.all_reduce(x)
        except symmpool.Error as error:
            errors.append(error)
    said = [(type(error).__name__, str(error)) for error in errors]
    return said, time.monotonic() - began, x.tolist()


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt])
def test_a_product_that_fails_behind_its_handshake_closes_the_communicator(tmp_path, kind):
    *others, last = values(3, fail_on_one_rank, str(tmp_path), kind)
    for _, took, x in (*others, last):
        assert took < 10 and x == [1.0] * 4
    for said, _, _ in others:
        assert said[0][0] == "DivergedError" and "rank 2" in said[0][1], said
    assert [name for name, _ in last[0]] == [kind.__name__, "InvalidStateError", "InvalidStateError"]
    assert f"fused_matmul_reduce_scatter: {kind.__name__}: no product" in last[0][-1][1]


def test_a_product_that_is_not_open_closes_nothing():
    call = pipeline.MatmulCall(
        types.SimpleNamespace(comm=types.SimpleNamespace(rank=0, world=2)),
        "name",
        torch.zeros(1),
        (1, 0, 1),
        0,
    )

    @pipeline._or_fail
    def product(call):
        raise ValueError("before the handshake")

    with pytest.raises(ValueError, match="before the handshake"):
        product(call)
