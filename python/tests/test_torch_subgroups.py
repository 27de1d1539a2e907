"""Groups of the backend within the default one, whose first calls meet in its memory."""

import datetime
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run, values
from test_torch_backend_teardown import mappings
from test_torch_distributed import begin

import symmpool
from symmpool import backend
from symmpool.communicators import subgroups
from symmpool.communicators.cache import cache, pool_of
from symmpool.groups.process_groups import ours
from symmpool.torch_backend.registration import has_python_backends


def ready(group, folder):
    """The default group, whose communicator other groups' are made in."""
    place = begin(group, folder, "symmpool")
    dist.all_reduce(torch.zeros(1))
    return place


def counting(own, counted):
    def call(self, *arguments):
        counted.append(own.__name__)
        return own(self, *arguments)

    return call


def store_calls():
    """How often this process has asked a store for something from now on."""
    counted = []
    for kind in (dist.TCPStore, dist.FileStore, dist.PrefixStore):
        for name in ("get", "multi_get", "wait", "check", "add", "compare_set"):
            setattr(kind, name, counting(getattr(kind, name), counted))
    return counted


def total(group, mine=1.0):
    x = torch.full((4,), float(mine))
    dist.all_reduce(x, group=group)
    return x[0].item()


def asks_nobody(group, folder):
    me, world = ready(group, folder)
    asked = store_calls()
    made = [dist.new_group(range(world)), dist.new_group([world - 1, 0])]
    sums = [total(each) if each is not dist.GroupMember.NON_GROUP_MEMBER else None for each in made]
    gloo = [ours(each)._fallbacks.is_made for each in made if each is not dist.GroupMember.NON_GROUP_MEMBER]
    found = list(asked)
    dist.destroy_process_group()
    return sums, gloo, found


@pytest.mark.parametrize("world", [2, 4])
def test_a_new_group_asks_no_store_and_makes_no_gloo(world, tmp_path):
    for rank, (sums, gloo, asked) in enumerate(values(world, asks_nobody, str(tmp_path))):
        assert sums == [world, 2.0 if rank in (0, world - 1) else None]
        assert not any(gloo) and asked == []


def rows_and_columns(group, folder):
    me, world = ready(group, folder)
    found = []
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    for name in ("row", "column"):
        found.append(total(mesh.get_group(name), me))
    # Groups of groups, and the same ranks again.
    for ranks in ([0, 1, 2, 3], [3, 1], [2, 0], [0, 1, 2]):
        inner = dist.new_group(ranks)
        found.append(total(inner, me) if me in ranks else None)
        again = dist.new_group(ranks)
        found.append(total(again, me) if me in ranks else None)
    dist.destroy_process_group()
    return found


def test_groups_of_all_kinds_have_their_sums(tmp_path):
    columns = {0: (2, 1), 1: (4, 1), 2: (2, 5), 3: (4, 5)}
    for rank, found in enumerate(values(4, rows_and_columns, str(tmp_path))):
        inner = [[6] * 2, [4 if rank in (1, 3) else None] * 2, [2 if rank in (0, 2) else None] * 2]
        inner.append([3 if rank < 3 else None] * 2)
        assert found == [*columns[rank], *(each for pair in inner for each in pair)]


def a_call_of_gloo(group, folder):
    me, world = ready(group, folder)
    some = dist.new_group(range(world), timeout=datetime.timedelta(seconds=30))
    right = [total(some) == world]
    before = ours(some)._fallbacks.is_made
    sparse = torch.sparse_coo_tensor([[me]], [1.0], (world,))
    dist.all_reduce(sparse, group=some)
    right.append(sparse.to_dense().tolist() == [1.0] * world and backend.last_backend() == "gloo")
    right.append(not before and ours(some)._fallbacks.is_made)
    # The backend that torch finds is none of a group of one rank.
    there = some._get_backend(torch.device("cpu"))
    x = torch.ones(2)
    there.allreduce([x]).wait()
    right += [x.tolist() == [world] * 2, (there.rank(), there.size()) == (me, world)]
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=20), some)
    right.append(ours(some)._fallbacks.group._get_backend(torch.device("cpu")).options._timeout.seconds == 20)
    dist.destroy_process_group(some)
    right.append(total(None) == world)
    dist.destroy_process_group()
    return right


@pytest.mark.parametrize("world", [2, 3])
def test_gloo_is_made_by_the_first_call_that_it_carries(world, tmp_path):
    assert all(all(right) for right in values(world, a_call_of_gloo, str(tmp_path)))


