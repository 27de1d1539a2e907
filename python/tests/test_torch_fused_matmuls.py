"""The compiler pass that fuses matrix products with all-gathers and reduce-scatters, on ranks of the
CPU."""

import torch
import torch.distributed as dist
from ranks import values
from test_torch_distributed import begin
from test_torch_fused_inductor import with_the_pass
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import symmpool
from symmpool import fused


def numbers(shape, seed, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) / 4).to(dtype)


def compiled(program, *arguments, inductor=False):
    """Returns the result of a compiled program, and the pass, which counts what it replaced."""
    made, found = with_the_pass(program, inductor)
    return made(*arguments), found


def near(one, other):
    return one.dtype == other.dtype and torch.allclose(one.float(), other.float(), rtol=0.05, atol=0.05)


def started(group, folder):
    me, world = begin(group, folder)
    return me, world, symmpool.Pool(device="cpu")


def sums(group, folder):
    me, world, pool = started(group, folder)
    wrong = []
    whole = (2, 64 * world, 2 * world)
    for shape, dim in (((512 * world,), 0), ((2, 256 * world), 1), (whole, 1), (whole, 2)):
        lefts = [numbers((*shape, 8 + nth), nth + me) for nth in range(3)]
        rights = [numbers((8 + nth, 16), 9 + nth + me) for nth in range(3)]

        def program(a, b, c, dim=dim, rights=rights):
            total = a @ rights[0] + (b @ rights[1] + c @ rights[2])
            return reduce_scatter_tensor(total, "avg", dim, dist.group.WORLD)

        def one(a, b, c, dim=dim, rights=rights):
            return reduce_scatter_tensor(a @ rights[0], "sum", dim, dist.group.WORLD) + c.sum()

        for each in (program, one) if len(shape) == 2 else (program,):
            wanted = each(*lefts)
            by_inductor = shape[1:] == (256 * world,) and dim == 1 and each is program
            made, found = compiled(each, *lefts, inductor=by_inductor)
            is_same = near(made, wanted) and made.is_contiguous()
            if found.replaced != 1 or not is_same:
                wrong.append((shape, dim, each.__name__, found.replaced))
    wrong += [] if pool.world == world else ["pool"]
    dist.destroy_process_group()
    return wrong


def test_sums_of_products_become_one_call(tmp_path):
    assert values(2, sums, str(tmp_path), limit=240) == [[]] * 2


def gathered(shard, dim, group):
    """Gathers the parts of all ranks along a dimension, as DTensor asks for it: torch 2.11 does not compile
    its own `all_gather_tensor` along others than the first one."""
    whole = all_gather_tensor(shard, 0, group)
    return torch.cat(whole.chunk(group.size()), dim) if dim else whole


def gathers(group, folder):
    me, world, pool = started(group, folder)
    everyone, wrong = dist.group.WORLD, []
    for shape, dim in (((512, 8), 0), ((2, 256, 8), 1), ((2, 64, 4, 8), 1)):
        shard = numbers(shape, me)
        rights = [numbers((8, size), size) for size in (8, 16, 24)]
        weights = [numbers((size, 8), size) for size in (16, 8)]

        def products(shard, rights, dim=dim):
            whole = gathered(shard * 2, dim, everyone)
            return [whole @ right for right in rights]

        def layers(shard, weights, dim=dim):
            whole = gathered(shard, dim, everyone)
            hidden = [nn.functional.linear(whole, weight) for weight in weights]
            return [whole, hidden[0] * 2, whole.sum() + hidden[1]]

        def one_after_the_other(shard, rights, dim=dim):
            whole = gathered(shard, dim, everyone)
            part = (whole @ rights[0]).chunk(world, dim)[me].contiguous()
            return [gathered(part, dim, everyone) @ rights[1]]

        for program, matrices, count in (
            (products, rights, 1),
            (layers, weights, 1),
            (one_after_the_other, rights, 2),
        ):
            wanted = program(shard, matrices)
            # Code that Inductor generates is slow to compile.
            by_inductor = shape == (2, 256, 8) and dim == 1 and program is products
            made, found = compiled(program, shard, matrices, inductor=by_inductor)
            is_same = all(map(near, made, wanted)) and all(one.is_contiguous() for one in made)
            if found.replaced != count or not is_same:
                wrong.append((shape, dim, program.__name__, found.replaced))
    wrong += [] if pool.world == world else ["pool"]
    dist.destroy_process_group()
    return wrong


def test_gathers_and_their_products_become_one_call(tmp_path):
    assert values(2, gathers, str(tmp_path), limit=240) == [[]] * 2


