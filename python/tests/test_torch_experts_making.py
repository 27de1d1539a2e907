"""How ranks make buffers for experts: all of them with the same options, or none."""

import threading

import pytest
import torch
from ranks import values

import symmpool
from symmpool import experts

OPTIONS = {"hidden": 64, "experts": 2, "top_k": 1, "max_tokens": 4, "dtype": torch.float32}


def check(buffer, me):
    """Sends a token to the other rank, and takes the sum back."""
    x = torch.full((1, 64), float(me + 1))
    received, handle = buffer.dispatch(x, torch.tensor([[1 - me]]), exact=True)
    assert received.x[:, 0].tolist() == [2.0 - me]
    assert torch.equal(buffer.combine(received.x, handle), x)


def threads_make(group):
    pool = symmpool.Pool(group, "cpu")
    experts.ExpertBuffer(pool, **OPTIONS)
    errors, kept = [], [[], []]

    def work(mine):
        try:
            for nth in range(15):
                buffer = experts.ExpertBuffer(pool, **OPTIONS)
                if nth % 3 == 0:
                    kept[mine].append(buffer)
        except Exception as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=work, args=(mine,)) for mine in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    kept.clear()
    check(experts.ExpertBuffer(pool, **OPTIONS), pool.rank)


def test_threads_make_equal_buffers_of_one_group():
    values(2, threads_make, limit=60)


def lone(group):
    pool = symmpool.Pool(group, "cpu")
    me = pool.rank
    kept = experts.ExpertBuffer(pool, **OPTIONS)
    dropped = experts.ExpertBuffer(pool, **OPTIONS)
    del dropped
    x = torch.tensor([7])
    for call in (
        lambda: symmpool.all_reduce(x, "max", pool),
        lambda: symmpool.barrier(pool),
        lambda: kept.dispatch(torch.ones(1, 64), torch.tensor([[0]])),
    ):
        with pytest.raises(symmpool.DivergedError, match="making of a buffer for experts of f32, hidden 64"):
            experts.ExpertBuffer(pool, **OPTIONS) if me == 0 else call()
        assert x.tolist() == [7]
        check(kept, me)


def test_a_rank_that_makes_a_buffer_alone_pairs_with_no_other_call():
    values(2, lone, limit=60)


def other_options(group):
    pool = symmpool.Pool(group, "cpu")
    me = pool.rank
    kept = experts.ExpertBuffer(pool, **OPTIONS)
    for name, both, words in (
        ("max_tokens", (4, 5), "max_tokens"),
        ("hidden", (64, 128), "hidden"),
        ("experts", (2, 4), "experts"),
        ("top_k", (1, 2), "top_k"),
        ("capacity", (None, 8), "capacity"),
        ("num_sms", (None, 4), "num_sms"),
        ("dtype", (torch.float32, torch.bfloat16), "bf16"),
    ):
        before = pool.stats()
        with pytest.raises(symmpool.DivergedError, match="making of a buffer for experts") as caught:
            experts.ExpertBuffer(pool, **{**OPTIONS, name: both[me]})
        assert words in str(caught.value) and pool.stats()["allocated"] == before["allocated"], name
        kept = experts.ExpertBuffer(pool, **OPTIONS)
        check(kept, me)


def test_ranks_whose_options_differ_all_learn_it_and_allocate_nothing():
    values(2, other_options, limit=60)


def without_room(group):
    """A rank has no room for the buffer's memory."""
    pool = symmpool.Pool(group, "cpu")
    too_large = {**OPTIONS, "hidden": 1 << 20, "max_tokens": 1 << 20}
    for _ in range(2):
        with pytest.raises(MemoryError):
            experts.ExpertBuffer(pool, **too_large)
        check(experts.ExpertBuffer(pool, **OPTIONS), pool.rank)


def test_no_room_for_a_buffer_is_an_error_that_ranks_go_on_after():
    values(2, without_room, limit=60)