def messages_first(group, folder):
    me, world = begin(group, folder, "symmpool")  # the default group has made no call
    pair = dist.new_group([0, world - 1])
    found = None
    if me == 0:
        dist.send(torch.full((3,), 5.0), world - 1, pair)
    elif me == world - 1:
        x = torch.zeros(3)
        dist.recv(x, 0, pair)
        found = x.tolist()
        refused = symmpool.UnsupportedError
        with pytest.raises(refused, match=r"strided"):
            pair.send([torch.ones(2).to_sparse()], 0, 0)
        if not has_python_backends():
            refused = symmpool.InvalidArgumentError
        with pytest.raises(refused, match=r"int_repr|quantized"):
            pair.send([torch.quantize_per_tensor(torch.zeros(4), 0.5, 1, torch.qint8)], 0, 0)
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_messages_need_no_gloo(tmp_path):
    assert values(3, messages_first, str(tmp_path))[2] == [5.0] * 3


def many(group, folder):
    me, world = ready(group, folder)
    kept = [dist.new_group(range(world)) for _ in range(200)]
    sums = {total(each) for each in reversed(kept)}
    nested = sum(cache.of_group(each, -1)[1].comm._is_nested for each in kept)
    for each in kept[::2]:
        dist.destroy_process_group(each)
    again = {total(dist.new_group(range(world))) for _ in range(20)}
    dist.destroy_process_group()
    return sums, again, nested


def test_two_hundred_groups_have_their_sums(tmp_path):
    for sums, again, nested in values(2, many, str(tmp_path)):
        assert sums == again == {2.0}
        assert 50 < nested < 200, "the others have met in the store"


