"""What torch.distributed's collectives become as calls of a communicator.

A communicator's tensors are contiguous and in one piece, and it has no gather, scatter or reduce. Each
function plans one collective: which method of the communicator is called, with which arguments, and what
copies results to where they belong. Tensors are torch's. Module-level calls and the backend of
torch.distributed both make their calls of these plans.

Which call a plan makes follows from what is the same on every rank: the operation, the element type, the
sizes. All ranks allocate the same amounts in the same order, as they may be in a pool's scope.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from symmpool.collectives.layout import check_destination, copy_back, destination, plain, row
from symmpool.collectives.reduce_op import NATIVE
from symmpool.collectives.reductions import REDUCED, Reduction, reduction
from symmpool.errors import InvalidArgumentError

__all__ = ["Plan", "check_lists"]


# The name of the communicator's method, its arguments, what copies results to where they belong behind the
# call, and the tensors that hold results then. A plain tuple: small calls take about as long as making an
# object.
Plan = tuple[str, tuple[Any, ...], Callable[[], None] | None, list[Any]]


def all_reduce(tensor: torch.Tensor, op: str, world: int, out: torch.Tensor | None = None) -> Plan:
    """Every rank's `tensor` reduced, in place or into `out`."""
    target = tensor if out is None else out
    if out is not None and (out.dtype != tensor.dtype or out.numel() != tensor.numel()):
        raise InvalidArgumentError(
            f"out: {out.numel()} elements of {out.dtype} where the input has {tensor.numel()} of "
            f"{tensor.dtype}"
        )
    # Asked here, too: a call less is felt by small calls of the backend.
    made = None if op in NATIVE and tensor.dtype in REDUCED else reduction(op, tensor.dtype)
    if made is not None:
        return _encoded(tensor, made, world, target, True)
    place, finish = destination(target)
    if out is None:
        return ("all_reduce", (place, op), finish, [target])
    return ("all_reduce", (plain(tensor), op, place), finish, [target])


def _encoded(tensor: torch.Tensor, made: Reduction, world: int, target: torch.Tensor, keeps: bool) -> Plan:
    """An all-reduce of encoded elements. Only a rank that `keeps` the result has it in `target`."""
    source = made.encode(tensor)
    if made.combine is None:
        total = torch.empty_like(source)
        finish = _decoded(target, made, lambda: total) if keeps else None
        return ("all_reduce", (source, made.op, total), finish, [target])
    parts = source.new_empty(world, source.numel())
    finish = _decoded(target, made, lambda: made.combine(parts)) if keeps else None
    return ("all_gather_into_tensor", (parts, source), finish, [target])


