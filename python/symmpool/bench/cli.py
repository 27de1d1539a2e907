"""`python -m symmpool bench`: the command line, and the benchmark of all-reduces.

Run it under torchrun, one process for each GPU (or any number on the CPU):

    torchrun --nproc-per-node 4 -m symmpool bench allreduce --dtype bf16
"""

import argparse
import sys
from functools import partial

import symmpool
from symmpool.bench import (
    alltoallv,
    check,
    collectives,
    experts,
    fused,
    hosts,
    order,
    overlap,
    peers,
    plot,
    rounds,
    session,
    table,
    timing,
)
from symmpool.bench.arguments import add_measuring, factor, size, size_list
from symmpool.bench.training import command as training


def parser():
    top = argparse.ArgumentParser(
        prog="python -m symmpool bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True)
    command = commands.add_parser("allreduce", help="all-reduces, compared with NCCL and torch, or gloo")
    command.add_argument(
        "--sizes", type=size_list, help="bytes per rank: 4K,16K,1M; default: from --min-size to --max-size"
    )
    # torchrun reads --max as an abbreviation of its own option.
    command.add_argument("--min-size", "--min", type=size, default=1 << 10, help="default 1K")
    command.add_argument("--max-size", "--max", type=size, help="default 64M, on the CPU 4M")
    command.add_argument("--factor", type=factor, default=4, help="between sizes (default 4)")
    command.add_argument("--dtype", choices=session.DTYPES, default="bf16")
    command.add_argument("--op", choices=["sum", "prod", "min", "max", "avg"], default="sum")
    command.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    command.add_argument(
        "--algorithm",
        default="auto",
        choices=[*symmpool.algorithms(), "all"],
        help="of symmpool; all: one column each (default auto)",
    )
    command.add_argument("--peers", help="only these, by their names in the table: NCCL,one-shot; or none")
    command.add_argument(
        "--scratch", type=size, help="bytes of symmpool's scratch: 768M (default: the library's)"
    )
    command.add_argument("--no-check", action="store_true", help="do not check results")
    add_measuring(command)
    alltoallv.add_options(commands)
    collectives.add_options(commands)
    experts.add_options(commands)
    fused.add_options(commands)
    hosts.add_options(commands)
    order.add_options(commands)
    overlap.add_options(commands)
    training.add_options(commands)
    return top


def prepare(ranks, options, contender, bytes_):
    """A contender's case for a size, checked, and its forms.

    Raises ValueError on every rank if it fails on any. After each step that may fail on one rank alone, all
    ranks exchange whether it did, so that none waits for a rank that has given up.
    """
    torch, op = ranks.torch, options.op

    step = ranks.insist

    def make():
        case = contender.case(max(1, bytes_ // contender.dtype.itemsize))
        # Numbers of calls and their graphs. Capturing also calls, so data is filled in afterwards.
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
    """Measures all contenders at one size."""
    torch = ranks.torch
    row = table.Row(bytes_, ranks.world)
    requested = {}
    for name, contender in contenders.items():
        if contender.limit and bytes_ > contender.limit:
            row.missing[name] = f"left out above {table.show_size(contender.limit)}"
        else:
            requested[name] = contender
    running = rounds.prepare_all(requested, row, lambda contender: prepare(ranks, options, contender, bytes_))

    def begin(case):
        # In place, values grow with every call, so they are filled in again.
        check.fill(torch, case.input, ranks.rank, options.op)

    def report_progress(what):
        step(f"{table.show_size(bytes_)}, {what}")

    rounds.measure(ranks, options, running, row, begin, report_progress)
    if options.eager:
        for name, (case, _) in running.items():
            ranks.meet()
            calls = min(timing.EAGER_CALLS, timing.calls_for(bytes_))
            spent = timing.time_eager(case.call, calls, 5, ranks.synchronize)
            row.eager[name] = tuple(max(column) for column in zip(*ranks.gather(spent)))
    for name in rounds.confirm(ranks, contenders, running, row):
        row.eager.pop(name, None)
    return row


def run(options, arguments):
    ranks = session.connect(options)
    dtype = getattr(ranks.torch, session.DTYPES[options.dtype])
    largest = options.max_size or (64 << 20 if ranks.on_cuda else 4 << 20)
    sizes = options.sizes or table.sizes_between(options.min_size, largest, options.factor)
    if any(size % dtype.itemsize for size in sizes):
        raise SystemExit(f"sizes must be multiples of the size of {options.dtype}: {dtype.itemsize} bytes")
    algorithms = symmpool.algorithms() if options.algorithm == "all" else [options.algorithm]
    only = session.requested_peers(options)
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

    def print_report(ours, others):
        report(options, facts, rows, ours, others)

    return session.end(ranks, contenders, pools, rows, print_report)


def report(options, facts, rows, ours, others):
    """Prints the tables, and writes the requested files."""
    print(f"all-reduce, {options.op} of {options.dtype}, {session.where(facts)}")
    print(f"microseconds per call, slowest rank, median of rounds{session.describe_forms(facts)}\n")
    print(table.format_table(*table.cells(rows, ours, others)))
    if options.eager:
        print("\neager: microseconds of host time per call / until it is done\n")
        print(table.format_table(*table.eager_cells(rows, [*ours, *others])))
    session.print_missing(facts, rows, lambda row: f"at {table.show_size(row.size)}")
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
        session.require_writable(path)
    try:
        if options.command == "alltoallv":
            return alltoallv.run(options, arguments)
        if options.command == "collectives":
            return collectives.run(options, arguments)
        if options.command == "fused":
            return fused.run(options, arguments)
        if options.command == "hosts":
            return hosts.run(options, arguments)
        if options.command == "experts":
            return experts.run(options, arguments)
        if options.command == "order":
            return order.run(options, arguments)
        if options.command == "overlap":
            return overlap.run(options, arguments)
        if options.command == "training":
            return training.run(options, arguments)
        return run(options, arguments)
    except ValueError as error:
        raise SystemExit(str(error)) from error