class Attention(nn.Module):
    """A layer of which three products have one input, as in a transformer."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, size, bias=False) for size in (16, 8, 8))
        self.out = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        return self.out(self.q(x) * torch.cat([self.k(x), self.v(x)], -1).sigmoid())


def trained(group, folder):
    me, world, pool = started(group, folder)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    torch.manual_seed(3)
    layer = Attention().bfloat16()
    plan = {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("q", "k", "v")}
    plan["out"] = RowwiseParallel(output_layouts=Shard(1))
    shard = numbers((2, 256, 16), 5 + me).requires_grad_()
    whole = torch.cat([numbers((2, 256, 16), 5 + rank) for rank in range(world)], 1).requires_grad_()
    layer(whole).float().pow(2).sum().backward()
    wanted = whole.grad.chunk(world, 1)[me]
    layer = parallelize_module(layer, mesh, plan)
    # The gather of the input is made once for all three, and the gradient of it is the sum.
    for each in (layer.q, layer.k, layer.v):
        each._forward_pre_hooks.clear()

    def enter(_, given):
        return DTensor.from_local(given[0], mesh, [Shard(1)]).redistribute(mesh, [Replicate()])

    layer.register_forward_pre_hook(enter)
    # Hooks of a part of what is compiled are compiled too.
    made, found = compiled(nn.Sequential(layer), shard)
    made.float().pow(2).sum().backward()
    right = near(shard.grad, wanted) and pool.world == world
    dist.destroy_process_group()
    return found.replaced, right


def test_layers_that_share_an_input_have_one_call_for_each_collective(tmp_path):
    assert values(2, trained, str(tmp_path), limit=240) == [(4, True)] * 2


def leaves(group, folder):
    me, world, pool = started(group, folder)
    rows, everyone = 256 * world, dist.group.WORLD
    x, y = numbers((rows, 8), me), numbers((rows, 8), me + 2)
    a, b = numbers((8, 16), me + 4), numbers((8, 16), me + 6)

    def scattered(whole, dim=0, of=everyone, op="sum"):
        return reduce_scatter_tensor(whole, op, dim, of)

    def used_elsewhere(x, y):
        total = x @ a + y @ b
        return scattered(total), total

    def a_product_used_elsewhere(x, y):
        product = x @ a
        return scattered(product + y @ b), product

    def added_to_something_else(x, y):
        return scattered(x @ a + y.repeat(1, 2))

    def scaled(x, y):
        return scattered(torch.add(x @ a, y @ b, alpha=2))

    def broadcast(x, y):
        return scattered(x @ a + y[:1] @ b)

    def along_columns(x, y):
        return scattered(x @ a + y @ b, 1)

    def of_few_rows(x, y):
        return scattered(x[: rows // 2] @ a + y[: rows // 2] @ b)

    def wide(x, y):
        return scattered(x.float() @ a.float() + y.float() @ b.float())

    def reshaped(x, y):
        return scattered((x @ a).view(2 * rows, 8) + (y @ b).view(2 * rows, 8))

    def of_five(x, y):
        return scattered(((x @ a + y @ b) + (x @ b + y @ a)) + (x + y) @ a)

    def gathered_columns(x, y):
        return gathered(x, 1, everyone) @ torch.cat([a] * world)

    def gathered_few_rows(x, y):
        return gathered(x[:64], 0, everyone) @ a

    def gathered_wide(x, y):
        return gathered(x.float(), 0, everyone) @ a.float()

    def multiplied_by_itself(x, y):
        whole = gathered(x, 0, everyone)
        return whole.t() @ whole

    def multiplied_by_what_comes_later(x, y):
        whole = gathered(x, 0, everyone)
        return whole @ (whole.sum() * a)

    def gathered_by_a_group_without_a_pool(x, y):
        return gathered(x, 0, alone) @ a

    def maximum(x, y):
        return scattered(x @ a + y @ b, op="max")

    alone = dist.new_group(list(range(world)))

    def of_a_group_without_a_pool(x, y):
        return scattered(x @ a + y @ b, of=alone)

    wrong = []
    for program in (
        used_elsewhere,
        a_product_used_elsewhere,
        added_to_something_else,
        scaled,
        broadcast,
        along_columns,
        of_few_rows,
        wide,
        reshaped,
        of_five,
        maximum,
        of_a_group_without_a_pool,
        gathered_columns,
        gathered_few_rows,
        gathered_wide,
        multiplied_by_itself,
        multiplied_by_what_comes_later,
        gathered_by_a_group_without_a_pool,
    ):
        made, found = compiled(program, x, y)
        wanted = program(x, y)
        pairs = zip(made, wanted, strict=True) if isinstance(made, tuple) else [(made, wanted)]
        if found.replaced or not all(near(one, other) for one, other in pairs):
            wrong.append((program.__name__, found.replaced))
    wrong += [] if pool.world == world else ["pool"]
    dist.destroy_process_group()
    return wrong


def dynamic(group, folder):
    me, world = begin(group, folder)
    everyone, without_pool = dist.group.WORLD, fused.inductor_pass().uuid()
    pool = symmpool.Pool(device="cpu")
    right, wrong = numbers((8, 16), 3), []

    def program(x):
        whole = torch.cat(all_gather_tensor(x, 0, everyone).chunk(world), 1)
        return reduce_scatter_tensor(whole @ right, "sum", 1, everyone)

    made, found = with_the_pass(program)
    for length in (256, 512, 384):
        x = numbers((2, length, 8), me)
        if not near(made(x), program(x)):
            wrong.append(length)
    # Only the first length was known when the program was compiled.
    wrong += [] if found.replaced == 1 and pool.world == world else [found.replaced]
    # Code that is compiled for a group with a pool is none of what is compiled for one without.
    wrong += [] if found.uuid() != without_pool else ["uuid"]
    dist.destroy_process_group()
    return wrong


def test_sizes_that_are_not_known_change_nothing(tmp_path):
    assert values(2, dynamic, str(tmp_path), limit=240) == [[]] * 2


def test_what_only_resembles_fused_matmuls_stays_as_it_is(tmp_path):
    assert values(2, leaves, str(tmp_path), limit=240) == [[]] * 2
