"""`bench training`: training steps and decoding with each library in turn, in one run.

In each round each library has its turn, in processes of its own (`symmpool.bench.training.turns` says why):
for each kind it makes a default process group and a model of the same weights, runs it, and destroys both.
Each round begins with another library. What counts is the median of a contender's rounds, of the slowest
rank. Losses, and logits of some steps of decoding, are compared with those of the peer's first round.
"""

import argparse
import contextlib
import gc
import gzip
import importlib.metadata
import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

from symmpool.bench import session, table, timing
from symmpool.bench.arguments import comma_separated, positive, seconds
from symmpool.bench.training import rows as results
from symmpool.bench.training import trace, turns
from symmpool.bench.training.turn_ranks import TurnRanks

TRAINED = ("fsdp", "ddp", "tp", "tp_compiled")
DECODED = ("decode", "decode_graph", "decode_compiled")
OURS, ORDINARY, FUSED = results.OURS, "ours ordinary", "ours fused"
#: The kinds in which some contenders differ from the others.
DIFFERS_IN = {
    ORDINARY: ["fsdp"],
    FUSED: ["tp_compiled", "decode_compiled"],
    "NCCL fused": ["tp_compiled"],
}
EXAMPLE = "--nproc-per-node 2 -m symmpool bench training"

#: Sizes: those of Llama 3 8B with 8 layers on a GPU, and such that take seconds on the CPU.
DEFAULTS = {
    "layers": (8, 2), "width": (4096, 128), "hidden": (14336, 256), "heads": (32, 8), "shared_heads": (8, 4),
    "vocabulary": (128256, 512), "batch": (2, 2), "length": (1024, 32), "steps": (20, 4), "warmup": (5, 2),
    "tokens": (128, 8), "prompt": (64, 8), "decode_batch": (1, 1), "rounds": (3, 2),
}  # fmt: skip
#: Steps that are profiled.
PROFILED = {"training": 3, "decode": 8}


def kind_list(text):
    found = comma_separated(text)
    unknown = [kind for kind in found if kind not in (*TRAINED, *DECODED)]
    if unknown or not found:
        raise argparse.ArgumentTypeError(
            f"{(unknown or [text])[0]!r} is none of {', '.join((*TRAINED, *DECODED))}"
        )
    return found


def thread_counts(text):
    return [positive(each) for each in comma_separated(text)]


def add_options(commands):
    it = commands.add_parser(
        "training", help="FSDP2, DDP, tensor parallelism and decoding of a Llama, beside NCCL or gloo"
    )
    it.add_argument("--kinds", type=kind_list, default=[*TRAINED, *DECODED], help="default: all of them")
    it.add_argument("--model", choices=["auto", "hf", "own"], default="auto",
                    help="Hugging Face's Llama, or one in plain torch (default: as installed)")  # fmt: skip
    it.add_argument(
        "--contenders", type=comma_separated,
        help=f"also: {ORDINARY} (FSDP's buffers in no windows), {FUSED} (products that hide communication in "
             "tp_compiled, norms with all-reduces in decode_compiled) and NCCL fused (torch's products)",
    )  # fmt: skip
    it.add_argument("--dtype", choices=["f32", "bf16"], help="default bf16, on the CPU f32")
    for name, (on_cuda, on_cpu) in DEFAULTS.items():
        shown = name.replace("_", "-")
        it.add_argument(f"--{shown}", type=positive, help=f"default {on_cuda}, on the CPU {on_cpu}")
    it.add_argument("--rate", type=float, default=1e-4, help="of learning (default 1e-4)")
    it.add_argument("--optimizer", choices=["fused", "foreach"], default="fused",
                    help="torch's AdamW in one kernel (default; not on the CPU), or in many")  # fmt: skip
    it.add_argument("--each-step", action="store_true",
                    help="read the loss of every step, as many programs do; the median counts")  # fmt: skip
    it.add_argument("--threads", type=thread_counts, default=[None], metavar="COUNTS",
                    help="OMP_NUM_THREADS of each round's turns, as 4,1 (default: as it is)")  # fmt: skip
    it.add_argument("--deterministic", action="store_true", help="only kernels that give the same bits again")
    it.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    it.add_argument("--timeout", type=seconds, default=120, help="longest wait in seconds")
    it.add_argument("--profile", type=Path, metavar="DIR",
                    help="write a trace of each contender's last round, and where time is lost")  # fmt: skip
    it.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    # For processes of a turn: the round's number, the contender, and the file for what is found.
    it.add_argument("--turn", nargs=3, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    it.set_defaults(plot=None)


def complete(options, on_cuda):
    """Fills in what was not given; raises ValueError for what does not fit together."""
    for name, values in DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, values[not on_cuda])
    options.dtype = options.dtype or ("bf16" if on_cuda else "f32")
    options.dtype_name = session.DTYPES[options.dtype]
    if options.width % options.heads or options.heads % options.shared_heads:
        raise ValueError(
            f"{options.width} numbers for {options.heads} heads, {options.shared_heads} of keys: each must "
            "be a multiple of the next"
        )
    if options.profile is not None and len(options.threads) > 1:
        raise ValueError("--profile with several counts of --threads: traces would have one name")


