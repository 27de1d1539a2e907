"""Tests that a refusal of one rank is reported once for every call that the others make, by any door."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin
from torch._C._distributed_c10d import AllgatherOptions

import symmpool
from symmpool import experts


def steps(me, count=3):
    """Sums of numbers that say in which step a rank is: None where a call is an error."""
    found = []
    for step in range(1, count + 1):
        x = torch.full((4,), float(10 * step + me))
        try:
            symmpool.all_reduce(x)
            found.append(x[0].item())
        except symmpool.Error:
            found.append(None)
    return found


RIGHT = [21.0, 41.0, 61.0]


def buffer():
    return experts.ExpertBuffer(
        hidden=64, experts=2, top_k=1, max_tokens=8, dtype=torch.float32, device="cpu"
    )


def interrupted(group, folder):
    """Ctrl-C while a dispatch waits for the call before it."""
    me, _ = begin(group, folder, "gloo")
    made, ids = buffer(), torch.zeros(4, 1, dtype=torch.int64)
    if me == 1:
        time.sleep(2)
    work = symmpool.all_reduce(torch.ones(8), async_op=True)
    # Where its thread has not begun it, the dispatch makes the sum itself, and Ctrl-C would end that.
    while not work.is_begun:
        time.sleep(0.01)
    if me == 0:
        threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT)).start()
    raised = None
    try:
        with torch.no_grad():
            made.dispatch(torch.ones(4, 64), ids)
    except BaseException as error:
        raised = type(error).__name__
    work.wait()
    return raised, steps(me)


def test_a_dispatch_that_is_interrupted_before_its_turn_is_reported_once(tmp_path):
    (zero, sums), (one, theirs) = values(2, interrupted, str(tmp_path))
    assert (zero, one) == ("KeyboardInterrupt", "DivergedError")
    assert sums == theirs == RIGHT


def called_back(group, folder):
    """A callback of a call that is under way dispatches by the buffer that this thread dispatches by, too."""
    begin(group, folder, "gloo")
    made, x, ids = buffer(), torch.ones(4, 64), torch.zeros(4, 1, dtype=torch.int64)

    def dispatch(_=None):
        time.sleep(0.2)
        with torch.no_grad():
            return made.dispatch(x, ids)[0].x.sum().item()

    later = symmpool.all_reduce(torch.ones(8), async_op=True).get_future().then(dispatch)
    return dispatch(), later.wait()


def test_callbacks_dispatch_by_a_buffer_that_is_in_use(tmp_path):
    zero, one = values(2, called_back, str(tmp_path))
    assert zero == (2 * 4 * 64.0, 2 * 4 * 64.0) and one == (0.0, 0.0)


def coalesced(group, folder):
    """Two calls at once, the first one of which is wrong on rank 0, as the first calls of a group."""
    me, _ = begin(group, folder, "symmpool")
    outputs = [torch.zeros(3 if me == 0 else 4), torch.zeros(4)]
    options = AllgatherOptions()
    options.asyncOp = True
    with pytest.raises(symmpool.Error):
        made = dist.group.WORLD.allgather_into_tensor_coalesced(outputs, [torch.ones(2)] * 2, options)
        made.wait()
    return steps(me)


def test_coalesced_first_calls_are_refused_as_often_as_the_others_make_them(tmp_path):
    assert values(2, coalesced, str(tmp_path)) == [RIGHT] * 2


def of_norm(group, folder):
    """The operator of the fused norm, whose way of quantising makes no sense on rank 0."""
    me, _ = begin(group, folder, "gloo")
    from symmpool import fused  # noqa: F401

    x, weight = torch.ones(2, 64), torch.ones(64)
    quant = "bogus" if me == 0 else "none"
    name = dist.group.WORLD.group_name
    with pytest.raises(symmpool.Error) as raised:
        torch.ops.symmpool.all_reduce_rms_norm(
            x, None, weight, None, 1e-6, 0.0, quant, None, "row", False, "auto", name
        )
    return type(raised.value).__name__, steps(me)


def test_an_operators_wrong_quantisation_is_an_error_on_every_rank(tmp_path):
    zero, one = values(2, of_norm, str(tmp_path))
    assert zero == ("InvalidArgumentError", RIGHT) and one == ("DivergedError", RIGHT)


def reduced(group, folder):
    """How often a tensor counts as written to by a reduce to rank 0."""
    begin(group, folder, "gloo")
    x = torch.ones(4)
    before = x._version
    symmpool.reduce(x, 0)
    return x._version > before


def test_a_reduce_is_a_write_on_its_root_alone(tmp_path):
    assert values(2, reduced, str(tmp_path)) == [True, False]
