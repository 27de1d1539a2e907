"""`bench hosts`: collectives of ranks that pretend to be on several hosts, compared with gloo alone.

What a network between hosts would add is left out: gloo goes by this machine's own interface. So the figures
say what each engine costs the processors.
"""

import os

from symmpool.bench import collectives, plot, session, table, timing
from symmpool.bench.arguments import add_measuring, positive, size_list

#: About how many bytes a span of calls moves.
SPAN_BYTES = 16 << 20


def add_options(commands):
    command = commands.add_parser("hosts", help="collectives over pretended hosts, compared with gloo")
    command.add_argument(
        "--pretend", type=positive, default=2, help="hosts of equally many ranks (default 2)"
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


def pretend(options):
    """Puts this process on its host, before the package looks for it."""
    world, rank = (int(os.environ.get(name, 0)) for name in ("WORLD_SIZE", "RANK"))
    if world and world % options.pretend:
        raise SystemExit(f"--pretend {options.pretend}: {world} ranks do not divide among as many hosts")
    host = rank % options.pretend if options.order == "turns" else rank * options.pretend // max(world, 1)
    os.environ["SYMMPOOL_HOST_ID"] = f"pretended-{host}"


def run(options, arguments):
    pretend(options)
    ranks = session.connect(options)
    dtype = getattr(ranks.torch, session.DTYPES[options.dtype])
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
    finally:
        progress.close()
    facts = session.describe("hosts", ranks, arguments, contenders, missing)

    def print_report(ours, others):
        what = f"collectives of {options.dtype} over {options.pretend} pretended hosts"
        print(f"{what}, {session.where(facts)}")
        print("microseconds per call, slowest rank, median of rounds; ordinary memory is torch's\n")
        print(table.format_table(*collectives.cells(rows, ours, others)))
        session.print_missing(facts, rows, lambda row: f"{row.operation} of {table.show_size(row.size)}")
        session.write(options, facts, rows)
        if options.plot:
            title = f"{what}, {session.devices(facts)}"
            panels = plot.panels_by(rows, lambda row: row.operation)
            plot.save(options.plot, panels, ours, others, title, facts, axis="bytes of the whole")

    return session.end(ranks, contenders, pools, rows, print_report)
