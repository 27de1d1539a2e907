"""Collectives of groups whose ranks are on several hosts, which this machine pretends to be."""

import datetime
import os
import socket
import subprocess
import sys
import textwrap
import time

import pytest
import ranks
import torch
import torch.distributed as dist

import symmpool
from symmpool import backend

HOST_ID = "SYMMPOOL_HOST_ID"
#: Ranks by host: in the order of hosts, in turns, uneven ones, one a host.
LAYOUTS = [["a", "a", "b", "b"], ["a", "b", "a", "b"], ["a", "a", "a", "b"], ["a", "b", "c"]]


def on_host(ids, group):
    os.environ[HOST_ID] = ids[group.rank]
    torch.set_num_threads(1)


def value(rank, count, dtype, seed):
    made = torch.Generator().manual_seed(1000 * seed + rank)
    # Whole numbers, whose sums every type has exactly.
    return torch.randint(0, 8, (count,), generator=made).to(dtype)


def collectives(group, ids):
    """Each against what follows from all ranks' inputs, which are known here."""
    on_host(ids, group)
    rank, world = group.rank, group.world
    pool = symmpool.Pool(group, "cpu")
    assert len(pool.hosts) == len(set(ids))
    for seed, (count, dtype) in enumerate(
        [
            (1, torch.int64),
            (7, torch.float32),
            (5000, torch.bfloat16),
            (90_001, torch.float64),
            (300_000, torch.uint8),
        ]
    ):
        inputs = [value(each, count, dtype, seed) for each in range(world)]
        longs = [value(each, count * world, dtype, seed + 50) for each in range(world)]
        for make in (torch.empty_like, lambda like: pool.empty(like.shape, dtype=like.dtype)):
            x, long = make(inputs[rank]), make(longs[rank])
            out, long_out = make(x), make(long)
            pool.commit()

            def fresh(x=x, long=long, inputs=inputs, longs=longs):
                x.copy_(inputs[rank])
                long.copy_(longs[rank])

            fresh()
            symmpool.all_reduce(x, group=group)
            assert torch.equal(x, sum(inputs[1:], inputs[0])), (rank, count, dtype)
            fresh()
            symmpool.all_reduce(x, op="max", group=group)
            assert torch.equal(x, torch.stack(inputs).amax(0))
            fresh()
            symmpool.reduce_scatter_tensor(out, long, group=group)
            whole = sum(longs[1:], longs[0])
            assert torch.equal(out, whole[rank * count : (rank + 1) * count])
            symmpool.all_gather_into_tensor(long_out, x, group=group)
            assert torch.equal(long_out, torch.cat(inputs))
            symmpool.all_to_all_single(long_out, long, group=group)
            parts = [each[rank * count : (rank + 1) * count] for each in longs]
            assert torch.equal(long_out, torch.cat(parts))
            for root in range(world):
                fresh()
                symmpool.broadcast(x, root, group=group)
                assert torch.equal(x, inputs[root])
    symmpool.barrier(group=group)
    sends = [[(source * 3 + target) % 4 * 11 for target in range(world)] for source in range(world)]
    source = torch.cat(
        [torch.full((n,), rank * 10 + to) for to, n in enumerate(sends[rank])] or [torch.empty(0)]
    )
    comes = [sends[each][rank] for each in range(world)]
    target = torch.empty(sum(comes), dtype=source.dtype)
    symmpool.all_to_all_single(target, source, comes, sends[rank], group=group)
    assert torch.equal(
        target, torch.cat([torch.full((n,), each * 10 + rank) for each, n in enumerate(comes)])
    )
    return True


@pytest.mark.parametrize("ids", LAYOUTS, ids="".join)
def test_collectives_cross_hosts(ids):
    assert ranks.values(len(ids), collectives, ids) == [True] * len(ids)


