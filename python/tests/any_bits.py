"""Elements of any type of torch's, for tests of what only moves data."""

import torch


def data(dtype, rank, count, device="cpu"):
    """Any bits at all: they are to arrive as they are."""
    generator = torch.Generator().manual_seed(1000 * rank + count)
    most = 2 if dtype == torch.bool else 256
    bits = torch.randint(0, most, (count * dtype.itemsize,), generator=generator)
    return bits.to(device, torch.uint8).view(dtype)
