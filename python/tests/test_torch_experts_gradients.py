"""Gradients through `experts`, of what tokens are multiplied by too, compared with plain PyTorch on one
rank."""

import pytest
import torch
from ranks import values
from torch.nn import functional

import symmpool
from symmpool import experts

HIDDEN, EXPERTS, TOP_K, TOKENS, WORLD = 32, 4, 2, 6, 2
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def tokens_of(seed, needs_grad):
    """Tokens, ids and weights of all ranks."""
    generator = torch.Generator().manual_seed(seed)
    all_ = []
    for _ in range(WORLD):
        x = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_(needs_grad)
        ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices
        ids[0, 1] = -1
        weights = torch.rand(TOKENS, TOP_K, generator=generator)
        all_.append((x, ids, weights))
    return all_


def parameters():
    """A matrix of each expert, and a vector of each, which is found by its number."""
    generator = torch.Generator().manual_seed(9)
    matrices = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5
    return matrices, torch.randn(EXPERTS, HIDDEN, generator=generator)


def wanted_of(x, ids, weights, matrices, vectors):
    out = torch.zeros_like(x)
    for k in range(TOP_K):
        here, expert = (ids[:, k] >= 0)[:, None], ids[:, k].clamp(min=0)
        made = torch.einsum("th,tgh->tg", x, matrices[expert]) * vectors[expert]
        out = out + torch.where(here, made * weights[:, k : k + 1], 0)
    return out


def mixture_by_rank(buffer, x, ids, weights, matrices, vectors, **options):
    received, handle = buffer.dispatch(x, ids, weights, **options)
    made = torch.zeros_like(received.x)
    for k in range(TOP_K):
        local = received.topk_ids[:, k]
        here = (local >= 0)[:, None]
        each = torch.zeros_like(received.x)
        for expert in range(len(matrices)):
            each = torch.where(
                (local == expert)[:, None], functional.linear(received.x, matrices[expert]), each
            )
        each = each * vectors[local.clamp(min=0)]
        made = made + torch.where(here, each * received.topk_weights[:, k : k + 1], 0)
    return buffer.combine(made, handle)


def mixture_by_expert(buffer, x, ids, weights, matrices, vectors, **options):
    received, handle = buffer.dispatch(x, ids, weights, layout="expert", alignment=2, **options)
    at = torch.arange(len(received.x))
    expert = torch.searchsorted(received.expert_offsets[1:].contiguous(), at, right=True)
    expert = expert.clamp(max=len(matrices) - 1)
    made = torch.zeros_like(received.x)
    for number in range(len(matrices)):
        here = (expert == number)[:, None]
        made = torch.where(here, functional.linear(received.x, matrices[number]) * vectors[number], made)
    return buffer.combine(made, handle)


def microbatches(group, layout, needs_grad, exact, of_layers):
    """Several microbatches, or layers, that share a buffer: none is backward before all are forward."""
    pool = symmpool.Pool(group, "cpu")
    me, local = pool.rank, EXPERTS // WORLD
    mixture = mixture_by_rank if layout == "rank" else mixture_by_expert
    buffer = experts.ExpertBuffer(
        pool, hidden=HIDDEN, experts=EXPERTS, top_k=TOP_K, max_tokens=TOKENS, dtype=torch.float32
    )
    given = [each.clone().requires_grad_() for each in parameters()]
    own = [each[me * local : (me + 1) * local].clone().requires_grad_() for each in parameters()]
    batches = [tokens_of(seed, needs_grad) for seed in range(3)]
    loss = wanted_loss = 0
    for batch in batches:
        x, ids, weights = batch[me]
        out = x.detach().clone().requires_grad_(needs_grad)
        mine = out
        for _ in range(2 if of_layers else 1):
            out = mixture(buffer, out, ids, weights, *own, exact=exact)
        loss = loss + (out * torch.linspace(-1, 1, HIDDEN)).sum()
        for rank, (wanted, *routing) in enumerate(batch):
            made = wanted
            for _ in range(2 if of_layers else 1):
                made = wanted_of(made, *routing, *given)
            wanted_loss = wanted_loss + (made * torch.linspace(-1, 1, HIDDEN)).sum()
            if rank == me:
                torch.testing.assert_close(out, made, **CLOSE)
        batch[me] = (batch[me][0], mine)
    loss.backward()
    wanted_loss.backward()
    for found, wanted in zip(own, given):
        torch.testing.assert_close(found.grad, wanted.grad[me * local : (me + 1) * local], **CLOSE)
    for batch in batches:
        if needs_grad:
            torch.testing.assert_close(batch[me][1].grad, batch[me][0].grad, **CLOSE)


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_parameters_of_microbatches_and_layers_that_share_a_buffer(layout, needs_grad):
    for exact in (False, True):
        for of_layers in (False, True):
            values(WORLD, microbatches, layout, needs_grad, exact, of_layers)


