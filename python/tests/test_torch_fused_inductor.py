"""The compiler pass that fuses all-reduces with the residual and the norm behind, on ranks of the CPU."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ranks import values
from test_torch_distributed import begin
from test_torch_fused import near, numbers, unfused
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

import symmpool
from symmpool import fused


class WrittenOut(torch.nn.Module):
    """The norm as models of Hugging Face have it."""

    def __init__(self, weight, eps):
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(dtype)


def graphs_through(found):
    """A compiler that gives the pass the graphs that Inductor would get, and runs them as they are."""

    def passed(module, _):
        found(module.graph)
        module.recompile()
        return module

    return aot_autograd(fw_compiler=passed, bw_compiler=passed, decompositions=select_decomp_table())


def with_the_pass(program, inductor=False):
    """A compiled program, and the pass, which counts what it replaced. Without `inductor` the pass gets the
    graphs that Inductor would get, which then run as they are: C++ takes long to compile."""
    found = fused.inductor_pass()
    torch._dynamo.reset()
    # Graphs from the compiler's cache do not pass the pass.
    options = {"post_grad_custom_pre_pass": found, "fx_graph_cache": False}
    how = {"options": options} if inductor else {"backend": graphs_through(found)}
    return torch.compile(program, **how), found


def compiled(program, *arguments, inductor=False):
    """Returns the result of a compiled program, and how often the pass found its call in it."""
    made, found = with_the_pass(program, inductor)
    with torch.no_grad():
        return made(*arguments), found.replaced


def programs(me, group, dtype, form, all_of_them):
    hidden, eps = 64, 1e-5
    weight = numbers((hidden,), 5, dtype)
    x, residual = numbers((2, 3, 32), 7 + me, dtype), numbers((2, 3, hidden), 9, dtype)
    matrix = numbers((hidden, 32), 11, dtype)
    if form == "written out":
        norm = WrittenOut(weight, eps)
    else:
        norm = torch.nn.RMSNorm(hidden, eps, dtype=dtype)
        norm.weight.data.copy_(weight)
    wrong = []
    product = torch.nn.functional.linear(x, matrix)
    total, wanted = unfused(product, residual, weight, eps)
    summed, normed = unfused(product, None, weight, eps)

    def layer(x, residual):
        y = funcol.all_reduce(torch.nn.functional.linear(x, matrix), "sum", group)
        residual = residual + y
        return norm(residual) * 2, residual

    def flat(x, residual):
        y = torch.nn.functional.linear(x, matrix).view(6, hidden)
        y = funcol.all_reduce(y, "sum", group).view(2, 3, hidden)
        return norm(y + residual) * 2, y.new_zeros(())

    def first(x, residual):
        y = funcol.all_reduce(torch.nn.functional.linear(x, matrix), "sum", group)
        return norm(y) * 2, y + 1

    (out, sums), times = compiled(layer, x, residual, inductor=all_of_them)
    exact = fused.all_reduce_rms_norm(product, residual, weight, eps)
    if times != 1 or not torch.equal(sums, total) or not near(out, 2 * wanted, dtype):
        wrong.append(("layer", times))
    if not torch.equal(out, exact.out * 2):
        wrong.append("bits")
    if not all_of_them:
        return wrong

    def layers(x, residual):
        for _ in range(2):
            residual = residual + funcol.all_reduce(torch.nn.functional.linear(x, matrix), "sum", group)
            x = norm(residual)[..., :32].contiguous()
        return x, residual

    (out, sums), times = compiled(layers, x, residual)
    with torch.no_grad():
        once = fused.all_reduce_rms_norm(product, residual, weight, eps)
        narrow = once.out[..., :32].contiguous()
        twice = fused.all_reduce_rms_norm(
            torch.nn.functional.linear(narrow, matrix), once.residual, weight, eps
        )
    if times != 2 or not torch.equal(sums, twice.residual):
        wrong.append(("layers", times))
    (out, _), times = compiled(flat, x, residual)
    if times != 1 or not torch.equal(out, exact.out * 2):
        wrong.append(("flat", times))
    (out, sums), times = compiled(first, x, residual)
    if times != 1 or not torch.equal(sums, summed + 1) or not near(out, 2 * normed, dtype):
        wrong.append(("without a residual", times))
    return wrong


def fuses(name, folder, backend):
    me, _ = begin(name, folder, backend)
    wrong = []
    for dtype, form, all_of_them in (
        (torch.bfloat16, "written out", True),
        (torch.bfloat16, "functional", False),
        (torch.float32, "functional", False),
    ):
        if found := programs(me, dist.group.WORLD, dtype, form, all_of_them):
            wrong.append((str(dtype), form, found))
    dist.destroy_process_group()
    return wrong


def test_layers_become_one_call(tmp_path):
    assert values(2, fuses, str(tmp_path), "symmpool", limit=240) == [[]] * 2


def leaves(name, folder):
    me, _ = begin(name, folder, "symmpool")
    group = dist.group.WORLD
    others = dist.new_group(backend="gloo")
    weight = numbers((64,), 5, torch.float32)
    x, residual = numbers((3, 64), 7 + me, torch.float32), numbers((3, 64), 9, torch.float32)
    narrow = numbers((60,), 5, torch.float32)
    wide = weight.double()

    def norm(total, weight=weight):
        return total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-5) * weight

    def averaged(x, residual):
        return norm(funcol.all_reduce(x, "avg", group) + residual)

    def used_before(x, residual):
        y = funcol.all_reduce(x, "sum", group)
        return norm(y + residual), y

    def of_another_length(x, residual):
        return norm(funcol.all_reduce(x[:, :60].contiguous(), "sum", group) + residual[:, :60], narrow)

    def other_weight(x, residual):
        return norm(funcol.all_reduce(x, "sum", group) + residual, wide)

    def other_mean(x, residual):
        total = funcol.all_reduce(x, "sum", group) + residual
        return total * torch.rsqrt(total.pow(2).mean(0, keepdim=True) + 1e-5) * weight

    def cubed(x, residual):
        total = funcol.all_reduce(x, "sum", group) + residual
        return total * torch.rsqrt(total.pow(4).mean(-1, keepdim=True) + 1e-5) * weight

    def elsewhere(x, residual):
        return norm(funcol.all_reduce(x, "sum", others) + residual)

    wrong = []
    for program in (elsewhere, averaged, used_before, of_another_length, other_weight, other_mean, cubed):
        made, times = compiled(program, x, residual)
        with torch.no_grad():
            wanted = program(x, residual)
        pairs = zip(made, wanted, strict=True) if isinstance(made, tuple) else [(made, wanted)]
        if times or not all(torch.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in pairs):
            wrong.append((program.__name__, times))
    # A pool makes the group one that symmpool serves.
    pool = symmpool.Pool(others, "cpu")
    if compiled(elsewhere, x, residual)[1] != 1:
        wrong.append("with a pool")
    del pool
    # Gradients flow as before.
    x.requires_grad_()

    def trained(x, residual):
        return norm(funcol.all_reduce(x * 1, "sum", group).detach() * x + residual).sum()

    made, found = with_the_pass(trained)
    made(x, residual).backward()
    if x.grad is None or found.replaced:
        wrong.append("gradient")
    dist.destroy_process_group()
    return wrong


def test_what_only_resembles_a_layer_stays_as_it_is(tmp_path):
    assert values(2, leaves, str(tmp_path), limit=240) == [[]] * 2
