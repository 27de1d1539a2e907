"""`bench hosts`: collectives of ranks that pretend to be on several hosts, compared with gloo alone.

What a network between hosts would add is left out: gloo goes by this machine's own interface. So the figures
say what each engine costs the processors. Behind the table of whole calls stand their phases, what a model
predicts of them, and the bars that they are to reach.
"""

import argparse
import dataclasses
import os
import time
from statistics import median

import symmpool
from symmpool.bench import collectives, plot, scale, session, table, timing
from symmpool.bench.arguments import add_measuring, size_list

#: About how many bytes a span of calls moves.
SPAN_BYTES = 16 << 20
#: Bytes of the call inside a host, and of messages between hosts, by which the cost of a byte is measured.
INSIDE, BETWEEN = 4 << 20, 1 << 20
#: Phases of a call in the order in which they begin, as `Communicator.phase_times` calls them.
PHASES = ("meeting", "agreement", "before", "between", "after")
#: How many times as long gloo alone takes at least, where hosts have as many ranks, several each: from and
#: up to which bytes of the whole tensor.
FASTER = {
    "all_reduce": (2.0, 1 << 20, 64 << 20),
    "reduce_scatter": (1.5, 1 << 20, 64 << 20),
    "all_gather": (1.5, 1 << 20, 64 << 20),
    "all_to_all": (1.5, 256 << 10, 4 << 20),
}
#: Most of gloo's time among other hosts, most of a call's time for the agreement on it, and from which size.
AT_MOST, AGREEMENT, FROM = 1.03, 0.03, 64 << 10


def ranks_by_host(text):
    """Numbers of ranks of hosts, as `3+1`; or how many hosts share all ranks equally."""
    try:
        counts = [int(each) for each in text.split("+")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of hosts, as 2, nor the ranks of each host, as 3+1"
        )
    return counts


def add_options(commands):
    command = commands.add_parser("hosts", help="collectives over pretended hosts, compared with gloo")
    command.add_argument(
        "--pretend",
        type=ranks_by_host,
        default=[2],
        help="how many hosts of equally many ranks, or the ranks of each host as 3+1 (default 2)",
    )
    command.add_argument("--order", choices=["blocks", "turns"], default="blocks", help="of ranks over hosts")
    command.add_argument(
        "--sizes", type=size_list, default=size_list("64K,1M,16M,64M"), help="bytes of the whole tensor"
    )
    command.add_argument(
        "--operations",
        type=collectives.operation_list,
        default=list(collectives.OPERATIONS),
        help="default: all of them",
    )
    command.add_argument("--dtype", choices=session.DTYPES, default="f32")
    command.add_argument("--peers", help="only these: gloo; or none")
    add_measuring(command)
    command.set_defaults(rounds=10, replays=1, device="cpu")


