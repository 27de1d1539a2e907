"""`symmpool.install()` on one GPU. Each test is a process of its own: it can only be done first."""

import textwrap

import pytest
from one_process import run_program

import symmpool


def python(program):
    return run_program(program)[0]


INSTALL = """
import symmpool, torch
symmpool.install()
"""


def installed(program):
    return python(INSTALL + textwrap.dedent(program))


@pytest.fixture(autouse=True)
def torch():
    return pytest.importorskip("torch")


def test_too_late_is_an_error():
    observed = python("""
        import symmpool, torch
        torch.ones(1, device="cuda")
        try:
            symmpool.install()
        except symmpool.InvalidStateError as error:
            print("refused", error)
    """)
    assert "refused" in observed and "start" in observed


def test_tensors_are_right_and_counted():
    observed = installed("""
        symmpool.install()
        x = torch.arange(1 << 20, device="cuda")
        y = [x * i for i in range(50)]
        assert all(int(t[-1]) == ((1 << 20) - 1) * i for i, t in enumerate(y))
        stats = symmpool.memory_stats()
        assert stats["allocated"] >= 51 * 8 << 20 and stats["reserved"] >= stats["allocated"]
        place = y[3].data_ptr()
        del y[3]
        z = torch.empty(1 << 20, dtype=torch.int64, device="cuda")
        assert z.data_ptr() <= place, "the lowest place that fits"
        peak = stats["peak_allocated"]
        del x, y, z
        assert symmpool.memory_stats()["allocated"] == 0
        torch.cuda.empty_cache()
        stats = symmpool.memory_stats()
        assert stats["reserved"] == 0 and stats["peak_allocated"] >= peak
        symmpool.reset_peak_memory_stats()
        assert symmpool.memory_stats()["peak_allocated"] == 0
        print(symmpool.memory_summary())
    """)
    assert "reserved" in observed


def test_out_of_memory_is_an_exception_and_not_a_null_tensor():
    observed = installed("""
        try:
            torch.empty(1 << 44, dtype=torch.uint8, device="cuda")
        except RuntimeError as error:
            print(type(error).__name__, error)
        assert float(torch.ones(10, device="cuda").sum()) == 10
        free = torch.cuda.mem_get_info()[0]
        held = [torch.empty(free // 4, dtype=torch.uint8, device="cuda") for _ in range(3)]
        del held
        # Memory that is free in the lane serves another size after it went back.
        torch.empty(free // 10 * 9, dtype=torch.uint8, device="cuda").fill_(1)
        print(symmpool.memory_stats())
    """)
    assert "CUDA out of memory" in observed and "'ooms': 1" in observed


def test_a_fraction_of_memory_is_kept_to():
    observed = installed("""
        torch.cuda.set_per_process_memory_fraction(0.01)
        try:
            torch.empty(torch.cuda.mem_get_info()[1] // 50, dtype=torch.uint8, device="cuda")
        except RuntimeError as error:
            print(error)
    """)
    assert "fraction" in observed


def test_streams_wait_for_each_other():
    installed("""
        side = torch.cuda.Stream()
        for i in range(200):
            x = torch.full((1 << 22,), float(i), device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(200_000)
                y = x.sum()
            x.record_stream(side)
            del x
            z = torch.full((1 << 22,), -1.0, device="cuda")
            torch.cuda.current_stream().wait_stream(side)
            assert float(y) == i * (1 << 22), (i, float(y))
    """)


def test_graphs_keep_their_memory():
    installed("""
        x = torch.zeros(1 << 20, device="cuda")
        w = torch.randn(1 << 20, device="cuda")
        def body():
            a = w * 2
            b = a + 1
            del a
            c = b * 3 + torch.ones_like(b)
            x.copy_(c - b)
        torch.cuda.synchronize()
        graphs = []
        for shared in (None, None, "first"):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=graphs[0].pool() if shared else None):
                body()
            graphs.append(graph)
        expected = (lambda b: b * 3 + 1 - b)(w * 2 + 1)
        assert symmpool.memory_stats()["graphs"] == 2
        for graph in graphs * 3:
            noise = [torch.full((1 << 20,), 9.0, device="cuda") for _ in range(20)]
            x.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.allclose(x, expected)
            assert all(bool((n == 9).all()) for n in noise)
            del noise
        del graph, graphs
        assert symmpool.memory_stats()["graphs"] == 0
        torch.cuda.empty_cache()
    """)


