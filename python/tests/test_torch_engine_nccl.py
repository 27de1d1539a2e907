"""Our class in place of engines' `PyNcclCommunicator`, with a stand-in for theirs; `python/tests/engines` has
the engines' own code call it."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin

import symmpool
from symmpool.engines import nccl_communicator
from symmpool.engines.nccl_communicator import derived, is_derived
from symmpool.errors import InvalidArgumentError, InvalidStateError, UnsupportedError


class PyNcclCommunicator:
    """Stand-in for the engines' class: a communicator of NCCL, and SGLang's way to turn it on."""

    def __init__(self, group, device, library_path=None, is_symmetric_memory_enabled=False, cta_policy=None):
        self.is_nccls = True

    @classmethod
    def from_unique_id_bytes(cls, unique, rank, world_size, device):
        return cls(None, device)

    @contextlib.contextmanager
    def change_state(self, enable):
        before, self.disabled = self.disabled, not enable
        yield
        self.disabled = before


def never():
    return False


CPU = torch.device("cpu")


def batches(made, me, world):
    """A scatter within a batch sends nothing before that ends, and one that fails leaves no batch."""
    into, part = torch.empty(3), torch.empty(1)
    made.group_start()
    made.scatter(part, torch.arange(float(world)) if me == 0 else None, [1] * world, 0)
    made.recv(into, (me - 1) % world)
    made.send(torch.full((3,), float(me)), (me + 1) % world)
    made.group_end()
    right = [into.tolist() == [float((me - 1) % world)] * 3, part.tolist() == [float(me)]]
    with pytest.raises(RuntimeError) if me == 0 else contextlib.nullcontext():
        made.scatter(torch.empty(2), torch.zeros(world) if me == 0 else None, [1] + [0] * (world - 1), 0)
    with pytest.raises(InvalidStateError, match=f"group_end on rank {me}: call group_start first"):
        made.group_end()
    return right


def sglangs(group, folder):
    """SGLang's form: sums in place, disabled until it is turned on, sizes beside each gather."""
    me, world = begin(group, folder)
    kind = derived(PyNcclCommunicator, True, never)
    made = kind(dist.group.WORLD, CPU, is_symmetric_memory_enabled=False)
    right = [isinstance(made, PyNcclCommunicator), made.disabled, made.available, made.world_size == world]
    x = torch.full((4,), me + 1.0)
    made.all_reduce(x)
    right.append(x.tolist() == [me + 1.0] * 4 and made.outplace_all_reduce(x) is None)
    with made.change_state(enable=True):
        out = made.outplace_all_reduce(x)
        right.append(out.tolist() == [6.0] * 4 and x.tolist() == [me + 1.0] * 4)
        made.all_reduce(x)
        right.append(x.tolist() == [6.0] * 4)
        made.all_reduce(x, dist.ReduceOp.MAX)
        right.append(x.tolist() == [6.0] * 4)
        y = torch.full((4,), me + 1.0)
        made.all_reduce(y, op=dist.ReduceOp.MAX, stream=None)
        right.append(y.tolist() == [3.0] * 4)
        sizes = [2, 0, 1]
        every = torch.cat([torch.full((size, 2), float(rank)) for rank, size in enumerate(sizes)])
        found = torch.empty(3, 2)
        made.all_gather(found, torch.full((sizes[me], 2), float(me)), sizes)
        right.append(torch.equal(found, every))
        part = torch.empty(sizes[me], 2)
        made.reduce_scatter(part, every.clone(), sizes=sizes)
        right.append(torch.equal(part, torch.full_like(part, 3.0 * me)))
        exchanged = torch.empty(2 * world)
        made.all_to_all_single(exchanged, torch.arange(2.0 * world) + 10 * me)
        right.append(
            exchanged.tolist() == [2 * me + at + 10 * rank for rank in range(world) for at in (0, 1)]
        )
        y = torch.full((3,), float(me))
        made.broadcast(y, 2)
        right.append(y.tolist() == [2.0] * 3)
        # In a batch ranks may all receive first.
        into = torch.empty(3)
        made.group_start()
        made.recv(into, (me - 1) % world)
        made.send(torch.full((3,), float(me)), (me + 1) % world)
        made.group_end()
        right.append(into.tolist() == [float((me - 1) % world)] * 3)
        right += batches(made, me, world)
    right.append(made.disabled)
    # NCCL alone has windows, and gathers that its copy engines make.
    right.append(type(kind(dist.group.WORLD, CPU, None, True)) is PyNcclCommunicator)
    right.append(type(kind(dist.group.WORLD, CPU, cta_policy=0)) is PyNcclCommunicator)
    # Two of one group are two communicators, which need not be called in one order.
    second = kind(dist.group.WORLD, CPU)
    right.append(second._symmpool.pool is not made._symmpool.pool)
    with pytest.raises(UnsupportedError, match=f"register_comm_window_raw on rank {me}: "):
        made.register_comm_window_raw(0, 1)
    made.destroy()
    made.destroy()
    right.append(not made.available and made.disabled)
    with pytest.raises(InvalidArgumentError), second.change_state(enable=True):
        second.broadcast(x, 7)
    dist.destroy_process_group()
    return right


def test_sglangs_form_of_the_communicator_is_served(tmp_path):
    assert [set(each) for each in values(3, sglangs, str(tmp_path))] == [{True}] * 3


def refused(group, folder):
    """One rank cannot take part: all have NCCL's, and a warning that names the rank and why."""
    me, _ = begin(group, folder)
    warnings = []
    nccl_communicator.logger.warning = lambda text, *words: warnings.append(text % words)
    if me == 1:

        def no_pool(*arguments, **options):
            raise symmpool.Error("no memory is left")

        symmpool.Pool = no_pool
    nccl_communicator._SECONDS = 2.0
    made = derived(PyNcclCommunicator, False, never)(dist.group.WORLD, CPU)
    dist.destroy_process_group()
    return made.is_nccls, warnings


def test_where_one_rank_cannot_take_part_all_have_nccls_and_say_why(tmp_path):
    for is_nccls, warnings in values(2, refused, str(tmp_path)):
        assert is_nccls
        (line,) = warnings
        assert "NCCL does: " in line and "rank 1: no memory is left" in line


def test_communicators_of_other_programs_and_of_one_rank_are_nccls():
    kind = derived(PyNcclCommunicator, False, never)
    assert kind is derived(PyNcclCommunicator, False, never)
    assert is_derived(kind) and not is_derived(PyNcclCommunicator)
    assert type(kind(object(), CPU)) is PyNcclCommunicator
    assert type(kind.from_unique_id_bytes(b"", 0, 2, CPU)) is PyNcclCommunicator
    assert type(derived(PyNcclCommunicator, False, lambda: True)(None, CPU)) is PyNcclCommunicator
