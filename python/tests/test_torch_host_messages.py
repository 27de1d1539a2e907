"""Point-to-point messages of CPU tensors on the backend: as gloo has them, and how they fail."""

import datetime
import os
import random
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run, values
from test_torch_distributed import begin

import symmpool
from symmpool.torch_backend import mailbox

TYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64)


def program(seed, world):
    """Messages of a random program: sender, receiver, tag, length, type, and whether the receiver names its
    sender. Those of one tag whose sender is not named have one sender."""
    draw = random.Random(seed)
    messages = []
    for _ in range(draw.randrange(20, 60)):
        sender = draw.randrange(world)
        receiver = (sender + draw.randrange(1, world)) % world
        is_named = draw.random() < 0.7
        # Gloo takes no empty messages from ranks that are not named.
        length = draw.choice((0, 1, 7, 300, 5000, 16384, 16385, 60000)[not is_named :])
        tag = draw.randrange(3) if is_named else 100 + sender
        messages.append((sender, receiver, tag, length, draw.choice(TYPES), is_named))
    return messages


def execute(messages, me, group, seed):
    """Returns the tensors that this rank receives in a program, by messages, and from whom."""
    draw = random.Random(1000 * seed + me)
    sends, receives = [], []
    for number, message in enumerate(messages):
        if message[0] == me:
            sends.append((number, message))
        if message[1] == me:
            receives.append((number, message))
    # Where the calls of a kind lie between those of the other may differ, and so may the order of tags.
    calls = [(each, True) for each in sends] + [(each, False) for each in receives]
    keys = {}
    for (_, message), _ in calls:
        keys.setdefault((message[:3], message[5]), []).append(draw.random())
    for key in keys.values():
        key.sort(reverse=True)
    calls.sort(key=lambda call: keys[call[0][1][:3], call[0][1][5]].pop())
    works, found = [], {}
    for (number, (sender, receiver, tag, length, dtype, is_named)), is_send in calls:
        if is_send:
            x = (torch.arange(length) * (number + 1) % 113).to(dtype)
            works.append((None, dist.isend(x, receiver, group=group, tag=tag)))
            continue
        x = torch.zeros(length, dtype=dtype)
        if not is_named and draw.random() < 0.5 and not any(is_send for _, is_send in calls):
            found[number] = (dist.recv(x, None, group=group, tag=tag), x)
            continue
        work = dist.irecv(x, sender if is_named else None, group=group, tag=tag)
        works.append(((number, sender, x), work))
    draw.shuffle(works)
    for what, work in works:
        work.wait()
        if what is not None:
            number, sender, x = what
            found[number] = (sender, x)
    return found


def random_programs(group, folder, seeds):
    me, world = begin(group, folder, "symmpool")
    beside = dist.new_group(backend="gloo")
    wrong = []
    for seed in seeds:
        messages = program(seed, world)
        ours, expected = (execute(messages, me, each, seed) for each in (None, beside))
        if ours.keys() != expected.keys():
            wrong.append((seed, "receives"))
        for number, (source, x) in expected.items():
            if ours[number][0] != source or not torch.equal(ours[number][1], x):
                wrong.append((seed, number, messages[number]))
    served = symmpool.backend.backend_counts()
    dist.destroy_process_group()
    return wrong, served["send"].keys() | served["recv"].keys()


@pytest.mark.parametrize("world", [2, 4])
def test_random_programs_receive_what_they_do_on_gloo(world, tmp_path):
    found = values(world, random_programs, str(tmp_path), range(12))
    assert found == [([], {"symmpool"})] * world


def two_of_four(group, folder):
    """A pair that has messages while the others have none, and never make a collective."""
    me, _ = begin(group, folder, "symmpool")
    if me in (1, 3):
        return True
    x = torch.full((5,), float(me))
    # Before the other rank has come.
    begun = time.monotonic()
    works = [dist.isend(x, 2 - me, tag=tag) for tag in range(10)]
    for work in works:
        work.wait()
    assert time.monotonic() - begun < 5
    time.sleep(0.2 * me)
    got = torch.zeros(10, 5)
    for tag in reversed(range(10)):
        assert dist.recv(got[tag], tag=tag) == 2 - me
    return got.tolist() == [[2.0 - me] * 5] * 10


