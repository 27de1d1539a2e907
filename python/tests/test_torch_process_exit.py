"""How programs end, on purpose or not: nobody waits in vain, and nobody crashes."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run, values
from test_torch_distributed import begin

import symmpool

kept = []


def leaves(group, folder):
    begin(group, folder)
    pool, other = symmpool.Pool(device="cpu"), symmpool.Pool(device="cpu")
    x = pool.empty(1 << 20, torch.float32).fill_(1.0)
    y = other.empty(4, torch.float32).fill_(1.0)
    symmpool.all_reduce(y)
    work = symmpool.all_reduce(x, async_op=True)
    # Nothing is destroyed, waited for or let go of.
    kept.extend([pool, other, x, y, work])
    return y[0].item()


def test_leaving_without_destroying_anything_ends_well(tmp_path):
    outcomes = run(3, leaves, str(tmp_path))
    assert [(each.status, each.value) for each in outcomes] == [(0, 3.0)] * 3, outcomes


def raises(group, folder):
    begin(group, folder)
    pool = symmpool.Pool(device="cpu")
    x = pool.empty(1 << 10, torch.float32).fill_(1.0)
    symmpool.all_reduce(x)
    if pool.rank == 1:
        raise ZeroDivisionError
    started = time.monotonic()
    try:
        for _ in range(1000):
            symmpool.all_reduce(x)
    except symmpool.PeerLostError as error:
        return error.ranks, time.monotonic() - started < 10
    return "nothing was raised"


def test_an_exception_on_one_rank_is_an_error_on_the_others_when_it_ends(tmp_path):
    outcomes = run(3, raises, str(tmp_path))
    assert "ZeroDivisionError" in outcomes[1].error
    assert [outcomes[rank].value for rank in (0, 2)] == [((1,), True)] * 2


def interrupted_all(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=60)
    numbers = torch.empty(group.world, dtype=torch.int64)
    comm.all_gather_into_tensor(numbers, torch.tensor([os.getpid()]))
    if group.rank == 0:
        # A terminal does so, once the others wait; this one comes last.
        time.sleep(0.5)
        for number in reversed(numbers.tolist()):
            os.kill(number, signal.SIGINT)
        time.sleep(60)
    comm.barrier()


def test_ctrl_c_ends_ranks_that_wait_for_each_other():
    started = time.monotonic()
    outcomes = run(3, interrupted_all)
    assert time.monotonic() - started < 30
    assert all("KeyboardInterrupt" in each.error for each in outcomes), outcomes


def interrupted_alone(group):
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    try:
        symmpool.Pool((store, 0, 2), "cpu", timeout=60)
    except KeyboardInterrupt:
        return time.monotonic() - started < 10
    return "not interrupted"


def test_ctrl_c_raises_while_a_rank_is_missing():
    assert values(1, interrupted_alone) == [True]


def interrupted_commit(group):
    pool = symmpool.Pool(group, "cpu", timeout=60)
    if group.rank == 1:
        # Comes when the other has left.
        time.sleep(2.5)
        with pytest.raises(symmpool.InvalidStateError, match="rank 0 gave up: interrupted"):
            pool.commit()
        return True
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pool.commit()
    assert time.monotonic() - started < 10
    # From then on it says so, and nothing of the signal is left.
    for _ in range(2):
        with pytest.raises(symmpool.InvalidStateError, match="since an earlier failure"):
            pool.commit()
    return True


def test_ctrl_c_ends_a_commit_that_waits_for_a_rank_and_the_rank_gets_an_error():
    assert values(2, interrupted_commit) == [True, True]


def handled_commit(group):
    pool = symmpool.Pool(group, "cpu", timeout=60)
    if group.rank == 1:
        time.sleep(3)
        pool.commit()
        return True
    observed = []

    def handler(number, _frame):
        # The locks of the commit can be taken here, as no handler runs within it.
        observed.append((number, pool.stats()["commits"], pool.block(10, "uint8").nbytes))

    for number in (signal.SIGALRM, signal.SIGINT):
        signal.signal(number, handler)
    for after, number in ((0.3, signal.SIGALRM), (0.6, signal.SIGINT)):
        threading.Timer(after, os.kill, (os.getpid(), number)).start()
    pool.commit()
    return sorted(observed) == [(signal.SIGINT, 1, 10), (signal.SIGALRM, 1, 10)]


def test_handlers_of_a_program_run_after_a_commit_and_do_not_end_it():
    assert values(2, handled_commit) == [True, True]


def interrupted_call(group, op):
    pool = symmpool.Pool(group, "cpu", timeout=60)
    comm = symmpool.Communicator(pool, timeout=60)
    x = pool.empty(1 << 20, torch.float32)
    if group.rank == 1:
        time.sleep(3)
        return True
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        # A call that refuses its arguments, after the others know, ends so too.
        comm.all_reduce(x, op=op)
    assert time.monotonic() - started < 10
    for _ in range(2):
        with pytest.raises(symmpool.InvalidStateError, match="failed; rebuild it.*interrupted"):
            comm.all_reduce(x)
    return True


def test_ctrl_c_ends_a_call_whose_commit_waits_for_a_rank():
    # One with an operation that there is not is refused at once, and waits for nobody.
    assert values(2, interrupted_call, "sum") == [True, True]


def runs_out(group, folder):
    begin(group, folder)
    # A segment an allocation: refused at once, and nothing is taken before.
    pool = symmpool.Pool(device="cpu", window_policy="per-segment")
    first = pool.empty(1000, torch.float32).fill_(pool.rank)
    symmpool.all_reduce(first)
    observed = []
    try:
        x = pool.empty(1 << 39 if pool.rank == 1 else 1 << 20, torch.uint8)
    except MemoryError as error:
        observed.append(type(error).__name__)
    try:
        pool.commit()
    except symmpool.OutOfMemoryError as error:
        observed.append(f"{type(error).__name__}, rank 1 named: {'rank 1' in str(error)}")
    x = None  # noqa: F841  # tensors that were allocated since go before all agree again
    gc.collect()
    pool.resync()
    again = pool.empty(1 << 21, torch.float32).fill_(1.0)
    symmpool.all_reduce(again)
    dist.destroy_process_group()
    return observed, first[0].item(), again[-1].item()


def test_out_of_memory_on_one_rank_is_an_error_on_all_ranks_which_stay_usable(tmp_path):
    observed = "OutOfMemoryError, rank 1 named: True"
    first, second, third = values(3, runs_out, str(tmp_path))
    assert first == third == ([observed], 3.0, 3.0)
    assert second == (["OutOfMemoryError", observed], 3.0, 3.0)


def in_a_child(pool, comm, group, x):
    """The errors in a forked child, and how it ends when it releases everything."""
    calls = {
        "allocate": lambda: pool.empty(4, torch.float32),
        "block": lambda: pool.block(4, "float32"),
        "reserve": lambda: pool.reserve(1 << 30),
        "commit": pool.commit,
        "resync": pool.resync,
        "reduce": lambda: comm.all_reduce(x),
        "reduce nonsense": lambda: comm.all_reduce("nonsense"),
        "module-level": lambda: symmpool.all_reduce(x, group=group),
        "not waited for": lambda: symmpool.all_reduce(x, group=group, async_op=True),
        "a new pool": lambda: symmpool.Pool(group, "cpu"),
        "a new communicator": lambda: symmpool.Communicator(pool),
        "barrier": comm.barrier,
        "scope": pool.__enter__,
    }
    for name, call in calls.items():
        try:
            call()
            return name
        except symmpool.InvalidStateError as error:
            if "fork" not in str(error):
                return name
    mine = symmpool.Group.in_process(1)[0]
    y = symmpool.Pool(mine, "cpu").empty(4, torch.float32).fill_(2.0)
    symmpool.all_reduce(y, group=mine)
    return "" if y.tolist() == [2.0] * 4 else "its own"


def forks(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool)
    x = pool.empty(1000, torch.float32).fill_(1.0)
    symmpool.all_reduce(x, group=group)
    symmpool.all_reduce(x, group=group, async_op=True).wait()
    child = os.fork()
    if child == 0:
        wrong = "an exception"
        try:
            signal.alarm(20)
            wrong = in_a_child(pool, comm, group, x)
            del pool, comm, x
            gc.collect()
        finally:
            os.write(2, wrong.encode())
            os._exit(bool(wrong))
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    # The parent goes on as if there had been no child.
    comm.all_reduce(x)
    y = pool.empty(1 << 22, torch.float32).fill_(1.0)
    symmpool.all_reduce(y, group=group)
    return ended, x[-1].item(), y[-1].item()


def test_a_forked_child_is_refused_and_harms_nobody():
    assert values(2, forks) == [(0, 8.0, 2.0)] * 2


def outlives(group, folder):
    me, world = begin(group, folder)
    pool = symmpool.Pool(device="cpu")
    x = pool.empty(1000, torch.float32).fill_(me + 1.0)
    symmpool.all_reduce(x)
    symmpool.forget(pool)
    del pool
    dist.destroy_process_group()
    gc.collect()
    x += 1
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=me, world_size=world)
    again = symmpool.Pool(device="cpu")
    y = again.empty(1000, torch.float32).copy_(x)
    symmpool.all_reduce(y)
    symmpool.all_reduce(x)  # ordinary memory to the new pool
    dist.destroy_process_group()
    return x[-1].item(), y[-1].item()


@pytest.mark.parametrize("world", [1, 2])
def test_tensors_outlive_their_pool_and_their_group(world, tmp_path):
    last = world * (world * (world + 1) / 2 + 1)
    assert values(world, outlives, str(tmp_path)) == [(last, last)] * world


# Whatever a thread does when the program ends, the end takes a while: there are objects to be let go of.
ENDS = """
import sys, threading, time
import torch
from symmpool.communicators import host_work

class Late:
    def __del__(self):
        end = time.monotonic() + 1
        while time.monotonic() < end:
            pass

sys.late = Late()
go, begun = threading.Event(), threading.Event()
class Owner: pass
owner = Owner()
under_way = host_work.Worker(owner).submit(go.wait, (), [torch.ones(1)])

def callback(future):
    begun.set()
    time.sleep(2.3)
    print("called", flush=True)
    return future.value()

chained = under_way.get_future().then(callback)
"""


@pytest.mark.parametrize("last", ["go.set(); begun.wait()", ""])
def test_a_program_ends_with_what_follows_a_call_but_not_with_a_call_that_waits(last):
    started = time.monotonic()
    command = [sys.executable, "-c", ENDS + last]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ("called\n" if last else "")
    assert time.monotonic() - started < 40