def other_calls(group, folder, ids):
    """Calls that are made of the collectives above, and a message, which another backend carries."""
    on_host(ids, group)
    store = dist.FileStore(f"{folder}/store", group.world)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "cpu:symmpool", store=store, rank=group.rank, world_size=group.world, timeout=timeout
    )
    me, world = dist.get_rank(), dist.get_world_size()
    found = {}

    def full(value, count=3000):
        return torch.full((count,), float(value))

    half = dist._make_nccl_premul_sum(0.5)
    for count in (3, 300_000):
        x = full(me + 1, count)
        dist.reduce(x, 1)
        found["reduce"] = x.unique().tolist() if me == 1 else [10.0]
        parts = [torch.empty(count) for _ in range(world)] if me == 2 else None
        dist.gather(full(me, count), parts, dst=2)
        if parts:
            found["gather"] = torch.stack(parts).unique(dim=1).flatten().tolist()
        out = torch.empty(count)
        dist.scatter(out, [full(10 + each, count) for each in range(world)] if me == 0 else None, src=0)
        found["scatter"] = [value - me for value in out.unique().tolist()]
        x = full(me, count)
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        found["average"] = x.unique().tolist()
        x = full(me, count)
        dist.all_reduce(x, op=half)
        found["half of each"] = x.unique().tolist()
        long = full(me, count * world)
        dist.reduce_scatter_tensor(out, long, op=half)
        found["half of each, scattered"] = out.unique().tolist()
        dist.reduce_scatter_tensor(out, long, op=dist.ReduceOp.AVG)
        found["average, scattered"] = out.unique().tolist()
        x = torch.full((count,), me + 4)
        dist.all_reduce(x, op=dist.ReduceOp.BOR)
        found["bits"] = x.unique().tolist()
    served = backend.backend_counts()
    x = full(me)
    if me == 0:
        dist.send(x, 3)
    elif me == 3:
        dist.recv(x, 0)
    found["message"] = [x[0].item() if me == 3 else 0.0]
    dist.destroy_process_group()
    return found, {call: list(counts) for call, counts in served.items()}


@pytest.mark.parametrize("ids", ["aabb", "abbb"])
def test_what_is_made_of_other_collectives_crosses_hosts(ids, tmp_path):
    right = {
        "reduce": [10.0],
        "gather": [0.0, 1.0, 2.0, 3.0],
        "scatter": [10.0],
        "average": [1.5],
        "half of each": [3.0],
        "half of each, scattered": [3.0],
        "average, scattered": [1.5],
        "bits": [7],
        "message": [0.0],
    }
    results = ranks.values(4, other_calls, str(tmp_path), ids)
    assert [rank for rank, (found, _) in enumerate(results) if "gather" in found] == [2]
    for found, served in results:
        # The root alone has what was gathered.
        assert {"gather": right["gather"], **found} == right
        assert {"reduce", "gather", "scatter", "all_reduce", "reduce_scatter_tensor"} <= served.keys(), served
        assert all(backends == ["symmpool"] for backends in served.values()), served


def messages(group, ids):
    on_host(ids, group)
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=60.0)
    with pytest.raises(symmpool.UnsupportedError, match="2 hosts"):
        comm.send(torch.ones(3), (group.rank + 1) % group.world)
    return goes_on(comm)


def test_messages_of_communicators_over_hosts_are_refused_by_a_sentence():
    assert ranks.values(2, messages, ["a", "b"]) == [True] * 2


def model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(64, 200), torch.nn.GELU(), torch.nn.Linear(200, 8))


