"""A transformer whose layers are split over the ranks, trained with NCCL and with symmpool.

    torchrun --nproc-per-node 4 bench/programs/tensor_parallel.py [--json FILE]
    torchrun --nproc-per-node 2 bench/programs/tensor_parallel.py --device cpu

Each rank has some attention heads and a part of the hidden units of every layer, so a layer's output is the
sum of all ranks' parts. That takes one all-reduce after attention and one after the hidden units in the
forward pass, and one before each in the backward pass. Weights and data are random. The same training
runs with both libraries, eagerly and, on GPUs, captured as a whole (forward, backward and update) in a CUDA
graph. The program prints tokens a second and the losses. On two ranks all losses must be equal; on more
ranks sums are rounded differently, which training amplifies, so only the first steps are compared.

With symmpool the tensors that are summed lie in a pool, so that peers read them where they are. Nothing else
differs; see `Symmpool`.
"""

import argparse
import contextlib
import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

import symmpool
from symmpool.bench import session

#: Other threads, such as NCCL's watchdog, may query events during a capture.
CAPTURE_ERROR_MODE = "thread_local"


class Distributed:
    """torch.distributed: NCCL, or gloo on the CPU."""

    def __init__(self, device):
        self.name = "NCCL" if device.type == "cuda" else "gloo"

    # Any memory can be summed.
    scope = staticmethod(contextlib.nullcontext)
    reduce = staticmethod(dist.all_reduce)

    def graph(self, graph, stream):
        return torch.cuda.graph(graph, stream=stream, capture_error_mode=CAPTURE_ERROR_MODE)


class Symmpool:
    name = "symmpool"
    reduce = staticmethod(symmpool.all_reduce)

    def __init__(self, device):
        self.pool = symmpool.Pool(device=device)

    def scope(self):
        # On the CPU torch has no hook that places tensors.
        return contextlib.nullcontext() if self.pool.device == "cpu" else self.pool

    def graph(self, graph, stream):
        return symmpool.graph(graph, stream=stream, capture_error_mode=CAPTURE_ERROR_MODE)


class ColumnParallel(torch.autograd.Function):
    """`x @ weight.T`, where each rank has some rows of the weight. Every rank has all of `x`, so the
    gradient of `x` is the sum over the ranks."""

    @staticmethod
    def forward(ctx, x, weight, ranks):
        ctx.save_for_backward(x, weight)
        ctx.ranks = ranks
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        with ctx.ranks.scope():
            of_x = gradient @ weight
        ctx.ranks.reduce(of_x)
        return of_x, gradient.t() @ x, None


class RowParallel(torch.autograd.Function):
    """`x @ weight.T`, where each rank has some columns of the weight and of `x`. The result is the sum of
    all ranks' products."""

    @staticmethod
    def forward(ctx, x, weight, ranks):
        ctx.save_for_backward(x, weight)
        with ranks.scope():
            y = x @ weight.t()
        ranks.reduce(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x, None


class Layer(torch.nn.Module):
    def __init__(self, options, make):
        super().__init__()
        width, self.heads = options.width, options.heads // dist.get_world_size()
        self.size = width // options.heads
        # Queries, keys and values of this rank's heads, then its part of the hidden units.
        self.qkv = make.rows(3 * width, width)
        self.out = make.columns(width, width)
        self.up = make.rows(4 * width, width)
        self.down = make.columns(width, 4 * width)

    def forward(self, x, batch, ranks):
        mixed = ColumnParallel.apply(F.layer_norm(x, x.shape[-1:]), self.qkv, ranks)
        q, k, v = mixed.view(batch, -1, self.heads, 3, self.size).permute(3, 0, 2, 1, 4)
        # Attention is written out: fused kernels add gradients up in an order that changes between runs.
        scores = q @ k.transpose(-1, -2) / self.size**0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        seen = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        seen = seen.transpose(1, 2).reshape(x.shape[0], -1)
        x = x + RowParallel.apply(seen, self.out, ranks)
        hidden = F.gelu(ColumnParallel.apply(F.layer_norm(x, x.shape[-1:]), self.up, ranks))
        return x + RowParallel.apply(hidden, self.down, ranks)


class Weights:
    """Random weights: every rank draws all of them, and keeps its part."""

    def __init__(self, device, dtype):
        self.generator = torch.Generator().manual_seed(2026)
        self.device, self.dtype = device, dtype

    def whole(self, rows, columns):
        drawn = torch.randn(rows, columns, generator=self.generator) * columns**-0.5
        return torch.nn.Parameter(drawn.to(self.device, self.dtype))

    def part(self, weight, dim):
        mine = weight.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()]
        return torch.nn.Parameter(mine.contiguous())

    def rows(self, rows, columns):
        return self.part(self.whole(rows, columns), 0)

    def columns(self, rows, columns):
        return self.part(self.whole(rows, columns), 1)


class Model(torch.nn.Module):
    def __init__(self, options, device, dtype):
        super().__init__()
        make = Weights(device, dtype)
        self.embedding = make.whole(options.vocabulary, options.width)
        self.layers = torch.nn.ModuleList(Layer(options, make) for _ in range(options.layers))
        self.head = make.whole(options.vocabulary, options.width)

    def forward(self, tokens, ranks):
        batch, given = tokens.shape[0], tokens[:, :-1]
        x = F.embedding(given, self.embedding).flatten(0, 1)
        for layer in self.layers:
            x = layer(x, batch, ranks)
        logits = F.layer_norm(x, x.shape[-1:]) @ self.head.t()
        return F.cross_entropy(logits.float(), tokens[:, 1:].flatten())


