"""`bench collectives`: every collective, in windows and in ordinary memory, compared with NCCL or gloo.

The column "ours ordinary" is what a program gets whose tensors are not in a pool.
"""

import argparse
from functools import partial

from symmpool import Communicator
from symmpool.bench import peers, plot, rounds, session, table, timing
from symmpool.bench.arguments import add_measuring, comma_separated, size_list

#: The collectives, and by which factor nccl-tests multiplies bytes for bus bandwidth.
OPERATIONS = {
    "all_reduce": lambda world: 2 * (world - 1) / world,
    "all_gather": lambda world: (world - 1) / world,
    "reduce_scatter": lambda world: (world - 1) / world,
    "broadcast": lambda world: 1,
    "all_to_all": lambda world: (world - 1) / world,
}


def operation_list(text):
    names = comma_separated(text)
    unknown = [name for name in names if name not in OPERATIONS]
    if unknown or not names:
        named = (unknown or [text])[0]
        raise argparse.ArgumentTypeError(f"{named!r} is none of {', '.join(OPERATIONS)}")
    return names


def budget_list(text):
    try:
        budgets = [int(each) for each in comma_separated(text)]
    except ValueError:
        budgets = []
    if not budgets or min(budgets) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} are no numbers of SMs, 2 or more, separated by commas")
    return budgets


def add_options(commands):
    command = commands.add_parser(
        "collectives", help="every collective, in windows and in ordinary memory, compared with NCCL or gloo"
    )
    command.add_argument(
        "--sizes", type=size_list, help="bytes of the whole tensor; default 64K,1M,16M,64M,256M"
    )
    command.add_argument(
        "--operations", type=operation_list, default=list(OPERATIONS), help="default: all of them"
    )
    command.add_argument("--dtype", choices=session.DTYPES, default="bf16")
    command.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    command.add_argument("--peers", help="only these: NCCL,NCCL window (or gloo); or none")
    command.add_argument(
        "--device-memory",
        type=size_list,
        default=[],
        help="of symmpool: also communicators of so many bytes each, as in 96M,16M, on GPUs",
    )
    command.add_argument(
        "--sm-budgets",
        type=budget_list,
        default=[],
        help="of symmpool: also kernels of so many SMs at most, as in 88,44,22, on GPUs",
    )
    add_measuring(command)


class CollectiveContender(peers.Contender):
    """A contender with an input and an output of `count` elements. `calls` gives its calls by name."""

    def __init__(self, name, ranks, dtype, count):
        super().__init__(ranks, dtype, "sum", count)
        self.name = name
        self.set_up(count)

    def set_up(self, count):
        self.input, self.output = self.empty(count), self.empty(count)

    def case(self, operation, count):
        """The case of a collective whose whole tensor has `count` elements."""
        part = count // self.ranks.world
        whole, other = self.input[:count], self.output[:count]
        read, written = {
            "all_reduce": (whole, whole),
            "all_gather": (whole[:part], other),
            "reduce_scatter": (whole, other[:part]),
            "broadcast": (whole, whole),
            "all_to_all": (whole, other),
        }[operation]
        call = self.calls()[operation]
        return peers.Case(read, written, lambda: call(written, read))

    def close(self):
        self.input = self.output = None


class Ours(CollectiveContender):
    def __init__(self, name, ranks, dtype, count, pool, in_windows, **limits):
        self.pool, self.in_windows, self.limits = pool, in_windows, limits
        super().__init__(name, ranks, dtype, count)
        self.comm = self.communicator()
        pool.commit()

    def communicator(self):
        return Communicator(self.pool, timeout=self.ranks.timeout, concurrent=1, **self.limits)

    def empty(self, count):
        return self.pool.empty(count, self.dtype) if self.in_windows else super().empty(count)

    def calls(self):
        comm = self.comm
        return {
            "all_reduce": lambda out, x: comm.all_reduce(x),
            "all_gather": comm.all_gather_into_tensor,
            "reduce_scatter": comm.reduce_scatter_tensor,
            "broadcast": lambda out, x: comm.broadcast(x, 0),
            "all_to_all": comm.all_to_all_single,
        }

    def confirm(self):
        self.comm.synchronize()

    def close(self):
        super().close()
        self.comm = self.pool = None


