"""Expected results of dispatch to experts and combine, in plain PyTorch."""

from dataclasses import dataclass

import torch


@dataclass
class Routing:
    """The tokens, ids and weights of every rank."""

    x: list
    ids: list
    weights: list
    experts: int

    @property
    def world(self):
        return len(self.x)

    @property
    def local(self):
        return self.experts // self.world

    def on(self, rank):
        """The experts of all tokens as numbers of those of a rank, -1 for those elsewhere; by source."""
        first = rank * self.local
        here = [(ids >= first) & (ids < first + self.local) for ids in self.ids]
        return [torch.where(mask, ids - first, -1) for mask, ids in zip(here, self.ids)]

    def received(self, rank):
        """(tokens, ids, weights, source offsets, source index) of the rows that a rank receives by rank."""
        rows, ids, weights, offsets, index = [], [], [], [0], []
        for source, local in enumerate(self.on(rank)):
            chosen = (local >= 0).any(1).nonzero()[:, 0]
            rows.append(self.x[source][chosen])
            ids.append(local[chosen])
            weights.append(self.weights[source][chosen])
            index.append(chosen)
            offsets.append(offsets[-1] + len(chosen))
        return torch.cat(rows), torch.cat(ids), torch.cat(weights), offsets, torch.cat(index)

    def by_expert(self, rank, alignment):
        """(places, offsets): of each received row and expert its row by expert, and where experts begin."""
        _, ids, _, _, _ = self.received(rank)
        places, offsets = torch.full_like(ids, -1), [0]
        for expert in range(self.local):
            chosen = (ids == expert).flatten().nonzero()[:, 0]
            places.view(-1)[chosen] = torch.arange(len(chosen)) + offsets[-1]
            offsets.append(offsets[-1] + -(-len(chosen) // alignment) * alignment)
        return places, offsets

    def combined(self, me, answers, dtype, hosts=None):
        """The sums of a rank's tokens, where `answers[rank]` comes back for the rows of that rank. `hosts`
        are the ranks of each host: the sum of another host is rounded before hosts are added up."""
        out = torch.zeros((len(self.x[me]), answers[0].shape[1]))
        for ranks in hosts or [range(len(answers))]:
            partial = torch.zeros_like(out)
            for rank in ranks:
                _, _, _, offsets, index = self.received(rank)
                chosen = index[offsets[me] : offsets[me + 1]]
                partial[chosen] += answers[rank][offsets[me] : offsets[me + 1]].float()
            out += partial if me in ranks else partial.to(dtype).float()
        return out.to(dtype)

    def weighted(self, rank, answer, alignment, dtype, weights=None):
        """Returns the sums that come back from a rank whose rows lie by expert."""
        places, _ = self.by_expert(rank, alignment)
        _, _, given, _, _ = self.received(rank)
        given = (
            given if weights is None else Routing(self.x, self.ids, weights, self.experts).received(rank)[2]
        )
        out = torch.zeros((len(places), answer.shape[1]))
        for k in range(places.shape[1]):
            chosen = (places[:, k] >= 0).nonzero()[:, 0]
            rows = answer[places[chosen, k]].float() * given[chosen, k : k + 1]
            out[chosen] += rows
        return out.to(dtype)


def quantized(x, how):
    """Tokens as float8_e4m3fn, and their scales."""
    groups = x.float().unflatten(1, (-1, 128))
    scales = groups.abs().amax(2).clamp(min=1e-4) / 448
    exponents = (scales.view(torch.int32) + 0x7FFFFF) >> 23
    if how != "fp8":
        scales = (exponents << 23).view(torch.float32)
    scaled = (groups * (1 / scales)[:, :, None]).clamp(-448, 448)
    rows = scaled.to(torch.float8_e4m3fn).flatten(1)
    return rows, exponents.to(torch.uint8) if how == "fp8_ue8m0" else scales


def random(seed, world, dtype=torch.bfloat16, hidden=None, top_k=None, tokens=32):
    """A routing of one of several kinds, the same on every rank: (routing, hidden, top_k, most tokens)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(most):
        return int(torch.randint(most, (1,), generator=generator))

    top_k = top_k or 1 + seed % 12
    hidden = hidden or [64, 128, 256, 384, 1024][draw(5)]
    experts, most = world * (1 + draw(8)), 1 + draw(tokens)
    x, ids, weights = [], [], []
    for _ in range(world):
        count = [0, most, draw(most + 1), draw(most + 1)][draw(4)]
        x.append(torch.randn((count, hidden), generator=generator).to(dtype))
        kind = draw(6)
        low, high = [(0, 1), (-1, 0), (0, min(2, experts)), (-1, experts), (0, experts), (0, experts)][kind]
        chosen = torch.randint(low, high, (count, top_k), generator=generator)
        if kind > 3 and top_k <= experts:
            scores = torch.rand((count, experts), generator=generator)
            chosen = scores.topk(top_k).indices if count else chosen
        ids.append(chosen)
        weights.append(torch.rand((count, top_k), generator=generator))
    return Routing(x, ids, weights, experts), hidden, top_k, most


def answers_of(routing, seed, hidden, dtype, alignment=None):
    """Returns the experts' answers to the rows of each rank: rows of their own. `alignment` for rows by
    expert."""
    found = []
    for rank in range(routing.world):
        count = len(routing.received(rank)[0])
        if alignment is not None:
            count = routing.by_expert(rank, alignment)[1][-1]
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        found.append(torch.randn((count, hidden), generator=generator).to(dtype))
    return found
