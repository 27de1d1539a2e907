"""`bench fused`: all-reduce, residual and RMSNorm as one call, compared with an all-reduce and then a norm.

The norm behind an all-reduce is what torch's compiler makes of it, one kernel, as programs have it. With
`--what matmul` matrix products are measured instead: see `matmuls`.
"""

import symmpool
from symmpool.bench import matmuls, peers, rounds, session, table, timing
from symmpool.bench.arguments import add_measuring, comma_separated

EPS = 1e-6
#: Sizes that are measured where none are given, on GPUs and on the CPU.
USUAL = {
    "cuda": {"tokens": [1, 8, 32, 64, 128, 256, 512, 1024, 2048], "hidden": [4096, 8192]},
    "cpu": {"tokens": [1, 8], "hidden": [1024]},
}


def numbers(text):
    found = [int(each) for each in comma_separated(text)]
    if not found or min(found) < 1:
        raise ValueError(f"{text!r}: numbers above 0 are needed")
    return found


def add_options(commands):
    command = commands.add_parser(
        "fused", help="all-reduces with a residual and a norm, compared with separate kernels"
    )
    for name, usual in USUAL["cuda"].items():
        on_cuda, on_cpu = (",".join(map(str, each)) for each in (usual, USUAL["cpu"][name]))
        command.add_argument(f"--{name}", type=numbers, help=f"default {on_cuda}, on the CPU {on_cpu}")
    command.add_argument("--dtype", choices=["f32", "f16", "bf16"], default="bf16", help="default bf16")
    command.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    matmuls.add_options(command)
    add_measuring(command, calls=[1, 10, 20])


class Row(table.Row):
    """The results for one number of tokens."""

    def __init__(self, tokens, hidden, size, world):
        super().__init__(size, world)
        self.tokens, self.hidden = tokens, hidden

    def to_json(self):
        whole = {"tokens": self.tokens, "hidden": self.hidden, "bytes": self.size}
        return {**whole, "figures": self.figures(lambda name: {}), "missing": self.missing}


class Case:
    """The tensors of a call, and what it writes."""

    def __init__(self, ranks, tokens, hidden, dtype):
        torch = ranks.torch
        generator = torch.Generator(device=ranks.device).manual_seed(ranks.rank)
        shape = (tokens, hidden)
        self.x = torch.randn(shape, generator=generator, device=ranks.device).to(dtype)
        self.work = self.x.clone()
        generator.manual_seed(99)
        self.residual = torch.randn(shape, generator=generator, device=ranks.device).to(dtype)
        self.weight = torch.randn(hidden, generator=generator, device=ranks.device).to(dtype)
        self.out, self.sums = torch.empty_like(self.x), torch.empty_like(self.x)


class Contender:
    """A way to make the call. `call_of` gives what makes it, for a case."""

    def __init__(self, call_of):
        self.call_of = call_of

    def confirm(self):
        pass

    def close(self):
        pass


def fused_by(algorithm, pool):
    def call_of(case):
        from symmpool import fused

        def call():
            fused.all_reduce_rms_norm(
                case.x,
                case.residual,
                case.weight,
                EPS,
                out=case.out,
                residual_out=case.sums,
                group=pool,
                algorithm=algorithm,
            )

        return call

    return Contender(call_of)


def unfused_by(torch, reduce, compiled):
    def norm(x, residual, weight, out, sums):
        total = x + residual
        wide = total.float()
        factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        sums.copy_(total)
        out.copy_((wide * factor * weight.float()).to(out.dtype))

    behind = torch.compile(norm, dynamic=False) if compiled else norm

    def call_of(case):
        # The all-reduce is in place, so its numbers grow from call to call; its time does not.
        def call():
            reduce(case.work)
            behind(case.work, case.residual, case.weight, case.out, case.sums)

        return call

    return Contender(call_of)


def prepare(ranks, options, contender, row, dtype, checked):
    """A case and its forms. What a fused call gives is compared with separate operations."""
    torch = ranks.torch
    case = ranks.insist(lambda: Case(ranks, row.tokens, row.hidden, dtype))
    call = contender.call_of(case)
    ranks.insist(call)
    if checked:
        total = case.x.clone()
        ranks.insist(lambda: symmpool.all_reduce(total))
        total = total + case.residual
        wide = total.double()
        norm = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * case.weight.double()
        near = (case.out.double() - norm).abs() <= 0.01 * norm.abs() + 1e-6
        right = torch.equal(case.sums, total) and bool(near.all())
        if wrong := ranks.gather(right).count(False):
            raise ValueError(f"wrong on {wrong} ranks")
    case.work.zero_()
    return case, timing.forms(ranks, call, row.size, options)


def measure(ranks, options, contenders, row, dtype, step):
    """Measures all contenders. Their graphs end with it: NCCL does not end while one holds its calls."""

    def prepared(name):
        checked = name.startswith("ours") and "unfused" not in name
        return prepare(ranks, options, contenders[name], row, dtype, checked)

    def report_progress(what):
        step(f"{row.tokens} x {row.hidden}, {what}")

    running = rounds.prepare_all({name: name for name in contenders}, row, prepared)
    rounds.measure(ranks, options, running, row, lambda case: None, report_progress)


def run(options, arguments):
    if options.what == "matmul":
        return matmuls.run(options, arguments)
    ranks = session.connect(options)
    torch, pools = ranks.torch, peers.Pools()
    session.fill_in(options, USUAL[ranks.device.type])
    dtype = getattr(torch, session.DTYPES[options.dtype])
    pool = ranks.insist(lambda: pools.get(ranks))
    contenders = {
        "ours": fused_by("auto", pool),
        "ours one-shot": fused_by("one_shot", pool),
        "ours two-shot": fused_by("two_shot", pool),
        "ours unfused": unfused_by(torch, lambda x: symmpool.all_reduce(x, group=pool), ranks.on_cuda),
        "NCCL" if ranks.on_cuda else "gloo": unfused_by(torch, ranks.dist.all_reduce, ranks.on_cuda),
    }
    cases = [(tokens, hidden) for hidden in options.hidden for tokens in options.tokens]
    if ranks.on_cuda:
        # The norm is compiled for each shape and way to reduce; beyond the limit torch would not compile it.
        torch._dynamo.config.recompile_limit = 2 * len(cases) + 1
    progress, rows = session.Progress(len(cases) * (options.rounds + 1), ranks.rank == 0), []
    try:
        for tokens, hidden in cases:
            row = Row(tokens, hidden, tokens * hidden * dtype.itemsize, ranks.world)
            measure(ranks, options, contenders, row, dtype, progress.step)
            rows.append(row)
    finally:
        progress.close()
    facts = session.describe("fused", ranks, arguments, contenders, {})

    def print_report(ours, others):
        print(f"all-reduce, residual and RMSNorm of {options.dtype}, {session.where(facts)}")
        print(f"microseconds per call, slowest rank, median of rounds{session.describe_forms(facts)}\n")
        names = [*ours, *others]
        lines = [[str(row.hidden), str(row.tokens), *map(row.shown, names)] for row in rows]
        print(table.format_table(["hidden", "tokens", *names], lines))
        session.print_missing(facts, rows, lambda row: f"{row.tokens} x {row.hidden}")
        session.write(options, facts, rows)

    return session.end(ranks, contenders, pools, rows, print_report)
