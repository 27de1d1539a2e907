"""`bench fused --what matmul`: matrix products that hide their communication, beside separate calls.

A column is a way to make the call, and "matmul" the products of this rank alone, without communication. The
efficiency of a way is the time of the products alone divided by its own.
"""

import warnings

import symmpool
from symmpool.bench import peers, rounds, session, table

KINDS = ("all_gather", "reduce_scatter", "all_gather_fp8", "reduce_scatter_fp8", "all_reduce")
#: Contenders that other kinds do not have.
ONLY_SUMS = ("ours one kernel",)


def shapes(text):
    """Sizes such as "4096x28672": K of the whole left matrix, and N."""
    found = []
    for each in text.split(","):
        sizes = [int(size) for size in each.split("x")]
        if len(sizes) != 2 or min(sizes) < 1:
            raise ValueError(f"{text!r}: sizes such as 4096x28672 are needed")
        found.append(tuple(sizes))
    return found


#: Sizes that are measured where none are given: on GPUs those of Llama 3, on the CPU small ones.
USUAL = {
    "cuda": {
        "rows": "2048,8192,16384",
        "few_rows": "1,8,32,64",
        "gather": [(4096, 28672), (8192, 57344), (8192, 10240)],
        "scatter": [(14336, 4096), (28672, 8192), (8192, 8192)],
    },
    "cpu": {"rows": "64", "few_rows": "1,8", "gather": [(64, 128)], "scatter": [(128, 64)]},
}


def add_options(command):
    command.add_argument(
        "--what",
        choices=["norm", "matmul"],
        default="norm",
        help="all-reduces with a norm, or matrix products",
    )
    on_cuda, on_cpu = USUAL["cuda"], USUAL["cpu"]
    for name, what in (("rows", "of products: M"), ("few_rows", "of all_reduce's")):
        usual = f"default {on_cuda[name]}, on the CPU {on_cpu[name]}"
        command.add_argument(f"--{name.replace('_', '-')}", help=f"{what} ({usual})")
    for name, what in (("gather", "gathered rows"), ("scatter", "scattered sums")):
        usual = ",".join("x".join(map(str, each)) for each in on_cuda[name])
        command.add_argument(
            f"--{name}", type=shapes, help=f"of {what}: KxN (default {usual}; small on the CPU)"
        )
    command.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")


class Row(table.Row):
    """The results for one product."""

    def __init__(self, kind, sizes, bytes, world):
        super().__init__(bytes, world)
        self.kind, self.sizes = kind, sizes

    def to_json(self):
        rows, inner, columns = self.sizes
        whole = {"kind": self.kind, "rows": rows, "inner": inner, "columns": columns, "bytes": self.size}
        return {**whole, "figures": self.figures(lambda name: {}), "missing": self.missing}

    def efficiency(self, name):
        """The time of the products alone divided by a contender's, in text."""
        alone, own = self.microseconds("matmul"), self.microseconds(name)
        return "" if not alone or not own or name == "matmul" else f"{alone / own:.2f}"