def trained(group, folder, ids, backend):
    """The losses of a few steps of data parallel training, and the weights behind them."""
    on_host(ids, group)
    timeout = datetime.timedelta(seconds=60)
    store = dist.FileStore(f"{folder}/{backend.replace(':', '-')}", group.world)
    dist.init_process_group(backend, store=store, rank=group.rank, world_size=group.world, timeout=timeout)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(model(3))
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
        losses = []
        for step in range(5):
            torch.manual_seed(100 * step + group.rank)
            x = torch.randn(16, 64)
            loss = (parallel(x) - x[:, :8].sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        weights = torch.cat([each.detach().flatten() for each in parallel.parameters()])
        return losses, weights.numpy().tobytes()
    finally:
        dist.destroy_process_group()


def test_training_over_hosts_is_that_of_gloo_and_the_same_in_every_run(tmp_path):
    ids = ["a", "a", "b", "b"]
    runs = []
    for run in ("one", "other"):
        (tmp_path / run).mkdir()
        runs.append(ranks.values(4, trained, str(tmp_path / run), ids, "cpu:symmpool"))
    assert runs[0] == runs[1]
    # All ranks have the same weights, to the bit.
    assert len({weights for _, weights in runs[0]}) == 1
    reference = ranks.values(4, trained, str(tmp_path), ids, "gloo")
    for (ours, _), (theirs, _) in zip(runs[0], reference, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def refused(group, ids):
    on_host(ids, group)
    pool = symmpool.Pool(group, "cpu")
    x = pool.empty(1024, 8)
    pool.commit()
    x.fill_(1)
    calls = {
        "a norm": lambda: symmpool.fused.all_reduce_rms_norm(
            x, torch.ones_like(x), torch.ones(8), group=pool
        ),
        "a handle": lambda: symmpool.rendezvous(x, group=pool),
    }
    found = {}
    for what, call in calls.items():
        try:
            call()
            found[what] = "no error"
        except symmpool.UnsupportedError as error:
            found[what] = str(error)
        except Exception as error:
            found[what] = repr(error)
    # The communicator goes on.
    symmpool.all_reduce(x, group=pool)
    return found, x[0, 0].item()


def test_what_needs_peers_memory_is_refused_on_every_rank():
    for rank, (found, total) in enumerate(ranks.values(4, refused, ["a", "b", "a", "b"])):
        assert total == 4
        for what, text in found.items():
            assert "2 hosts" in text or "on host" in text, (rank, what, text)


def left_alone(group, ids, how):
    """Rank 3 ends in the middle of a program; what the others get, and when."""
    on_host(ids, group)
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=5.0)
    x = torch.ones(100_000)
    comm.all_reduce(x)
    if group.rank == 3:
        if how == "dies":
            os._exit(0)
        raise SystemExit
    begun = time.monotonic()
    with pytest.raises(symmpool.Error) as raised:
        for _ in range(20):
            comm.all_reduce(x)
    took = time.monotonic() - begun
    with pytest.raises(symmpool.Error, match="failed on all hosts"):
        comm.barrier()
    return str(raised.value), took


@pytest.mark.parametrize("how", ["dies", "leaves"])
def test_a_rank_that_is_gone_is_an_error_on_all_hosts(how):
    outcomes = ranks.run(4, left_alone, ["a", "a", "b", "b"], how)
    for found in outcomes[:3]:
        assert found.error is None, found.error
        text, took = found.value
        # The communicator's timeout, that of gloo behind it, and the look for a reason.
        assert took < 20, (took, text)
        assert "host b" in text, text


def goes_on(comm):
    x = torch.ones(10_000)
    comm.all_reduce(x)
    return x[0].item() == comm.world


def different_calls(group, ids):
    on_host(ids, group)
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=60.0)
    host, found = group.rank // 2, []
    for counts in [(50_000, 50_008), (1, 3_000_000), (3_000_000, 1), (8, 9), (300, 301)]:
        begun = time.monotonic()
        with pytest.raises(symmpool.DivergedError) as raised:
            comm.all_reduce(torch.ones(counts[host]))
        found.append((str(raised.value), raised.value.ranks, time.monotonic() - begun))
        assert goes_on(comm)
    return found


def test_different_calls_on_two_hosts_are_named_and_all_go_on():
    for rank, found in enumerate(ranks.values(4, different_calls, ["a", "a", "b", "b"])):
        text = found[0][0]
        assert "50000" in text and "50008" in text and f"host {'ab'[1 - rank // 2]}" in text, text
        for text, named, took in found:
            assert named and took < 10, (text, took)


def refused_on_one_rank(group, ids):
    on_host(ids, group)
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=60.0)
    found = []
    x, long = torch.ones(4000), torch.ones(4000 * group.world)
    sizes = [4000] * (4 if group.rank != 1 else 3)
    calls = [
        lambda: comm.all_reduce(x if group.rank != 1 else x.to(torch.complex64)),
        lambda: comm.all_to_all_single(long.clone(), long, [4000] * 4, sizes),
        lambda: comm.broadcast(x, 0 if group.rank != 1 else 99),
        lambda: comm.all_reduce(x, op="sum" if group.rank != 1 else "nonsense"),
    ]
    for call in calls:
        begun = time.monotonic()
        try:
            call()
            found.append(("no error", time.monotonic() - begun))
        except (symmpool.Error, ValueError, TypeError) as error:
            found.append((type(error).__name__, str(error), time.monotonic() - begun))
        assert goes_on(comm)
    return found


@pytest.mark.parametrize("ids", [["a", "a", "b", "b"], ["a", "b", "b", "b"]], ids="".join)
def test_a_call_that_one_rank_refuses_is_an_error_on_all_and_all_go_on(ids):
    for rank, found in enumerate(ranks.values(4, refused_on_one_rank, ids)):
        for kind, text, took in found:
            assert took < 10, (kind, text, took)
            assert rank == 1 or (kind == "DivergedError" and "rank 1" in text), (rank, kind, text)
            assert rank != 1 or kind != "DivergedError", (kind, text)


