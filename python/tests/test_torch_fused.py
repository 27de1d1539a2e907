"""All-reduce, residual and RMSNorm as one call, on the CPU: eager, compiled, refused."""

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin

import symmpool
from symmpool import fused
from symmpool.errors import DivergedError, InvalidArgumentError

FP8 = torch.float8_e4m3fn


def numbers(shape, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def unfused(x, residual, weight, eps, bias=None, weight_bias=0.0):
    """The sum and its norm, by one operation after the other."""
    total = x.clone()
    symmpool.all_reduce(total)
    if bias is not None:
        total = total + bias
    if residual is not None:
        total = total + residual
    wide = total.double()
    factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return total, (wide * factor * (weight.double() + weight_bias))


def near(found, wanted, dtype):
    step = {torch.float32: 1e-5, torch.float16: 1.1e-3, torch.bfloat16: 8.5e-3}[dtype]
    return bool(((found.double() - wanted).abs() <= step * wanted.abs() + 1e-6).all())


def same_everywhere(*tensors):
    """Whether all ranks have the same bits."""
    for tensor in tensors:
        bits = tensor.contiguous().view(torch.uint8).flatten().clone()
        every = torch.empty(bits.numel() * dist.get_world_size(), dtype=torch.uint8)
        dist.all_gather_into_tensor(every, bits)
        if any(not torch.equal(part, bits) for part in every.chunk(dist.get_world_size())):
            return False
    return True


def norms(group, folder):
    me, _ = begin(group, folder)
    wrong = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for hidden in (8, 1000, 9000):
            for tokens in (0, 7):
                seed = hidden + tokens
                x = numbers((tokens, hidden), 7 * seed + me, dtype)
                residual, weight, bias = (
                    numbers(shape, seed + nth, dtype)
                    for nth, shape in enumerate(((tokens, hidden), (hidden,), (hidden,)))
                )
                for given, more in (
                    ((residual, None), {}),
                    ((None, None), {"weight_bias": 1.0}),
                    ((residual, bias), {}),
                ):
                    total, norm = unfused(x, given[0], weight, 1e-6, given[1], **more)
                    made = fused.all_reduce_rms_norm(x, given[0], weight, 1e-6, bias=given[1], **more)
                    right = torch.equal(made.residual, total) and near(made.out, norm, dtype)
                    if not (right and made.scale is None and same_everywhere(made.out, made.residual)):
                        wrong.append((str(dtype), hidden, tokens, more))
                alone = fused.all_reduce_rms_norm(x, residual)
                if alone.out is not alone.residual or not torch.equal(
                    alone.out, unfused(x, residual, weight, 0)[0]
                ):
                    wrong.append((str(dtype), hidden, tokens, "sum"))
    dist.destroy_process_group()
    return wrong


def test_norms_are_those_of_separate_operations(tmp_path):
    assert values(2, norms, str(tmp_path)) == [[]] * 2


def quantized(group, folder):
    me, _ = begin(group, folder)
    wrong = []
    for dtype in (torch.bfloat16, torch.float32):
        for tokens, hidden in ((5, 256), (1, 4096), (3, 128)):
            x = numbers((tokens, hidden), 7 * hidden + me, dtype)
            residual, weight = numbers((tokens, hidden), 1, dtype), numbers((hidden,), 2, dtype)
            norm = fused.all_reduce_rms_norm(x, residual, weight).out.float()
            groups = norm.view(tokens, -1, 128)
            per_group = groups.abs().amax(-1).clamp(min=1e-10) / 448
            per_token = (norm.abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
            fixed = torch.tensor([0.02])

            def quantize(scale, norm=norm, hidden=hidden):
                scale = scale.repeat_interleave(hidden // scale.shape[1], dim=1)
                return (norm / scale).clamp(-448, 448).to(FP8)

            own = torch.empty(hidden // 128, tokens + 1).t()[:tokens]
            for quant, scale, strides in (
                (fused.fp8_per_token(), per_token, (1, 1)),
                (fused.fp8_per_group(), per_group, (hidden // 128, 1)),
                (fused.fp8_per_group(layout="column"), per_group, (1, tokens)),
                (fused.fp8_per_group(layout="column_aligned"), per_group, (1, -(-tokens // 4) * 4)),
                (fused.fp8_per_group(own), per_group, (1, tokens + 1)),
                (fused.fp8_per_token(powers_of_two=True), per_token.log2().ceil().exp2(), (1, 1)),
            ):
                beside = torch.empty_like(x)
                made = fused.all_reduce_rms_norm(x, residual, weight, quant=quant, norm_out=beside)
                if not (
                    torch.equal(made.scale, scale)
                    and made.scale.stride() == strides
                    and torch.equal(made.out.view(torch.uint8), quantize(scale).view(torch.uint8))
                    and torch.equal(beside.float(), norm)
                ):
                    wrong.append((str(dtype), hidden, str(quant)))
            made = fused.all_reduce_rms_norm(x, residual, weight, quant=fused.fp8_static(fixed))
            byte = (norm * (1 / fixed)).clamp(-448, 448).to(FP8)
            if made.scale is not None or not torch.equal(made.out.view(torch.uint8), byte.view(torch.uint8)):
                wrong.append((str(dtype), hidden, "static"))
    dist.destroy_process_group()
    return wrong


def test_quantised_outputs_are_the_norm_over_their_scales(tmp_path):
    assert values(2, quantized, str(tmp_path)) == [[]] * 2


def in_place(group, folder):
    me, _ = begin(group, folder)
    x, residual = numbers((4, 64), me, torch.bfloat16), numbers((4, 64), 9, torch.bfloat16)
    weight = numbers((64,), 2, torch.bfloat16)
    wanted = fused.all_reduce_rms_norm(x, residual, weight)
    pool = symmpool.Pool(group, device="cpu")
    windows = [pool.empty((4, 64), torch.bfloat16) for _ in range(2)]
    same = []
    for a, b in ((x.clone(), residual.clone()), windows):
        a.copy_(x)
        b.copy_(residual)
        made = fused.all_reduce_rms_norm(a, b, weight, out=a, residual_out=b)
        same += [made.out is a and made.residual is b]
        same += [torch.equal(a, wanted.out) and torch.equal(b, wanted.residual)]
    dist.destroy_process_group()
    return same


def test_outputs_may_be_the_inputs(tmp_path):
    assert values(2, in_place, str(tmp_path)) == [[True] * 4] * 2


def compiled(group, folder):
    me, _ = begin(group, folder)
    x, residual = numbers((4, 256), me, torch.bfloat16), numbers((4, 256), 9, torch.bfloat16)
    weight = numbers((256,), 2, torch.bfloat16)

    def step(x, residual):
        a, residual, _ = fused.all_reduce_rms_norm(x * 2, residual, weight)
        quant = fused.fp8_per_group(layout="column")
        b, residual, scale = fused.all_reduce_rms_norm(a, residual, weight, quant=quant)
        c, residual, _ = fused.all_reduce_rms_norm(a, residual)
        out = torch.empty_like(a)
        fused.all_reduce_rms_norm(a, residual, weight, out=out)
        return b.float() * scale.repeat_interleave(128, 1), c, residual, out

    wanted = step(x, residual)
    same = []
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        found = torch.compile(step, backend=backend, fullgraph=True)(x, residual)
        same.append(all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)))
    dist.destroy_process_group()
    return same


def test_compiled_calls_are_what_eager_ones_are(tmp_path):
    assert values(2, compiled, str(tmp_path)) == [[True] * 2] * 2


def compiled_with_gradients(group, folder):
    """Whether calls with tensors that require grad are refused when they are compiled: an operator without a
    gradient would cut them off in silence."""
    begin(group, folder)
    name = dist.group.WORLD.group_name
    x, weight = torch.ones(4, 64), torch.nn.Parameter(torch.ones(64))
    right, residual = torch.nn.Parameter(torch.ones(64, 8)), torch.zeros(4, 64)
    ops = torch.ops.symmpool
    calls = (
        lambda: fused.all_reduce_rms_norm(x, None, weight, None).out,
        lambda: fused.all_reduce_rms_norm(x, residual, weight, out=torch.empty_like(x)).out,
        lambda: ops.matmul_all_reduce(x, right, "sum", name),
        lambda: ops.fused_all_gather_matmul(x, [right], 0, name)[1][0],
        lambda: ops.fused_matmul_reduce_scatter(x, right, "sum", 0, name),
    )
    found = []
    for call in calls:
        torch._dynamo.reset()
        made = torch.compile(call, backend="aot_eager")
        try:
            made()
            found.append("nothing")
        except Exception as error:
            found.append("requires grad, and no gradient flows through it" in str(error))
        with torch.no_grad():
            found.append(torch.equal(made(), call()))
    dist.destroy_process_group()
    return found


def test_compiled_calls_refuse_what_requires_grad(tmp_path):
    assert values(2, compiled_with_gradients, str(tmp_path)) == [[True] * 10] * 2


def with_default_eps(group, folder):
    me, _ = begin(group, folder)
    found = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        # So small that what is added counts.
        x, norm = numbers((4, 64), me, dtype) * 1e-4, torch.nn.RMSNorm(64, dtype=dtype)
        with torch.no_grad():
            made = fused.all_reduce_rms_norm(x, None, norm.weight, norm.eps)
            close = torch.allclose(made.out.float(), norm(made.residual).float(), rtol=2e-2)
        found.append(close and norm.eps is None)
    dist.destroy_process_group()
    return found


def test_a_norm_without_an_epsilon_is_torchs(tmp_path):
    assert values(2, with_default_eps, str(tmp_path)) == [[True] * 3] * 2


def refused(group, folder):
    me, _ = begin(group, folder)
    x, weight = torch.ones(4, 64), torch.ones(64)
    symmpool.all_reduce(torch.ones(1))
    texts = []
    for nth, (arguments, more) in enumerate(
        (
            ((x[:, :60].contiguous(), None, weight[:60]), {}),
            ((x.t(), None, torch.ones(4)), {}),
            ((x.long(), None, weight), {}),
            ((x, x[:2], weight), {}),
            ((x, None, weight.half()), {}),
            ((x, None, weight), {"out": torch.ones(4, 64, dtype=torch.float16)}),
            ((x.clone().requires_grad_(), None, weight), {}),
            ((x, None, weight), {"quant": "fp8"}),
            ((x, None, weight), {"quant": fused.fp8_per_group()}),
            ((x, None, weight), {"quant": fused.fp8_static(torch.ones(2))}),
            ((x, None, weight), {"out": x.view(-1)[:0].view(0, 64)}),
            ((x, None, weight, float("nan")), {}),
            ((x, None, weight), {"residual_out": x, "out": x}),
            ((3, None, weight), {}),
            ((x, None, weight, "small"), {}),
            ((x, None, [1.0] * 64), {}),
            ((x, None, weight), {"quant": fused.fp8_static(0.5)}),
            ((x, None, weight), {"algorithm": 3}),
            ((x, None, weight), {"weight_bias": None}),
            ((x.to("meta"), None, weight), {}),
        )
    ):
        # One of the ranks is wrong, in turn, and the other one learns of it.
        is_wrong = nth % 2 == me
        try:
            if is_wrong:
                fused.all_reduce_rms_norm(*arguments, **more)
            else:
                fused.all_reduce_rms_norm(x, None, weight)
            texts.append("nothing")
        except InvalidArgumentError as error:
            texts.append(str(error) if is_wrong else f"unexpected {error}")
        except DivergedError as error:
            texts.append("diverged" if not is_wrong else f"unexpected {error}")
    eps = 1e-5 if me else 1e-6
    with pytest.raises(DivergedError, match="epsilon"):
        fused.all_reduce_rms_norm(x, None, weight, eps)
    # The communicator is still there.
    made = fused.all_reduce_rms_norm(x, None, weight)
    texts.append(bool((made.residual == 2).all()))
    dist.destroy_process_group()
    return texts


def test_what_does_not_fit_is_refused_by_name_on_all_ranks(tmp_path):
    words = [
        "60 elements",
        "4 elements",
        "torch.int64",
        "residual: ",
        "weight: ",
        "out: ",
        "requires grad",
        "quant: 'fp8'",
        "128",
        "one scale",
        "out: ",
        "epsilon",
        "overlaps",
        "all_reduce_rms_norm on rank 1: x: an object of type int",
        "eps: 'small' is no number",
        "weight: an object of type list",
        "quant: a scale of type float",
        "algorithm: 3 is none of auto, one_shot, two_shot",
        "weight_bias: None is no number",
        "x: a tensor on meta",
    ]
    for me, texts in enumerate(values(2, refused, str(tmp_path))):
        for nth, (text, word) in enumerate(zip(texts[:-1], words, strict=True)):
            assert word in text if nth % 2 == me else text == "diverged", (me, nth, text)
        assert texts[-1] is True
