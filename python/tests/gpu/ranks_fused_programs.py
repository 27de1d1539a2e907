"""Compiled tensor-parallel layers with fused norms, and FlashInfer's calls, on a GPU for each rank.

    torchrun --nproc-per-node 2 python/tests/gpu/ranks_fused_programs.py [--device cpu] [--count 4]

So many layers of a Llama are split by DTensor and compiled, as they are and with `fused.inductor_pass()`;
results are compared with those of one rank alone, and times of a captured forward pass are printed for
several numbers of tokens.
"""

import sys
import time

import ranks_start
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import symmpool  # noqa: F401
from symmpool import fused
from symmpool.engines import flashinfer_comm

HIDDEN, HEADS, WIDE = 4096, 32, 14336


class Norm(torch.nn.Module):
    """RMSNorm as models of Hugging Face write it."""

    def __init__(self, hidden, eps=1e-5):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(1 + 0.1 * torch.randn(hidden)), eps

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(dtype)


class Layer(torch.nn.Module):
    def __init__(self, hidden, heads, wide):
        super().__init__()
        self.heads, self.size = heads, hidden // heads
        self.first, self.second = Norm(hidden), Norm(hidden)
        self.q, self.k, self.v, self.o = (torch.nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (torch.nn.Linear(hidden, wide, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(wide, hidden, bias=False)

    def forward(self, x):
        y = self.first(x)
        heads = [each(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for each in (self.q, self.k, self.v)]
        y = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


SPLIT = {name: ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
SPLIT |= {name: RowwiseParallel() for name in ("o", "down")}


def forward(program, find):
    """A compiled program, by way of the pass if there is one."""
    torch._dynamo.reset()
    more = {"fx_graph_cache": False}
    if find is not None:
        more["post_grad_custom_pre_pass"] = find
    return torch.compile(program, options=more)


def timed(run, rounds=20):
    """Microseconds of a captured run."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    dist.barrier()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(2 * rounds):
        if turn == rounds:
            begin.record()
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    longest = torch.tensor([begin.elapsed_time(end) / rounds * 1000], device="cuda")
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


def layers(arguments, device, mesh):
    small = device == "cpu"
    hidden, heads, wide = (256, 8, 512) if small else (HIDDEN, HEADS, WIDE)
    torch.manual_seed(arguments.seed)
    dtype = torch.bfloat16
    with torch.device(device):
        model = torch.nn.Sequential(*(Layer(hidden, heads, wide) for _ in range(arguments.count))).to(dtype)
        last = Norm(hidden).to(dtype)
        x = torch.randn(1, 64, hidden, dtype=dtype)
    torch.nn.init.normal_(last.weight, 1, 0.1)
    for tensor in (*model.parameters(), *last.parameters(), x):
        dist.broadcast(tensor.data, 0)
    wrong = 0
    with torch.no_grad():
        whole = last(model(x)).float()
        for layer in model:
            parallelize_module(layer, mesh, SPLIT)

        def program(x):
            return last(model(x))

        made = {}
        for name, find in (("separate", None), ("fused", fused.inductor_pass())):
            run = forward(program, find)
            made[name] = run(x).float()
            error = ((made[name] - whole).norm() / whole.norm()).item()
            # Each layer has two all-reduces, each of which a norm follows.
            wanted = 2 * arguments.count
            found = find.replaced if find is not None else wanted
            if not error < 0.02 or found != wanted:
                wrong += 1
                print(f"rank {dist.get_rank()}: {name}: error {error:.4f}, {found} calls fused", flush=True)
            if small:
                continue
            for tokens in (1, 8, 64):
                one = x[:, :tokens].contiguous()
                fixed = forward(program, fused.inductor_pass() if find is not None else None)
                us = timed(lambda fixed=fixed, one=one: fixed(one))
                if dist.get_rank() == 0:
                    print(f"{arguments.backend}, {name}, {tokens} tokens: {us:.1f} us", flush=True)
    return wrong


def flashinfer(device):
    """A call as vLLM makes it, eagerly and captured."""
    torch.manual_seed(5)
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(backend="gloo")
    workspace = flashinfer_comm.create_allreduce_fusion_workspace("trtllm", world, rank, group=group)
    x = torch.randn(16, 4096, device=device).to(torch.bfloat16) * (rank + 1)
    residual, weight = (torch.randn(shape, device=device).bfloat16() for shape in ((16, 4096), (4096,)))
    for tensor in (residual, weight):
        dist.broadcast(tensor, 0)
    wanted = fused.all_reduce_rms_norm(x, residual, weight, 1e-5)
    out, sums = torch.empty_like(x), torch.empty_like(x)

    def call():
        flashinfer_comm.allreduce_fusion(
            input=x, workspace=workspace, pattern=1, launch_with_pdl=True, residual_out=sums, norm_out=out,
            residual_in=residual, rms_gamma=weight, rms_eps=1e-5, use_oneshot=True, fp32_acc=True,
        )  # fmt: skip

    call()
    wrong = not (torch.equal(out, wanted.out) and torch.equal(sums, wanted.residual))
    if device != "cpu":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        wrong = wrong or not torch.equal(out, wanted.out)
    if wrong:
        print(f"rank {rank}: FlashInfer's call differs", flush=True)
    return int(wrong)


def main():
    parser = ranks_start.parser(__doc__, 4, "layers")
    parser.add_argument("--backend", default="symmpool", help=f"of the group: symmpool or {ranks_start.PEER}")
    arguments = parser.parse_args()
    device = ranks_start.device_of(arguments.device)
    if device is None:
        return 0
    dist.init_process_group(arguments.backend)
    mesh = init_device_mesh(arguments.device, (dist.get_world_size(),))
    began = time.monotonic()
    wrong = layers(arguments, str(device), mesh) + flashinfer(str(device))
    print(f"rank {dist.get_rank()}: {wrong} wrong after {time.monotonic() - began:.0f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
