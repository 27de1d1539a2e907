"""Callbacks of futures that make calls and wait for them, between processes on the CPU."""

import subprocess
import sys
import threading
import time
import types

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin

import symmpool
from symmpool.communicators import host_work


def nested(group, folder):
    me, world = begin(group, folder, "symmpool")
    right = []
    for call in (dist.all_reduce, symmpool.all_reduce):
        by_future, by_work, at_once, deep = (torch.full((5,), me + 1.0) for _ in range(4))

        def innermost(done, call=call, x=deep):
            call(x)
            return done.value()[0]

        def inner(done, call=call, x=by_work, y=deep):
            call(x, async_op=True).wait()
            return call(y, async_op=True).get_future().then(innermost).wait()

        def outer(done, call=call, x=by_future, y=at_once):
            call(x, async_op=True).get_future().wait()
            call(y)
            return done.value()[0]

        first = torch.ones(3)
        chained = call(first, async_op=True).get_future().then(outer).then(inner)
        answer = chained.wait()
        total = world * (world + 1) / 2
        right.append(first.tolist() == [world] * 3)
        right += [x.tolist() == [total] * 5 for x in (by_future, by_work, at_once)]
        right.append(answer.tolist() == deep.tolist() == [world * total] * 5)
    dist.destroy_process_group()
    return right


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_callback_makes_calls_and_waits_for_them(world, tmp_path):
    for right in values(world, nested, str(tmp_path)):
        assert all(right), right


def late(me, step):
    """Ranks that take turns at being late."""
    if step % 3 == me:
        time.sleep(0.002)


def in_order(group, folder):
    """Each call has a size of its own, so that two ranks with two orders do not agree."""
    me, world = begin(group, folder, "symmpool")
    wrong = []
    for step in range(100):
        tensors = [torch.ones(n) for n in (100, 2000, 30, 400, 5000)]
        a, nested_in_a, b, nested_in_b, last = tensors

        def follow(x, step=step):
            def observed(done):
                late(me, step + 1)
                dist.all_reduce(x, async_op=True).get_future().wait()
                late(me, step)
                return done.value()

            return observed

        futures = []
        for x, y in ((a, nested_in_a), (b, nested_in_b)):
            begun = dist.all_reduce(x, async_op=True)
            late(me, step)
            futures.append(begun.get_future().then(follow(y)))
        if step % 2:
            # Nobody waits for the callbacks, but what follows comes after them.
            dist.all_reduce(last)
        else:
            dist.all_reduce(last, async_op=True).wait()
        for future in futures:
            future.wait()
        wrong += [x for x in tensors if x.tolist() != [world] * len(x)]
    dist.destroy_process_group()
    return wrong


def test_what_callbacks_begin_comes_in_one_place_on_every_rank(tmp_path):
    assert values(2, in_order, str(tmp_path)) == [[], []]


def power_sgd(group, folder):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    me, world = begin(group, folder, "symmpool")
    torch.manual_seed(1)
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    # A bucket for each layer.
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.01)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=3)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(me)
    data, target = torch.randn(32, 64), torch.zeros(32, 64)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(data), target)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    weights = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
    dist.barrier()
    del model
    dist.destroy_process_group()
    return losses, weights.tolist()


def test_gradients_are_compressed_by_a_hook_whose_callbacks_make_calls(tmp_path):
    (losses, mine), (others, theirs) = values(2, power_sgd, str(tmp_path))
    assert mine == theirs
    for found in (losses, others):
        assert found[-1] < 0.9 * found[3] < found[0]


class Owner:
    pass


def test_a_callback_waits_for_what_was_begun_before():
    owner = Owner()
    worker = host_work.Worker(owner)
    go, made = threading.Event(), []
    first = worker.submit(go.wait, (), [])
    second = worker.submit(made.append, (2,), ["second"])
    third = worker.submit(made.append, (3,), ["third"]).get_future()

    def observed(_):
        made.append("called")
        second.wait()
        made.append("second is done")
        worker.submit(made.append, ("at once",), [])
        return third.wait()

    followed = first.get_future().then(observed)
    worker.submit(made.append, (4,), [])
    go.set()
    # Calls that follow come after the callbacks, too.
    worker.order.join()
    assert made == ["called", 2, "second is done", "at once", 3, 4]
    assert followed.done() and followed.wait() == ["third"]


def test_who_waits_for_a_barrier_waits_on_the_host():
    from symmpool.torch_backend.work import BarrierWork

    waited = []
    begun = types.SimpleNamespace(wait=lambda timeout: not waited.append(timeout))
    assert BarrierWork(begun, lambda: waited.append("host")).wait(3) and waited == [3, "host"]


def test_a_future_requested_while_the_call_ends_is_set_once():
    owner = Owner()
    worker = host_work.Worker(owner)
    for _ in range(2000):
        assert worker.submit(int, (), []).get_future().wait() == []
    ran = threading.Event()
    assert worker.submit(ran.set, (), []).wait() and ran.is_set()


def test_an_error_in_a_call_of_a_callback_is_reported():
    owner = Owner()
    worker = host_work.Worker(owner)
    go = threading.Event()
    first = worker.submit(go.wait, (), [])

    def observed(_):
        return worker.submit(int, ("nonsense",), []).get_future().wait()

    future = first.get_future().then(observed)
    go.set()
    with pytest.raises(RuntimeError, match="nonsense"):  # torch's, which names the error
        future.wait()
    assert worker.submit(int, (), []).wait()


# A callback makes a call when the program ends; one that ends, after others that were begun, or one
# that waits for a rank that does not come.
ENDS = """
import threading, time
import torch
from symmpool.communicators import host_work

class Owner: pass
owner = Owner()
worker = host_work.Worker(owner)
go, begun = threading.Event(), threading.Event()
first = worker.submit(go.wait, (), [])
def callback(_):
    begun.set()
    time.sleep(0.5)
    later.wait()
    worker.submit({call}, (), []).get_future().wait()
    print("called", flush=True)
chained = first.get_future().then(callback)
later = worker.submit(time.sleep, (0.1,), [])
go.set()
begun.wait()
"""


@pytest.mark.parametrize("call, out", [("int", "called\n"), ("threading.Event().wait", "")])
def test_a_program_ends_with_a_callback_under_way(call, out):
    started = time.monotonic()
    command = [sys.executable, "-c", ENDS.format(call=call)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, out), ended.stderr
    assert time.monotonic() - started < 40