def test_a_pair_needs_no_other_rank(tmp_path):
    assert values(4, two_of_four, str(tmp_path)) == [True] * 4


def elsewhere(group, folder):
    """Large messages pass while both ranks wait for something else."""
    me, _ = begin(group, folder, "symmpool")
    other = dist.new_group(backend="gloo")
    x, got = torch.full((1 << 20,), me + 1.0), torch.zeros(1 << 20)
    works = [dist.irecv(got, 1 - me), dist.isend(x, 1 - me)]
    before = torch.ones(1)
    time.sleep(0.5)
    dist.all_reduce(before, group=other)
    done = [work.is_completed() for work in works]
    for work in works:
        work.wait()
    is_right = got.eq(2.0 - me).all().item()
    dist.destroy_process_group()
    return done, is_right


def test_messages_pass_while_ranks_are_elsewhere(tmp_path):
    assert values(2, elsewhere, str(tmp_path)) == [([True, True], True)] * 2


CALLS = {
    "recv": lambda x: dist.recv(x, 1),
    "any": lambda x: dist.recv(x),
    "send": lambda x: dist.send(torch.zeros(1 << 20), 1),
    "irecv": lambda x: dist.irecv(x, 1, tag=3).wait(),
}


def killed(group, folder, call):
    me, _ = begin(group, folder, "symmpool", timeout=datetime.timedelta(seconds=60))
    x = torch.zeros(4)
    if me == 1:
        dist.recv(x, 0, tag=1)
        os.kill(os.getpid(), signal.SIGKILL)
    if me == 2:
        dist.recv(x, 0, tag=9)
        return True
    dist.isend(x, 1, tag=1).wait()
    began = time.monotonic()
    with pytest.raises(symmpool.PeerLostError, match="rank 1") as raised:
        CALLS[call](x)
    took = time.monotonic() - began
    with pytest.raises(symmpool.PeerLostError, match="rank 1"):
        dist.send(x, 1)
    dist.send(x, 2, tag=9)
    return raised.value.ranks, took < 5


@pytest.mark.parametrize("call", CALLS)
def test_a_killed_rank_is_named_at_once(call, tmp_path):
    found = run(3, killed, str(tmp_path), call, silent=(1,))
    assert found[0].value == ((1,), True), found[0].error
    assert found[2].value is True, found[2].error


def in_vain(group, folder):
    me, _ = begin(group, folder, "symmpool", timeout=datetime.timedelta(seconds=1))
    found = []
    if me == 0:
        x = torch.zeros(4)
        for call in (lambda: dist.recv(x, 1, tag=2), lambda: dist.recv(x), CALLS["send"]):
            with pytest.raises(symmpool.TimeoutError) as raised:
                call(x) if call is CALLS["send"] else call()
            found.append((raised.value.ranks, str(raised.value)))
        work = dist.irecv(x, 1)
        with pytest.raises(symmpool.TimeoutError):
            work.wait(datetime.timedelta(milliseconds=50))
        dist.send(torch.ones(1), 1, tag=5)
        work.wait()
        assert x.tolist() == [2.0] * 4 and work.is_success()
    else:
        dist.irecv(torch.zeros(1), 0, tag=5).wait(datetime.timedelta(seconds=60))
        dist.send(torch.full((4,), 2.0), 0)
    dist.destroy_process_group()
    return found


def test_a_message_that_does_not_come_names_the_rank(tmp_path):
    found, _ = values(2, in_vain, str(tmp_path))
    assert [ranks for ranks, _ in found] == [(1,)] * 3
    assert "recv of 4 f32 (16 bytes), tag 2, from rank 1 on rank 0" in found[0][1]
    assert "from any rank" in found[1][1] and "send of 1048576 f32" in found[2][1]


def interrupted(group, folder):
    me, _ = begin(group, folder, "symmpool")
    if me == 0:
        for call in (lambda: dist.recv(torch.zeros(1), 1), lambda: dist.send(torch.zeros(1 << 20), 1)):
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt) as raised:
                call()
            assert time.monotonic() - began < 5
            assert raised.value.__cause__.ranks == (1,)
        dist.send(torch.ones(1), 1, tag=4)
    else:
        dist.recv(torch.zeros(1), 0, tag=4)
        dist.send(torch.full((2,), 3.0), 0)
    # Neither was left behind: a receive that takes this message, or a send.
    got = torch.zeros(2)
    if me == 0:
        dist.recv(got, 1)
    dist.destroy_process_group()
    return got.tolist()


