"""All-reduce, residual and RMSNorm as one kernel, compared with separate operations of torch.

    python -m torch.distributed.run --nproc-per-node N python/tests/gpu/ranks_fused.py

Sums are compared bit by bit with those of symmpool's all-reduce, norms with torch's in float64, 8-bit floats
and scales with what torch makes of the norm; all outputs bit by bit between ranks, algorithms, and calls that
are eager, on a side stream, and captured. Exits with 1 if anything was wrong. `--device cpu` runs it on the
CPU.
"""

import sys

import ranks_start
import torch
import torch.distributed as dist

import symmpool
from symmpool import fused

FP8 = torch.float8_e4m3fn
STEPS = {torch.float32: 1e-5, torch.float16: 1.1e-3, torch.bfloat16: 8.5e-3}
HIDDEN = (64, 128, 1000, 4096, 5120, 7168, 8192, 16384)
TOKENS = (0, 1, 7, 128, 2048)


def numbers(shape, seed, dtype, device):
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).flatten()


def same_everywhere(tensor, world):
    """Whether all ranks have the same bits."""
    mine = bits(tensor)
    if mine.numel() == 0:
        return True
    whole = torch.empty(mine.numel() * world, dtype=torch.uint8, device=mine.device)
    symmpool.all_gather_into_tensor(whole, mine)
    return all(torch.equal(part, mine) for part in whole.chunk(world))


def quantizations(hidden, device):
    yield None
    yield fused.fp8_static(torch.tensor([0.02], device=device))
    yield fused.fp8_per_token()
    if hidden % 128 == 0:
        yield fused.fp8_per_group()
        yield fused.fp8_per_group(layout="column_aligned", powers_of_two=True)


def expected(norm, quant):
    """The scales and bytes of a norm, as torch makes them on the CPU: on GPUs it multiplies by inverses."""
    wide = norm.float().cpu()
    tokens, hidden = wide.shape
    if quant.kind == "fp8_static":
        return None, (wide * (1 / quant.scale.cpu())).clamp(-448, 448).to(FP8)
    if quant.kind == "fp8_token":
        scale = (wide.abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
    else:
        scale = wide.view(tokens, hidden // 128, 128).abs().amax(-1).clamp(min=1e-10) / 448
    if quant.powers_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale.double()))).float()
    repeated = scale.repeat_interleave(hidden // scale.shape[1], dim=1)
    return scale, (wide / repeated).clamp(-448, 448).to(FP8)


def variants(x, residual, weight, quant, device):
    """Yields the results of a call in every way that it can be made."""

    def call(algorithm="auto"):
        return fused.all_reduce_rms_norm(x, residual, weight, 1e-6, quant=quant, algorithm=algorithm)

    yield "eager", call()
    if device.type == "cpu":
        return
    yield "one shot", call("one_shot")
    yield "two shot", call("two_shot")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made = call()
    torch.cuda.current_stream().wait_stream(side)
    yield "side stream", made
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
        made = call()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    yield "captured", made


def check(x, residual, weight, quant, world):
    """Returns what is wrong with a case."""
    total = x.clone()
    symmpool.all_reduce(total)
    total = total + residual
    wide = total.double()
    norm = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
    beside = fused.all_reduce_rms_norm(x, residual, weight, 1e-6).out
    first, reference = None, None if quant is None else expected(beside, quant)
    for how, made in variants(x, residual, weight, quant, x.device):
        if not torch.equal(bits(made.residual), bits(total)):
            yield f"{how}: the sum"
        if quant is None:
            near = (made.out.double() - norm).abs() <= STEPS[x.dtype] * norm.abs() + 1e-6
            if not bool(near.all()):
                yield f"{how}: the norm"
        else:
            scale, wanted = reference
            if scale is not None and not torch.equal(made.scale.cpu(), scale):
                yield f"{how}: the scales"
            if not torch.equal(bits(made.out).cpu(), bits(wanted)):
                yield f"{how}: the 8-bit floats"
        first = made if first is None else first
        if not torch.equal(bits(made.out), bits(first.out)):
            yield f"{how}: other bits than eager"
        if not (same_everywhere(made.out, world) and same_everywhere(made.residual, world)):
            yield f"{how}: ranks differ"


def main():
    options = ranks_start.parser(__doc__, 1, "rounds").parse_args()
    device = ranks_start.device_of(options.device)
    if device is None:
        return 0
    dist.init_process_group("gloo" if device.type == "cpu" else ranks_start.PEER)
    me, world = dist.get_rank(), dist.get_world_size()
    cases = wrong = 0
    hiddens, tokens = (HIDDEN, TOKENS) if device.type == "cuda" else (HIDDEN[:3], TOKENS[:3])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for hidden in hiddens:
            for count in tokens:
                seed = options.seed + hidden + count
                x = numbers((count, hidden), 100 * seed + me, dtype, device)
                residual = numbers((count, hidden), seed + 1, dtype, device)
                weight = numbers((hidden,), seed + 2, dtype, device)
                for quant in quantizations(hidden, device):
                    cases += 1
                    for what in check(x, residual, weight, quant, world):
                        wrong += 1
                        kind = "none" if quant is None else quant.kind
                        print(f"rank {me}: {dtype} {count} x {hidden}, {kind}: {what}", flush=True)
    print(f"rank {me}: {cases} cases, {wrong} wrong", flush=True)
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