def fit(options, world):
    """Raises ValueError where a rank would not get its part."""
    divided = {"shared-heads": options.shared_heads, "length": options.length, "hidden": options.hidden}
    divided["vocabulary"] = options.vocabulary
    for name, count in divided.items():
        if count % world:
            raise ValueError(f"--{name} {count} is no multiple of {world} ranks")


def contenders(options, on_cuda):
    """Backends by the contender's name, the peer first."""
    peer = "NCCL" if on_cuda else "gloo"
    ours = "cuda:symmpool,cpu:gloo" if on_cuda else "symmpool"
    theirs = "cuda:nccl,cpu:gloo" if on_cuda else "gloo"
    known = {peer: theirs, OURS: ours, ORDINARY: ours, FUSED: ours}
    if on_cuda:
        known["NCCL fused"] = theirs
    asked = options.contenders or [peer, OURS]
    if unknown := [name for name in asked if name not in known]:
        raise ValueError(f"--contenders {unknown[0]}: there are {', '.join(known)}")
    return peer, {name: backend for name, backend in known.items() if name in asked}


def make(kind, name, turn_ranks, options):
    """The program that a contender runs in a round."""
    fused = {FUSED: "ours", "NCCL fused": "torch"}.get(name)
    if kind in DECODED:
        from symmpool.bench.training.decode import Decoding

        return Decoding(kind, turn_ranks, options, fused)
    from symmpool.bench.training.steps import Training

    training = Training(kind, turn_ranks, options, fused)
    if name == ORDINARY:
        training.without_windows()
    return training


def run_round(kind, name, turn_ranks, options, where):
    """Runs one program with the default group that is there, and returns what was found. `where` is the file
    of its trace, if one is to be written."""
    from symmpool.backend import backend_counts

    backend_counts(reset=True)
    program = make(kind, name, turn_ranks, options)
    count = options.steps if kind in TRAINED else options.tokens
    try:
        found = [program.step(number) for number in range(options.warmup)]
        # Compilers and imports have left millions of objects. A collection that looks through them takes a
        # third of a second, and falls into some contenders' steps and not into others'.
        gc.collect()
        gc.freeze()
        turn_ranks.barrier()
        times = [time.perf_counter()]
        for number in range(options.warmup, options.warmup + count):
            found.append(program.step(number))
            if options.each_step and kind in TRAINED:
                program.numbers(found[-1:])
                times.append(time.perf_counter())
        turn_ranks.synchronize()
        took = time.perf_counter() - times[0]
        if options.each_step and kind in TRAINED:
            took = count * median(end - begin for begin, end in pairwise(times))
        took = max(turn_ranks.gather(took))
        numbers = turn_ranks.gather(program.numbers(found))
        cuda = turn_ranks.torch.cuda
        report = {
            "tokens_a_second": count * program.tokens_a_step / took,
            "numbers": numbers,
            "peak_bytes": cuda.max_memory_allocated() if turn_ranks.on_cuda else None,
            "reserved_bytes": cuda.max_memory_reserved() if turn_ranks.on_cuda else None,
            "device_bytes": turn_ranks.device_bytes(),
            # Counts of calls on groups of ours: none are the peer's, unless some fell back to it.
            "calls": backend_counts(reset=True),
        }
        if where is not None:
            profile(program, kind, turn_ranks, where)
    finally:
        gc.unfreeze()
        program.close()
    return report


