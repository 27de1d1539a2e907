"""`python -m symmpool bench alltoallv`: all-to-alls of traffic matrices, compared with
torch.distributed and torch's symmetric memory."""

import argparse
from functools import partial
from pathlib import Path

import symmpool
from symmpool import _symmpool
from symmpool.bench import matrices, peers, plot, rounds, session, table, timing
from symmpool.bench.arguments import add_measuring, bandwidth, comma_separated, imbalance, size_list

#: The bandwidth of a rank's links in GB/s, from which the table's lower bound follows.
LINK = 355.0

#: symmpool's algorithms, by the names that `all_to_all=` takes.
ALGORITHMS = _symmpool.all_to_all_algorithms()

#: Counts on CUDA are multiples of this number of bytes: torch's vdev divides a part among up to 64 blocks
#: equally, and stops the device if that leaves a remainder.
GRAIN = 128


def kinds(text):
    """The kinds of matrices in a comma-separated list."""
    found = comma_separated(text)
    if not found or any(kind not in matrices.KINDS for kind in found):
        raise argparse.ArgumentTypeError(f"{text!r}: there are {', '.join(matrices.KINDS)}")
    return found


def add_options(commands):
    command = commands.add_parser(
        "alltoallv", help="all-to-alls of traffic matrices, compared in the same way"
    )
    command.add_argument("--sizes", type=size_list, help="average bytes that a rank sends: 4K,1M,64M")
    command.add_argument(
        "--matrices",
        type=kinds,
        default=list(matrices.KINDS),
        help=f"a list of {', '.join(matrices.KINDS)} (default: all)",
    )
    command.add_argument(
        "--matrix",
        type=Path,
        metavar="FILE",
        help="a matrix from a file instead: JSON, or one line per row; in bytes (on CUDA multiples of "
        "128), or weights if --sizes is given",
    )
    command.add_argument("--imbalance", type=imbalance, default=1.0, help="of zipf and moe (default 1)")
    command.add_argument("--seed", type=int, default=1, help="of moe")
    command.add_argument("--dtype", choices=session.DTYPES, default="bf16")
    command.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    command.add_argument("--algorithm", default="auto", choices=[*ALGORITHMS, "all"])
    command.add_argument(
        "--link", type=bandwidth, default=LINK, help="GB/s of a rank's links, for the lower bound"
    )
    command.add_argument("--peers", help="only these, by their names in the table: NCCL,vdev; or none")
    add_measuring(command)


class Exchange:
    """One matrix of one contender: a call without arguments, and the tensors that it reads and writes."""

    def __init__(self, input, output, call):
        self.input, self.output, self.call = input, output, call


class Contender:
    """One implementation. `sent` and `received` are the largest numbers of elements in any matrix."""

    def __init__(self, ranks, dtype, sent, received):
        self.ranks, self.dtype = ranks, dtype
        self.torch, self.dist = ranks.torch, ranks.dist
        self.input, self.output = self.make(sent, received)

    def make(self, sent, received):
        return self.empty(sent), self.empty(received)

    def empty(self, count):
        return self.torch.empty(max(count, 1), dtype=self.dtype, device=self.ranks.device)

    def parts(self, counts):
        """This rank's send and receive counts, and the parts of the tensors that they fill."""
        send = counts[self.ranks.rank]
        receive = [row[self.ranks.rank] for row in counts]
        return send, receive, self.input[: sum(send)], self.output[: sum(receive)]

    def single(self, run, counts):
        """`all_to_all_single` of symmpool or torch.distributed, without lists of counts if all are equal."""
        send, receive, input, output = self.parts(counts)
        if len({count for row in counts for count in row}) == 1:
            return Exchange(input, output, lambda: run(output, input))
        return Exchange(input, output, lambda: run(output, input, receive, send))

    def confirm(self):
        pass

    def close(self):
        self.input = self.output = None


class Ours(Contender):
    """Splits in host memory; both tensors in a pool."""

    def __init__(self, ranks, dtype, sent, received, pools, algorithm):
        self.pool = pools.get(ranks)
        super().__init__(ranks, dtype, sent, received)
        self.comm = symmpool.Communicator(
            self.pool, all_to_all=algorithm, timeout=ranks.timeout, concurrent=1
        )

    def empty(self, count):
        tensor = self.pool.empty(max(count, 1), self.dtype)
        self.pool.commit()
        return tensor

    def exchange(self, counts):
        return self.single(self.comm.all_to_all_single, counts)

    def confirm(self):
        self.comm.synchronize()

    def close(self):
        super().close()
        self.comm = self.pool = None


class OursDevice(Ours):
    """Splits in the device's memory, and an output that may be longer than what is received."""

    def exchange(self, counts):
        send, receive, input, output = self.parts(counts)
        splits = self.torch.tensor(send, dtype=self.torch.int64, device=self.ranks.device)
        comm, whole = self.comm, self.output
        return Exchange(input, output, lambda: comm.all_to_all_v(whole, input, splits))


