"""Calls that write to a tensor count up its version, so that autograd notices."""

import numpy
import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin

import symmpool
from symmpool import fused


def alone():
    (group,) = symmpool.Group.in_process(1)
    return symmpool.Pool(group, "cpu")


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def module_level(pool, y):
    x = torch.zeros_like(y)
    on = {"group": pool}
    return {
        "all_reduce": lambda: symmpool.all_reduce(y, **on),
        "all_reduce async": lambda: symmpool.all_reduce(y, async_op=True, **on).wait(),
        "all_reduce out": lambda: symmpool.all_reduce(x, out=y, **on),
        "all_reduce max by name": lambda: symmpool.all_reduce(y, "max", algorithm="auto", **on),
        "reduce": lambda: symmpool.reduce(y, 0, **on),
        "reduce_scatter_tensor": lambda: symmpool.reduce_scatter_tensor(y, x, **on),
        "reduce_scatter": lambda: symmpool.reduce_scatter(y, [x], **on),
        "all_gather_into_tensor": lambda: symmpool.all_gather_into_tensor(y, x, **on),
        "all_gather": lambda: symmpool.all_gather([y], x, **on),
        "all_to_all_single": lambda: symmpool.all_to_all_single(y, x, **on),
        "all_to_all": lambda: symmpool.all_to_all([y], [x], **on),
        "all_to_all_v": lambda: symmpool.all_to_all_v(y, x, torch.tensor([4]), **on),
        "gather": lambda: symmpool.gather(x, [y], 0, **on),
        "scatter": lambda: symmpool.scatter(y, [x], 0, **on),
    }


def of_communicator(pool, y):
    comm, x = symmpool.Communicator(pool), torch.zeros_like(y)
    inbox = pool.zeros(4)
    pool.commit()
    return {
        "all_reduce": lambda: comm.all_reduce(y),
        "all_reduce out": lambda: comm.all_reduce(x, "sum", y),
        "all_reduce by name": lambda: comm.all_reduce(y, algorithm="auto"),
        "reduce_scatter_tensor": lambda: comm.reduce_scatter_tensor(y, x),
        "all_gather_into_tensor": lambda: comm.all_gather_into_tensor(y, x),
        "all_to_all_single": lambda: comm.all_to_all_single(y, x),
        "all_to_all_v": lambda: comm.all_to_all_v(y, x, torch.tensor([4])),
        "get": lambda: comm.get(y, inbox, 0),
    }


def operators(pool, y):
    x, name, of = torch.zeros_like(y), pool.group_name, torch.ops.symmpool
    return {
        "all_reduce_": lambda: of.all_reduce_(y, "sum", name),
        "all_reduce_into_": lambda: of.all_reduce_into_(y, x, "sum", name),
        "reduce_scatter_into_": lambda: of.reduce_scatter_into_(y, x, "sum", name),
        "all_gather_into_": lambda: of.all_gather_into_(y, x, name),
        "all_to_all_into_": lambda: of.all_to_all_into_(y, x, [], [], name),
        "broadcast_": lambda: of.broadcast_(y, 0, name),
    }


@pytest.mark.parametrize("door", [module_level, of_communicator, operators])
def test_autograd_notices_what_a_call_has_overwritten(door):
    pool = alone()
    for name in door(pool, zeros(4)):
        for view in (lambda y: y, lambda y: y.t() if y.dim() == 2 else y):
            x = zeros(4).requires_grad_()
            y = view(x.exp())
            before = y._version
            door(pool, y)[name]()
            assert y._version > before, name
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
        # A parameter, and a tensor that no graph is of.
        for y in (zeros(4).requires_grad_(), zeros(4)):
            before = y._version
            door(pool, y)[name]()
            assert y._version > before, name


def strided_and_encoded(pool):
    for y in (
        zeros(4, 3).t(),
        zeros(4, dtype=torch.bool),
        torch._neg_view(zeros(4)),
        zeros(2, dtype=torch.int16),
    ):
        before = y._version
        symmpool.all_reduce(y, "max", group=pool)
        assert y._version > before
        before = y._version
        symmpool.broadcast(y, 0, pool)


def test_copies_to_strided_tensors_count_too():
    strided_and_encoded(alone())


def test_what_has_no_version_is_written_all_the_same():
    pool = alone()
    with torch.inference_mode():
        y = zeros(4)
        symmpool.all_reduce(y, group=pool)
    symmpool.all_reduce(y, group=pool)
    symmpool.all_reduce(numpy.zeros(4, numpy.float32), group=pool)
    symmpool.all_reduce(pool.block(4, "float32"), group=pool)
    comm = symmpool.Communicator(pool)
    comm.all_reduce(y)
    comm.all_reduce(numpy.zeros(4, numpy.float32))


def test_a_gradient_through_a_communicators_call_warns():
    pool = alone()
    comm = symmpool.Communicator(pool)
    x = zeros(4).requires_grad_()
    y = x * 2
    comm.all_reduce(y)
    with pytest.warns(UserWarning, match="a gradient came back"):
        y.sum().backward()


def between_two(group, folder):
    me, _ = begin(group, folder)
    pool = symmpool.Pool(device="cpu")
    y, x = zeros(4), zeros(4)
    counted = {}

    def count(name, tensor, call):
        before = tensor._version
        call()
        counted[name] = tensor._version - before

    count("broadcast", y, lambda: symmpool.broadcast(y, 0))
    count("message", y, lambda: symmpool.send(y, 1) if me == 0 else symmpool.recv(y, 0))
    comm = symmpool.Communicator(pool)
    count("message of a communicator", y, lambda: comm.send(y, 1) if me == 0 else comm.recv(y, 0))
    count("broadcast of a communicator", y, lambda: comm.broadcast(y, 0))
    # On the backend torch decides, as on its own ones.
    dist.destroy_process_group()
    begin(group, folder + "/backend", "cpu:symmpool")
    for name, call in {
        "all_reduce": lambda: dist.all_reduce(y),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(zeros(8), x),
        "broadcast": lambda: dist.broadcast(y, 0),
    }.items():
        count(f"backend {name}", y, call)
    dist.destroy_process_group()
    return counted


def test_who_only_reads_counts_nothing(tmp_path):
    (tmp_path / "backend").mkdir()
    sender, receiver = values(2, between_two, str(tmp_path))
    assert set(sender.values()) == {0}, sender
    written = {"broadcast", "message", "message of a communicator", "broadcast of a communicator"}
    assert {name for name, counts in receiver.items() if counts} == written, receiver


@pytest.mark.parametrize("argument", ["out", "residual_out", "norm_out", "scale"])
def test_fused_calls_count_what_they_are_given_to_write_to(argument):
    pool = alone()
    x, weight = zeros(2, 128, dtype=torch.bfloat16), zeros(128, dtype=torch.bfloat16)
    y = {
        "out": torch.empty(2, 128, dtype=torch.float8_e4m3fn),
        "residual_out": torch.empty_like(x),
        "norm_out": torch.empty_like(x),
        "scale": torch.empty(2, 1),
    }
    given = {name: tensor for name, tensor in y.items() if name != "scale"}
    before = y[argument]._version
    fused.all_reduce_rms_norm(x, None, weight, quant=fused.fp8_per_token(y["scale"]), group=pool, **given)
    assert y[argument]._version > before
