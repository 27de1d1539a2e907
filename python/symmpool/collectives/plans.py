"""Plans of torch.distributed's collectives, as calls of a communicator.

A communicator's tensors are contiguous and in one piece, and it has no gather, scatter or reduce. Each
function plans one collective: which method of the communicator is called, with which arguments. Tensors are
torch's. Module-level calls and the backend of torch.distributed both make their calls of these plans.

A plan is made at once, and raises what is wrong with the call by looking at shapes, types and lists alone.
Copies of inputs, and memory for results that are copied afterwards, are its preparation, which runs in the
order of the group's calls: behind those that were begun before, which may write to what is copied.

Which call a plan makes follows from what is the same on every rank: the operation, the element type, the
sizes. All ranks allocate the same amounts in the same order, as they may be in a pool's scope.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from symmpool.collectives.layout import (
    check_destination,
    check_source,
    copy_back,
    destination,
    is_plain,
    plain,
    row,
)
from symmpool.collectives.reduce_op import NATIVE
from symmpool.collectives.reductions import REDUCED, Op, ReductionPlan, reduction
from symmpool.errors import InvalidArgumentError

if TYPE_CHECKING:
    from symmpool.collectives.types import SplitSizes
    from symmpool.communicators.work import PreparedCall

__all__ = ["Plan", "check_lists"]

# Function that returns the arguments of the communicator's method, and a function that copies results to
# their places behind the call, or None.
Prepare = Callable[[], tuple[tuple[Any, ...], Callable[[], None] | None]]
# The name of the communicator's method, its arguments, its preparation, and the tensors that hold results
# then. With a preparation, which gives the arguments itself, those here are the caller's tensors: they are
# kept until the call is done. A plain tuple: small calls take about as long as making an object.
Plan = tuple[str, tuple[Any, ...], Prepare | None, list[Any]]


def all_reduce(tensor: torch.Tensor, op: Op, world: int, out: torch.Tensor | None = None) -> Plan:
    """Every rank's `tensor` reduced, in place or into `out`."""
    # Asked here, too: a call less is felt by small calls of the backend.
    made = None if op in NATIVE and tensor.dtype in REDUCED else reduction(op, tensor.dtype)
    if made is None and is_plain(tensor) and (out is None or is_plain(out)):
        arguments = (tensor, op) if out is None else (tensor, op, out)
        return ("all_reduce", arguments, None, [tensor if out is None else out])
    target = tensor if out is None else out
    _check_alike("out", target, tensor, tensor.numel())
    if made is not None:
        return _encoded(tensor, made, world, target, True)
    check_destination(target)

    def prepare() -> PreparedCall:
        place, finish = destination(target)
        return (place, op) if out is None else (plain(tensor), op, place), finish

    return ("all_reduce", (tensor, target), prepare, [target])


def all_reduce_coalesced(tensors: list[torch.Tensor], op: Op, world: int) -> Plan:
    """Every tensor of a list reduced in place, one behind the other in a copy."""
    first = tensors[0]
    for at, each in enumerate(tensors):
        if each.dtype is not first.dtype or each.device != first.device:
            wanted = f"{first.dtype} on {first.device}, as the first"
            raise InvalidArgumentError(f"tensors[{at}]: {each.dtype} on {each.device}, and not {wanted}")
        check_destination(each)
    call = all_reduce(first.new_empty(0), op, world)[0]

    def prepare() -> PreparedCall:
        together = torch.cat([row(each) for each in tensors])
        _, arguments, inner, _ = all_reduce(together, op, world)
        arguments, finish = (arguments, None) if inner is None else inner()
        parts = together.split([each.numel() for each in tensors])

        def finish_all() -> None:
            if finish is not None:
                finish()
            copy_back([(each, part.view(each.shape)) for each, part in zip(tensors, parts, strict=True)])()

        return arguments, finish_all

    return (call, tuple(tensors), prepare, tensors)


def _encoded(
    tensor: torch.Tensor, made: ReductionPlan, world: int, target: torch.Tensor, keeps: bool
) -> Plan:
    """An all-reduce of encoded elements. Only a rank that `keeps` the result has it in `target`."""
    check_source(tensor)
    if keeps:
        check_destination(target)

    def prepare() -> PreparedCall:
        source = made.encode(tensor)
        combine = made.combine
        if combine is None:
            total = torch.empty_like(source)
            return (source, made.op, total), _decoded(target, made, lambda: total) if keeps else None
        parts = source.new_empty(world, source.numel())
        finish = _decoded(target, made, lambda: combine(parts)) if keeps else None
        return (parts, source), finish

    call = "all_reduce" if made.combine is None else "all_gather_into_tensor"
    return (call, (tensor, target), prepare, [target])


