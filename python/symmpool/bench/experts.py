"""`python -m symmpool bench experts`: dispatch to experts and combine, compared with all-to-alls and
all-gathers of torch.distributed, and with DeepEP where it is installed.

    torchrun --nproc-per-node 2 -m symmpool bench experts --tokens 1,8,128,4096
    torchrun --nproc-per-node 8 -m symmpool bench experts --pretend 2 --tokens 128,4096 --hidden 2048

With `--pretend` the ranks pretend to be on several hosts of the CPU, and behind the table stand the bytes
that crossed hosts, beside the least that could: a row and its scales once to each host that needs the token,
and one row back.
"""

import argparse

from symmpool.bench import (
    crossing,
    expert_contenders,
    expert_low_latency,
    expert_routing,
    hosts,
    plot,
    rounds,
    session,
    table,
    timing,
)
from symmpool.bench.arguments import add_measuring, comma_separated, count_list, positive

#: The calls that are measured. In the routed ones and `exact` the routing is new in every call; in the first
#: three a handle has it. In `exact` the host asks how many rows there are, so that it cannot be captured.
CASES = ("dispatch", "dispatch_fp8", "combine", "routed", "routed_fp8", "exact", *expert_low_latency.CASES)


def _choices(known):
    def parse(text):
        found = comma_separated(text)
        if not found or any(each not in known for each in found):
            raise argparse.ArgumentTypeError(f"{text!r}: there are {', '.join(known)}")
        return found

    return parse


def add_options(commands):
    command = commands.add_parser("experts", help="dispatch to experts and combine, compared in the same way")
    command.add_argument("--tokens", type=count_list, help="of each rank: 1,8,128,512,4096")
    command.add_argument("--hidden", type=positive, help="channels of a token (default 7168, on the CPU 512)")
    command.add_argument("--experts", type=positive, help="of all ranks (default 256, on the CPU 16)")
    command.add_argument("--top-k", type=positive, help="experts of a token (default 8, on the CPU 2)")
    command.add_argument(
        "--routing",
        type=_choices(expert_routing.KINDS),
        default=["uniform", "skewed"],
        help=f"a list of {', '.join(expert_routing.KINDS)} (default: uniform,skewed)",
    )
    command.add_argument(
        "--cases",
        type=_choices(CASES),
        default=list(CASES),
        help=f"a list of {', '.join(CASES)} (default: all); routed and exact: layout, dispatch and combine, "
        "with exact sizes known to the host; low_latency: DeepEP's names, for up to "
        f"{expert_low_latency.MAX_TOKENS} tokens on CUDA",
    )
    command.add_argument(
        "--pretend",
        type=hosts.ranks_by_host,
        help="how many hosts of equally many ranks, or the ranks of each host as 3+1: on the CPU",
    )
    command.add_argument("--order", choices=["blocks", "turns"], default="blocks", help="of ranks over hosts")
    command.add_argument("--num-sms", type=positive, help="the most SMs of symmpool's and DeepEP's kernels")
    command.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    command.add_argument(
        "--peers", help="only these, by their names in the table: all-to-all,DeepEP; or none"
    )
    add_measuring(command)


class Row(table.Row):
    """The results of one case, routing and number of tokens."""

    def __init__(self, case, routing, size, world):
        super().__init__(size, world)
        self.case, self.routing, self.tokens = case, routing.kind, routing.tokens
        #: Bytes that crossed hosts in a call, and the least that could, of all ranks; by contender.
        self.crossed = {}

    def to_json(self):
        figures = self.figures(lambda name: {"gb_s": self.size / self.microseconds(name) / 1e3})
        return {
            "case": self.case,
            "routing": self.routing,
            "tokens": self.tokens,
            "heaviest_bytes": self.size,
            "figures": figures,
            "missing": self.missing,
            **({"crossed_hosts": self.crossed} if self.crossed else {}),
        }


def prepare(ranks, options, contender, row, routing):
    """An exchange, checked, and its forms. Raises ValueError on every rank if that fails on any."""
    step = ranks.insist
    exchange = step(lambda: contender.exchange(row.case, routing))
    made = []
    if row.case == "exact" and ranks.on_cuda:
        forms = [timing.eager(ranks, exchange.call, row.size)]
    else:

        def keep():
            made.append(dict(exchange.found))

        forms = timing.forms(ranks, exchange.call, row.size, options, keep)
    graphs = [form.run for form in forms if form.name not in (timing.EAGER, timing.LOOP)]
    for run, found in [*zip(graphs, made), (exchange.call, {})]:
        exchange.found.update(found)
        step(exchange.poison)
        step(run)
        wrong = sum(ranks.gather(step(exchange.wrong)))
        if wrong:
            raise ValueError(f"{wrong:,} wrong bytes, over all ranks")
    return exchange, forms


