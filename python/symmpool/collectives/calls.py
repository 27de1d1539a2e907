"""How module-level calls are made: straight, or by a plan where tensors or reductions need one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from symmpool._symmpool import _count_versions
from symmpool.collectives.reduce_op import NATIVE, op_name
from symmpool.communicators import devices, torch_state
from symmpool.communicators.cache import (
    communicator_for,
    communicator_to_write,
    first_device,
    look_up,
)
from symmpool.communicators.entry import CommunicatorEntry
from symmpool.communicators.gradients import watch
from symmpool.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from symmpool._symmpool import Communicator
    from symmpool.collectives.plans import Plan
    from symmpool.collectives.types import Op, Tensor
    from symmpool.communicators.work import Work
    from symmpool.groups.types import GroupLike

__all__ = ["make", "make_direct", "needs_plan", "reduction_needs_plan", "with_results"]

# Element types that communicators reduce, as torch, numpy and this package write them.
_REDUCED = frozenset(
    "float32 float64 float16 bfloat16 int32 int64 uint8 int8 float8_e4m3fn float8_e5m2".split()
)
# Those that `symmpool.collectives.reductions` knows a way for.
_ENCODED = frozenset("bool int16 uint16 uint32 uint64 complex32 complex64 complex128".split())


# Makes a call's plan, as those of `symmpool.collectives.plans`, on this rank of a number of ranks.
Planner = Callable[[int, int], Any]


def needs_plan(*tensors: Any) -> bool:
    """Whether one of these is a tensor of torch that has strides, and whose elements do not lie row by
    row."""
    for tensor in tensors:
        is_contiguous = getattr(tensor, "is_contiguous", None)
        if is_contiguous is None:
            continue
        try:
            if is_contiguous():
                if tensor.is_neg() or tensor.is_conj():
                    return True
            # Tensors of other layouts are refused by the communicator.
            elif str(tensor.layout) == "torch.strided":
                return True
        except (AttributeError, RuntimeError, TypeError):
            continue  # a nested tensor, for one
    return False


def reduction_needs_plan(op: Op, tensor: Tensor) -> bool:
    """Whether a communicator does not reduce such elements so, and there may be another way. What makes no
    sense needs none: the communicator refuses it."""
    dtype = str(getattr(tensor, "dtype", "")).removeprefix("torch.")
    if dtype in _ENCODED:
        return True
    try:
        return dtype in _REDUCED and op_name(op) not in NATIVE
    except InvalidArgumentError:
        return False


def _method(comm: Communicator, call: str, algorithm: str | None, of: str) -> Callable[..., object]:
    """A communicator's method, with the algorithm that the call names. It is one of the collective `of`."""
    method = getattr(comm, call)
    if algorithm is None:
        return method
    if call != of:
        raise InvalidArgumentError(
            f"algorithm: {algorithm!r} is for {of} as it is; with such tensors or operations it is made of "
            f"{call}"
        )
    # No function of Python's own: Ctrl-C could come between its begin and the call.
    named = functools.partial(method, algorithm=algorithm)
    named.__name__ = call  # type: ignore[attr-defined]
    return named


def make_direct(
    tensor: Tensor,
    group: GroupLike,
    call: str,
    arguments: tuple[object, ...],
    results: list[Tensor],
    async_op: bool,
    algorithm: str | None = None,
) -> Work | None:
    """Makes a call that needs no plan: of a communicator's method, with the caller's arguments. It writes to
    the tensor, by which the communicator is found."""
    entry = communicator_to_write(tensor, group, None, (call, arguments))
    if entry is None:
        return None
    _say_written(entry, call, arguments, results)
    return entry.run(_method(entry.comm, call, algorithm, call), arguments, results, async_op)


def _say_written(
    entry: CommunicatorEntry, call: str, arguments: tuple[object, ...], writes: Sequence[Tensor]
) -> None:
    """Has autograd notice what a call overwrites. A broadcast's root only reads."""
    if call != "broadcast" or arguments[1] != entry.comm.rank:
        _count_versions(writes)


@torch_state.opaque
def make(
    tensor: Tensor,
    group: GroupLike,
    plan: Planner,
    async_op: bool,
    writes: Sequence[Tensor] = (),
    algorithm: tuple[str | None, str] = (None, ""),
) -> Work | None:
    """Makes a call on the communicator that serves a group on a tensor's device (without a tensor, where the
    group's first pool is): Work with `async_op`, else None. The call writes to the tensors of `writes`.

    What the plan refuses is raised here at once, and reported to the other ranks. `algorithm` is the name of
    one, and the method that it is for."""

    def first(rank: int, world: int) -> tuple[str, tuple[object, ...]]:
        call, arguments, prepare, _ = plan(rank, world)
        # A plan with a preparation has checked everything.
        return call, arguments if prepare is None else ()

    if tensor is None:
        entry = look_up(None, group, devices.number_of(first_device(group)), first)
    else:
        entry = communicator_for(tensor, group, first)
    if entry is None:
        return None
    with entry.preparing():
        call, arguments, prepare, results = plan(entry.comm.rank, entry.comm.world)
        method = _method(entry.comm, call, *algorithm)
        for each in writes:
            if getattr(each, "requires_grad", False):
                watch(each)  # type: ignore[arg-type]  # only torch's have it
        _say_written(entry, call, arguments, writes)
    return entry.run(method, arguments, results, async_op, prepare)


def with_results(plan: Plan, results: list[Tensor]) -> Plan:
    """A plan whose Work has these tensors as its results: the caller's, where the plan's are others on the
    same memory."""
    return (*plan[:3], results)
