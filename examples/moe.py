"""Trains a mixture of experts, of which each rank has some, by `symmpool.experts`.

    torchrun --nproc-per-node 2 examples/moe.py [--device cpu] [--pretend-hosts 2]

Every rank has its part of the tokens and its part of the experts; everything else is on every rank, and its
gradients are summed up. `dispatch` sends each token to the ranks of its experts, and `combine` brings back
the weighted sums. Gradients take the same ways. Losses depend on the numbers of ranks and hosts by rounding
alone. On the CPU ranks may be on several hosts, which `--pretend-hosts` has one machine try.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

from symmpool import experts

WORDS, HIDDEN, TOP_K, TOKENS = 64, 128, 2, 256


class Mixture(torch.nn.Module):
    """A layer of experts. Every rank draws the same weights, and keeps those of its own experts."""

    def __init__(self, count, device):
        super().__init__()
        self.norm, self.router = torch.nn.LayerNorm(HIDDEN), torch.nn.Linear(HIDDEN, count)
        local = count // dist.get_world_size()
        every = [torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.GELU()) for _ in range(count)]
        self.experts = torch.nn.ModuleList(every[dist.get_rank() * local :][:local])
        # The ranks meet here. The buffer has room for as many tokens of each rank as a call brings at most.
        self.buffer = experts.ExpertBuffer(
            hidden=HIDDEN,
            experts=count,
            top_k=TOP_K,
            max_tokens=TOKENS,
            dtype=torch.float32,
            device=device,
        )

    def forward(self, x):
        tokens = self.norm(x)
        weights, ids = self.router(tokens).softmax(1).topk(TOP_K)
        # With `exact`, there are as many rows as tokens came, which the host waits for.
        received, handle = self.buffer.dispatch(tokens, ids, weights, exact=True)
        return x + self.buffer.combine(self.run(received), handle)

    def run(self, received):
        """The weighted sum of what this rank's experts make of each row. Their ids here begin at 0."""
        out = torch.zeros_like(received.x)
        for number, expert in enumerate(self.experts):
            row, k = (received.topk_ids == number).nonzero(as_tuple=True)
            made = expert(received.x[row]) * received.topk_weights[row, k, None]
            out = out.index_add(0, row, made)
        return out


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--pretend-hosts", type=int, default=1, metavar="HOSTS", help="share the ranks out")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: there must be one at least")
    if "RANK" not in os.environ:
        sys.exit("this needs a launcher: torchrun --nproc-per-node 2 examples/moe.py")
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no GPU here; --device cpu needs none")
    if options.pretend_hosts > 1:
        if options.device == "cuda" or options.pretend_hosts > int(os.environ["WORLD_SIZE"]):
            parser.error(f"--pretend-hosts {options.pretend_hosts}: at most one for each rank, on the CPU")
        os.environ["SYMMPOOL_HOST_ID"] = f"host{int(os.environ['RANK']) % options.pretend_hosts}"
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if options.experts < TOP_K or options.experts % world or TOKENS % world:
        parser.error(
            f"--experts {options.experts}: {TOP_K} at least, and equally many on each of {world} ranks"
        )

    torch.manual_seed(1)
    layers = [torch.nn.Embedding(WORDS, HIDDEN), *(Mixture(options.experts, device) for _ in range(2))]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(HIDDEN, WORDS)).to(device)
    shared = [each for name, each in model.named_parameters() if ".experts." not in name]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(2)
    for step in range(options.steps):
        # All tokens of a step, of which each rank takes its part. The word to find is the one that follows.
        words = torch.randint(WORDS, (TOKENS,), generator=data).to(device).chunk(world)[rank]
        loss = F.cross_entropy(model(words), (words + 1) % WORDS, reduction="sum") / TOKENS
        optimizer.zero_grad()
        loss.backward()
        for each in shared:
            dist.all_reduce(each.grad)
        optimizer.step()
        dist.all_reduce(total := loss.detach())
        if rank == 0:
            print(f"step {step}: loss {total.item():.5f}", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