def _decoded(
    target: torch.Tensor, made: ReductionPlan, total: Callable[[], torch.Tensor]
) -> Callable[[], None]:
    """Returns the function that decodes the reduced elements into `target`."""

    def finish() -> None:
        with torch.inference_mode():
            target.copy_(made.decode(total()).view(target.shape))

    return finish


def reduce(tensor: torch.Tensor, op: Op, root: int, rank: int, world: int) -> Plan:
    """Every rank's `tensor` reduced into the root's. Every rank's call looks alike to the others, and only
    the root's tensor is written to."""
    _check_root("reduce", root, world)
    made = reduction(op, tensor.dtype)
    if made is not None:
        return _encoded(tensor, made, world, tensor, rank == root)
    check_source(tensor)
    if rank == root:
        check_destination(tensor)

    def prepare() -> PreparedCall:
        source = plain(tensor)
        total = torch.empty_like(source)
        return (source, op, total), copy_back([(tensor, total)]) if rank == root else None

    return ("all_reduce", (tensor,), prepare, [tensor])


def broadcast(tensor: torch.Tensor, root: int, rank: int) -> Plan:
    """The root's `tensor` copied into every other rank's."""
    if is_plain(tensor):
        return ("broadcast", (tensor, root), None, [tensor])
    # The root's is only read.
    (check_source if rank == root else check_destination)(tensor)

    def prepare() -> PreparedCall:
        place, finish = (plain(tensor), None) if rank == root else destination(tensor)
        return (place, root), finish

    return ("broadcast", (tensor, root), prepare, [tensor])


def all_gather_into_tensor(output: torch.Tensor, input: torch.Tensor, world: int) -> Plan:
    """Every rank's `input`, one behind the other in `output`."""
    if is_plain(output) and is_plain(input):
        return ("all_gather_into_tensor", (output, input), None, [output])
    _check_alike("output_tensor", output, input, input.numel() * world)
    check_source(input)
    check_destination(output)

    def prepare() -> PreparedCall:
        place, finish = destination(output)
        return (place, plain(input)), finish

    return ("all_gather_into_tensor", (output, input), prepare, [output])


def reduce_scatter_tensor(output: torch.Tensor, input: torch.Tensor, op: Op, world: int) -> Plan:
    """This rank's part of every rank's `input` reduced, in `output`."""
    made = None if op in NATIVE and input.dtype in REDUCED else reduction(op, input.dtype)
    if made is None and is_plain(output) and is_plain(input):
        return ("reduce_scatter_tensor", (output, input, op), None, [output])
    if output.dtype != input.dtype or input.numel() != output.numel() * world:
        raise InvalidArgumentError(
            f"input: {input.numel()} elements of {input.dtype} where {output.numel() * world} of "
            f"{output.dtype} are needed, one part for every rank of {world}"
        )
    _check_alike("input", input, output, input.numel())
    check_source(input)
    check_destination(output)
    call, prepare = _scattered(output, lambda: input, made, op, world)
    return (call, (output, input), prepare, [output])


def _scattered(
    output: torch.Tensor, whole: Callable[[], torch.Tensor], made: ReductionPlan | None, op: Op, world: int
) -> tuple[str, Prepare]:
    """A reduce-scatter of what `whole` gives: the name of the call, and its preparation."""
    if made is None:

        def prepare_plain() -> PreparedCall:
            place, finish = destination(output)
            return (place, plain(whole()), op), finish

        return "reduce_scatter_tensor", prepare_plain
    combine = made.combine
    if combine is None:

        def prepare_sum() -> PreparedCall:
            source = made.encode(whole())
            total = source.new_empty(source.numel() // world)
            return (total, source, made.op), _decoded(output, made, lambda: total)

        return "reduce_scatter_tensor", prepare_sum

    def prepare_parts() -> PreparedCall:
        source = made.encode(whole())
        parts = torch.empty_like(source)
        return (parts, source), _decoded(output, made, lambda: combine(parts.view(world, -1)))

    return "all_to_all_single", prepare_parts


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_sizes: SplitSizes,
    input_sizes: SplitSizes,
    world: int,
) -> Plan:
    """Part r of every rank's `input`, sent to rank r."""
    if is_plain(output) and is_plain(input):
        return ("all_to_all_single", (output, input, output_sizes, input_sizes), None, [output])
    given = output_sizes is not None or input_sizes is not None
    _check_alike("output", output, input, output.numel() if given else input.numel())
    for name, tensor, sizes in (("output", output, output_sizes), ("input", input, input_sizes)):
        _check_sizes(name, tensor, sizes, world)
    check_source(input)
    check_destination(output)

    def prepare() -> PreparedCall:
        place, finish = destination(output)
        return (place, plain(input), output_sizes, input_sizes), finish

    return ("all_to_all_single", (output, input), prepare, [output])