def views_and_copies(group):
    pool = symmpool.Pool(group, "cpu")
    buffer = experts.ExpertBuffer(pool, hidden=128, experts=EXPERTS, top_k=TOP_K, max_tokens=TOKENS)
    x, ids = torch.ones(3, 128, dtype=torch.bfloat16), torch.tensor([[0, 2], [3, 1], [1, -1]])
    memory = {name: part.untyped_storage().data_ptr() for name, part in buffer._memory.items()}

    def is_view(tensor, part="rows"):
        return tensor.untyped_storage().data_ptr() == memory[part]

    for options, view in [({}, False), ({"copy": False}, True), ({"copy": True}, False)]:
        for exact in (False, True):
            received, _ = buffer.dispatch(x, ids, quantize="fp8", exact=exact, **options)
            parts = ((received.x, "rows"), (received.scales, "scales"), (received.topk_ids, "ids"))
            assert [is_view(*each) for each in (*parts, (received.topk_weights, "weights"))] == [view] * 4
            count = int(received.num_rows)
            if not view and not exact:
                assert (received.topk_ids[count:] == -1).all() and not received.topk_weights[count:].any()
                assert not received.x[count:].float().any() and not received.scales[count:].any()
            assert (received.x[:count].float() == 448).all()
    with torch.no_grad():
        assert is_view(buffer.dispatch(x, ids)[0].x)
        assert not is_view(buffer.dispatch(x, ids, copy=True)[0].x)
    with torch.inference_mode():
        assert is_view(buffer.dispatch(x, ids)[0].x)
    received, _, wait = buffer.dispatch(x, ids, hook=True)
    wait()
    assert not is_view(received.x)
    grad = x.clone().requires_grad_()
    with pytest.raises(symmpool.InvalidArgumentError, match="copy=False"):
        buffer.dispatch(grad, ids, copy=False)
    # A tensor that a call writes to has another version, which autograd compares.
    out = torch.empty(16, 128, dtype=torch.bfloat16)
    version = out._version
    _, handle = buffer.dispatch(x, ids, layout="expert", out=out)
    assert out._version > version
    sums = torch.empty_like(x)
    version = sums._version
    buffer.combine(out, handle, out=sums)
    assert sums._version > version
    # A second derivative is an error, not a gradient of zeros.
    received, handle = buffer.dispatch(grad, ids)
    squares = buffer.combine(received.x * 2, handle).float().square().sum()
    (first,) = torch.autograd.grad(squares, grad, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.float().sum().backward()


def test_what_is_received_is_a_view_or_a_copy():
    values(WORLD, views_and_copies)


def through_operators(group, backend):
    pool = symmpool.Pool(group, "cpu")
    me = pool.rank
    buffer = experts.ExpertBuffer(
        pool, hidden=HIDDEN, experts=EXPERTS, top_k=TOP_K, max_tokens=TOKENS, dtype=torch.float32
    )
    run_dispatch, run_combine = torch.ops.symmpool.experts_dispatch, torch.ops.symmpool.experts_combine

    def mixture(x, ids, weights, matrix, layout):
        by_expert = layout == "expert"
        rows, _, row_ids, row_weights, handle = run_dispatch(
            x, ids, None if by_expert else weights, buffer.name, layout, 2, None
        )
        made = functional.linear(rows, matrix)
        if not by_expert:
            made = made * torch.where(row_ids >= 0, row_weights, 0).sum(1, keepdim=True)
        return run_combine(made, handle, weights if by_expert else None, x.shape[0], buffer.name, layout, 2)

    compiled = torch.compile(mixture, backend=backend, fullgraph=True) if backend else mixture
    x, ids, weights = tokens_of(1, True)[me]
    matrix = parameters()[0][0]
    for layout in ("rank", "expert"):
        for needs in ((True, True), (True, False), (False, True), (False, False)):
            given = [x.detach().clone().requires_grad_(needs[0]), weights.clone().requires_grad_(needs[1])]
            wanted = [each.detach().clone().requires_grad_(each.requires_grad) for each in given]
            ours, theirs = (matrix.clone().requires_grad_() for _ in range(2))
            out = compiled(given[0], ids, given[1], ours, layout)
            # The matrix is the same for all experts.
            total = torch.where(ids >= 0, wanted[1], 0).sum(1, keepdim=True)
            expected = functional.linear(wanted[0], theirs) * total
            torch.testing.assert_close(out, expected, **CLOSE)
            (out * torch.linspace(-1, 1, HIDDEN)).sum().backward()
            (expected * torch.linspace(-1, 1, HIDDEN)).sum().backward()
            for found, right in zip(given, wanted):
                if found.requires_grad:
                    torch.testing.assert_close(found.grad, right.grad, **CLOSE)
            # A rank's matrix has a gradient of the rows that came here, which together are all tokens'.
            symmpool.all_reduce(ours.grad, group=pool)
            symmpool.all_reduce(theirs.grad, group=pool)
            torch.testing.assert_close(ours.grad, theirs.grad, **CLOSE)
    with pytest.raises(Exception, match="quantize"):
        run_dispatch(x, ids, weights, buffer.name, "rank", 1, "fp8")
    with pytest.raises(Exception, match="they require grad, and by expert"):
        run_dispatch(x, ids, weights.requires_grad_(), buffer.name, "expert", 1, None)
    assert torch.equal(buffer.dispatch(x.detach(), ids, exact=True)[0].num_rows, received_of(me))


def written_in_between(group):
    """A tensor that the backward pass needs is written to, on one rank."""
    pool = symmpool.Pool(group, "cpu")
    me = pool.rank
    buffer = experts.ExpertBuffer(
        pool, hidden=HIDDEN, experts=EXPERTS, top_k=TOP_K, max_tokens=TOKENS, dtype=torch.float32
    )
    found = []
    for nth in range(3):
        x, ids, weights = tokens_of(1, False)[me]
        x = x.float().requires_grad_()
        weights.requires_grad_()
        layout = "expert" if nth == 1 else "rank"
        given = weights.detach() if layout == "expert" else weights
        rows, _, row_ids, row_weights, handle = torch.ops.symmpool.experts_dispatch(
            x, ids, given, buffer.name, layout, 1, None
        )
        # One of the operators alone goes backward.
        if nth == 0:
            written, loss = row_ids, rows.sum() + row_weights.sum()
        else:
            output = rows.detach().clone().requires_grad_()
            made = output * 1
            by = weights if layout == "expert" else None
            sums = torch.ops.symmpool.experts_combine(made, handle, by, x.shape[0], buffer.name, layout, 1)
            written, loss = handle if nth == 2 else made, sums.sum()
        if me == 1:
            with torch.no_grad():
                written.add_(0)
        try:
            loss.backward()
            found.append("served")
        except symmpool.DivergedError as error:
            found.append("rank 1: a call that the rank itself declined" in str(error))
        except RuntimeError as error:
            found.append("inplace" in str(error))
        found.append(torch.equal(buffer.dispatch(x.detach(), ids, exact=True)[0].num_rows, received_of(me)))
    return found


def test_what_autograd_refuses_on_a_rank_is_an_error_on_every_rank():
    assert values(WORLD, written_in_between, limit=100) == [[True] * 6] * WORLD


def narrow_weights(group, dtype, layout, form):
    """Returns the gradients of weights of a narrow type, and of the same numbers in float32."""
    pool = symmpool.Pool(group, "cpu")
    buffer = experts.ExpertBuffer(
        pool, hidden=HIDDEN, experts=EXPERTS, top_k=TOP_K, max_tokens=TOKENS, dtype=torch.float32
    )
    x, ids, weights = tokens_of(1, False)[pool.rank]
    x, weights = x.float(), weights.to(dtype)

    def operators(x, weights):
        given = weights.detach() if layout == "expert" else weights
        rows, _, _, row_weights, handle = torch.ops.symmpool.experts_dispatch(
            x, ids, given, buffer.name, layout, 1, None
        )
        by_rank = layout == "rank"
        rows = rows * row_weights.sum(1, keepdim=True) if by_rank else rows * 2
        by = None if by_rank else weights
        return torch.ops.symmpool.experts_combine(rows, handle, by, x.shape[0], buffer.name, layout, 1)

    def methods(x, weights, given=False):
        received, handle = buffer.dispatch(x, ids, weights, layout=layout)
        if layout == "rank":
            return buffer.combine(received.x * received.topk_weights.sum(1, keepdim=True), handle)
        return buffer.combine(received.x * 2, handle, weights=weights if given else None)

    call = {
        "methods": methods,
        "given to combine": lambda *of: methods(*of, given=True),
        "operators": operators,
        "compiled": torch.compile(operators, backend="aot_eager"),
    }[form]
    found = []
    for given in (weights, weights.float()):
        x_in, given = x.clone().requires_grad_(), given.clone().requires_grad_()
        out = call(x_in, given)
        (out * torch.linspace(-1, 1, HIDDEN)).sum().backward()
        found.append((out, x_in.grad, given.grad))
    (out, x_grad, grad), (wide, wide_x_grad, wide_grad) = found
    assert torch.equal(out, wide) and torch.equal(x_grad, wide_x_grad)
    assert grad.dtype == dtype and torch.equal(grad, wide_grad.to(dtype)) and grad.abs().max() > 0
    with torch.no_grad():
        assert torch.equal(call(x, weights), call(x, weights.float()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("form", ["methods", "given to combine", "operators", "compiled"])
def test_weights_of_narrow_types_are_converted_and_have_gradients_of_their_type(dtype, layout, form):
    if dtype == torch.float16 and form != "methods":
        pytest.skip("the other type is enough")
    values(WORLD, narrow_weights, dtype, layout, form, limit=100)


def received_of(me):
    local = EXPERTS // WORLD
    count = sum(int((ids // local == me).any(1).sum()) for _, ids, _ in tokens_of(1, False))
    return torch.tensor(count, dtype=torch.int32)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_gradients_flow_through_the_operators(backend):
    values(WORLD, through_operators, backend, limit=300)


def autocast(group):
    """Autocast changes the types of what experts make, not what calls do."""
    pool = symmpool.Pool(group, "cpu")
    buffer = experts.ExpertBuffer(pool, hidden=HIDDEN, experts=EXPERTS, top_k=TOP_K, max_tokens=TOKENS)
    x, ids, weights = tokens_of(1, False)[pool.rank]
    x = x.to(torch.bfloat16).requires_grad_()
    matrix = parameters()[0][0].clone().requires_grad_()
    weights.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        received, handle = buffer.dispatch(x, ids, weights, layout="expert")
        out = buffer.combine(functional.linear(received.x, matrix), handle)
    out.float().sum().backward()
    total = torch.where(ids >= 0, weights, 0).sum(1, keepdim=True)
    right = (x.detach().float() @ matrix.detach().t()) * total.detach()
    torch.testing.assert_close(out.float(), right, rtol=0.05, atol=0.1)
    assert x.grad is not None and weights.grad is not None and matrix.grad is not None


def test_calls_under_autocast():
    values(WORLD, autocast)
