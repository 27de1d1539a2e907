"""The model of `tensor_parallel_fused.py`: layers as Llama 3 has them, of which each rank has a part.

A rank has some attention heads and a part of the hidden units of every layer. What it makes of its part is
added up over the ranks by a `way` to communicate, which the program has several of. Positions are left out:
they are computed within a rank.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F

#: What is added to mean squares in norms.
EPS = 1e-5


def gated(both):
    """The hidden units: half of them open the others."""
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def norm(x, weight):
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


class Weights:
    """Random weights: each rank draws its own part, of a generator of its own where parts differ."""

    def __init__(self, device, dtype):
        self.device, self.dtype = device, dtype
        self.same, self.own = (torch.Generator(device).manual_seed(seed) for seed in self.seeds())

    @staticmethod
    def seeds():
        return 2026, 1000 + dist.get_rank()

    def drawn(self, rows, columns, inner, generator):
        made = torch.randn(rows, columns, generator=generator, device=self.device, dtype=torch.float32)
        return torch.nn.Parameter((made * inner**-0.5).to(self.dtype))

    def whole(self, rows, columns):
        return self.drawn(rows, columns, columns, self.same).requires_grad_(False)

    def part(self, rows, columns, inner):
        """This rank's part of a weight that has `inner` columns on all ranks together."""
        return self.drawn(rows, columns, inner, self.own)

    def of_norm(self, size):
        ones = torch.ones(size, device=self.device, dtype=self.dtype)
        return torch.nn.Parameter(ones, requires_grad=False)


class Layer(torch.nn.Module):
    """A layer's weights. Queries, keys and values are one matrix, and so are both halves of hidden units."""

    def __init__(self, options, make, world):
        super().__init__()
        hidden, wide = options.hidden, options.wide
        size = hidden // options.heads
        heads, kv_heads = options.heads // world, options.kv_heads // world
        self.sizes = (heads, kv_heads, size)
        self.qkv = make.part((heads + 2 * kv_heads) * size, hidden, hidden)
        self.out = make.part(hidden, heads * size, hidden)
        self.gate_up = make.part(2 * wide // world, hidden, hidden)
        self.down = make.part(hidden, wide // world, wide)
        self.first, self.second = make.of_norm(hidden), make.of_norm(hidden)

    def heads_of(self, mixed, batch):
        """Queries, keys and values as (batch, heads, length, size)."""
        heads, kv_heads, size = self.sizes
        parts = mixed.view(batch, -1, heads + 2 * kv_heads, size).transpose(1, 2)
        return parts.split((heads, kv_heads, kv_heads), dim=1)


class Llama(torch.nn.Module):
    """The embedding, the head and the norms are on every rank, and stay as they are."""

    def __init__(self, options, device, dtype):
        super().__init__()
        make, world = Weights(device, dtype), dist.get_world_size()
        self.embedding = make.whole(options.vocabulary, options.hidden)
        self.layers = torch.nn.ModuleList(Layer(options, make, world) for _ in range(options.layers))
        self.last = make.of_norm(options.hidden)
        self.head = make.whole(options.vocabulary, options.hidden)

    def split_weights(self):
        """The weights of which each rank has a part."""
        for layer in self.layers:
            yield from (layer.qkv, layer.out, layer.gate_up, layer.down)

    def read(self, tokens, targets, batch, way):
        """The loss of this rank's tokens, which are a part of `batch` sequences on all ranks together."""
        x = F.embedding(tokens, self.embedding)
        for layer in self.layers:
            mixed = way.column(norm(x, layer.first), layer.qkv)
            q, k, v = layer.heads_of(mixed, batch)
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            seen = seen.transpose(1, 2).reshape(len(mixed), -1)
            x = x + way.row(seen, layer.out)
            hidden = gated(way.column(norm(x, layer.second), layer.gate_up))
            x = x + way.row(hidden, layer.down)
        logits = norm(x, self.last) @ self.head.t()
        return F.cross_entropy(logits.float(), targets)

    def caches(self, count, context, device):
        """Random keys and values of earlier tokens, and room for those of one more, for each layer."""
        drawn = torch.Generator(device).manual_seed(3000 + dist.get_rank())
        caches = []
        for layer in self.layers:
            _, kv_heads, size = layer.sizes
            shape = (2, count, kv_heads, context + 1, size)
            caches.append(torch.randn(shape, generator=drawn, device=device).to(self.embedding.dtype))
        return caches

    def decode(self, tokens, targets, caches, way):
        """The loss of one more token for each sequence."""
        residual = F.embedding(tokens, self.embedding)
        x = norm(residual, self.layers[0].first)
        following = [layer.first for layer in self.layers][1:] + [self.last]
        for layer, cache, after in zip(self.layers, caches, following, strict=True):
            q, k, v = layer.heads_of(x @ layer.qkv.t(), len(tokens))
            keys, values = cache
            keys[:, :, -1:] = k
            values[:, :, -1:] = v
            seen = F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
            seen = seen.transpose(1, 2).reshape(len(tokens), -1)
            x, residual = way.reduce_norm(seen, layer.out, residual, layer.second)
            hidden = gated(x @ layer.gate_up.t())
            x, residual = way.reduce_norm(hidden, layer.down, residual, after)
        return F.cross_entropy((x @ self.head.t()).float(), targets)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="It is a part of tensor_parallel_fused.py, which is the program to start.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args()
    parser.error("this is no program: start tensor_parallel_fused.py")