class Case:
    """The matrices of a call. K and N are divided among the ranks as tensor parallelism has it: N where
    shards are gathered, K where sums are scattered."""

    def __init__(self, ranks, kind, sizes, dtype):
        torch, world = ranks.torch, ranks.world
        rows, inner, columns = sizes
        self.gathers, self.is_scaled = kind.startswith("all_gather"), kind.endswith("fp8")
        self.is_sum = kind == "all_reduce"
        generator = torch.Generator(device=ranks.device).manual_seed(ranks.rank)

        def random(*shape):
            made = torch.randn(shape, generator=generator, device=ranks.device) / 8
            return made.to(torch.float8_e4m3fn if self.is_scaled else dtype)

        if self.gathers:
            self.left = random(rows // world, inner)
            self.right = random(columns // world, inner).t()
            self.whole = random(rows, inner)
        else:
            self.left = self.whole = random(rows, inner // world)
            self.right = random(columns, inner // world).t()
        if not self.is_scaled and not self.is_sum:
            # Row by row, as weights of layers lie for products of this kind.
            self.right = self.right.contiguous()
        self.scale = torch.ones((), device=ranks.device)
        self.dtype, self.name = dtype, ranks.dist.group.WORLD.group_name
        self.found = None

    def product(self, torch, left):
        if not self.is_scaled:
            return left @ self.right
        scales = (self.scale, self.scale)
        return torch._scaled_mm(left, self.right, *scales, out_dtype=self.dtype, use_fast_accum=True)


def alone(torch, case):
    return case.product(torch, case.whole)


def unfused(torch, gather, scatter, add_up):
    def call(torch, case):
        if case.is_sum:
            made = case.product(torch, case.left)
            add_up(made)
            return made
        if case.gathers:
            whole = torch.empty_like(case.whole)
            gather(whole, case.left)
            return case.product(torch, whole)
        made = case.product(torch, case.left)
        out = made.new_empty((made.shape[0] // case.world, made.shape[1]))
        scatter(out, made)
        return out

    return call


def fused_by(operators):
    def call(torch, case):
        if case.is_sum:
            return operators.matmul_all_reduce(case.left, case.right, "sum", case.name)
        if case.gathers and not case.is_scaled:
            _, (made,) = operators.fused_all_gather_matmul(
                case.left, [case.right], 0, case.name, return_A=False
            )
            return made
        if case.gathers:
            rest = ([None], [None], [case.dtype], [True])
            scales = (case.scale, [case.scale])
            _, (made,) = operators.fused_all_gather_scaled_matmul(
                case.left, [case.right], *scales, 0, case.name, *rest
            )
            return made
        if not case.is_scaled:
            return operators.fused_matmul_reduce_scatter(case.left, case.right, "sum", 0, case.name)
        shape = [case.left.shape[0], case.right.shape[1]]
        return operators.fused_scaled_matmul_reduce_scatter(
            case.left,
            case.right,
            case.scale,
            case.scale,
            "sum",
            0,
            0,
            case.name,
            shape,
            None,
            None,
            case.dtype,
            True,
        )

    return call


def in_one_kernel(torch, case):
    way = torch.ops.symmpool.matmul_all_reduce
    return way(case.left, case.right, "sum", case.name, algorithm="one_kernel")


class Contender:
    """A way to make the call. `call_of` gives what makes it, for a case."""

    def __init__(self, torch, way):
        self.torch, self.way = torch, way

    def call_of(self, case):
        def call():
            case.found = self.way(self.torch, case)

        return call

    def confirm(self):
        pass

    def close(self):
        pass


def wanted(ranks, case):
    """Returns the expected result of a call, in float32 by separate operations."""
    torch, world = ranks.torch, ranks.world
    if case.gathers:
        parts = [torch.empty_like(case.left).view(torch.uint8) for _ in range(world)]
        ranks.dist.all_gather(parts, case.left.view(torch.uint8))
        whole = torch.cat([part.view(case.left.dtype) for part in parts])
        return whole.float() @ case.right.float()
    total = case.left.float() @ case.right.float()
    ranks.dist.all_reduce(total)
    return total if case.is_sum else total.chunk(world)[ranks.rank]


def prepare(ranks, options, name, contender, row, dtype):
    """A case and its forms. Every element of what a call gives is compared first."""
    from symmpool.bench import timing

    torch = ranks.torch
    case = ranks.insist(lambda: Case(ranks, row.kind, row.sizes, dtype))
    case.world = ranks.world
    call = contender.call_of(case)
    ranks.insist(call)
    if name != "matmul":
        reference = ranks.insist(lambda: wanted(ranks, case))
        most = float(reference.abs().max())
        right = float((case.found.float() - reference).abs().max()) <= 0.02 * max(most, 1.0)
        if count := ranks.gather(right).count(False):
            raise ValueError(f"wrong on {count} ranks")
        del reference
        case.found = None
        if ranks.on_cuda:
            torch.cuda.empty_cache()
    return case, timing.forms(ranks, call, row.size, options)


class TorchOperators:
    """torch's own fused operators, whatever is installed."""

    def __init__(self, ranks):
        import torch.distributed._symmetric_memory as theirs

        theirs.enable_symm_mem_for_group(ranks.dist.group.WORLD.group_name)
        self.theirs = theirs

    def __getattr__(self, name):
        return getattr(self.theirs, f"_{name}")


def measure(ranks, options, contenders, row, dtype, step):
    """Measures all contenders. Their graphs end with it: NCCL does not end while one holds its calls."""

    def prepared(name):
        return prepare(ranks, options, name, contenders[name], row, dtype)

    def report_progress(what):
        step(f"{row.kind} {'x'.join(map(str, row.sizes))}, {what}")

    left_out = ("torch fused",) if row.kind == "all_reduce" else ONLY_SUMS
    names = [name for name in contenders if name not in left_out]
    running = rounds.prepare_all({name: name for name in names}, row, prepared)
    rounds.measure(ranks, options, running, row, lambda case: None, report_progress)


def run(options, arguments):
    ranks = session.connect(options)
    torch, pools = ranks.torch, peers.Pools()
    dtype = getattr(torch, session.DTYPES[options.dtype])
    pool = ranks.insist(lambda: pools.get(ranks))
    dist = ranks.dist
    from symmpool import fused  # noqa: F401  (registers the operators)

    session.fill_in(options, USUAL[ranks.device.type])
    peer = "NCCL" if ranks.on_cuda else "gloo"
    ways = {
        "matmul": alone,
        "ours fused": fused_by(torch.ops.symmpool),
        "ours unfused": unfused(
            torch,
            lambda to, x: symmpool.all_gather_into_tensor(to, x, group=pool),
            lambda to, x: symmpool.reduce_scatter_tensor(to, x, group=pool),
            lambda x: symmpool.all_reduce(x, group=pool),
        ),
        f"{peer} unfused": unfused(
            torch, dist.all_gather_into_tensor, dist.reduce_scatter_tensor, dist.all_reduce
        ),
    }
    if ranks.on_cuda and torch.cuda.get_device_capability() == (9, 0):
        ways["ours one kernel"] = in_one_kernel
    if ranks.on_cuda:
        try:
            ways["torch fused"] = fused_by(TorchOperators(ranks))
        except (ImportError, RuntimeError) as error:
            warnings.warn(f"torch's fused operators are left out: {error}", RuntimeWarning, stacklevel=1)
    contenders = {name: Contender(torch, way) for name, way in ways.items()}
    cases = []
    for kind in options.kinds.split(","):
        if kind not in KINDS:
            raise ValueError(f"--kinds: {kind!r} is none of {', '.join(KINDS)}")
        sizes = options.gather if kind.startswith("all_gather") else options.scatter
        counts = options.few_rows if kind == "all_reduce" else options.rows
        cases += [(kind, (int(rows), *each)) for each in sizes for rows in counts.split(",")]
    progress, rows = session.Progress(len(cases) * (options.rounds + 1), ranks.rank == 0), []
    try:
        for kind, sizes in cases:
            travels = sizes[1] if kind.startswith("all_gather") else sizes[2]
            row = Row(kind, sizes, sizes[0] * travels * dtype.itemsize, ranks.world)
            measure(ranks, options, contenders, row, dtype, progress.step)
            rows.append(row)
            if ranks.on_cuda:
                torch.cuda.empty_cache()
    finally:
        progress.close()
    facts = session.describe("fused", ranks, arguments, contenders, {})

    def print_report(ours, others):
        print(f"matrix products of {options.dtype}, {session.where(facts)}")
        print(f"microseconds per call, slowest rank, median of rounds{session.describe_forms(facts)};")
        print("behind it the time of the products alone divided by it\n")
        names = list(ways)
        lines = [
            [
                row.kind,
                *map(str, row.sizes),
                *(f"{row.shown(name)}  {row.efficiency(name)}".rstrip() for name in names),
            ]
            for row in rows
        ]
        print(table.format_table(["kind", "M", "K", "N", *names], lines))
        session.print_missing(facts, rows, lambda row: f"{row.kind} {row.sizes}")
        session.write(options, facts, rows)

    return session.end(ranks, contenders, pools, rows, print_report)