def measure(ranks, options, contenders, row, routing, step):
    running = rounds.prepare_all(contenders, row, lambda each: prepare(ranks, options, each, row, routing))

    if options.pretend:
        placed = hosts.host_ranks(options, ranks.world)
        least = crossing.least(routing, placed, row.case, options.hidden)
        for name, (exchange, _) in running.items():
            row.crossed[name] = {"bytes": crossing.measured(ranks, placed, exchange.call), "least": least}

    def report_progress(what):
        step(f"{row.case}, {row.routing}, {row.tokens} tokens, {what}")

    rounds.measure(ranks, options, running, row, lambda exchange: None, report_progress)
    if options.eager:
        for name, (exchange, _) in running.items():
            ranks.meet()
            spent = timing.time_eager(exchange.call, timing.EAGER_CALLS, 5, ranks.synchronize)
            row.eager[name] = tuple(max(column) for column in zip(*ranks.gather(spent)))
    for name in rounds.confirm(ranks, contenders, running, row):
        row.eager.pop(name, None)


def cells(rows, ours, others):
    """The table's heading and lines."""
    names = [*ours, *others]
    heading = ["call", "routing", "tokens", *names, "GB/s", "best contender", "peer/ours"]
    lines = []
    for row in rows:
        _, own = row.best(ours)
        rival, theirs = row.best(others)
        speed = None if own is None else row.size / own / 1e3
        ratio = None if own is None or theirs is None else theirs / own
        times = [row.shown(name) for name in names]
        end = [table.figure(speed), rival or "-", table.figure(ratio)]
        lines.append([row.case, row.routing, str(row.tokens), *times, *end])
    return heading, lines


def bytes_of_row(case, hidden):
    """Bytes of a row that travel in a case, which may be there and back."""
    quantized, plain = hidden + hidden // 32, 2 * hidden
    there = quantized if case.endswith("_fp8") else plain
    return there + plain if case.startswith("routed") or case == "exact" else there


def with_defaults(options, on_cuda):
    """The options, with what the device suggests where nothing was given."""
    defaults = {"tokens": [1, 8, 128, 512, 4096], "hidden": 7168, "experts": 256, "top_k": 8}
    if not on_cuda:
        defaults = {"tokens": [1, 8, 64], "hidden": 512, "experts": 16, "top_k": 2}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.top_k > options.experts:
        raise SystemExit(
            f"--top-k {options.top_k}: a token has different experts, and there are {options.experts}"
        )
    return options


def run(options, arguments):
    if options.pretend:
        options.device = "cpu"
        hosts.pretend(options)
        crossing.watch()
    ranks = session.connect(options)
    if options.pretend:
        # Ranks share cores.
        ranks.torch.set_num_threads(1)
    options = with_defaults(options, ranks.on_cuda)
    only = session.requested_peers(options)
    contenders, missing, pools = expert_contenders.set_up(ranks, options, max(options.tokens), only)
    todo = [
        (case, kind, tokens)
        for case in options.cases
        for kind in options.routing
        for tokens in options.tokens
        # Low-latency calls are measured on GPUs alone.
        if case not in expert_low_latency.CASES or (ranks.on_cuda and tokens <= expert_low_latency.MAX_TOKENS)
    ]
    rows = []
    progress = session.Progress(len(todo) * (options.rounds + 1), ranks.rank == 0)
    try:
        for case, kind, tokens in todo:
            routing = expert_routing.make(
                ranks.torch, ranks, kind, tokens, options.hidden, options.experts, options.top_k
            )
            size = routing.sent() * bytes_of_row(case, options.hidden)
            row = Row(case, routing, max(size, 1), ranks.world)
            measure(ranks, options, contenders, row, routing, progress.step)
            rows.append(row)
    finally:
        progress.close()
    facts = session.describe("experts", ranks, arguments, contenders, missing)
    if options.pretend:
        facts["hosts"] = hosts.host_ranks(options, ranks.world)

    def print_report(ours, others):
        report(options, facts, rows, ours, others)

    return session.end(ranks, contenders, pools, rows, print_report)


def report(options, facts, rows, ours, others):
    made_for = f"hidden {options.hidden}, top-{options.top_k} of {options.experts} experts"
    print(f"experts, {made_for}, {session.where(facts)}")
    print(
        "microseconds per call, slowest rank, median of rounds; GB/s: the heaviest rank's bytes to or from "
        f"others{session.describe_forms(facts)}\n"
    )
    print(table.format_table(*cells(rows, ours, others)))
    if options.pretend:
        print("\nbytes that crossed hosts in a call, of all ranks, and how many times the least that could\n")
        print(table.format_table(*crossing.cells(rows)))
    if options.eager:
        print("\neager: microseconds of host time per call / until it is done\n")
        print(table.format_table(*table.eager_cells(rows, [*ours, *others])))
    session.print_missing(facts, rows, lambda row: f"for {row.case}, {row.routing}, {row.tokens} tokens")
    session.write(options, facts, rows)
    if options.plot:
        title = f"experts, {made_for}, {session.devices(facts)}"
        panels = plot.panels_by(rows, lambda row: f"{row.case}, {row.routing}")
        plot.save(options.plot, panels, ours, others, title, facts, axis="the heaviest rank's bytes")