def test_ctrl_c_ends_a_wait_and_the_message(tmp_path):
    assert values(2, interrupted, str(tmp_path))[0] == [3.0] * 2


def destroyed(group, folder):
    me, _ = begin(group, folder, "symmpool")
    pair = dist.new_group()
    if me == 0:
        work = dist.irecv(torch.zeros(1), 1, group=pair)
        dist.barrier()
        dist.destroy_process_group(pair)
        with pytest.raises(symmpool.InvalidStateError, match="was destroyed"):
            work.wait()
        with pytest.raises(ValueError, match="group"):
            dist.send(torch.zeros(1), 1, group=pair)
        dist.barrier()
    else:
        dist.barrier()
        began = time.monotonic()
        with pytest.raises(symmpool.PeerLostError, match="rank 0.*destroyed the group"):
            dist.recv(torch.zeros(1), 0, group=pair)
        assert time.monotonic() - began < 5
        dist.barrier()
    dist.destroy_process_group()
    return True


def test_a_destroyed_group_ends_its_messages_on_both_ranks(tmp_path):
    assert values(2, destroyed, str(tmp_path)) == [True] * 2


def forked(group, folder):
    me, _ = begin(group, folder, "symmpool")
    x = torch.full((3,), float(me))
    if me == 0:
        dist.send(x, 1)
        work = dist.irecv(x, 1)
        future = work.get_future()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            is_error = isinstance(work.exception(), symmpool.InvalidStateError)
            found = [work.is_completed() and is_error, not work.is_success()]
            for call in (lambda: dist.send(x, 1), work.wait, future.wait, work.get_future().wait):
                try:
                    call()
                except (symmpool.InvalidStateError, RuntimeError) as error:
                    found.append("forked" in str(error))
            os.write(write, b"y" if found == [True] * 6 else b"n")
            os._exit(0)
        assert os.read(read, 1) == b"y"
        os.waitpid(child, 0)
        dist.send(x, 1)
        work.wait()
    else:
        got = torch.zeros(3)
        for _ in range(2):
            dist.recv(got, 0)
        dist.send(x, 0)
    dist.destroy_process_group()
    return x.tolist()


def test_a_forked_child_is_refused_and_its_parent_goes_on(tmp_path):
    assert values(2, forked, str(tmp_path)) == [[1.0] * 3] * 2


def without_memory_in_common(group, folder):
    """One rank has no mailbox: all messages of the group go by gloo."""
    if group.rank == 1:

        class Missing:
            def __init__(self, *_):
                raise symmpool.OutOfMemoryError("no descriptor is left")

        mailbox.Mailbox = Missing
    me, world = begin(group, folder, "symmpool")
    got = torch.zeros(4)
    works = [dist.isend(torch.full((4,), float(me)), (me + 1) % world), dist.irecv(got, (me - 1) % world)]
    for work in works:
        work.wait()
    counts = symmpool.backend.backend_counts()
    dist.destroy_process_group()
    return got.tolist(), counts["send"]


def test_gloo_carries_the_messages_of_ranks_without_memory_in_common(tmp_path):
    found = values(3, without_memory_in_common, str(tmp_path))
    assert found == [([float((me - 1) % 3)] * 4, {"gloo": 1}) for me in range(3)]


def futures(group, folder):
    me, _ = begin(group, folder, "symmpool")
    got = torch.zeros(2)
    if me == 0:
        work = dist.irecv(got, 1)
        future = work.get_future()
        assert not future.done()
        dist.send(torch.ones(1), 1)
        assert future.wait()[0] is got and work.result()[0] is got and work.exception() is None
    else:
        dist.recv(torch.zeros(1), 0)
        dist.isend(torch.full((2,), 5.0), 0).get_future().wait()
    dist.destroy_process_group()
    return got.tolist()


def test_futures_of_messages_come_to_their_end(tmp_path):
    assert values(2, futures, str(tmp_path))[0] == [5.0] * 2