def host_ranks(options, world):
    """The ranks of each pretended host."""
    counts = options.pretend
    shown = "+".join(map(str, counts))
    if len(counts) == 1:
        if world % counts[0]:
            raise SystemExit(f"--pretend {shown}: {world} ranks do not divide among as many hosts")
        counts = [world // counts[0]] * counts[0]
    if sum(counts) != world:
        raise SystemExit(f"--pretend {shown}: there are {world} ranks")
    placed = [[] for _ in counts]
    rank = 0
    while rank < world:
        for host, count in enumerate(counts):
            some = count if options.order == "blocks" else int(len(placed[host]) < count)
            placed[host] += range(rank, rank + some)
            rank += some
    return placed


def pretend(options):
    """Puts this process on its host, before the package looks for it."""
    world, rank = (int(os.environ.get(name, 0)) for name in ("WORLD_SIZE", "RANK"))
    if world:
        placed = host_ranks(options, world)
        host = next(number for number, each in enumerate(placed) if rank in each)
        os.environ["SYMMPOOL_HOST_ID"] = f"pretended-{host}"


def measure_phases(ranks, options, contender, row):
    """Microseconds a call by phase, as the mean of all ranks; None where all are on one host."""
    case = contender.case(row.operation, row.size // contender.dtype.itemsize)
    calls = max(options.calls or [timing.calls_for(row.size)])
    case.call()
    ranks.meet()
    before = contender.comm.phase_times()
    if before is None:
        return None
    for _ in range(calls):
        case.call()
    after = contender.comm.phase_times()
    spent = {name: (after[name] - before[name]) / calls * 1e6 for name in (*PHASES, "total")}
    everyone = ranks.gather(spent)
    return {name: sum(each[name] for each in everyone) / len(everyone) for name in spent}


def measured_costs(ranks, options, placed):
    """Costs of steps and bytes here, for the model of `scale`: inside a host by a communicator of its ranks,
    and between hosts by gloo alone. The hosts have as many ranks."""
    from symmpool.communicators.outer import GlooOuter

    torch, dist = ranks.torch, ranks.dist
    host = next(number for number, each in enumerate(placed) if ranks.rank in each)
    here = placed[host]
    index, hosts = here.index(ranks.rank), len(placed)

    def slowest(call, calls, takes_part=True):
        """Seconds of a call on the slowest rank that makes it: the median of rounds. The others wait."""
        spans = []
        for _ in range(options.rounds):
            ranks.meet()
            begin = time.perf_counter()
            for _ in range(calls if takes_part else 0):
                call()
            spans.append((time.perf_counter() - begin) / calls if takes_part else 0.0)
        return median(map(max, zip(*ranks.gather(spans))))

    group = [dist.new_group(each) for each in placed][host]
    pool = symmpool.Pool(group, device="cpu")
    comm = symmpool.Communicator(pool, timeout=ranks.timeout, concurrent=1)
    whole = pool.empty(INSIDE // 4, dtype=torch.float32)
    part = pool.empty(len(whole) // len(here), dtype=torch.float32)
    pool.commit()
    handshake = slowest(comm.barrier, 50)
    # Each rank reads and writes the whole.
    gather = slowest(lambda: comm.all_gather_into_tensor(whole[: len(part) * len(here)], part), 5)
    store = dist.distributed_c10d._get_default_store()

    def connect(name, members):
        """An engine among the ranks of this index on some hosts; None on another host."""
        prefix = dist.PrefixStore(f"bench/hosts/{name}/{index}", store)
        return GlooOuter(prefix, members.index(host), len(members), 60) if host in members else None

    def exchange(outer, nbytes):
        parts = [0 if each == outer.rank else nbytes for each in range(outer.world)]
        given = torch.zeros(2, sum(parts), dtype=torch.uint8)
        return lambda: outer.finish(outer.all_to_all(given[0].data_ptr(), given[1].data_ptr(), parts, parts))

    outer, pair = connect("all", list(range(hosts))), connect("pair", [0, 1])
    leads = index == 0
    step = slowest(exchange(outer, scale.HEAD), 20, leads)
    least = slowest(exchange(pair, scale.HEAD) if pair else None, 20, leads and pair is not None)
    alone = slowest(exchange(outer, BETWEEN), 3, leads)
    sent = slowest(exchange(outer, BETWEEN), 3)
    for each in filter(None, (outer, pair)):
        while not each.abort():
            time.sleep(0.01)
    leaving = BETWEEN * (hosts - 1)
    return scale.Costs(
        handshake=handshake,
        byte=max(gather - handshake, 0.0) / (2 * INSIDE),
        step=least,
        peer=max(step - least, 0.0) / max(hosts - 2, 1),
        alone=max(alone - step, 0.0) / leaving,
        leaving=max(sent - step, 0.0) / (leaving * len(here)),
        shares=True,
    )


def predictions(rows, placed, costs):
    """For each row, the phases that the model predicts, and by how much their sum is off what was measured of
    ours: None where it was not."""
    found = []
    for row in rows:
        phases = scale.predict(row.operation, row.size, len(placed), len(placed[0]), costs)
        measured = row.microseconds("ours")
        found.append((phases, phases.total * 1e6 / measured - 1 if measured else None))
    return found


def ratio(row, ours, other):
    """The other one's time divided by ours, as the median of rounds, in each of which both were measured."""
    pairs = list(zip(row.rounds.get(ours, []), row.rounds.get(other, [])))
    return median(theirs / own for own, theirs in pairs) if pairs else None


def are_alike(placed):
    """Whether there are several hosts, of as many ranks each."""
    return len(placed) > 1 and len({len(each) for each in placed}) == 1


def bars(rows, placed):
    """Bars of the rows: what is compared, the bar, the measured value, and whether it is met."""
    several = are_alike(placed) and len(placed[0]) > 1
    found = []

    def add(row, what, bar, measured, at_least):
        if measured is not None:
            met = measured >= bar if at_least else measured <= bar
            entry = {"operation": row.operation, "bytes": row.size, "what": what, "bar": bar}
            found.append({**entry, "at_least": at_least, "measured": measured, "met": met})

    for row in rows:
        faster = ratio(row, "ours", "gloo")
        bar, least, most = FASTER.get(row.operation, (0, 1, 0))
        if several and least <= row.size <= most:
            add(row, "gloo / ours", bar, faster, True)
        elif not several and row.size >= FROM and faster:
            add(row, "ours / gloo", AT_MOST, 1 / faster, False)
        if row.phases and row.size >= FROM:
            add(row, "agreement / call", AGREEMENT, row.phases["agreement"] / row.phases["total"], False)
    return found


def print_phases(rows):
    lines = []
    for row in rows:
        if row.phases:
            rest = row.phases["total"] - sum(row.phases[name] for name in PHASES)
            times = [*(row.phases[name] for name in PHASES), rest, row.phases["total"]]
            flat = row.shown("gloo") if "gloo" in row.rounds else "-"
            lines.append([row.operation, table.show_size(row.size), *map(table.figure, times), flat])
    if lines:
        print("\nphases of ours, microseconds, mean of all ranks\n")
        print(table.format_table(["operation", "size", *PHASES, "copies", "call", "gloo"], lines))


def print_predictions(rows, found):
    heading = ["operation", "size", "handshakes", "inside", "between hosts", "predicted", "ours", "off by"]
    lines = []
    for row, (phases, off) in zip(rows, found):
        parts = (phases.handshakes, phases.inside, phases.between, phases.total)
        figures = [table.figure(seconds * 1e6) for seconds in parts]
        shown = "" if off is None else f"{off:+.0%}"
        lines.append([row.operation, table.show_size(row.size), *figures, row.shown("ours"), shown])
    print("\nthe model of docs/scale.md, with costs measured here; microseconds\n")
    print(table.format_table(heading, lines))
    errors = [abs(off) for _, off in found if off is not None]
    if errors:
        print(f"\nmedian error {median(errors):.0%}")


def print_bars(found):
    if not found:
        return
    lines = []
    for each in found:
        sign = ">=" if each["at_least"] else "<="
        percent = each["what"] == "agreement / call"
        bar, measured = (
            f"{each[name]:.1%}" if percent else f"{each[name]:.2f}" for name in ("bar", "measured")
        )
        verdict = "met" if each["met"] else "MISSED"
        size = table.show_size(each["bytes"])
        lines.append([each["operation"], size, each["what"], measured, f"{sign} {bar}", verdict])
    print("\nbars, medians of pairs\n")
    print(table.format_table(["operation", "size", "what", "measured", "bar", ""], lines))


def run(options, arguments):
    pretend(options)
    ranks = session.connect(options)
    dtype = getattr(ranks.torch, session.DTYPES[options.dtype])
    placed = host_ranks(options, ranks.world)
    # Ranks share cores, so calls take long.
    ranks.torch.set_num_threads(1)
    timing.SPAN_BYTES = SPAN_BYTES
    sizes = options.sizes
    session.require_parts(options, sizes, dtype, ranks.world)
    requested = session.requested_peers(options)
    contenders, missing, pools = collectives.set_up(ranks, dtype, max(sizes) // dtype.itemsize, requested)
    steps = len(options.operations) * len(sizes) * (options.rounds + 1)
    progress = session.Progress(steps, ranks.rank == 0)
    try:
        rows = [
            collectives.measure(ranks, options, contenders, operation, size, progress.step)
            for operation in options.operations
            for size in sizes
        ]
        for row in rows:
            if "ours" in contenders and row.rounds.get("ours"):
                row.phases = measure_phases(ranks, options, contenders["ours"], row)
    finally:
        progress.close()
    facts = session.describe("hosts", ranks, arguments, contenders, missing)
    facts["hosts"] = placed
    facts["bars"] = bars(rows, placed)
    predicted = []
    if are_alike(placed):
        costs = measured_costs(ranks, options, placed)
        predicted = predictions(rows, placed, costs)
        facts["costs"] = dataclasses.asdict(costs)
        facts["predicted"] = [{**dataclasses.asdict(phases), "off": off} for phases, off in predicted]

    def print_report(ours, others):
        shown = " and ".join(str(len(each)) for each in placed)
        what = f"collectives of {options.dtype} over {len(placed)} pretended hosts of {shown} ranks"
        print(f"{what}, {session.where(facts)}")
        print("microseconds per call, slowest rank, median of rounds; ordinary memory is torch's\n")
        print(table.format_table(*collectives.cells(rows, ours, others)))
        print_phases(rows)
        if predicted:
            print_predictions(rows, predicted)
        print_bars(facts["bars"])
        session.print_missing(facts, rows, lambda row: f"{row.operation} of {table.show_size(row.size)}")
        session.write(options, facts, rows)
        if options.plot:
            title = f"{what}, {session.devices(facts)}"
            panels = plot.panels_by(rows, lambda row: row.operation)
            plot.save(options.plot, panels, ours, others, title, facts, axis="bytes of the whole")

    return session.end(ranks, contenders, pools, rows, print_report)
