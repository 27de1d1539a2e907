"""Captures of graphs behind calls that were made outside of them, on one GPU.

    python -m pytest python/tests/gpu/test_captures.py -q

CUDA ends a capture in which a stream is to wait for something outside of it. What is done need not be waited
for; what is not done is an error before anything is captured, and the capture goes on.
"""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

import symmpool  # noqa: E402

pytestmark = pytest.mark.gpu

#: Cycles that a stream sleeps so that what follows is certainly not done.
LONG = 400_000_000


@pytest.fixture
def alone():
    (group,) = symmpool.Group.in_process(1)
    pool = symmpool.Pool(group, "cuda:0")
    yield group, pool
    torch.cuda.synchronize()


class Capture:
    """A capture on a stream of its own; unlike torch's it does not wait for the device first."""

    def __init__(self):
        self.graph, self.stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def __enter__(self):
        self.scope = torch.cuda.stream(self.stream)
        self.scope.__enter__()
        self.graph.capture_begin()
        return self.graph

    def __exit__(self, *error):
        self.graph.capture_end()
        self.scope.__exit__(*error)


def collectives(group, x):
    """One call of each kind on a world of one, with what becomes of `x`."""
    parts, scattered, exchanged = (torch.empty_like(x) for _ in range(3))
    symmpool.all_reduce(x, "sum", group)
    symmpool.all_gather_into_tensor(parts, x, group)
    symmpool.reduce_scatter_tensor(scattered, x, "sum", group)
    symmpool.all_to_all_single(exchanged, x, group=group)
    symmpool.broadcast(x, 0, group)
    return [parts, scattered, exchanged]


def test_a_capture_follows_asynchronous_calls_that_are_done(alone):
    group, _ = alone
    x = torch.ones(1000, device="cuda")
    symmpool.all_reduce(x, "sum", group, async_op=True).wait()
    torch.cuda.synchronize()
    with Capture() as graph:
        x.add_(1)
        found = collectives(group, x)
    for turn in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert all(each.tolist() == [turn + 2.0] * 1000 for each in found)


def test_a_capture_of_asynchronous_calls_follows_others(alone):
    group, _ = alone
    x = torch.ones(1000, device="cuda")
    works = [symmpool.all_reduce(x, "sum", group, async_op=True) for _ in range(3)]
    torch.cuda.synchronize()
    with Capture() as graph:
        x.add_(1)
        work = symmpool.all_reduce(x, "sum", group, async_op=True)
        # An object that goes away in a capture may have to ask whether calls are done.
        works.clear()
        work.wait()
        assert work.is_completed() and work.wait(1.0)
        y = x * 2
    graph.replay()
    # A mark in a graph is nothing that later calls could wait for.
    symmpool.all_reduce(x, "sum", group)
    symmpool.all_reduce(x, "sum", group, async_op=True).wait()
    torch.cuda.synchronize()
    assert y.tolist() == [4.0] * 1000
    # The first graph stays: to let go of one spoils a capture.
    with Capture() as second:
        symmpool.all_reduce(x, "sum", group)
    second.replay()
    torch.cuda.synchronize()


@pytest.mark.parametrize("async_op", [False, True])
def test_what_is_not_done_is_an_error_and_the_capture_goes_on(alone, async_op):
    group, _ = alone
    x, z = torch.ones(1000, device="cuda"), torch.ones(1000, device="cuda")
    # A first call makes the communicator, which takes longer than anything sleeps here.
    symmpool.all_reduce(x, "sum", group)
    torch.cuda.synchronize()
    busy = torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(LONG)
        pending = symmpool.all_reduce(x, "sum", group, async_op=True)
    with Capture() as graph:
        with pytest.raises(symmpool.InvalidStateError, match="before the capture"):
            symmpool.all_reduce(z, "sum", group, async_op=async_op)
        with pytest.raises(symmpool.InvalidStateError, match="before the capture"):
            pending.wait()
        z.add_(1)
    pending.wait()
    graph.replay()
    torch.cuda.synchronize()
    assert z.tolist() == [2.0] * 1000
    # Later calls still come behind it, and captures too.
    with Capture() as second:
        symmpool.all_reduce(z, "sum", group)
    second.replay()
    torch.cuda.synchronize()
    assert z.tolist() == [2.0] * 1000


def test_channels_are_captured_behind_asynchronous_calls(alone):
    group, pool = alone
    x = pool.empty(1000, torch.float32)
    x.fill_(1.0)
    comm = symmpool.communicator(group, "cuda:0")
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        symmpool.all_reduce(x, "sum", group)
        comm.signal(0, 0)
        comm.wait(0, 0)
    symmpool.all_reduce(x, "sum", group, async_op=True).wait()
    torch.cuda.synchronize()
    with Capture() as graph:
        comm.signal(0, 0)
        comm.wait(0, 0)
        comm.barrier()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    comm.synchronize()


def test_memory_of_a_pool_is_used_in_captures_on_other_streams(alone):
    _, pool = alone
    x = pool.empty(1000, torch.float32)
    x.fill_(1.0)
    with Capture() as graph:
        y = x + 1
    graph.replay()
    torch.cuda.synchronize()
    assert y.tolist() == [2.0] * 1000
