"""A forked child, such as a DataLoader's worker, whose parent has a call under way: an error that says what
to do at every door, at once, and an end of the child that waits for nothing."""

import atexit
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import threading
import time

import torch
import torch.distributed as dist
from ranks import values
from torch.utils.data import DataLoader, Dataset

import symmpool
from symmpool import experts, fused
from symmpool.communicators import cache


def in_child(act, limit=20):
    """Returns the result of `act` in a forked child. None if it did not end in time."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(limit - 5)
        try:
            found = act()
        except BaseException as error:
            found = repr(error)
        os.write(writing, pickle.dumps(found))
        # The interpreter ends so too.
        threading._shutdown()
        atexit._run_exitfuncs()
        gc.collect()
        os._exit(0)
    os.close(writing)
    end = time.monotonic() + limit
    while time.monotonic() < end and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.01)
    else:
        if time.monotonic() >= end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
    with os.fdopen(reading, "rb") as pipe:
        return pickle.loads(pipe.read())


def outcomes(doors):
    found = {}
    for name, door in doors.items():
        started = time.monotonic()
        try:
            found[name] = ("returned", repr(door())[:200])
        except BaseException as error:
            found[name] = (type(error).__name__, str(error))
        found[name] += (time.monotonic() - started < 3,)
    return found


class Calls(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, at):
        x = torch.ones(3)
        symmpool.all_reduce(x)
        return x


def forked(group, folder, backend):
    if backend == "symmpool":
        importlib.import_module("symmpool.backend")
    dist.init_process_group(
        backend, store=dist.FileStore(f"{folder}/store", 2), rank=group.rank, world_size=2
    )
    me = dist.get_rank()
    pool = symmpool.Pool(None, "cpu")
    x, weight, residual = torch.ones(2, 64), torch.ones(64), torch.ones(2, 64)
    ids = torch.zeros(2, 1, dtype=torch.int64)
    options = {"hidden": 64, "experts": 2, "top_k": 1, "max_tokens": 4, "dtype": torch.float32}
    buffer = experts.ExpertBuffer(**options)
    received, handle = buffer.dispatch(x, ids)
    dist.all_reduce(x)
    symmpool.all_reduce(x)
    # Messages both ways, for which pairs of ranks have memory.
    for source in (0, 1):
        dist.send(x, 1) if me == source == 0 else dist.recv(x, 0) if source == 0 else None
        dist.send(x, 0) if me == source == 1 else dist.recv(x, 1) if source == 1 else None
    comm = symmpool.communicator()
    store = dist.distributed_c10d._get_default_store()
    if me == 1:
        # Until then the other rank's calls are under way.
        store.wait(["forked"])
    works = [symmpool.all_reduce(torch.ones(5), async_op=True) for _ in range(3)]
    begun = dist.all_reduce(torch.ones(5), async_op=True)
    future = works[2].get_future()
    message = dist.irecv(torch.ones(5), 1) if me == 0 else dist.isend(torch.ones(5), 0)
    doors = {
        "all_reduce": lambda: symmpool.all_reduce(x),
        "wrong": lambda: symmpool.all_reduce(x, "most"),
        "strided": lambda: symmpool.all_reduce(torch.ones(4, 4).t()),
        "async": lambda: symmpool.all_reduce(x, async_op=True),
        "barrier": lambda: symmpool.barrier(),
        "backend": lambda: dist.all_reduce(x),
        "backend async": lambda: dist.all_reduce(x, async_op=True),
        "backend barrier": lambda: dist.barrier(),
        "backend send": lambda: dist.send(x, 1),
        "backend recv": lambda: dist.recv(x, 1),
        "backend isend": lambda: dist.isend(x, 1),
        "backend batch": lambda: dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 1)])[0].wait(),
        "backend message wait": lambda: message.wait(),
        "backend object": lambda: dist.broadcast_object_list([1], 0),
        "send": lambda: symmpool.send(x, 1),
        "operator": lambda: torch.ops.symmpool.all_reduce(x, "sum", ""),
        "communicator": lambda: comm.all_reduce(x),
        "found": lambda: cache.communicator().all_reduce(x),
        "synchronize": lambda: comm.synchronize(),
        "mark": lambda: comm.mark().wait(),
        "wait": lambda: works[0].wait(),
        "wait for a while": lambda: works[0].wait(5),
        "result": lambda: works[0].result(),
        "new future": lambda: works[1].get_future().wait(),
        "future": lambda: future.wait(),
        "backend wait": lambda: begun.wait(),
        "dispatch": lambda: buffer.dispatch(x, ids),
        "combine": lambda: buffer.combine(received.x, handle),
        "buffer": lambda: experts.ExpertBuffer(**options),
        "dispatch with a gradient": lambda: buffer.dispatch(x.clone().requires_grad_(), ids),
        "experts' operator": lambda: torch.ops.symmpool.experts_dispatch(
            x, ids, None, buffer.name, "rank", 1, None
        ),
        "norm": lambda: fused.all_reduce_rms_norm(x, residual, weight),
        "product": lambda: fused.matmul_all_reduce(x, torch.ones(64, 4), "sum", None),
        "pool": lambda: pool.empty(3),
        "another pool": lambda: symmpool.Pool(None, "cpu"),
        "commit": lambda: pool.commit(),
    }
    free = {
        "exception": lambda: type(works[0].exception()).__name__,
        "is_completed": lambda: works[0].is_completed(),
        "is_success": lambda: works[0].is_success(),
        "forget": lambda: symmpool.forget(pool),
    }
    if backend == "symmpool":
        free["destroy"] = dist.destroy_process_group
    else:
        # Gloo's own calls, and the end of its group, wait there for a thread that it has not.
        doors = {name: door for name, door in doors.items() if not name.startswith("backend")}

    def act():
        found = outcomes(doors), outcomes(free)
        works.clear()
        gc.collect()
        return found

    found = in_child(act) if me == 0 else None
    if me == 0:
        text = None
        try:
            list(DataLoader(Calls(), num_workers=1, timeout=30, multiprocessing_context="fork"))
        except RuntimeError as error:
            text = str(error)
        found = (found, text)
        store.set("forked", "1")
    # The parent's calls are as they were.
    for work in (*works, begun, message):
        work.wait()
    dist.all_reduce(x)
    dist.destroy_process_group()
    return found


def test_a_child_that_is_forked_while_a_call_is_under_way_is_refused_at_every_door(tmp_path):
    for backend in ("symmpool", "gloo"):
        (tmp_path / backend).mkdir()
        found, _ = values(2, forked, str(tmp_path / backend), backend, limit=80)
        assert found[0] is not None
        (doors, free), loader = found
        for name, (kind, text, at_once) in doors.items():
            assert at_once and kind == "InvalidStateError" and "fork" in text, (name, kind, text)
        assert free["exception"][:2] == ("returned", "'InvalidStateError'"), free
        assert free["is_completed"][:2] == ("returned", "True")
        assert free["is_success"][:2] == ("returned", "False")
        assert all(at_once for _, _, at_once in free.values()), free
        assert "InvalidStateError" in loader and "after the fork" in loader, loader