def profile(program, kind, turn_ranks, where):
    """Runs some more steps under torch's profiler, and writes the first rank's trace."""
    from torch.profiler import ProfilerActivity, schedule
    from torch.profiler import profile as profiler

    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if turn_ranks.on_cuda else [])
    count = PROFILED["training" if kind in TRAINED else "decode"]

    def ready(made):
        if turn_ranks.rank == 0:
            made.export_chrome_trace(str(where))

    plan = schedule(wait=0, warmup=1, active=count, repeat=1)
    turn_ranks.barrier()
    with profiler(activities=kinds, schedule=plan, on_trace_ready=ready) as made:
        for number in range(count + 1):
            program.step(number)
            if number in (0, count):
                # Work that the last step has queued belongs to it, and work that the warm-up has queued to
                # none.
                turn_ranks.synchronize()
            made.step()


def read_trace(path):
    """The summary of a trace, and None; or None and why there is none."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    try:
        return trace.summarize(events), None
    except ValueError as error:
        return None, str(error)


class Profiles:
    """Traces of contenders' last rounds, and what they say."""

    def __init__(self, folder):
        self.folder, self.summaries, self.texts = folder, {}, []

    def path(self, kind, name):
        return self.folder / f"{kind}_{name.replace(' ', '_')}.json.gz"

    def add(self, kind, names):
        """Reads the traces of one kind, and writes what is known so far."""
        found = {}
        for name in names:
            path = self.path(kind, name)
            summary, why = read_trace(path) if path.exists() else (None, "there is no trace")
            if summary is None:
                self.texts.append(f"{kind}, {name}: {why}")
            else:
                found[name] = summary
        if found:
            self.summaries[kind] = found
            self.texts.append(f"{kind}: microseconds a step on rank 0\n{trace.compare(found)}")
        (self.folder / "summary.txt").write_text("\n\n".join(self.texts) + "\n")
        (self.folder / "summary.json").write_text(json.dumps(self.summaries, indent=1) + "\n")


def row_of(kind, threads, options, on_cuda, backends, peer):
    """The row of a kind with so many threads of OpenMP, with those contenders that it cannot have."""
    row = results.Row(kind, peer, threads)
    if kind in DECODED and options.model == "own":
        row.missing = dict.fromkeys(backends, "needs transformers")
    elif kind in ("decode_graph", "decode_compiled", "tp_compiled") and not on_cuda:
        row.missing = dict.fromkeys(backends, "needs a GPU")
    for name, where in DIFFERS_IN.items():
        if name in backends and kind not in where:
            row.missing.setdefault(name, f"differs from others in {' and '.join(where)} alone")
    return row


def choose_model(options):
    from symmpool.bench.training import models

    if options.model == "auto":
        options.model = "hf" if models.has_transformers() else "own"
    elif options.model == "hf" and not models.has_transformers():
        raise SystemExit("--model hf: there is no transformers here; --model own needs none")


def run(options, arguments):
    _, on_cuda = session.find_torch(options, EXAMPLE)
    complete(options, on_cuda)
    fit(options, int(os.environ["WORLD_SIZE"]))
    choose_model(options)
    if hasattr(options, "turn"):
        return take_turn(options, on_cuda)
    return run_turns(options, arguments, on_cuda)


