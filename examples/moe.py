"""A small transformer with a mixture of experts in each layer, trained and decoded over the ranks.

    torchrun --nproc-per-node 2 examples/moe.py [--json FILE]
    torchrun --nproc-per-node 2 examples/moe.py --device cpu --hidden 64 --layers 1 --batch 2 --steps 3

Each rank has its own sequences and its part of the experts; everything else is on every rank, and its
gradients are summed up. Tokens go to the ranks of their experts in three ways: by `symmpool.experts`, by
all-to-alls of torch.distributed with a row for each token and rank, and by all-gathers with a reduce-scatter.
Weights and data are random and the same for all three. The program prints tokens a second of training and of
decoding, and compares the losses."""

import argparse
import json
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

from symmpool import experts
from symmpool.bench import session


class Exchanged(torch.autograd.Function):
    """An all-to-all of rows, whose gradient is the way back."""

    @staticmethod
    def forward(ctx, rows, send, receive):
        ctx.sizes = send, receive
        out = rows.new_empty((sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx, gradient):
        send, receive = ctx.sizes
        return Exchanged.apply(gradient, receive, send), None, None


class Gathered(torch.autograd.Function):
    """The rows of all ranks."""

    @staticmethod
    def forward(ctx, rows):
        out = rows.new_empty((dist.get_world_size() * len(rows), *rows.shape[1:]))
        dist.all_gather_into_tensor(out, rows.contiguous())
        return out

    @staticmethod
    def backward(ctx, gradient):
        return Scattered.apply(gradient)


class Scattered(torch.autograd.Function):
    """This rank's part of the sum of all ranks' rows."""

    @staticmethod
    def forward(ctx, rows):
        out = rows.new_empty((len(rows) // dist.get_world_size(), *rows.shape[1:]))
        dist.reduce_scatter_tensor(out, rows.contiguous())
        return out

    @staticmethod
    def backward(ctx, gradient):
        return Gathered.apply(gradient)


def run_experts(model, rows, ids, weights):
    """The weighted sums of what this rank's experts make of rows; ids are numbers of these experts, or -1."""
    out = torch.zeros_like(rows)
    for number, expert in enumerate(model.experts):
        row, k = (ids == number).nonzero(as_tuple=True)
        out = out.index_add(0, row, expert(rows[row]) * weights[row, k, None])
    return out


class Symmpool:
    name = "symmpool"

    def __init__(self, options, device):
        self.buffer = experts.ExpertBuffer(
            hidden=options.hidden,
            experts=options.experts,
            top_k=options.top_k,
            max_tokens=options.batch * options.length,
            dtype=torch.float32,
            device=device,
        )

    def mixture(self, model, x, ids, weights):
        received, handle = self.buffer.dispatch(x, ids, weights, exact=True)
        rows = run_experts(model, received.x, received.topk_ids, received.topk_weights)
        return self.buffer.combine(rows, handle)


class AllToAll:
    name = "all-to-all"

    def __init__(self, options, device):
        self.local = options.experts // dist.get_world_size()

    def mixture(self, model, x, ids, weights):
        world, rank = dist.get_world_size(), dist.get_rank()
        rows = [((ids // self.local) == each).any(1).nonzero()[:, 0] for each in range(world)]
        index, send = torch.cat(rows), [len(each) for each in rows]
        counts = torch.tensor(send, device=x.device)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        sizes = send, received.tolist()
        ids = Exchanged.apply(ids[index], *sizes) - rank * self.local
        made = run_experts(
            model, Exchanged.apply(x[index], *sizes), ids, Exchanged.apply(weights[index], *sizes)
        )
        return torch.zeros_like(x).index_add(0, index, Exchanged.apply(made, *sizes[::-1]))


class AllGather:
    name = "all-gather"

    def __init__(self, options, device):
        self.local = options.experts // dist.get_world_size()

    def mixture(self, model, x, ids, weights):
        ids = Gathered.apply(ids) - dist.get_rank() * self.local
        return Scattered.apply(run_experts(model, Gathered.apply(x), ids, Gathered.apply(weights)))


class Layer(torch.nn.Module):
    """Attention with a cache, and a mixture of experts."""

    def __init__(self, options, exchange):
        super().__init__()
        hidden, local = options.hidden, options.experts // dist.get_world_size()
        self.heads, self.top_k, self.exchange = options.heads, options.top_k, exchange
        self.before, self.between = torch.nn.LayerNorm(hidden), torch.nn.LayerNorm(hidden)
        self.qkv, self.out = torch.nn.Linear(hidden, 3 * hidden), torch.nn.Linear(hidden, hidden)
        self.router = torch.nn.Linear(hidden, options.experts)
        self.experts = torch.nn.ModuleList()
        for number in range(options.experts):
            # Every rank draws the same weights, and keeps those of its own experts.
            wide = torch.nn.Linear(hidden, 2 * hidden), torch.nn.GELU(), torch.nn.Linear(2 * hidden, hidden)
            if number // local == dist.get_rank():
                self.experts.append(torch.nn.Sequential(*wide))

    def forward(self, x, cache=None):
        batch, length, hidden = x.shape
        parts = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        if cache is not None:
            if cache:
                key, value = torch.cat([cache[0], key], 2), torch.cat([cache[1], value], 2)
            cache[:] = key, value
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=cache is None)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        tokens = self.between(x).view(-1, hidden)
        weights, ids = self.router(tokens).softmax(1).topk(self.top_k)
        return x + self.exchange.mixture(self, tokens, ids, weights).view_as(x)


class Model(torch.nn.Module):
    def __init__(self, options, exchange):
        super().__init__()
        self.embedding = torch.nn.Embedding(options.words, options.hidden)
        self.layers = torch.nn.ModuleList(Layer(options, exchange) for _ in range(options.layers))
        self.head = torch.nn.Linear(options.hidden, options.words)

    def forward(self, words, caches=None):
        x = self.embedding(words)
        for number, layer in enumerate(self.layers):
            x = layer(x, None if caches is None else caches[number])
        return self.head(x)


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def train(model, options, device):
    """The losses of all steps, summed up over ranks, and tokens a second of all ranks."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    shared = [each for name, each in model.named_parameters() if ".experts." not in name]
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, begin = [], 0.0
    for step in range(options.steps + 1):
        if step == 1:
            synchronize(device)
            begin = time.perf_counter()
        words = torch.randint(options.words, (options.batch, options.length + 1), generator=generator).to(
            device
        )
        made = model(words[:, :-1])
        loss = F.cross_entropy(made.flatten(0, 1), words[:, 1:].flatten()) / dist.get_world_size()
        update.zero_grad()
        loss.backward()
        for each in shared:
            dist.all_reduce(each.grad)
        update.step()
        dist.all_reduce(loss := loss.detach())
        losses.append(loss)
    synchronize(device)
    tokens = options.steps * options.batch * options.length * dist.get_world_size()
    return [float(each) for each in losses], tokens / (time.perf_counter() - begin)


@torch.no_grad()
def decode(model, options, device):
    """Tokens a second of all ranks; each step makes one for every sequence."""
    words = torch.arange(options.batch, device=device)[:, None]
    caches, begin = [[] for _ in model.layers], 0.0
    for step in range(options.steps + 1):
        if step == 1:
            synchronize(device)
            begin = time.perf_counter()
        words = model(words, caches)[:, -1:].argmax(-1)
    synchronize(device)
    return options.steps * options.batch * dist.get_world_size() / (time.perf_counter() - begin)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = {"hidden": 1024, "heads": 8, "layers": 4, "experts": 32, "top_k": 4}
    numbers |= {"words": 1024, "batch": 8, "length": 128, "steps": 20}
    for name, value in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    options = parser.parse_args()
    _, device = session.find_device(options, "--nproc-per-node 2 examples/moe.py")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    found = {}
    for kind in (Symmpool, AllToAll, AllGather):
        torch.manual_seed(1)
        model = Model(options, kind(options, device)).to(device)
        losses, trained = train(model, options, device)
        found[kind.name] = {"losses": losses, "trained": trained, "decoded": decode(model, options, device)}
        if dist.get_rank() == 0:
            speeds = f"{trained:10,.0f} tokens/s trained, {found[kind.name]['decoded']:10,.0f} decoded"
            print(f"{kind.name:>10}: {speeds}, loss {losses[0]:.4f} to {losses[-1]:.4f}", flush=True)
    every = [torch.tensor(each["losses"]) for each in found.values()]
    close = all(torch.allclose(each, every[0], rtol=1e-3) for each in every[1:])
    if dist.get_rank() == 0:
        print("the losses agree" if close else "the losses DIFFER")
        if options.json:
            with open(options.json, "w") as file:
                json.dump(found, file, indent=1)
    dist.destroy_process_group()
    return 0 if close else 1


if __name__ == "__main__":
    sys.exit(main())