def test_memory_freed_while_capturing_comes_back_afterwards():
    installed("""
        side = torch.cuda.Stream()
        before = torch.ones(1 << 22, device="cuda")
        before.record_stream(side)
        torch.cuda.synchronize()
        place = before.data_ptr()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            inside = torch.zeros(1 << 22, device="cuda")
            del before
            assert inside.data_ptr() != place
        after = torch.ones(1 << 22, device="cuda")
        graph.replay()
        torch.cuda.synchronize()
        assert float(after.sum()) == 1 << 22 and float(inside.sum()) == 0
    """)


def test_a_pools_scope_needs_no_mempool_then():
    observed = installed("""
        pool = symmpool.Pool(symmpool.Group.in_process(1)[0], "cuda:0")
        comm = symmpool.Communicator(pool)
        with pool:
            x = torch.ones(1 << 20, device="cuda")
            y = x * 2
        z = x + y
        assert pool.is_window(x) and pool.is_window(y) and not pool.is_window(z)
        comm.all_reduce(x)
        assert float(x.sum()) == 1 << 20
        assert pool._scope().slot.live == 2
        x.record_stream(torch.cuda.Stream())
        del x, y
        assert pool._scope().slot.live == 0
        pool.commit()
        stats = pool.stats()["lanes"]["default"]
        assert stats["deferred"] == 0, stats
        with pool:
            kept = torch.full((100,), 5.0, device="cuda")
        del pool, comm
        assert float(kept.sum()) == 500
        print("ended")
    """)
    assert "ended" in observed


TRAIN = """
import torch
torch.manual_seed(0)
torch.backends.cuda.matmul.allow_tf32 = False
model = torch.nn.TransformerEncoder(
    torch.nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True), 3,
    enable_nested_tensor=False,
).cuda()
head = torch.nn.Linear(256, 100).cuda()
optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-3)
for step in range(20):
    x = torch.randn(8, 32 + 8 * (step % 5), 256, device="cuda")
    loss = torch.nn.functional.cross_entropy(head(model(x)).flatten(0, 1),
                                             torch.randint(100, (x.shape[0] * x.shape[1],), device="cuda"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{step} {loss.item():.9f}")
"""


def test_training_has_the_same_losses():
    assert python(INSTALL + TRAIN) == python(TRAIN)


def test_leaving_is_quiet():
    _, errors = run_program(INSTALL + "x = torch.ones(1000, device='cuda')\nprint(x.sum())")
    assert errors == ""


def test_numbers_before_any_use():
    # In this process nothing is installed.
    assert not symmpool.is_installed()
    assert symmpool.memory_stats(63)["allocs"] == 0
    assert "device 63" in symmpool.memory_summary(63)


def test_torchs_own_statistics_have_these_numbers():
    observed = installed("""
        x = torch.ones(4 << 20, device="cuda")
        cuda, ours = torch.cuda, symmpool.memory_stats()
        assert cuda.memory_allocated() == ours["allocated"] >= 16 << 20
        assert cuda.memory_reserved() == ours["reserved"]
        assert cuda.max_memory_allocated() == ours["peak_allocated"]
        assert cuda.max_memory_reserved() == ours["peak_reserved"]
        assert cuda.memory_stats()["allocation.all.current"] == ours["allocs"] - ours["frees"]
        assert "Allocated memory" in cuda.memory_summary()
        (segment,) = cuda.memory_snapshot()
        assert segment["total_size"] == ours["reserved"]
        del x
        cuda.reset_peak_memory_stats()
        assert cuda.max_memory_allocated() == cuda.memory_allocated() == symmpool.memory_stats()["allocated"]
        cuda.reset_accumulated_memory_stats()
        assert cuda.memory_stats()["allocation.all.freed"] == 0
        cuda.empty_cache()
        free, total = cuda.mem_get_info()
        assert 0 < free <= total
        cuda.set_per_process_memory_fraction(0.5)
        print("as ours", cuda.memory_reserved())
    """)
    assert "as ours" in observed