def all_to_all_whole(
    output: torch.Tensor,
    input: torch.Tensor,
    output_sizes: SplitSizes,
    input_sizes: SplitSizes,
    rank: int,
    world: int,
) -> Plan:
    """Plans `all_to_all_single` where split sizes must be for all rows, as torch's other backends have it: a
    communicator would leave the last rows where they are."""
    for name, tensor, sizes in (("output", output, output_sizes), ("input", input, input_sizes)):
        if sizes is not None and tensor.dim() > 0 and sum(sizes) != tensor.shape[0]:
            raise InvalidArgumentError(
                f"all_to_all_single: {name}_split_sizes: {sizes} are {sum(sizes)} rows, and {name} has "
                f"{tensor.shape[0]} on rank {rank}; the sizes must be for all of them"
            )
    return all_to_all_single(output, input, output_sizes, input_sizes, world)


def all_gather(outputs: list[torch.Tensor], input: torch.Tensor, world: int) -> Plan:
    """Every rank's `input`, in a tensor of `outputs` each. Inputs may be of different sizes."""
    check_lists("all_gather", world, single=input, output=outputs)
    sizes = [each.numel() for each in outputs]
    is_even = len(set(sizes)) == 1
    if is_even and input.numel() != sizes[0]:
        raise InvalidArgumentError(
            f"symmpool: all_gather: the input has {input.numel()} elements, and the output tensors have "
            f"{sizes[0]} each"
        )
    _check_written(outputs)
    check_source(input)

    def prepare() -> PreparedCall:
        (flat, finish), sent = _split(outputs, sizes), row(input)
        if is_even:
            return (flat, sent), finish
        # Every rank sends all it has to every rank.
        return (flat, sent.repeat(world), sizes, [sent.numel()] * world), finish

    call = "all_gather_into_tensor" if is_even else "all_to_all_single"
    return (call, (input, *outputs), prepare, outputs)


def reduce_scatter(output: torch.Tensor, inputs: list[torch.Tensor], op: Op, rank: int, world: int) -> Plan:
    """Input r of every rank reduced, in rank r's `output`. Inputs may be of different sizes."""
    check_lists("reduce_scatter", world, single=output, input=inputs)
    made, sizes = reduction(op, output.dtype), [each.numel() for each in inputs]
    if output.numel() != sizes[rank]:
        raise InvalidArgumentError(
            f"symmpool: reduce_scatter: rank {rank}'s output has {output.numel()} elements, and input "
            f"tensor {rank} has {sizes[rank]}"
        )
    for each in inputs:
        check_source(each)
    check_destination(output)
    if len(set(sizes)) == 1:
        call, prepare = _scattered(output, lambda: _joined(inputs), made, op, world)
        return (call, (output, *inputs), prepare, [output])

    def prepare_uneven() -> PreparedCall:
        whole = _joined(inputs)
        _, arguments, encode, _ = all_reduce(whole, op, world)
        decode = None
        if encode is not None:
            arguments, decode = encode()
        copy = copy_back([(output, whole.split(sizes)[rank].view(output.shape))])

        def finish() -> None:
            if decode is not None:
                decode()
            copy()

        return arguments, finish

    call = "all_gather_into_tensor" if made is not None and made.combine is not None else "all_reduce"
    return (call, (output, *inputs), prepare_uneven, [output])


def all_to_all(outputs: list[torch.Tensor], inputs: list[torch.Tensor], world: int) -> Plan:
    """Input r of every rank, sent to rank r. Tensors may be of different sizes."""
    check_lists("all_to_all", world, output=outputs, input=inputs)
    sizes = [each.numel() for each in outputs]
    counts = [each.numel() for each in inputs]
    _check_written(outputs)
    for each in inputs:
        check_source(each)

    def prepare() -> PreparedCall:
        flat, finish = _split(outputs, sizes)
        return (flat, _joined(inputs), sizes, counts), finish

    return ("all_to_all_single", (*outputs, *inputs), prepare, outputs)


