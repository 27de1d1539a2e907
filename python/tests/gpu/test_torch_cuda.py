"""Collectives on CUDA tensors through torch's signatures, on one GPU.

    python -m pytest python/tests/gpu/test_torch_cuda.py -q

Ranks are threads' worth of work alone (a world of one), or two processes that share the GPU, which
take turns on it: right or wrong is what is tested here, not time.
"""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1]))

from ranks import values  # noqa: E402

import symmpool  # noqa: E402
from symmpool import ops  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture
def alone():
    (group,) = symmpool.Group.in_process(1)
    pool = symmpool.Pool(group, "cuda:0")
    yield group, pool
    torch.cuda.synchronize()


def test_calls_run_on_the_current_stream(alone):
    group, pool = alone
    x = pool.empty(1 << 20, torch.float32)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.fill_(3.0)
        assert symmpool.all_reduce(x, "sum", group) is None
        y = x + 1
    stream.synchronize()
    assert bool((y == 4.0).all())


def test_tensors_that_are_no_windows_are_served(alone):
    group, _ = alone
    x = torch.full((1000,), 2.0, device="cuda")
    out = torch.empty_like(x)
    symmpool.all_reduce(x, torch.distributed.ReduceOp.MAX, group, out=out)
    assert out.tolist() == [2.0] * 1000


def test_calls_that_are_not_waited_for(alone):
    group, pool = alone
    x = pool.empty(1 << 22, torch.float32)
    symmpool.all_reduce(x, "sum", group)  # a first call takes long
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    x.fill_(2.0)
    work = symmpool.all_reduce(x, "sum", group, async_op=True)
    assert not work.is_completed()
    work.wait()
    y = x * 2  # on the current stream, behind the call
    torch.cuda.synchronize()
    assert work.is_completed() and work.is_success() and y[0].item() == 4.0
    future = symmpool.all_reduce(x, "sum", group, async_op=True).get_future()
    assert future.then(lambda done: done.value()[0] + 1).wait()[0].item() == 3.0
    # Letting go of a tensor does not free what a call still uses.
    for step in range(20):
        z = torch.full((1 << 20,), float(step), device="cuda")
        symmpool.all_reduce(z, "sum", group, async_op=True)
        del z
    symmpool.barrier(group)
    torch.cuda.synchronize()
    assert symmpool.communicator(group, "cuda:0").failure is None


def test_calls_are_captured(alone):
    group, pool = alone
    x = pool.empty(4096, torch.float32).fill_(1.0)
    symmpool.all_reduce(x, "sum", group)
    symmpool.all_reduce(x, "sum", group, async_op=True).wait()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1.0)
        symmpool.all_reduce(x, "sum", group, async_op=True)
        symmpool.all_reduce(x, "sum", group)  # behind the one before
        x.mul_(2.0)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert x[0].item() == ((1 + 1) * 2 + 1) * 2 * 2 + 2


def test_compiled_calls(alone):
    group, _ = alone
    name = ops.name_of(group)

    def step(x):
        y = torch.ops.symmpool.all_reduce(x * 2, "sum", name)
        torch.ops.symmpool.all_reduce_(y, "max", name)
        return torch.ops.symmpool.all_gather(y, 1, name).sum()

    # Compiled sums have another order: of whole numbers it does not matter.
    x = torch.arange(-20, 44, device="cuda", dtype=torch.float32)
    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        assert torch.compile(step, backend=backend, fullgraph=True)(x) == step(x)


def test_the_handle_points_to_device_memory(alone):
    group, pool = alone
    x = pool.empty((4, 8), torch.bfloat16).fill_(1.0)
    handle = symmpool.rendezvous(x, group)
    assert handle.buffer_ptrs == [x.data_ptr()]
    view = handle.get_buffer(0, (8,), torch.bfloat16, 8)
    view.fill_(5.0)
    assert x[1].tolist() == [5.0] * 8 and view.device == x.device
    assert handle.get_signal_pad(0).tolist() == [0] * 512
    handle.barrier()
    handle.put_signal(0, 3)
    handle.wait_signal(0, 3, timeout_ms=1000)
    torch.cuda.synchronize()
    assert symmpool.communicator(pool, pool.device).failure is None


def two_on_one(group):
    pool = symmpool.Pool(group, "cuda:0", allow_shared_device=True, timeout=60)
    x = pool.empty(10_000, torch.bfloat16).fill_(group.rank + 1)
    symmpool.all_reduce(x, "sum", group)
    gathered = torch.empty(20_000, dtype=torch.bfloat16, device="cuda")
    symmpool.all_gather_into_tensor(gathered, x + group.rank, group)
    part = torch.empty(5_000, dtype=torch.bfloat16, device="cuda")
    work = symmpool.reduce_scatter_tensor(part, x, "max", group, async_op=True)
    work.wait()
    root = torch.full((5,), group.rank, device="cuda")
    symmpool.broadcast(root, 1, group)
    handle = symmpool.rendezvous(x)
    theirs = handle.get_buffer(1 - group.rank, (10_000,), torch.bfloat16)
    seen = theirs[7].item()
    handle.barrier(2, timeout_ms=20_000)
    symmpool.barrier(group, device="cuda:0")
    torch.cuda.synchronize()
    return x[9].item(), gathered[[0, -1]].tolist(), part[3].item(), root.tolist(), seen


def test_two_ranks_that_share_the_gpu():
    assert values(2, two_on_one, limit=300) == [(3.0, [3.0, 4.0], 3.0, [1] * 5, 3.0)] * 2


def outputs_apart(group):
    pool = symmpool.Pool(group, "cuda:0", allow_shared_device=True, timeout=60)
    observed = []
    x, out = pool.empty(4096, torch.float32).fill_(group.rank), pool.empty(8192, torch.float32)
    for first, second in [(out[:4096], out[4096:]), (out[:4096], torch.empty(4096, device="cuda"))]:
        comm = symmpool.Communicator(pool, timeout=20, all_to_all="copy")
        comm.all_to_all_single(out[:4096], x)
        comm.synchronize()
        observed.append(out[:4096:2048].tolist())
        try:
            comm.all_to_all_single(second if group.rank else first, x)
            comm.synchronize()
        except symmpool.DivergedError as error:
            observed.append("same order" in str(error) and 'all_to_all="direct"' in str(error))
    comm = symmpool.Communicator(pool, timeout=20, all_to_all="direct")
    mine = out[4096:] if group.rank else out[:4096]
    comm.all_to_all_single(mine, x)
    comm.synchronize()
    return observed, mine[::2048].tolist()


def test_copied_parts_need_outputs_at_one_offset_and_say_so():
    right = [[0.0, 1.0], True] * 2, [0.0, 1.0]
    assert values(2, outputs_apart, limit=300) == [right] * 2


def test_a_pool_is_on_torchs_current_device(alone):
    group, _ = alone
    torch.cuda.set_device(torch.cuda.device_count() - 1)
    try:
        pool = symmpool.Pool(group)
        assert pool.device == f"cuda:{torch.cuda.device_count() - 1}"
    finally:
        torch.cuda.set_device(0)
