"""Exchanges of rows with torch's tensors: a mixture of experts, in short."""

import torch
from ranks import values

import symmpool


def experts(group):
    pool = symmpool.Pool(group, "cpu")
    comm = symmpool.Communicator(pool, timeout=20)
    me, world, tokens, hidden, top = pool.rank, pool.world, 17, 8, 2
    torch.manual_seed(me)
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16)
    chosen = torch.stack([torch.randperm(world)[:top] for _ in range(tokens)])
    weights = torch.rand(tokens, top)
    # A row for each choice of a token.
    exchange = comm.row_exchange(tokens * top, hidden, torch.bfloat16)
    layout = exchange.layout()
    rows = x.repeat_interleave(top, 0)
    received = pool.empty((tokens * top * world, hidden), torch.bfloat16)
    exchange.send(received, rows, chosen.flatten(), layout)
    assert isinstance(layout.counts, torch.Tensor) and layout.counts.dtype == torch.int64
    assert layout.source_index.dtype == torch.int32
    total = int(layout.counts.sum())
    # This rank's expert multiplies by its number.
    received[:total] *= me + 1
    back = torch.empty_like(rows)
    exchange.send_back(back, received, layout)
    mixed = (back.view(tokens, top, hidden).float() * weights[:, :, None]).sum(1)
    factors = (weights * (chosen + 1)).sum(1, keepdim=True)
    return torch.allclose(mixed, x.float() * factors, rtol=2e-2, atol=1e-2), total


def test_a_mixture_of_experts_by_hand():
    found = values(3, experts)
    assert [right for right, _ in found] == [True] * 3
    assert sum(total for _, total in found) == 3 * 17 * 2
