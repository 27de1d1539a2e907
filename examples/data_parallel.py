"""Trains a small model on all ranks, whose gradients lie in symmetric memory.

    torchrun --nproc-per-node 2 examples/data_parallel.py [--device cpu]

All gradients are views of one tensor of a pool, so one all-reduce without copies averages them. A sum has
the same bits on every rank, so the weights stay equal, which is checked at the end. With `--device cpu` ranks
need no GPU.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist

import symmpool


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: there must be one at least")
    if "RANK" not in os.environ:
        sys.exit("this needs a launcher: torchrun --nproc-per-node 2 examples/data_parallel.py")
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no GPU here; --device cpu needs none")

    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # Any backend will do: symmpool takes its store and its timeout.
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    # Weights are the same on every rank.
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(device)

    # A pool on the default process group. Every rank must allocate the same tensors in the same order.
    pool = symmpool.Pool(device=device)
    parameters = list(model.parameters())
    gradients = pool.zeros(sum(each.numel() for each in parameters), dtype=torch.float32)
    at = 0
    for each in parameters:
        each.grad = gradients[at : at + each.numel()].view_as(each)
        at += each.numel()
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    # Other examples on each rank, of one function.
    torch.manual_seed(1 + rank)
    x = torch.randn(256, 16, device=device)
    y = x.square().mean(1, keepdim=True)
    for step in range(options.steps):
        optimizer.zero_grad(set_to_none=False)  # the gradients stay views of the pool's tensor
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        symmpool.all_reduce(gradients, "avg")
        optimizer.step()
        if step in (0, options.steps - 1):
            mean = loss.detach().clone()
            symmpool.all_reduce(mean, "avg")  # memory outside of a pool is copied
            if rank == 0:
                print(f"step {step}: loss {mean.item():.4f}")

    # Weights are equal if the largest of all ranks are the smallest too.
    weights = torch.cat([each.detach().flatten() for each in parameters])
    largest, smallest = weights.clone(), weights.clone()
    symmpool.all_reduce(largest, "max")
    symmpool.all_reduce(smallest, "min")
    equal = torch.equal(largest, smallest)
    if rank == 0:
        print("all ranks have equal weights" if equal else "the weights DIFFER")
    dist.destroy_process_group()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