def test_running_out_of_memory_is_torchs_error_and_can_be_tried_again():
    observed = installed("""
        caught = 0
        for size in (1 << 44, 1 << 43, 1 << 20):
            try:
                x = torch.empty(size, dtype=torch.uint8, device="cuda")
                break
            except torch.OutOfMemoryError as error:
                assert str(error).startswith("CUDA out of memory. "), error
                caught += 1
                torch.cuda.empty_cache()
        assert caught == 2 and x.numel() == 1 << 20

        class Big(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, gradient):
                # A thread of torch's own.
                return torch.empty(1 << 42, device="cuda")

        y = torch.ones(10, device="cuda", requires_grad=True)
        for _ in range(3):
            try:
                Big.apply(y).sum().backward()
            except torch.OutOfMemoryError:
                caught += 1
        # A batch that does not fit is halved until it does.
        free, total = torch.cuda.mem_get_info()
        batch, sizes = 2 * total, []
        while batch > total // 64:
            try:
                torch.empty(batch, dtype=torch.uint8, device="cuda")
                break
            except torch.OutOfMemoryError:
                sizes.append(batch)
                batch //= 2
        assert sizes and batch <= free
        assert float(torch.ones(10, device="cuda").sum()) == 10
        print("caught", caught, symmpool.memory_stats()["ooms"] >= 6)
    """)
    assert "caught 5 True" in observed


COMPILED = """
import logging
torch.manual_seed(0)
torch.backends.cuda.matmul.allow_tf32 = False
make = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
model = make.cuda()
compiled = torch.compile(model, mode="reduce-overhead")


def close(a, b):
    return torch.allclose(a, b, atol=1e-4, rtol=1e-4)
"""


def test_compiled_functions_replay_graphs_whose_results_stay():
    pytest.importorskip("triton")
    observed = installed(
        textwrap.dedent(COMPILED)
        + textwrap.dedent("""
        with torch.no_grad():
            found = []
            for _ in range(12):
                x = torch.randn(32, 256, device="cuda")
                found.append((compiled(x), model(x)))
                noise = torch.full((1 << 20,), 9.0, device="cuda")
            assert all(close(ours, eager) for ours, eager in found)
            assert len({ours.data_ptr() for ours, _ in found}) == 12
            graphs = symmpool.memory_stats()["graphs"]
            assert graphs >= 1, symmpool.memory_stats()
            # Another size is another graph, or the same one in what torch calls a dynamic shape.
            for rows in (7, 64, 7, 64, 7, 64):
                x = torch.randn(rows, 256, device="cuda")
                assert close(compiled(x), model(x))
            # New values of parameters are read, and their memory may move.
            model[0].weight.mul_(0.5)
            assert close(compiled(x), model(x))
            model[0].weight.data = model[0].weight.data.clone() + 0.25
            for _ in range(3):
                assert close(compiled(x), model(x))
        torch.cuda.memory_summary()
        del compiled
        torch._dynamo.reset()
        import gc
        gc.collect()
        print("graphs", graphs, "then", symmpool.memory_stats()["graphs"])
    """)
    )
    assert "graphs" in observed


def test_compiled_training_has_the_gradients_of_eager():
    pytest.importorskip("triton")
    observed = installed(
        textwrap.dedent(COMPILED)
        + textwrap.dedent("""
        wrong = 0
        for step in range(8):
            a, b = torch.randn(2, 32, 256, device="cuda")
            found = []
            for function in (compiled, model):
                model.zero_grad()
                # Two forward calls before a backward one: the first one's tensors must stay.
                (function(a).square().mean() + function(b).abs().mean()).backward()
                found.append([p.grad.clone() for p in model.parameters()])
            wrong += not all(close(ours, eager) for ours, eager in zip(*found))
        graphs = symmpool.memory_stats()["graphs"]

        class Running(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("total", torch.zeros(256, device="cuda"))

            def forward(self, x):
                self.total.add_(x.sum(0))
                return self.total * 2

        running, ours = Running(), []
        step = torch.compile(running, mode="reduce-overhead")
        with torch.no_grad():
            for i in range(8):
                ours.append(step(torch.ones(4, 256, device="cuda")))
        wrong += [x[0].item() for x in ours] != [8.0 * (i + 1) for i in range(8)]
        wrong += running.total[0].item() != 32
        print("wrong", wrong, "graphs", graphs)
        assert graphs >= 2
    """)
    )
    assert "wrong 0" in observed
