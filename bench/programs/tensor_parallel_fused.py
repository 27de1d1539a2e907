"""A Llama whose layers are split over the ranks: with NCCL, with symmpool, and with symmpool's fused calls.

    torchrun --nproc-per-node 2 bench/programs/tensor_parallel_fused.py [--json FILE]
    torchrun --nproc-per-node 2 bench/programs/tensor_parallel_fused.py --device cpu

There are three programs. `decode` makes one token for each of some sequences: an all-reduce ends attention,
and another one the hidden units; `fused.all_reduce_rms_norm` makes one call of it, the residual and the norm
that follow. `prefill` reads whole sequences and `training` learns from them. Between products each rank has
its part of the tokens, which are gathered before a product and scattered behind one:
`fused.fused_all_gather_matmul` and `fused.fused_matmul_reduce_scatter` make one call of each pair.

Every program runs eagerly and compiled by Inductor, and on GPUs both are captured in CUDA graphs too. The
compiled program calls torch's functional collectives alone, as for NCCL: `fused.inductor_pass()` and, after
`fused.install()`, Inductor's micro-pipelining find what can be fused. Weights and tokens are random and the
same in all of them. The program prints tokens a second, and compares the losses.
"""

import argparse
import contextlib
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from tensor_parallel_llama import Llama
from tensor_parallel_ways import Distributed, Fused, Symmpool

import symmpool
from symmpool import fused
from symmpool.bench import session

PROGRAMS, MODES = ("decode", "prefill", "training"), ("eager", "graph", "compiled", "compiled graph")


class Program:
    """One of the programs, with its tokens."""

    def __init__(self, kind, count, model, options, device):
        self.kind, self.count, self.model, self.rate = kind, count, model, options.rate
        rank, world = dist.get_rank(), dist.get_world_size()
        drawn = torch.Generator().manual_seed(1)
        batches = [torch.randint(options.vocabulary, (2, count), generator=drawn) for _ in range(4)]
        # Sequences are divided among the ranks; decoding ranks have all tokens.
        mine = slice(None) if kind == "decode" else slice(rank * count // world, (rank + 1) * count // world)
        self.batches = [each[:, mine].contiguous().to(device) for each in batches]
        self.given = self.batches[0].clone()
        self.batch, self.caches = options.batch, None
        if kind == "decode":
            self.caches = model.caches(count, options.context, device)
        self.weights = list(model.split_weights()) if kind == "training" else []
        self.start = [weight.detach().clone() for weight in self.weights]

    def reset(self):
        with torch.no_grad():
            for weight, value in zip(self.weights, self.start, strict=True):
                weight.copy_(value)

    def load(self, number):
        self.given.copy_(self.batches[number % len(self.batches)])

    def step_of(self, way, is_compiled):
        """A function of no arguments that makes one step and gives its loss."""

        def forward(tokens, targets):
            if self.caches is not None:
                return self.model.decode(tokens, targets, self.caches, way)
            return self.model.read(tokens, targets, self.batch, way)

        if is_compiled:
            forward = torch.compile(
                forward, options=way.options_for(self.kind), dynamic=False, fullgraph=True
            )

        def inference():
            with torch.no_grad():
                return forward(*self.given)

        def training():
            loss = forward(*self.given)
            gradients = torch.autograd.grad(loss, self.weights)
            with torch.no_grad():
                # Each rank's loss is that of its own tokens.
                rate = self.rate / dist.get_world_size()
                torch._foreach_add_(self.weights, gradients, alpha=-rate)
            return loss.detach()

        return training if self.kind == "training" else inference


def runs_of(program, way, stream, modes):
    """Returns the functions that run a program in each mode. All have run before, so that nothing
    is compiled, loaded or allocated for the first time when they are measured or captured."""
    runs = {}
    for is_compiled, named in ((False, "eager"), (True, "compiled")):
        captured = "compiled graph" if is_compiled else "graph"
        if not {named, captured} & set(modes):
            continue
        step = program.step_of(way, is_compiled)
        step()
        # A compiled program allocates everything itself. It is compiled outside of the scope, in
        # which ranks have to allocate alike.
        around = way.scope if is_compiled else contextlib.nullcontext

        def run(step=step, around=around):
            with around():
                return step()

        for _ in range(2):
            run()
        if named in modes:
            runs[named] = run
        if captured in modes and stream is not None:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with way.graph(graph, stream):
                loss = run()

            def replay(graph=graph, loss=loss):
                graph.replay()
                return loss

            replay.graph = graph
            runs[captured] = replay
    return runs


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(run, count, device):
    """Seconds that so many runs take on the slowest rank."""
    synchronize(device)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        run()
    synchronize(device)
    took = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def losses_of(run, program, count):
    """The losses of the first steps, of all tokens."""
    program.reset()
    losses = []
    for number in range(count):
        program.load(number)
        losses.append(run().detach().clone())
    mine = torch.stack(losses).double().cpu()
    dist.all_reduce(mine)
    return (mine / dist.get_world_size()).tolist()


def attempted(action):
    """Returns the result of `action` and None; or, on every rank, None and why it failed on some
    rank."""
    value, why = None, None
    try:
        value = action()
    except Exception as error:
        why = f"{type(error).__name__}: {error}".strip()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, why)
    failed = [f"rank {rank}: {each}" for rank, each in enumerate(everyone) if each]
    return (None, failed[0]) if failed else (value, None)