class Distributed(Contender):
    """torch.distributed's all_to_all_single: NCCL or gloo."""

    def exchange(self, counts):
        return self.single(self.dist.all_to_all_single, counts)


class DistributedWindow(Distributed):
    """NCCL on tensors that are registered with it as symmetric windows."""

    def make(self, sent, received):
        self.memory = peers.NcclMemory(self.ranks)
        return self.memory.make(lambda: super(DistributedWindow, self).make(sent, received))

    def close(self):
        self.memory.close()
        super().close()
        self.memory = None


class Vdev(Contender):
    """torch.ops.symm_mem.all_to_all_vdev, splits in the device's memory, over NVSHMEM."""

    def __init__(self, ranks, dtype, sent, received):
        import torch.distributed._symmetric_memory as symmetric

        if not symmetric.is_nvshmem_available():
            raise ValueError("this build of torch has no NVSHMEM, or finds none")
        if 64 % ranks.world:
            raise ValueError(f"its 64 blocks cannot be divided evenly among {ranks.world} ranks")
        symmetric.set_backend("NVSHMEM")
        self.symmetric = symmetric
        # Long enough for all 64 blocks to be used, whatever is sent.
        super().__init__(ranks, dtype, max(sent, (8 << 20) // dtype.itemsize), received)
        self.group = self.dist.group.WORLD.group_name
        world = ranks.world
        self.splits = symmetric.empty(world, dtype=ranks.torch.int64, device=ranks.device)
        self.came = symmetric.empty((2, world), dtype=ranks.torch.int64, device=ranks.device)
        for tensor in (self.input, self.output, self.splits, self.came):
            symmetric.rendezvous(tensor, self.group)

    def empty(self, count):
        return self.symmetric.empty(max(count, 1), dtype=self.dtype, device=self.ranks.device)

    def exchange(self, counts):
        send, _, input, output = self.parts(counts)
        splits, came, group = self.splits, self.came, self.group
        given = self.torch.tensor(send, dtype=self.torch.int64, device=self.ranks.device)
        run, whole, out = self.torch.ops.symm_mem.all_to_all_vdev, self.input, self.output
        splits.copy_(given)

        def call():
            # One tensor of splits serves all matrices.
            run(whole, out, splits, came, group)

        exchange = Exchange(input, output, call)
        exchange.begin = lambda: splits.copy_(given)
        return exchange

    def close(self):
        super().close()
        self.splits = self.came = None


def set_up(ranks, dtype, sent, received, algorithms, only):
    """The contenders that could be set up, symmpool first, and by name the reasons why others could not."""
    pools = peers.Pools()
    plans = []
    for name in algorithms:
        suffix = "" if name == "auto" else f" {name}"
        plans.append((f"ours{suffix}", Ours, (pools, name)))
        plans.append((f"ours device{suffix}", OursDevice, (pools, name)))
    others = [("gloo", Distributed)]
    if ranks.on_cuda:
        others = [("NCCL", Distributed), ("NCCL window", DistributedWindow), ("vdev", Vdev)]
    if unknown := [name for name in only or [] if name not in dict(others)]:
        raise SystemExit(f"--peers {unknown[0]}: there are {', '.join(dict(others))}")
    plans += [(name, kind, ()) for name, kind in others if only is None or name in only]
    found, missing = ranks.attempt_each(
        {name: partial(kind, ranks, dtype, sent, received, *more) for name, kind, more in plans}
    )
    return found, missing, pools


def pattern(torch, like, rank, begin, count):
    """`count` elements of a rank's input, from element `begin`: small integers, which every type holds."""
    at = torch.arange(begin, begin + count, device=like.device, dtype=torch.int64)
    return ((at * 31 + (at >> 7) * 17 + rank * 41) % 113).to(like.dtype)


def count_wrong(torch, ranks, output, counts):
    """The number of elements of the output that differ from what their rank sent."""
    wrong, at, me = 0, 0, ranks.rank
    for sender, row in enumerate(counts):
        expected = pattern(torch, output, sender, sum(row[:me]), row[me])
        wrong += int((output[at : at + row[me]] != expected).sum())
        at += row[me]
    return wrong


class Row(table.Row):
    """The results of one matrix and size."""

    def __init__(self, kind, size, world, heaviest, link):
        super().__init__(size, world)
        self.kind, self.heaviest = kind, heaviest
        #: The least microseconds that the links need.
        self.bound = heaviest / link / 1e3

    def to_json(self):
        figures = self.figures(lambda name: {"gb_s": self.heaviest / self.microseconds(name) / 1e3})
        return {
            "matrix": self.kind,
            "bytes": self.size,
            "heaviest_bytes": self.heaviest,
            "bound_us": self.bound,
            "figures": figures,
            "missing": self.missing,
        }


def prepare(ranks, options, contender, row, counts):
    """An exchange, checked, and its forms. Raises ValueError on every rank if that fails on any."""
    torch = ranks.torch

    step = ranks.insist

    def make():
        exchange = contender.exchange(counts)
        begin = getattr(exchange, "begin", None)
        if begin:
            begin()
        exchange.input.copy_(pattern(torch, exchange.input, ranks.rank, 0, exchange.input.numel()))
        exchange.output.fill_(99)
        return exchange

    exchange = step(make)
    forms = timing.forms(ranks, exchange.call, row.size, options)
    graphs = [form.run for form in forms if form.name not in (timing.EAGER, timing.LOOP)]
    for run in [exchange.call, *graphs]:
        step(lambda: exchange.output.fill_(120))
        step(run)
        wrong = sum(ranks.gather(step(lambda: count_wrong(torch, ranks, exchange.output, counts))))
        if wrong:
            raise ValueError(f"{wrong:,} wrong elements, over all ranks")
    return exchange, forms


def measure(ranks, options, contenders, row, counts, step):
    """Measures all contenders with one matrix."""
    running = rounds.prepare_all(contenders, row, lambda each: prepare(ranks, options, each, row, counts))

    def begin(exchange):
        getattr(exchange, "begin", lambda: None)()

    def report_progress(what):
        step(f"{row.kind}, {table.show_size(row.size)}, {what}")

    rounds.measure(ranks, options, running, row, begin, report_progress)
    rounds.confirm(ranks, contenders, running, row)


def cells(rows, ours, others):
    """The table's heading and lines."""
    names = [*ours, *others]
    heading = ["matrix", "size", *names, "bound", "of bound", "best contender", "peer/ours"]
    lines = []
    for row in rows:
        _, own = row.best(ours)
        rival, theirs = row.best(others)
        times = [row.shown(name) for name in names]
        share = None if own is None or not row.bound else row.bound / own
        ratio = None if own is None or theirs is None else theirs / own
        end = [table.figure(row.bound), table.figure(share), rival or "-", table.figure(ratio)]
        lines.append([row.kind, table.show_size(row.size), *times, *end])
    return heading, lines


def plans(options, world, itemsize, on_cuda):
    """(kind, average bytes per rank, elements by pair of ranks) of every row to be measured."""
    most = 64 << 20 if on_cuda else 4 << 20
    sizes = options.sizes or [4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
    sizes = options.sizes or [size for size in sizes if size <= most]
    grain = GRAIN // itemsize if on_cuda else 1
    if options.matrix:
        weights = matrices.read(options.matrix, world)
        if not options.sizes:
            size = max(int(sum(map(sum, weights)) / world), 1)
            return [(options.matrix.name, size, matrices.elements(weights, itemsize, grain))]
        return [(options.matrix.name, size, matrices.scale(weights, size, itemsize, grain)) for size in sizes]
    made = {kind: matrices.make(kind, world, options.imbalance, options.seed) for kind in options.matrices}
    return [
        (kind, size, matrices.scale(weights, size, itemsize, grain))
        for kind, weights in made.items()
        for size in sizes
    ]


def run(options, arguments):
    ranks = session.connect(options)
    dtype = getattr(ranks.torch, session.DTYPES[options.dtype])
    algorithms = ALGORITHMS if options.algorithm == "all" else [options.algorithm]
    only = session.requested_peers(options)
    todo = plans(options, ranks.world, dtype.itemsize, ranks.on_cuda)
    # The largest over all ranks: a pool's tensors are equally long on each.
    sent = max(sum(row) for _, _, counts in todo for row in counts)
    received = max(sum(column) for _, _, counts in todo for column in zip(*counts))
    contenders, missing, pools = set_up(ranks, dtype, sent, received, algorithms, only)
    rows = []
    progress = session.Progress(len(todo) * (options.rounds + 1), ranks.rank == 0)
    try:
        for kind, size, counts in todo:
            heaviest = matrices.heaviest(counts) * dtype.itemsize
            row = Row(kind, size, ranks.world, heaviest, options.link)
            measure(ranks, options, contenders, row, counts, progress.step)
            rows.append(row)
    finally:
        progress.close()
    facts = session.describe("alltoallv", ranks, arguments, contenders, missing)

    def print_report(ours, others):
        report(options, facts, rows, ours, others)

    return session.end(ranks, contenders, pools, rows, print_report)


def report(options, facts, rows, ours, others):
    print(f"all-to-all of {options.dtype}, {session.where(facts)}")
    print(
        "microseconds per call, slowest rank, median of rounds; bound: the heaviest rank's bytes at "
        f"{options.link:g} GB/s{session.describe_forms(facts)}\n"
    )
    print(table.format_table(*cells(rows, ours, others)))
    session.print_missing(facts, rows, lambda row: f"for {row.kind}, {table.show_size(row.size)}")
    session.write(options, facts, rows)
    if options.plot:
        title = f"all-to-all of {options.dtype}, {session.devices(facts)}"
        panels = plot.panels_by(rows, lambda row: row.kind)
        plot.save(options.plot, panels, ours, others, title, facts, axis="average bytes that a rank sends")