def wrong_options(group, ids):
    on_host(ids, group)
    pool = symmpool.Pool(group, "cpu")
    begun = time.monotonic()
    with pytest.raises(symmpool.Error) as raised:
        options = {"algorithms": {"all_reduce": 7}} if group.rank == 1 else {}
        symmpool.Communicator(pool, timeout=60.0, **options)
    took = time.monotonic() - begun
    return goes_on(symmpool.Communicator(pool, timeout=60.0)), took, str(raised.value)


def test_options_that_one_rank_refuses_are_an_error_on_all_and_the_next_is_made():
    for works, took, text in ranks.values(4, wrong_options, ["a", "a", "b", "b"]):
        assert works and took < 20, (took, text)
        assert "rank 1" in text or "algorithms" in text, text


def forked(group, ids):
    on_host(ids, group)
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=60.0)
    assert goes_on(comm)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            comm.all_reduce(torch.ones(5))
        except symmpool.InvalidStateError:
            status = 0
        del comm
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    return goes_on(comm)


def test_a_forked_child_leaves_the_connections_alone():
    assert ranks.values(2, forked, ["a", "b"]) == [True] * 2


def ending(program, **environment):
    """Ends of two processes that run a program on two hosts: their codes, and what they printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in range(2):
        own = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        own |= {HOST_ID: "ab"[rank], **environment}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(program)],
                env=os.environ | own,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        texts = [process.communicate(timeout=90)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], texts


def test_a_process_ends_where_a_transfer_is_under_way():
    codes, texts = ending(
        """
        import time, torch, symmpool
        group = symmpool.Group.from_env()
        comm = symmpool.Communicator(symmpool.Pool(group, "cpu"), timeout=60.0)
        comm.all_reduce(torch.ones(10))
        if group.rank == 0:
            # The message of the call that is refused is under way, and nobody comes to it.
            try:
                comm.broadcast(torch.ones(10), 99)
            except symmpool.Error as error:
                print("refused")
        else:
            time.sleep(3)
        """
    )
    assert codes == [0, 0] and "refused" in texts[0], texts


def test_interrupts_end_no_process_in_the_middle_of_a_transfer():
    codes, texts = ending(
        """
        import os, signal, threading, time, torch, symmpool
        group = symmpool.Group.from_env()
        comm = symmpool.Communicator(symmpool.Pool(group, "cpu"), timeout=3.0)
        x = torch.ones(3_000_000)
        comm.all_reduce(x)
        if group.rank == 0:
            def interrupt():
                for wait in (1.0, 0.7, 0.4, 0.4):
                    time.sleep(wait)
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            threading.Thread(target=interrupt, daemon=True).start()
            seen = 0
            def calm(depth):
                # Interrupts come in the middle of handlers, too.
                global seen
                try:
                    calm(depth - 1) if depth else comm.all_reduce(x)
                    time.sleep(0.5)
                except KeyboardInterrupt:
                    seen += 1
                    time.sleep(0.5)
                except symmpool.TimeoutError:
                    pass  # on a loaded machine interrupts come later
            calm(9)
            x.fill_(3)
            print("interrupted", seen)
        else:
            time.sleep(14)
        """
    )
    assert codes == [0, 0] and "interrupted" in texts[0] and "interrupted 0" not in texts[0], texts


def changed_timeout(group, ids):
    on_host(ids, group)
    comm = symmpool.Communicator(symmpool.Pool(group, "cpu"), timeout=120.0)
    comm.barrier()
    comm.timeout = 1.0
    if group.rank == 1:
        time.sleep(9)
        return 0.0
    begun = time.monotonic()
    with pytest.raises(symmpool.Error):
        comm.barrier()
    return time.monotonic() - begun


def test_a_timeout_that_changes_reaches_gloo():
    # The timeout, that of gloo behind it, and the look for a reason.
    assert max(ranks.values(2, changed_timeout, ["a", "b"])) < 8


def test_hosts_without_gloo_are_refused_by_a_sentence(monkeypatch):
    (group,) = symmpool.Group.in_process(1)
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    from symmpool.communicators import outer

    rendezvous = outer.OuterRendezvous(symmpool.Pool(group, "cpu"))
    with pytest.raises(symmpool.UnsupportedError, match="gloo carries data"):
        rendezvous.outers(1.0)