def train(ranks, options, device, dtype, captured):
    """Trains, and returns the losses of all steps and the tokens a second."""
    model = Model(options, device, dtype)
    parameters = list(model.parameters())
    drawn = torch.Generator().manual_seed(1)
    shape = (options.batch, options.length + 1)
    batches = [torch.randint(options.vocabulary, shape, generator=drawn).to(device) for _ in range(4)]
    tokens = batches[0].clone()

    def step():
        loss = model(tokens, ranks)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=options.rate)
        return loss.detach()

    on_cuda = device.type == "cuda"
    # The graph is captured on the stream of the first steps, for which torch has memory by then.
    stream = torch.cuda.Stream() if on_cuda else None
    if on_cuda:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream) if on_cuda else contextlib.nullcontext():
        start = [parameter.detach().clone() for parameter in parameters]
        for _ in range(3):
            step()
        with torch.no_grad():
            for parameter, value in zip(parameters, start, strict=True):
                parameter.copy_(value)
        run = step
        if captured:
            graph = torch.cuda.CUDAGraph()
            with ranks.graph(graph, stream):
                loss = step()

            def run():
                graph.replay()
                return loss.clone()

        losses = []
        if on_cuda:
            torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        for number in range(options.steps):
            tokens.copy_(batches[number % len(batches)])
            losses.append(run())
        if on_cuda:
            torch.cuda.synchronize()
        took = time.perf_counter() - begin
    found = [loss.item() for loss in losses]
    if captured:
        graph.reset()
    return found, options.steps * options.batch * options.length / took


def tolerance(world, dtype):
    """The largest relative difference that the losses of the compared steps may have. Two numbers have one
    sum, in whichever order. With more ranks the order changes the rounding of sums by a few units in the last
    place; a loss is a mean over such sums, and updates pass the difference on to the next steps."""
    if world == 2:
        return 0.0
    return 2e-2 if dtype == torch.bfloat16 else 1e-4


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # Defaults on a GPU, and on the CPU, where the training takes seconds with them and not hours.
    defaults = {
        "layers": (8, 2), "width": (2048, 256), "heads": (16, 8), "vocabulary": (8192, 1024),
        "batch": (4, 2), "length": (512, 64), "steps": (60, 20), "compared": (20, 20), "rounds": (3, 1),
    }  # fmt: skip
    for name, (on_cuda, on_cpu) in defaults.items():
        parser.add_argument(f"--{name}", type=int, help=f"default {on_cuda}, on the CPU {on_cpu}")
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--json")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit("this runs under torchrun: torchrun --nproc-per-node 2 bench/programs/tensor_parallel.py")
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no GPU here; --device cpu needs none")
    for name, values in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, values[options.device == "cpu"])
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo")
    rank, world, dtype = dist.get_rank(), dist.get_world_size(), getattr(torch, options.dtype)
    if options.heads % world or options.width % options.heads:
        sys.exit(f"{options.heads} heads of {options.width} numbers are not for {world} ranks")

    found = {}
    for number in range(options.rounds):
        # Each round begins with another library.
        for make in (Distributed, Symmpool)[:: -1 if number % 2 else 1]:
            # The eager and the captured run share one pool. Nothing is made in it after the capture, since
            # replays use its memory.
            ranks = make(device)
            for captured in (False, True) if device.type == "cuda" else (False,):
                losses, rate = train(ranks, options, device, dtype, captured)
                key = (ranks.name, "graph" if captured else "eager")
                found.setdefault(key, []).append((losses, rate))
            del ranks

    allowed, right, rows = tolerance(world, dtype), True, []
    compared = options.steps if world == 2 else min(options.compared, options.steps)
    for (name, mode), rounds in found.items():
        other = found["NCCL" if device.type == "cuda" else "gloo", mode][0][0]
        losses = rounds[0][0]
        difference = max(
            abs(a - b) / abs(b)
            for each, _ in rounds
            for a, b in zip(each[:compared], other[:compared], strict=True)
        )
        everyone = [None] * world
        dist.all_gather_object(everyone, losses)
        right &= difference <= allowed and losses[-1] < losses[0]
        right &= all(each == losses for each in everyone)
        rates = sorted(rate for _, rate in rounds)
        rows.append((name, mode, rates[len(rates) // 2], losses[0], losses[-1], difference))
    if rank == 0:
        print(f"{world} ranks on {device.type}, {options.dtype}, torch {torch.__version__}")
        print(f"{'':10}{'':8}{'tokens/s':>12}{'first loss':>14}{'last loss':>14}{'loss difference':>17}")
        for name, mode, rate, first, last, difference in rows:
            print(f"{name:10}{mode:8}{rate:12.0f}{first:14.7f}{last:14.7f}{difference:17.1e}")
        print(
            f"losses of the first {compared} steps {'agree' if right else 'DO NOT AGREE'} "
            f"(allowed: {allowed:g} relatively)"
        )
        if options.json:
            names = ("with", "mode", "tokens_a_second", "first_loss", "last_loss", "apart")
            table = [dict(zip(names, row, strict=True)) for row in rows]
            arguments = map(session.without_folders, sys.argv[1:])
            command = ["python", "bench/programs/tensor_parallel.py", *arguments]
            on_cuda = device.type == "cuda"
            given = {key: value for key, value in vars(options).items() if key != "json"}
            report = session.facts(torch, "tensor_parallel", command, world, on_cuda)
            report |= {"options": given, "compared": compared, "agree": right, "allowed": allowed}
            report["results"] = table
            with open(options.json, "w") as file:
                file.write(json.dumps(report, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    if not right:
        sys.exit(1)


if __name__ == "__main__":
    main()
