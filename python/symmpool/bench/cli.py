"""`python -m symmpool bench`: options, and the order of things.

Run it under torchrun, one process a GPU (or any number on the CPU):

    torchrun --nproc-per-node 4 -m symmpool bench allreduce --dtype bf16
"""

import argparse
import sys
from functools import partial

import symmpool
from symmpool.bench import alltoallv, check, collectives, overlap, peers, plot, session, table, timing, turns
from symmpool.bench.arguments import add_measuring, factor, size, size_list
from symmpool.bench.training import command as training


def parser():
    top = argparse.ArgumentParser(
        prog="python -m symmpool bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True)
    it = commands.add_parser("allreduce", help="all-reduces, beside NCCL and torch, or gloo")
    it.add_argument("--sizes", type=size_list, help="bytes a rank: 4K,16K,1M; else from --min-size on")
    # torchrun takes --max for the beginning of an option of its own.
    it.add_argument("--min-size", "--min", type=size, default=1 << 10, help="default 1K")
    it.add_argument("--max-size", "--max", type=size, help="default 64M, on the CPU 4M")
    it.add_argument("--factor", type=factor, default=4, help="between sizes (default 4)")
    it.add_argument("--dtype", choices=session.DTYPES, default="bf16")
    it.add_argument("--op", choices=["sum", "prod", "min", "max", "avg"], default="sum")
    it.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    it.add_argument(
        "--algorithm",
        default="auto",
        choices=[*symmpool.algorithms(), "all"],
        help="of ours; all: one column each (default auto)",
    )
    it.add_argument("--peers", help="only these, by their names in the table: NCCL,one-shot; or none")
    it.add_argument("--scratch", type=size, help="bytes of scratch of ours: 768M (default: the library's)")
    it.add_argument("--no-check", action="store_true", help="do not check results")
    add_measuring(it)
    alltoallv.add_options(commands)
    collectives.add_options(commands)
    overlap.add_options(commands)
    training.add_options(commands)
    return top


def prepare(ranks, options, contender, bytes_):
    """A contender's case for a size, checked, and its forms.

    Raises ValueError on every rank if it fails on any. Between two steps that may fail on one rank
    alone all ranks hear of it, so that none waits for one that has given up.
    """
    torch, op = ranks.torch, options.op

    step = ranks.insist

    def make():
        case = contender.case(max(1, bytes_ // contender.dtype.itemsize))
        # How often a run calls; and its graph, which calls as well, so it is made before the data.
        counts = [1]
        if ranks.on_cuda:
            counts += [1, check.repeatable(case.input.dtype, op) if case.in_place else 3]
        graphs = [None] + [timing.capture(torch, case.call, count) for count in counts[1:]]
        return case, list(zip(counts, graphs))

    def fill():
        check.poison(case.output)
        check.fill(torch, case.input, ranks.rank, op)

    case, runs = step(make)
    forms = timing.forms(ranks, case.call, bytes_, options)
    for count, graph in runs if not options.no_check else []:
        step(fill)
        step(case.call if graph is None else graph.replay)
        applied = count if case.in_place else 1
        wrong = step(partial(check.count_wrong, torch, case.output, ranks.world, op, applied))
        total = sum(ranks.gather(wrong))
        if total:
            raise ValueError(f"{total:,} wrong elements, over all ranks, after {count} calls")
    step(fill)
    return case, forms


def measure_size(ranks, options, contenders, bytes_, step):
    """All contenders in all rounds at one size."""
    torch = ranks.torch
    row = table.Row(bytes_, ranks.world)
    asked = {}
    for name, contender in contenders.items():
        if contender.limit and bytes_ > contender.limit:
            row.missing[name] = f"left out above {table.show_size(contender.limit)}"
        else:
            asked[name] = contender
    running = turns.prepared(asked, row, lambda contender: prepare(ranks, options, contender, bytes_))

    def begin(case):
        # In place, data grows with every call; it begins anew here.
        check.fill(torch, case.input, ranks.rank, options.op)

    def told(what):
        step(f"{table.show_size(bytes_)}, {what}")

    turns.measure(ranks, options, running, row, begin, told)
    if options.eager:
        for name, (case, _) in running.items():
            ranks.meet()
            calls = min(timing.EAGER_CALLS, timing.calls_for(bytes_))
            spent = timing.time_eager(case.call, calls, 5, ranks.synchronize)
            row.eager[name] = tuple(max(column) for column in zip(*ranks.gather(spent)))
    for name in turns.confirm(ranks, contenders, running, row):
        row.eager.pop(name, None)
    return row


def run(options, arguments):
    ranks = session.connect(options)
    dtype = getattr(ranks.torch, session.DTYPES[options.dtype])
    largest = options.max_size or (64 << 20 if ranks.on_cuda else 4 << 20)
    sizes = options.sizes or table.sizes_between(options.min_size, largest, options.factor)
    if any(size % dtype.itemsize for size in sizes):
        raise SystemExit(f"sizes must be whole numbers of {options.dtype}: {dtype.itemsize} bytes")
    algorithms = symmpool.algorithms() if options.algorithm == "all" else [options.algorithm]
    only = session.asked_peers(options)
    known = [name for name, _ in peers.peers_for(ranks.on_cuda)]
    if unknown := [name for name in only or [] if name not in known]:
        raise SystemExit(f"--peers {unknown[0]}: there are {', '.join(known)}")
    count = max(sizes) // dtype.itemsize
    contenders, missing, pools = peers.set_up(
        ranks, dtype, options.op, count, algorithms, only, options.scratch
    )
    rows = []
    progress = session.Progress(len(sizes) * (options.rounds + 1), ranks.rank == 0)
    try:
        for bytes_ in sizes:
            rows.append(measure_size(ranks, options, contenders, bytes_, progress.step))
    finally:
        progress.close()
    facts = session.describe("allreduce", ranks, arguments, contenders, missing)

    def tell(ours, others):
        report(options, facts, rows, ours, others)

    return session.end(ranks, contenders, pools, rows, tell)


def report(options, facts, rows, ours, others):
    """Prints the tables, and writes what was asked for."""
    print(f"all-reduce, {options.op} of {options.dtype}, {session.where(facts)}")
    print(f"microseconds a call, slowest rank, median of rounds{session.told_forms(facts)}\n")
    print(table.lay_out(*table.cells(rows, ours, others)))
    if options.eager:
        print("\neager: microseconds of host time a call / until it is done\n")
        print(table.lay_out(*table.eager_cells(rows, [*ours, *others])))
    session.tell_missing(facts, rows, lambda row: f"at {table.show_size(row.size)}")
    session.write(options, facts, rows)
    if options.plot:
        title = f"all-reduce, {options.op} of {options.dtype}, {session.devices(facts)}"
        plot.save(options.plot, {"": rows}, ours, others, title, facts)


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = parser().parse_args(arguments)
    if options.plot:
        plot.require(options.plot)
    for path in filter(None, (options.json, options.plot)):
        session.require_place(path)
    try:
        if options.command == "alltoallv":
            return alltoallv.run(options, arguments)
        if options.command == "collectives":
            return collectives.run(options, arguments)
        if options.command == "overlap":
            return overlap.run(options, arguments)
        if options.command == "training":
            return training.run(options, arguments)
        return run(options, arguments)
    except ValueError as error:
        raise SystemExit(str(error)) from error
