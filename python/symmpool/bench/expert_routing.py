"""Tokens and their experts, for the benchmark of dispatch and combine, and what each call should give."""

from dataclasses import dataclass
from typing import Any

KINDS = ("uniform", "skewed", "one")


@dataclass
class Routing:
    """The tokens, experts and weights of all ranks, which every rank knows."""

    kind: str
    tokens: int
    rank: int
    x: list[Any]
    ids: list[Any]
    weights: list[Any]
    experts: int

    def on(self, rank, source):
        """Which tokens of a rank go to another."""
        local = self.experts // len(self.x)
        return ((self.ids[source] // local) == rank).any(1)

    def received(self, of=None):
        """The rows that this rank receives, of its tokens or of what `of` has for each rank."""
        torch_rows = [each[self.on(self.rank, source)] for source, each in enumerate(of or self.x)]
        return torch_rows[0].new_empty(0) if not torch_rows else _cat(torch_rows)

    def combined(self):
        """The sums of this rank's tokens, if every rank sends back what it received."""
        ranks = sum(self.on(rank, self.rank).int() for rank in range(len(self.x)))
        return self.x[self.rank] * ranks[:, None].to(self.x[self.rank].dtype)

    def sent(self):
        """Rows that the rank which sends or receives the most sends to, or receives from, others."""
        world = range(len(self.x))
        rows = [[int(self.on(to, source).sum()) for to in world] for source in world]
        sends = [sum(rows[a][b] for b in world if b != a) for a in world]
        receives = [sum(rows[b][a] for b in world if b != a) for a in world]
        return max(*sends, *receives)


def _cat(parts):
    import torch

    return torch.cat(parts)


def make(torch, ranks, kind, tokens, hidden, experts, top_k):
    """Tokens of small integers, whose sums are exact in bfloat16."""
    x, ids, weights = [], [], []
    for rank in range(ranks.world):
        generator = torch.Generator(device=ranks.device).manual_seed(1000 * tokens + rank)
        options = {"generator": generator, "device": ranks.device}
        x.append(torch.randint(-8, 9, (tokens, hidden), **options).to(torch.bfloat16))
        scores = torch.rand((tokens, experts), **options)
        if kind == "skewed":
            # The first experts are chosen more often, as by routers whose load is not balanced.
            scores *= torch.linspace(2, 1, experts, device=ranks.device)
        elif kind == "one":
            scores[:, 0] = 2
        ids.append(scores.topk(top_k, dim=1).indices)
        weights.append(torch.rand((tokens, top_k), **options))
    return Routing(kind, tokens, ranks.rank, x, ids, weights, experts)


def quantized(torch, x):
    """Tokens as float8_e4m3fn, with a scale for each 128 channels, as dispatch makes them."""
    groups = x.float().unflatten(1, (-1, 128))
    scales = groups.abs().amax(2).clamp(min=1e-4) / 448
    rows = (groups * (1 / scales)[:, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return rows.flatten(1), scales
