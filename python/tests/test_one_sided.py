"""Copies and signals between two ranks, by kernels and by engines without SMs: the same on the CPU."""

import numpy as np
import pytest
import torch
from ranks import values

import symmpool

WORLD, COUNT = 3, 1000
ENGINES = (("kernel", "kernel"), ("copy", "memory"))


def ring(group):
    pool = symmpool.Pool(group, device="cpu")
    comm = symmpool.Communicator(pool)
    me, following, before = group.rank, (group.rank + 1) % WORLD, (group.rank - 1) % WORLD
    inbox, found = pool.zeros((2, COUNT), dtype=torch.int64), []
    pool.commit()
    for number, (copies, signals) in enumerate(ENGINES):
        # Ranks are ahead of each other by whatever time; nobody waits for all.
        mine = torch.arange(COUNT) + 10_000 * me + number
        comm.put(inbox[number], mine, following, engine=copies)
        comm.signal(following, 2, engine=signals)
        comm.wait(before, 2, engine=signals)
        arrived = torch.equal(inbox[number], torch.arange(COUNT) + 10_000 * before + number)
        comm.signal(before, channel=3, engine=signals)
        comm.wait(following, channel=3, timeout=20.0, engine=signals)
        back = np.empty(COUNT, np.int64)
        comm.get(back, inbox[number], following, engine=copies)
        comm.signal(following, channel=4, engine=signals)
        # Nobody reads this inbox any more. Parts of tensors, and this rank itself:
        comm.wait(before, channel=4, engine=signals)
        comm.put(inbox[number, :3], mine[:3], me, engine=copies)
        found.append((arrived, back.tolist() == mine.tolist(), inbox[number, :4].tolist()))
        comm.barrier()
        inbox[number].zero_()
    return found


def test_copies_and_signals_are_the_same_by_every_engine():
    for me, found in enumerate(values(WORLD, ring)):
        before = (me - 1) % WORLD
        for number, (arrived, back, begin) in enumerate(found):
            assert arrived and back
            mine = [10_000 * me + nth + number for nth in range(3)]
            assert begin == [*mine, 10_000 * before + 3 + number]


def wrong(group):
    pool = symmpool.Pool(group, device="cpu")
    comm = symmpool.Communicator(pool)
    inbox, mine = pool.zeros(COUNT), torch.ones(COUNT)
    pool.commit()
    texts = []
    for call in (
        lambda: comm.put(torch.ones(COUNT), mine, 1),
        lambda: comm.get(mine, torch.ones(COUNT), 1, engine="copy"),
        lambda: comm.put(inbox, mine[:9], 1),
        lambda: comm.put(inbox, mine.to(torch.int32), 1, engine="copy"),
        lambda: comm.put(inbox, mine, 2),
        lambda: comm.put(inbox, inbox, group.rank),
        lambda: comm.put(inbox[::2], mine[::2], 1),
        lambda: comm.put(inbox, mine, 1, engine="memory"),
        lambda: comm.signal(1, engine="copy"),
        lambda: comm.signal(1, 16, engine="memory"),
        lambda: comm.wait(1, timeout=-1.0, engine="memory"),
    ):
        with pytest.raises(symmpool.InvalidArgumentError) as error:
            call()
        texts.append(str(error.value))
    with pytest.raises(symmpool.TimeoutError, match="channel 5"):
        comm.wait(1 - group.rank, 5, timeout=1e-3, engine="memory")
    with pytest.raises(TypeError, match="src"):
        comm.put(inbox, [1.0], 1)
    read_only = np.ones(COUNT, np.float32)
    read_only.flags.writeable = False
    with pytest.raises(symmpool.InvalidArgumentError, match="dst"):
        comm.get(read_only, inbox, 1)
    # Nobody else has noticed.
    comm.put(inbox, read_only, 1 - group.rank, engine="copy")
    comm.barrier()
    assert inbox.sum() == COUNT
    return texts


def test_what_does_not_fit_is_refused_on_the_rank_that_passes_it():
    words = [
        "not in the pool's heap",
        "not in the pool's heap",
        "dst: 1000 elements of float32, and src: 9",
        "src: 1000 of int32",
        "there are 2 ranks",
        "both ends overlap",
        "dst: not contiguous",
        'engine: "memory" is none of "kernel" and "copy"',
        'engine: "copy" is none of "kernel" and "memory"',
        "channels are 0 to 15",
        "timeout",
    ]
    for texts in values(2, wrong):
        assert all(word in text for word, text in zip(words, texts, strict=True)), texts