def _decoded(target: torch.Tensor, made: Reduction, total: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """What decodes the reduced elements into `target`."""
    check_destination(target)

    def finish() -> None:
        with torch.inference_mode():
            target.copy_(made.decode(total()).view(target.shape))

    return finish


def reduce(tensor: torch.Tensor, op: str, root: int, rank: int, world: int) -> Plan:
    """Every rank's `tensor` reduced into the root's. Every rank's call looks alike to the others, and only
    the root's tensor is written to."""
    made = reduction(op, tensor.dtype)
    if made is not None:
        return _encoded(tensor, made, world, tensor, rank == root)
    source = plain(tensor)
    total = torch.empty_like(source)
    finish = copy_back([(tensor, total)]) if rank == root else None
    return ("all_reduce", (source, op, total), finish, [tensor])


def broadcast(tensor: torch.Tensor, root: int, rank: int) -> Plan:
    """The root's `tensor` copied into every other rank's."""
    # The root's is only read.
    place, finish = (plain(tensor), None) if rank == root else destination(tensor)
    return ("broadcast", (place, root), finish, [tensor])


def all_gather_into_tensor(output: torch.Tensor, input: torch.Tensor) -> Plan:
    """Every rank's `input`, one behind the other in `output`."""
    place, finish = destination(output)
    return ("all_gather_into_tensor", (place, plain(input)), finish, [output])


def reduce_scatter_tensor(output: torch.Tensor, input: torch.Tensor, op: str, world: int) -> Plan:
    """This rank's part of every rank's `input` reduced, in `output`."""
    made = reduction(op, input.dtype)
    if made is None:
        place, finish = destination(output)
        return ("reduce_scatter_tensor", (place, plain(input), op), finish, [output])
    if output.dtype != input.dtype or input.numel() != output.numel() * world:
        raise InvalidArgumentError(
            f"input: {input.numel()} elements of {input.dtype} where {output.numel() * world} of "
            f"{output.dtype} are needed, one part for every rank of {world}"
        )
    source = made.encode(input)
    if made.combine is None:
        total = source.new_empty(source.numel() // world)
        finish = _decoded(output, made, lambda: total)
        return ("reduce_scatter_tensor", (total, source, made.op), finish, [output])
    parts = torch.empty_like(source)
    finish = _decoded(output, made, lambda: made.combine(parts.view(world, -1)))
    return ("all_to_all_single", (parts, source), finish, [output])


def all_to_all_single(
    output: torch.Tensor, input: torch.Tensor, output_sizes: Any = None, input_sizes: Any = None
) -> Plan:
    """Part r of every rank's `input`, sent to rank r."""
    place, finish = destination(output)
    arguments = (place, plain(input), output_sizes, input_sizes)
    return ("all_to_all_single", arguments, finish, [output])


def all_gather(outputs: list[torch.Tensor], input: torch.Tensor, world: int) -> Plan:
    """Every rank's `input`, in a tensor of `outputs` each. Inputs may be of different sizes."""
    check_lists("all_gather", world, single=input, output=outputs)
    sizes, sent = [each.numel() for each in outputs], row(input)
    flat, finish = _split(outputs, sizes)
    if len(set(sizes)) == 1:
        return ("all_gather_into_tensor", (flat, sent), finish, outputs)
    # Every rank sends all it has to every rank.
    counts = [sent.numel()] * world
    return ("all_to_all_single", (flat, sent.repeat(world), sizes, counts), finish, outputs)


def reduce_scatter(output: torch.Tensor, inputs: list[torch.Tensor], op: str, rank: int, world: int) -> Plan:
    """Input r of every rank reduced, in rank r's `output`. Inputs may be of different sizes."""
    check_lists("reduce_scatter", world, single=output, input=inputs)
    sizes, whole = [each.numel() for each in inputs], _joined(inputs)
    if len(set(sizes)) == 1:
        return reduce_scatter_tensor(output, whole, op, world)
    if output.numel() != sizes[rank]:
        raise InvalidArgumentError(
            f"symmpool: reduce_scatter: rank {rank}'s output has {output.numel()} elements, and input "
            f"tensor {rank} has {sizes[rank]}"
        )
    part = whole.split(sizes)[rank].view(output.shape)
    call, arguments, decode, _ = all_reduce(whole, op, world)
    copy = copy_back([(output, part)])

    def finish() -> None:
        if decode is not None:
            decode()
        copy()

    return (call, arguments, finish, [output])


def all_to_all(outputs: list[torch.Tensor], inputs: list[torch.Tensor], world: int) -> Plan:
    """Input r of every rank, sent to rank r. Tensors may be of different sizes."""
    check_lists("all_to_all", world, output=outputs, input=inputs)
    sizes = [each.numel() for each in outputs]
    flat, finish = _split(outputs, sizes)
    counts = [each.numel() for each in inputs]
    return ("all_to_all_single", (flat, _joined(inputs), sizes, counts), finish, outputs)


def gather(tensor: torch.Tensor, parts: list[torch.Tensor] | None, root: int, rank: int, world: int) -> Plan:
    """Every rank's `tensor`, in a tensor of the root's `parts` each."""
    _check_root_list("gather", "gather_list", tensor, parts, root, rank, world)
    count = tensor.numel()
    flat = tensor.new_empty(world * count)
    sent = [count if peer == root else 0 for peer in range(world)]
    if rank != root:
        return ("all_to_all_single", (flat[:0], row(tensor), [0] * world, sent), None, [])
    assert parts is not None
    pairs = zip(parts, flat.split(count) if count else [flat] * world, strict=True)
    finish = copy_back([(to, part.view(to.shape)) for to, part in pairs])
    return ("all_to_all_single", (flat, row(tensor), [count] * world, sent), finish, parts)


def scatter(tensor: torch.Tensor, parts: list[torch.Tensor] | None, root: int, rank: int, world: int) -> Plan:
    """Part r of the root's `parts`, in rank r's `tensor`."""
    _check_root_list("scatter", "scatter_list", tensor, parts, root, rank, world)
    count = tensor.numel()
    place, finish = destination(tensor)
    received = [count if peer == root else 0 for peer in range(world)]
    if rank == root:
        assert parts is not None
        flat, sent = _joined(parts), [count] * world
    else:
        flat, sent = tensor.new_empty(world * count)[:0], [0] * world
    return ("all_to_all_single", (place.view(-1), flat, received, sent), finish, [tensor])


def check_lists(operation: str, world: int, *, single: torch.Tensor | None = None, **lists: Any) -> None:
    """Refuses lists that have not a tensor for each rank, and tensors of several types or devices."""
    for name, parts in lists.items():
        if len(parts) != world:
            raise InvalidArgumentError(
                f"symmpool: {operation}: {len(parts)} {name} tensors for {world} ranks"
            )
    every = [each for parts in lists.values() for each in parts]
    every += [] if single is None else [single]
    if len({(each.dtype, each.device) for each in every}) > 1:
        raise InvalidArgumentError(f"symmpool: {operation}: all tensors must be of one type, on one device")


def _check_root_list(
    operation: str, name: str, tensor: torch.Tensor, parts: Any, root: int, rank: int, world: int
) -> None:
    """Refuses a list of parts where there is to be none, and one that does not fit the root's tensor."""
    if rank != root:
        if parts:
            raise InvalidArgumentError(
                f"symmpool: {operation}: {name} is the root's, rank {root}'s; rank {rank} passes none"
            )
        return
    if not parts:
        raise InvalidArgumentError(f"symmpool: {operation}: the root, rank {root}, needs a {name}")
    check_lists(operation, world, single=tensor, **{name: parts})
    sizes = {each.numel() for each in parts}
    if sizes != {tensor.numel()}:
        raise InvalidArgumentError(
            f"symmpool: {operation}: {name} has tensors of {sorted(sizes)} elements, and tensor has "
            f"{tensor.numel()}; all are of one size"
        )


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """New memory that holds all of them."""
    return torch.cat([row(each) for each in tensors])


def _split(outputs: list[torch.Tensor], sizes: list[int]) -> tuple[torch.Tensor, Callable[[], None]]:
    """Memory for what is to become of all outputs, and what copies it to them."""
    first = outputs[0]
    flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
    parts = zip(outputs, flat.split(sizes), strict=True)
    return flat, copy_back([(to, part.view(to.shape)) for to, part in parts])
