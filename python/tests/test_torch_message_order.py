"""Messages of `symmpool.isend` and `irecv` that threads and signal handlers begin, and their arguments."""

import sys
import threading

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin

import symmpool
from symmpool.collectives import messages
from symmpool.communicators import cache

THREADS, EACH = 3, 8


def send_from_threads(other, pair):
    together = threading.Barrier(THREADS)

    def work(mine):
        together.wait()
        sent = [torch.full((20000,), float(mine * EACH + nth)) for nth in range(EACH)]
        for message in [symmpool.isend(x, other, pair) for x in sent]:
            message.wait()

    threads = [threading.Thread(target=work, args=(mine,)) for mine in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def received_out_of_order(other, pair):
    wrong, last, y = [], [-1] * THREADS, torch.zeros(20000)
    for _ in range(THREADS * EACH):
        symmpool.recv(y, other, pair)
        mine, nth = divmod(int(y[0]), EACH)
        if nth != last[mine] + 1:
            wrong.append((mine, nth, last[mine]))
        last[mine] = nth
    return wrong


def ordered(group, path):
    """Threads of rank 0 send, and rank 1 looks whether each thread's messages come in order."""
    me, _ = begin(group, path, "symmpool")
    wrong, made = [], []
    sys.setswitchinterval(1e-6)

    class Counted(messages.Worker):
        def __init__(self, *arguments):
            made.append(self)
            super().__init__(*arguments)

    messages.Worker = Counted
    for _ in range(25):
        pair = dist.new_group([0, 1])
        symmpool.barrier(pair)
        made.clear()
        if me == 0:
            send_from_threads(1, pair)
            if len(made) != 1:
                wrong.append(("threads", len(made)))
        else:
            wrong += received_out_of_order(0, pair)
        symmpool.barrier(pair)
        dist.destroy_process_group(pair)
    assert not wrong, wrong
    dist.destroy_process_group()


def test_messages_of_a_thread_keep_their_order_beside_those_of_others(tmp_path):
    values(2, ordered, tmp_path, limit=60)


def arguments(group, path):
    me, _ = begin(group, path, "symmpool")
    other, x, y = 1 - me, torch.full((3,), float(me)), torch.zeros(3)
    for operation in (symmpool.isend, symmpool.irecv, dist.isend):
        with pytest.raises(symmpool.InvalidArgumentError, match="peer: it is missing"):
            symmpool.P2POp(operation, y)

    def refuse_tags():
        for tag in (-1, 1.5, "2", None):
            with pytest.raises(symmpool.InvalidArgumentError, match="^symmpool: tag|^tag"):
                symmpool.send(x, other, tag=tag) if me == 0 else symmpool.irecv(y, other, tag=tag)

    refuse_tags()
    symmpool.barrier()
    with pytest.raises(symmpool.InvalidArgumentError if me == 0 else symmpool.DivergedError):
        symmpool.send(x, other, tag=-1) if me == 0 else symmpool.recv(y, other)
    work = symmpool.isend(x, other, tag=7)
    assert symmpool.recv(y, other, tag=7) == other and y.tolist() == [float(other)] * 3
    work.wait()
    for mine in (dist.new_group([0]), dist.new_group([1])):
        if dist.get_rank(mine) < 0:
            assert symmpool.recv(y, other, mine) == -1
            assert symmpool.irecv(y, other, mine) is symmpool.isend(x, other, mine) is None
    dist.destroy_process_group()


def test_arguments_of_messages_are_as_those_of_torch(tmp_path):
    values(2, arguments, tmp_path, limit=60)


def begun_by_a_handler(group):
    """A signal handler begins a call in the middle of another one's beginning, or of a wait for all."""
    pool = symmpool.Pool(group, "cpu")
    x, y = torch.ones(3), torch.ones(3)
    symmpool.all_reduce(x, group=pool)
    entry = cache.communicator_for(x, pool)
    with entry.lock:
        symmpool.all_reduce(x, group=pool, async_op=True)
    queue = entry.pending
    handled = []

    def ends_with(waited):
        ends = type(queue).ends_with(queue, waited)
        if not handled:
            handled.append(symmpool.all_reduce(x, group=pool, async_op=True))
        return ends

    queue.ends_with = ends_with
    entry.join_pending()
    assert entry.pending is queue
    symmpool.all_reduce(y, group=pool)
    assert handled[0].is_completed() and entry.pending is None
    assert (x.tolist(), y.tolist()) == ([8.0] * 3, [2.0] * 3)


def test_a_signal_handler_begins_a_call_where_another_one_is_begun():
    values(2, begun_by_a_handler, limit=40)