def take_turn(options, on_cuda):
    """Runs each kind once, in the processes of a turn. The first rank writes what was found."""
    number, name, file = options.turn
    torch, device = session.find_device(options, EXAMPLE)
    # torch finds the backend by itself only where the package is installed.
    import symmpool.backend  # noqa: F401

    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    # The store outlives the turn, and a round has one for each number of threads.
    turn = f"{number}/{name}/{options.threads[0]}"
    turn_ranks = TurnRanks(torch, device, options.timeout, turn)
    _, backends = contenders(options, on_cuda)
    first, is_last = turn_ranks.rank == 0, int(number) == options.rounds - 1
    found = turns.Found(describe(turn_ranks, options, backends) if first else {})
    for kind in options.kinds:
        is_profiled = options.profile is not None and is_last
        where = Profiles(options.profile).path(kind, name) if is_profiled else None
        with turn_ranks.group(backends[name]):
            report, why = turn_ranks.attempt(
                lambda kind=kind, where=where: run_round(kind, name, turn_ranks, options, where)
            )
        found.add(kind, report, why)
        if first:
            found.write(Path(file))
            rate = "nothing" if why is not None else f"{report['tokens_a_second']:,.0f} tokens/s"
            print(f"  round {int(number) + 1}, {name}, {kind}: {rate}", file=sys.stderr, flush=True)
    turn_ranks.barrier()
    return 0


def run_turns(options, arguments, on_cuda):
    """Has each contender take its turns, in the processes of the benchmark, and reports."""
    peer, backends = contenders(options, on_cuda)
    names, is_first = list(backends), int(os.environ["RANK"]) == 0
    if options.profile is not None:
        options.profile.mkdir(parents=True, exist_ok=True)
    rows = [
        row_of(kind, threads, options, on_cuda, backends, peer)
        for threads in options.threads
        for kind in options.kinds
    ]

    # A kind that fails in one round is run in the others too: only the first rank knows of it.
    def runs_of(name, threads):
        return [row for row in rows if row.threads == threads and name not in row.missing]

    turn_rows = {threads: {name: runs_of(name, threads) for name in names} for threads in options.threads}
    command = ["python", "-m", "symmpool", "bench", *map(session.without_folders, arguments)]
    facts = {"missing": {}}
    for number in range(options.rounds):
        for threads, runs in turn_rows.items():
            for name in timing.order([name for name in names if runs[name]], number):
                kinds = [row.kind for row in runs[name]]
                found = turns.take(arguments, (number, name), kinds, threads)
                if not is_first:
                    continue
                facts = {**facts, **found.facts, "command": command}
                for row in runs[name]:
                    row.add(name, *found.of(row.kind))
                # After each turn, so that what comes later takes nothing away.
                session.write(options, facts, rows)
    if not is_first:
        return 0
    if options.profile is not None:
        profiles = Profiles(options.profile)
        for row in rows:
            profiles.add(row.kind, names)
    report(facts, options, rows, names, peer)
    return 1 if any(OURS in row.missing and row.rounds for row in rows) else 0


def describe(turn_ranks, options, backends):
    """The facts of the run, but for its command: the one of a turn is another."""
    facts = session.facts(turn_ranks.torch, "training", [], turn_ranks.world, turn_ranks.on_cuda)
    version = None
    if options.model == "hf":
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version("transformers")
    return {**facts, "transformers": version, "contenders": list(backends), "missing": {}}


def report(facts, options, rows, names, peer):
    """Prints the table."""
    whose = "Hugging Face's Llama" if options.model == "hf" else "a Llama in plain torch"
    print(f"{whose} of {options.layers} layers, {options.dtype}, {session.where(facts)}")
    print(f"tokens a second, slowest rank, median of {options.rounds} rounds\n")
    print(table.format_table(*results.cells(rows, names, peer)))
    session.print_missing(facts, rows, lambda row: f"in {row.kind}")
    if options.profile is not None:
        print(f"\n{(options.profile / 'summary.txt').read_text()}")