class Distributed(CollectiveContender):
    def calls(self):
        return self.functions()

    def functions(self):
        """torch.distributed's, which may be given a group."""
        dist = self.dist
        return {
            "all_reduce": lambda out, x, **group: dist.all_reduce(x, **group),
            "all_gather": dist.all_gather_into_tensor,
            "reduce_scatter": dist.reduce_scatter_tensor,
            "broadcast": lambda out, x, **group: dist.broadcast(x, 0, **group),
            "all_to_all": dist.all_to_all_single,
        }


class DistributedWindow(Distributed):
    """NCCL on tensors that are registered with it as symmetric windows."""

    def set_up(self, count):
        self.memory = peers.NcclMemory(self.ranks)
        self.input, self.output = self.memory.make(lambda: (self.empty(count), self.empty(count)))

    def close(self):
        self.memory.close()
        super().close()
        self.memory = None


class Row(table.Row):
    """The results of one operation at one size."""

    def __init__(self, operation, size, world):
        super().__init__(size, world)
        self.operation = operation
        #: Microseconds a call by phase, of ours over hosts.
        self.phases = None

    def bandwidth(self, name):
        """Bus bandwidth in GB/s."""
        return OPERATIONS[self.operation](self.world) * self.size / self.microseconds(name) / 1e3

    def to_json(self):
        found = self.figures(lambda name: {"busbw_gb_s": self.bandwidth(name)})
        whole = {"operation": self.operation, "bytes": self.size}
        whole |= {"phases_us": self.phases} if self.phases else {}
        return {**whole, "figures": found, "missing": self.missing}


def data(torch, like, rank):
    """A rank's input: small integers, whose sums are exact in every type except those of 8 bits."""
    values = torch.arange(like.numel(), device=like.device) % 5 + rank % 8
    return values.to(like.dtype)


def expected(torch, operation, rank, world, case):
    """The correct output of a case."""
    everyone = [data(torch, case.input, each) for each in range(world)]
    if operation == "broadcast":
        return everyone[0]
    if operation == "all_gather":
        return torch.cat(everyone)
    if operation == "all_to_all":
        return torch.cat([each.chunk(world)[rank] for each in everyone])
    total = sum(each.to(torch.float64) for each in everyone).to(case.input.dtype)
    return total if operation == "all_reduce" else total.chunk(world)[rank]