def by_threads(group, folder):
    me, world = ready(group, folder)
    kept = [dist.new_group(range(world)) for _ in range(40)]
    sums = []

    def first_calls(mine):
        sums.extend(total(each) for each in mine)

    # Each thread has groups of its own, in the same order on all ranks.
    threads = [threading.Thread(target=first_calls, args=(kept[at::4],)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    dist.destroy_process_group()
    return sums


def test_threads_make_first_calls_at_once(tmp_path):
    assert values(2, by_threads, str(tmp_path)) == [[2.0] * 40] * 2


def another_way(group, folder):
    me, world = begin(group, folder, "symmpool")
    some = dist.new_group(range(world))
    if me == 0:
        # This stands for a thread that makes the default group's first call at that time.
        ours(some).within.may_share = False
    dist.all_reduce(torch.zeros(1))
    begun = time.monotonic()
    found = total(some), cache.of_group(some, -1)[1].comm._is_nested
    took = time.monotonic() - begun
    dist.destroy_process_group()
    return *found, took < 10


def test_ranks_that_come_different_ways_meet_in_the_store(tmp_path):
    assert values(3, another_way, str(tmp_path)) == [(3.0, False, True)] * 3


def late(group, folder):
    me, world = ready(group, folder)
    some = dist.new_group(range(world), timeout=datetime.timedelta(seconds=2))
    said = None
    if me != 1:
        with pytest.raises(
            symmpool.TimeoutError, match=r"rank 1 did not come to the first call on cpu"
        ) as error:
            total(some)
        said = error.value.ranks
    dist.barrier()
    # The next try meets in the store, where the rank that was late finds the others.
    found = total(some)
    dist.destroy_process_group()
    return said, found


def test_who_is_late_is_named_and_met_by_the_next_try(tmp_path):
    assert values(3, late, str(tmp_path)) == [((1,), 3.0), (None, 3.0), ((1,), 3.0)]


def dies(group, folder):
    me, world = ready(group, folder)
    limit = datetime.timedelta(seconds=3)
    some = dist.new_group(range(world), timeout=limit)
    if me == 1:

        def make(*arguments, own=subgroups.make):
            # It has said that it is there, and makes no barrier.
            own(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        subgroups.make = make
    with pytest.raises((symmpool.TimeoutError, symmpool.PeerLostError)) as error:
        total(some)
    return error.value.ranks


def test_a_rank_that_dies_on_the_way_is_named(tmp_path):
    answers = run(3, dies, str(tmp_path), silent=(1,))
    assert [answers[0].value, answers[2].value] == [(1,)] * 2, answers


def memory_of_its_own(group, folder):
    me, world = ready(group, folder)
    some = dist.new_group(range(world))
    found = [total(some), total(some)]
    pool = pool_of(some, -1)
    x = pool.full((1000,), 2.0)
    symmpool.all_reduce(x, group=some)
    found.append((x[0].item(), pool.is_window(x) if hasattr(pool, "is_window") else True))
    other = symmpool.Pool(some, "cpu")
    y = other.full((10,), 3.0)
    symmpool.all_reduce(y, group=some)
    found.append(y[9].item())
    dist.destroy_process_group()
    return found


def test_pools_of_such_groups_are_as_others(tmp_path):
    assert values(2, memory_of_its_own, str(tmp_path)) == [[2.0, 2.0, (4.0, True), 6.0]] * 2


def forks(group, folder):
    me, world = ready(group, folder)
    some, later = dist.new_group(range(world)), dist.new_group(range(world))
    total(some)
    child = os.fork()
    if child == 0:
        said = []
        for each in (some, later):
            try:
                total(each)
            except symmpool.Error as error:
                said.append("fork" in str(error))
        os._exit(0 if said == [True, True] else 1)
    refused = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    found = total(some), total(later), refused
    dist.destroy_process_group()
    return found


def test_a_forked_child_is_refused_and_says_nothing_to_the_others(tmp_path):
    assert values(2, forks, str(tmp_path)) == [(2.0, 2.0, True)] * 2


def leaves(group, folder):
    me, world = ready(group, folder)
    some = dist.new_group(range(world), timeout=datetime.timedelta(seconds=20))
    total(some)
    before = mappings()
    said, took = None, 0.0
    if me == 0:
        dist.destroy_process_group(some)
    else:
        begun = time.monotonic()
        with pytest.raises(symmpool.PeerLostError) as error:
            total(some)
        said, took = error.value.ranks, time.monotonic() - begun
    dist.barrier()
    # In an order of its own on each rank.
    kept = [dist.new_group(range(world)) for _ in range(6)]
    for each in kept:
        total(each)
    for each in kept if me else reversed(kept):
        dist.destroy_process_group(each)
    left = mappings() - before
    dist.destroy_process_group()
    return said, took < 10, left


def test_a_rank_that_leaves_is_lost_and_groups_end_in_any_order(tmp_path):
    first, second = values(2, leaves, str(tmp_path))
    assert first == (None, True, -2) and second == ((0,), True, 0)


def sparse(mine):
    return torch.sparse_coo_tensor([[0]], [float(mine)], (4,))


def late_for_gloo(group, folder):
    me, world = ready(group, folder)
    made = dist.new_group(timeout=datetime.timedelta(seconds=4))
    total(made)
    found = None
    if me == world - 1:
        with pytest.raises(Exception, match="first call that gloo carries") as caught:
            dist.all_reduce(sparse(1), group=made)
        found = (isinstance(caught.value, symmpool.TimeoutError), caught.value.ranks)
    else:
        time.sleep(6)
    x = sparse(me + 1)
    dist.all_reduce(x, group=made)
    dist.destroy_process_group()
    return found, x.to_dense()[0].item()


def test_gloo_that_is_made_late_is_tried_again(tmp_path):
    first, second, last = values(3, late_for_gloo, str(tmp_path))
    assert first == second == (None, 6.0) and last == ((True, (0, 1)), 6.0)


def named_for_cuda_alone(group, folder):
    me, world = begin(group, folder, "cuda:symmpool,cpu:gloo")
    made = dist.new_group()
    x = torch.full((3,), float(me))
    if me == 0:
        dist.send(x, 1, group=made)
        dist.send(x, 1)
    elif me == 1:
        for which in (made, None):
            dist.recv(x, 0, group=which)
            assert x[0].item() == 0
    dist.barrier(made)
    dist.destroy_process_group()
    return True


def test_messages_of_groups_whose_cpu_is_gloos_go_on(tmp_path):
    assert values(2, named_for_cuda_alone, str(tmp_path)) == [True] * 2


def another_environment(group, folder, lazy):
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1" if group.rank in lazy else "0"
    ready(group, folder)
    made = dist.new_group()
    found = total(made), ours(made).within is not None
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("lazy", [(), (0, 1, 2)])
def test_lazy_connections_of_gloo_have_ranks_meet(lazy, tmp_path):
    assert values(3, another_environment, str(tmp_path), lazy) == [(3.0, not lazy)] * 3