def measure(program, ways, options, device, stream):
    """The results of a program: for each mode the tokens a second of each way, and the losses compared."""
    torch._dynamo.reset()
    ready, missing, fused_calls = {}, {}, 0
    for way in ways:
        found, why = attempted(lambda way=way: runs_of(program, way, stream, options.modes))
        if why is not None:
            missing[way.name] = why
            continue
        for mode, run in found.items():
            ready[mode, way.name] = run
        if isinstance(way, Fused):
            fused_calls, way.found.calls = way.found.calls, 0
    losses, rates = {}, {}
    for key, run in ready.items():
        losses[key] = losses_of(run, program, options.compared)
    for number in range(options.rounds):
        # Each round begins with another way.
        for key in list(ready)[:: -1 if number % 2 else 1]:
            program.reset()
            once = timed(ready[key], 2, device) / 2
            count = max(2, min(5000, int(options.seconds / once)))
            took = timed(ready[key], count, device)
            rates.setdefault(key, []).append(count * program.count / took)
    synchronize(device)
    for run in ready.values():
        # NCCL's communicator waits at its end for graphs that use it.
        if hasattr(run, "graph"):
            run.graph.reset()
    results = []
    for mode in (mode for mode in options.modes if any(mode == each for each, _ in ready)):
        figures, first = {}, None
        for way in ways:
            key = (mode, way.name)
            if key not in ready:
                continue
            first = losses[key] if first is None else first
            apart = max(abs(a - b) / abs(b) for a, b in zip(losses[key], first, strict=True))
            shown = sorted(rates[key])
            figures[way.name] = {
                "tokens_a_second": shown[len(shown) // 2], "rounds": rates[key], "losses": losses[key],
                "apart": apart,
            }  # fmt: skip
        entry = {"program": program.kind, "tokens": program.count, "mode": mode, "figures": figures}
        if "compiled" in mode:
            entry["fused_calls"] = fused_calls
        results.append(entry)
    return results, missing


def parsed():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # Defaults on a GPU, those of layers of Llama 3 8B, and on the CPU.
    defaults = {
        "layers": (4, 2), "hidden": (4096, 128), "heads": (32, 8), "kv-heads": (8, 4), "wide": (14336, 256),
        "vocabulary": (4096, 256), "batch": (4, 2), "length": (2048, 32), "context": (512, 16),
        "rounds": (3, 1), "compared": (6, 4),
    }  # fmt: skip
    for name, (on_cuda, on_cpu) in defaults.items():
        parser.add_argument(f"--{name}", type=int, help=f"default {on_cuda}, on the CPU {on_cpu}")

    def listed(allowed):
        def read(text):
            given = text.split(",")
            if unknown := [each for each in given if each not in allowed]:
                raise argparse.ArgumentTypeError(f"{unknown[0]!r}: there are {', '.join(allowed)}")
            return given

        return read

    parser.add_argument("--programs", type=listed(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--modes", type=listed(MODES), default=list(MODES), help="on the CPU without graphs")
    parser.add_argument("--decoded", help="numbers of sequences (default 8,64, on the CPU 2)")
    parser.add_argument("--seconds", type=float, help="of each measurement (default 0.3, on the CPU 0.05)")
    parser.add_argument("--rate", type=float, default=0.1, help="of learning (default 0.1)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default bfloat16, CPU: float32")
    parser.add_argument("--json")
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    more = {"decoded": ("8,64", "2"), "seconds": (0.3, 0.05), "dtype": ("bfloat16", "float32")}
    for name, values in (defaults | more).items():
        name = name.replace("-", "_")
        if getattr(options, name) is None:
            setattr(options, name, values[on_cpu])
    options.decoded = [int(each) for each in options.decoded.split(",")]
    return options


def connect(options):
    """The device of this rank, which is connected with the others."""
    if "RANK" not in os.environ:
        words = "torchrun --nproc-per-node 2 bench/programs/tensor_parallel_fused.py"
        sys.exit(f"this runs under torchrun: {words}")
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no GPU here; --device cpu needs none")
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo")
    world = dist.get_world_size()
    for name in ("heads", "kv_heads", "wide"):
        if getattr(options, name) % world:
            sys.exit(f"--{name.replace('_', '-')} {getattr(options, name)} is no multiple of {world} ranks")
    if options.batch * options.length % world:
        sys.exit(f"{options.batch} sequences of {options.length} tokens are not for {world} ranks")
    return device


def main():
    options = parsed()
    device = connect(options)
    on_cuda, dtype = device.type == "cuda", getattr(torch, options.dtype)
    pool = symmpool.Pool(device=str(device))
    fused.install()
    ways = [make(device, pool) for make in (Distributed, Symmpool, Fused)]
    model = Llama(options, device, dtype)
    stream = torch.cuda.Stream() if on_cuda else None
    if on_cuda:
        stream.wait_stream(torch.cuda.current_stream())
    results, missing = [], {}
    # Gradients are made in this thread, so that they are in the pool's scope where a step is.
    single = torch.autograd.set_multithreading_enabled(False)
    with single, torch.cuda.stream(stream) if on_cuda else contextlib.nullcontext():
        for kind in options.programs:
            whole = options.batch * options.length
            for count in options.decoded if kind == "decode" else [whole]:
                program = Program(kind, count, model, options, device)
                found, why = measure(program, ways, options, device, stream)
                results += found
                missing |= {f"{kind} of {count} tokens, {name}": each for name, each in why.items()}
                program.reset()
                if dist.get_rank() == 0:
                    print_results(found, ways, options, first=len(results) == len(found))
    allowed = 1e-2 if dtype == torch.bfloat16 else 1e-4
    agree = all(each["apart"] <= allowed for entry in results for each in entry["figures"].values())
    if dist.get_rank() == 0:
        for what, why in missing.items():
            print(f"{what}: {why}")
        print(f"losses {'agree' if agree else 'DO NOT AGREE'} (allowed: {allowed:g} relatively)")
        if options.json:
            command = ["python", "bench/programs/tensor_parallel_fused.py"]
            command += map(session.without_folders, sys.argv[1:])
            report = session.facts(torch, "tensor_parallel_fused", command, dist.get_world_size(), on_cuda)
            report["options"] = {key: value for key, value in vars(options).items() if key != "json"}
            report |= {"contenders": [way.name for way in ways], "agree": agree, "allowed": allowed}
            report |= {"missing": missing, "results": results}
            with open(options.json, "w") as file:
                file.write(json.dumps(report, indent=1) + "\n")
    fused.uninstall()
    dist.barrier()
    dist.destroy_process_group()
    if not agree or missing:
        sys.exit(1)


def print_results(results, ways, options, first):
    if first:
        print(f"{dist.get_world_size()} ranks, {options.dtype}, torch {torch.__version__}: tokens a second")
        heads = [f"{way.name:>12}" for way in ways]
        print(f"{'':10}{'tokens':>7}  {'':15}{''.join(heads)}{'fused/symmpool':>16}{'loss difference':>17}")
    for entry in results:
        rates = {name: each["tokens_a_second"] for name, each in entry["figures"].items()}
        shown = "".join(f"{rates[way.name]:12.0f}" if way.name in rates else f"{'-':>12}" for way in ways)
        ours = rates.get("symmpool")
        times = f"{rates['fused'] / ours:16.2f}" if ours and "fused" in rates else f"{'-':>16}"
        apart = max((each["apart"] for each in entry["figures"].values()), default=0.0)
        print(f"{entry['program']:10}{entry['tokens']:7}  {entry['mode']:15}{shown}{times}{apart:17.1e}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