def prepare(ranks, options, contender, row):
    """A case, checked, and its forms. Raises ValueError on every rank if that fails on any."""
    torch = ranks.torch

    step = ranks.insist

    def fill():
        case.output.fill_(99)
        case.input.copy_(data(torch, case.input, ranks.rank))

    def count_wrong():
        right = expected(torch, row.operation, ranks.rank, ranks.world, case)
        return int((case.output != right).sum())

    case = step(lambda: contender.case(row.operation, row.size // contender.dtype.itemsize))
    step(fill)
    step(case.call)
    if wrong := sum(ranks.gather(step(count_wrong))):
        raise ValueError(f"{wrong:,} wrong elements, over all ranks")
    # Zeros stay zeros when they are summed in place.
    step(lambda: case.input.zero_())
    return case, timing.forms(ranks, case.call, row.size, options)


def measure(ranks, options, contenders, operation, bytes_, step):
    """Measures all contenders with one operation at one size."""
    row = Row(operation, bytes_, ranks.world)
    running = rounds.prepare_all(contenders, row, lambda contender: prepare(ranks, options, contender, row))

    def report_progress(what):
        step(f"{operation}, {table.show_size(bytes_)}, {what}")

    rounds.measure(ranks, options, running, row, lambda case: None, report_progress)
    rounds.confirm(ranks, contenders, running, row)
    return row


def plans_of_ours(ranks, dtype, count, pools, device_memory=(), sm_budgets=()):
    """symmpool's contenders by name, each as a function that sets it up: in windows and in ordinary memory,
    by default, with each of these amounts of device memory, and with each of these SM budgets."""
    kinds = {"ours": True, "ours ordinary": False}
    limits = {"": {}}
    limits |= {f" {table.show_size(each)}": {"device_memory_bytes": each} for each in device_memory}
    limits |= {f" {each} SMs": {"sm_budget": each} for each in sm_budgets}

    def make(name, in_windows, limit):
        return Ours(name, ranks, dtype, count, pools.get(ranks), in_windows, **limit)

    return {
        name + limited: partial(make, name + limited, in_windows, limit)
        for name, in_windows in kinds.items()
        for limited, limit in limits.items()
    }


def set_up(ranks, dtype, count, only, device_memory=(), sm_budgets=()):
    """The contenders that could be set up, symmpool first, and by name the reasons why others could not."""
    pools = peers.Pools()
    others = (
        {"NCCL": Distributed, "NCCL window": DistributedWindow} if ranks.on_cuda else {"gloo": Distributed}
    )
    if unknown := [each for each in only or [] if each not in others]:
        raise SystemExit(f"--peers {unknown[0]}: there are {', '.join(others)}")
    plans = plans_of_ours(ranks, dtype, count, pools, device_memory, sm_budgets)
    for name, kind in others.items():
        if only is None or name in only:
            plans[name] = partial(kind, name, ranks, dtype, count)
    found, missing = ranks.attempt_each(plans)
    return found, missing, pools


def cells(rows, ours, others):
    """The table's heading and lines. `ours` and `others` are names of contenders."""
    names = [*ours, *others]
    ratios = [(own, other) for own in ours for other in others]
    heading = ["operation", "size", *names, "busbw GB/s", *[f"{b}/{a}" for a, b in ratios]]
    lines = []
    for row in rows:
        times = {name: row.microseconds(name) for name in names}
        first = row.bandwidth(ours[0]) if ours and times[ours[0]] else None
        quotients = [times[b] / times[a] if times[a] and times[b] else None for a, b in ratios]
        shown = [table.figure(value) for value in (first, *quotients)]
        lines.append([row.operation, table.show_size(row.size), *map(row.shown, names), *shown])
    return heading, lines


def run(options, arguments):
    names = options.operations
    ranks = session.connect(options)
    dtype = getattr(ranks.torch, session.DTYPES[options.dtype])
    small = "64K,1M,16M,64M,256M" if ranks.on_cuda else "4K,64K,1M"
    sizes = options.sizes or size_list(small)
    session.require_parts(options, sizes, dtype, ranks.world)
    if options.device_memory and not ranks.on_cuda:
        raise SystemExit("--device-memory: communicators on the CPU take no device's memory")
    if options.sm_budgets and not ranks.on_cuda:
        raise SystemExit("--sm-budgets: communicators on the CPU take no SMs")
    count = max(sizes) // dtype.itemsize
    requested = session.requested_peers(options)
    contenders, missing, pools = set_up(
        ranks, dtype, count, requested, options.device_memory, options.sm_budgets
    )
    progress = session.Progress(len(names) * len(sizes) * (options.rounds + 1), ranks.rank == 0)
    try:
        rows = [
            measure(ranks, options, contenders, operation, size, progress.step)
            for operation in names
            for size in sizes
        ]
    finally:
        progress.close()
    facts = session.describe("collectives", ranks, arguments, contenders, missing)

    def print_report(ours, others):
        print(f"collectives of {options.dtype}, {session.where(facts)}")
        forms = session.describe_forms(facts)
        print(f"microseconds per call, slowest rank, median of rounds; ordinary memory is torch's{forms}\n")
        print(table.format_table(*cells(rows, ours, others)))
        session.print_missing(facts, rows, lambda row: f"{row.operation} of {table.show_size(row.size)}")
        session.write(options, facts, rows)
        if options.plot:
            title = f"collectives of {options.dtype}, {session.devices(facts)}"
            panels = plot.panels_by(rows, lambda row: row.operation)
            plot.save(options.plot, panels, ours, others, title, facts, axis="bytes of the whole")

    return session.end(ranks, contenders, pools, rows, print_report)
