"""Random data that every rank can generate, and whether a result is its reduction.

Data is generated and checked in pieces, so that a check of a large tensor needs little memory.
"""

PIECE = 1 << 24


def pieces(torch, like, count, rank, op):
    """Rank `rank`'s data as (the index where a piece begins, the piece)."""
    for begin in range(0, count, PIECE):
        length = min(PIECE, count - begin)
        generator = torch.Generator(device=like.device)
        generator.manual_seed(7919 * rank + begin // PIECE + 1)
        if like.dtype.is_floating_point:
            values = torch.rand(length, generator=generator, device=like.device)
            # Products of numbers about 1 neither vanish nor overflow.
            values = values + 0.5 if op == "prod" else values * 2 - 1
        else:
            low = 0 if like.dtype == torch.uint8 else -4
            values = torch.randint(low, 5, (length,), generator=generator, device=like.device)
        yield begin, values.to(like.dtype)


def fill(torch, tensor, rank, op):
    """Writes rank `rank`'s data to a tensor."""
    for begin, values in pieces(torch, tensor, tensor.numel(), rank, op):
        tensor[begin : begin + values.numel()] = values


def poison(tensor):
    """Fills a tensor with a value that no reduction gives."""
    tensor.fill_(float("nan") if tensor.dtype.is_floating_point else 99)


def repeatable(dtype, op):
    """How often a call in place can be repeated with a result that can still be checked."""
    return 3 if dtype.is_floating_point and op != "prod" else 1


def count_wrong(torch, tensor, world, op, calls=1):
    """The number of elements that differ from the reduction of all ranks' data, repeated `calls` times in
    place."""
    wrong = 0
    exact = not tensor.dtype.is_floating_point or op in ("min", "max")
    # The largest relative error of one rounding.
    unit = 0.0 if exact else torch.finfo(tensor.dtype).eps / 2
    streams = [pieces(torch, tensor, tensor.numel(), rank, op) for rank in range(world)]
    for group in zip(*streams):
        begin = group[0][0]
        found = tensor[begin : begin + group[0][1].numel()]
        wide = torch.float64 if tensor.dtype.is_floating_point else torch.int64
        total = group[0][1].to(wide)
        magnitude = total.abs()
        for _, values in group[1:]:
            values = values.to(wide)
            magnitude = magnitude + values.abs()
            if op in ("sum", "avg"):
                total = total + values
            elif op == "prod":
                total = total * values
            else:
                total = getattr(torch, f"{op}imum")(total, values)
        if op == "avg":
            if exact:
                total = torch.div(total, world, rounding_mode="trunc")
            else:
                total, magnitude = total / world, magnitude / world
        if op == "prod":
            magnitude = total.abs()
        if op == "sum":
            # Each further call sums `world` equal results.
            scale = world ** (calls - 1)
            total, magnitude = total * scale, magnitude * scale
        if exact:
            # Integers wrap.
            good = found == total.to(tensor.dtype)
        else:
            # One rounding at each addition, in the worst order.
            good = (found.to(wide) - total).abs() <= world * calls * unit * magnitude
        # The NaN of an element that was never written compares as wrong, too.
        wrong += int((~good).sum())
    return wrong
