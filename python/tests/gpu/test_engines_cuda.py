"""Calls of serving engines with their adapters, on one GPU with NCCL's communicator of one rank.

    python -m pytest python/tests/gpu/test_engines_cuda.py -q

`ranks_engines.py` has several ranks.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu

COUNT = 3 << 20


def on_one_rank(test):
    """In a process of its own, which has a default group of NCCL's."""
    command = [sys.executable, __file__, test.__name__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.returncode == 0 and "done" in done.stdout, done.stdout + done.stderr


def vllms_scope(comm):
    import symmpool
    from symmpool.engines import vllm

    assert vllm.get_nccl_mem_pool() is None
    with vllm.nccl_symm_mem_context(comm) as context:
        assert not context.disabled
        inside = torch.full((COUNT,), 2.0, device="cuda")
    outside = torch.full((COUNT,), 1.0, device="cuda")
    (state,) = vllm._pools.values()
    assert vllm.is_symmetric_memory_tensor(inside) and not vllm.is_symmetric_memory_tensor(outside)
    assert isinstance(vllm.get_nccl_mem_pool(), torch.cuda.MemPool)
    # In a window before anybody sends it.
    assert state.pool.is_window(inside) and not state.pool.is_commit_due
    torch.distributed.all_reduce(inside)
    assert bool((inside == 2.0).all())
    # Memory that grows while capturing becomes a window afterwards.
    graph_pool, graph = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
    with pytest.raises(symmpool.InvalidStateError, match="set_graph_pool_id"), torch.cuda.graph(graph):
        vllm.nccl_symm_mem_context(comm).__enter__()
    torch.cuda.synchronize()
    vllm.set_graph_pool_id(graph_pool)
    graph, source = torch.cuda.CUDAGraph(), torch.zeros(COUNT, device="cuda")
    with torch.cuda.graph(graph, pool=graph_pool):
        before = source + 1.0
        with vllm.nccl_symm_mem_context(comm):
            captured = before * 3.0
            larger = torch.zeros(64 << 20, device="cuda")
        after = captured + before
    holds = vllm.is_symmetric_memory_tensor
    assert [holds(each) for each in (before, captured, larger, after)] == [False, True, True, False]
    assert state.pool.is_commit_due
    symmpool.commit_postponed()
    assert state.pool.is_window(captured) and state.pool.is_window(larger)
    for value in (0.0, 4.0):
        source.fill_(value)
        graph.replay()
        assert bool((after == 4.0 * (value + 1.0)).all()) and bool((larger == 0.0).all())


def sglangs_scope(comm):
    import engine_parts

    from symmpool.engines import sglang

    group = engine_parts.coordinator(comm)
    with sglang.use_symmetric_memory(group):
        first = torch.full((COUNT,), 2.0, device="cuda")
        saved = sglang.disable_symmetric_memory_context()
        elsewhere = torch.full((COUNT,), 1.0, device="cuda")
        sglang.restore_symmetric_memory_context(saved)
        second = torch.full((COUNT,), 3.0, device="cuda")
    holds = sglang.is_tensor_in_symmetric_mempool
    assert [holds(each) for each in (first, elsewhere, second)] == [True, False, True]
    assert isinstance(sglang.get_nccl_mem_pool("tp"), torch.cuda.MemPool)
    buffer, registered = sglang.allocate_symmetric_buffer(comm, 1 << 20)
    assert registered and buffer.shape == (1 << 20,) and not bool(buffer.any())
    # A capture does so too, where the graph's own pool is suspended as well.
    graph_pool, graph = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
    sglang.set_graph_pool_id(graph_pool)
    with torch.cuda.graph(graph, pool=graph_pool):
        with sglang.use_symmetric_memory(group):
            first = elsewhere + 1.0
            saved = sglang.disable_symmetric_memory_context()
            between = first * 2.0
            sglang.restore_symmetric_memory_context(saved)
            second = between + 1.0
        last = second + first
    assert [holds(each) for each in (first, between, second, last)] == [True, False, True, False]
    for value in (1.0, 5.0):
        elsewhere.fill_(value)
        graph.replay()
        assert bool((last == 3.0 * (value + 1.0) + 1.0).all())


def test_vllms_scope_in_and_outside_of_captures():
    on_one_rank(vllms_scope)


def test_sglangs_scope_in_and_outside_of_captures():
    on_one_rank(sglangs_scope)


def main(name):
    sys.path.insert(0, str(Path(__file__).parent))
    import engine_parts
    import torch.distributed as dist

    engine_parts.switch_on(os.environ)
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    globals()[name](engine_parts.pynccl(dist.group.WORLD, "cuda:0"))
    torch.cuda.synchronize()
    print("done", flush=True)
    # Windows of NCCL's go before its communicator.
    from symmpool.engines import sglang, vllm

    vllm._pools.clear()
    sglang._pools.clear()
    sglang._buffers.clear()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