def gather(tensor: torch.Tensor, parts: list[torch.Tensor] | None, root: int, rank: int, world: int) -> Plan:
    """Every rank's `tensor`, in a tensor of the root's `parts` each."""
    _check_root_list("gather", "gather_list", tensor, parts, root, rank, world)
    count = tensor.numel()
    check_source(tensor)
    _check_written(parts or [])

    def prepare() -> PreparedCall:
        flat = tensor.new_empty(world * count)
        sent = [count if peer == root else 0 for peer in range(world)]
        if rank != root:
            return (flat[:0], row(tensor), [0] * world, sent), None
        assert parts is not None
        pairs = zip(parts, flat.split(count) if count else [flat] * world, strict=True)
        finish = copy_back([(to, part.view(to.shape)) for to, part in pairs])
        return (flat, row(tensor), [count] * world, sent), finish

    return ("all_to_all_single", (tensor, *(parts or ())), prepare, parts or [])


def gather_single(output: torch.Tensor | None, input: torch.Tensor, root: int, rank: int, world: int) -> Plan:
    """Every rank's `input`, one behind the other in the root's `output`."""
    at_root = rank == root and output is not None
    parts = parts_of(output, input, world) if at_root else None  # type: ignore[arg-type]
    call, arguments, prepare, _ = gather(input, parts, root, rank, world)
    return call, arguments, prepare, [output] if at_root else []


def parts_of(output: torch.Tensor, input: torch.Tensor, world: int) -> list[torch.Tensor]:
    """The parts of `output` that belong to the ranks."""
    if output.numel() != world * input.numel() or not output.is_contiguous():
        raise InvalidArgumentError(
            f"output: {world * input.numel()} elements row by row are needed, not {output.numel()}"
        )
    return list(output.view(world, *input.shape).unbind())


def scatter(tensor: torch.Tensor, parts: list[torch.Tensor] | None, root: int, rank: int, world: int) -> Plan:
    """Part r of the root's `parts`, in rank r's `tensor`."""
    _check_root_list("scatter", "scatter_list", tensor, parts, root, rank, world)
    count = tensor.numel()
    check_destination(tensor)
    for each in parts or ():
        check_source(each)

    def prepare() -> PreparedCall:
        place, finish = destination(tensor)
        received = [count if peer == root else 0 for peer in range(world)]
        if rank == root:
            assert parts is not None
            flat, sent = _joined(parts), [count] * world
        else:
            flat, sent = tensor.new_empty(world * count)[:0], [0] * world
        return (place.view(-1), flat, received, sent), finish

    return ("all_to_all_single", (tensor, *(parts or ())), prepare, [tensor])


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


def _check_written(tensors: list[torch.Tensor]) -> None:
    for each in tensors:
        check_destination(each)


def _check_alike(name: str, tensor: torch.Tensor, other: torch.Tensor, count: int) -> None:
    """Refuses a tensor that is not of another one's type and device, and of so many elements."""
    if tensor.dtype != other.dtype or tensor.numel() != count:
        raise InvalidArgumentError(
            f"{name}: {tensor.numel()} elements of {tensor.dtype} where {count} of {other.dtype} are needed"
        )
    if tensor.device != other.device:
        raise InvalidArgumentError(f"{name}: on {tensor.device}, where the other tensor is on {other.device}")


def _check_sizes(name: str, tensor: torch.Tensor, sizes: SplitSizes, world: int) -> None:
    """Refuses split sizes of a tensor that are not rows for every rank, or are more than it has."""
    what = f"{name}_split_sizes"
    if sizes is None:
        if tensor.numel() % world:
            raise InvalidArgumentError(
                f"{name}: {tensor.numel()} elements are not a part for every rank of {world}"
            )
        return
    try:
        counts = [operator.index(size) for size in sizes]
    except TypeError:
        raise InvalidArgumentError(f"{what}: {sizes!r} is no sequence of numbers of rows") from None
    if len(counts) != world:
        raise InvalidArgumentError(f"{what}: {len(counts)} of them for {world} ranks")
    rows = tensor.shape[0] if tensor.dim() > 0 else 1
    if any(count < 0 for count in counts) or sum(counts) > rows:
        raise InvalidArgumentError(f"{what}: {sizes} are more than the {rows} rows of {name}")


def _check_root(operation: str, root: int, world: int) -> None:
    if not 0 <= root < world:
        raise InvalidArgumentError(f"{operation}: root {root} of a group of {world} ranks")


def _check_root_list(
    operation: str, name: str, tensor: torch.Tensor, parts: Any, root: int, rank: int, world: int
) -> None:
    """Refuses a list of parts where there is to be none, and one that does not fit the root's tensor."""
    _check_root(operation, root, world)
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
