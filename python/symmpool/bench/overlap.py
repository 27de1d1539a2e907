"""`bench overlap`: collectives while matrix products run, as in training.

A step is a collective on one stream and matrix products on another; both are finished at its end. The
products take longer than the collective alone, so the time of a step beyond them is what a collective costs a
program that never waits for it: the SMs that its kernels occupy, and memory bandwidth.

With `--backend` symmpool is measured as the backend of a process group of torch.distributed, which chooses
its share of the device by itself. The process has no other communicator of symmpool then, as communicators of
one process share the device.
"""

import argparse
import math
from functools import partial

from symmpool import Communicator
from symmpool.bench import collectives, peers, plot, rounds, session, table, timing
from symmpool.bench.arguments import add_measuring, comma_separated, factor, positive, size_list

#: The name of the products without a collective, which are not a contender.
PRODUCTS = "products"


def concurrent_list(text):
    found = comma_separated(text)
    if not found or not all(each.isascii() and each.isdigit() and 1 <= int(each) <= 16 for each in found):
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers from 1 to 16 are needed")
    return sorted({int(each) for each in found})


def add_options(commands):
    command = commands.add_parser(
        "overlap", help="collectives during matrix products, on GPUs, compared with NCCL"
    )
    command.add_argument("--sizes", type=size_list, help="bytes of the whole tensor; default 4M,32M,128M")
    command.add_argument(
        "--operations",
        type=collectives.operation_list,
        default=["all_reduce", "all_gather", "reduce_scatter"],
        help="default: all_reduce,all_gather,reduce_scatter",
    )
    command.add_argument("--dtype", choices=["f32", "f16", "bf16"], default="bf16", help="default bf16")
    command.add_argument(
        "--concurrent",
        type=concurrent_list,
        default=[1, 2],
        help="of symmpool: its option of this name, one column each (default 1,2)",
    )
    command.add_argument(
        "--windows",
        action="store_true",
        help="tensors in windows, also of NCCL, not in ordinary memory of torch",
    )
    command.add_argument(
        "--backend",
        action="store_true",
        help="measure symmpool as a backend of torch.distributed; --concurrent has no effect",
    )
    command.add_argument(
        "--order", type=positive, default=4096, help="rows of the square matrices (default 4096)"
    )
    command.add_argument(
        "--times",
        type=factor,
        default=2.0,
        help="how many times longer products take than the slowest collective",
    )
    add_measuring(command, calls=[1, 10, 20])
    command.set_defaults(device="cuda")


class Ours(collectives.Ours):
    """A communicator with the option `concurrent`, which limits its share of the device."""

    def __init__(self, name, ranks, dtype, count, pool, in_windows, concurrent):
        self.concurrent = concurrent
        super().__init__(name, ranks, dtype, count, pool, in_windows)

    def communicator(self):
        return Communicator(self.pool, timeout=self.ranks.timeout, concurrent=self.concurrent)


class OnBackend(collectives.Distributed):
    """symmpool as the backend of a process group."""

    def __init__(self, name, ranks, dtype, count, in_windows):
        import symmpool.backend  # noqa: F401

        self.in_windows = in_windows
        self.group = ranks.dist.new_group(backend="cuda:symmpool,cpu:gloo" if ranks.on_cuda else "symmpool")
        super().__init__(name, ranks, dtype, count)

    def empty(self, count):
        if not self.in_windows:
            return super().empty(count)
        device = self.ranks.device
        backend = self.group._get_backend(device)
        return backend.allocate_tensor(count, dtype=self.dtype, device=device)

    def calls(self):
        def on_group(call):
            return lambda *arguments: call(*arguments, group=self.group)

        return {name: on_group(call) for name, call in self.functions().items()}

    def confirm(self):
        # No call may have gone to NCCL.
        from symmpool.backend import backend_counts

        others = {
            operation: counts for operation, counts in backend_counts().items() if set(counts) != {"symmpool"}
        }
        if others:
            raise ValueError(f"calls that symmpool did not serve: {others}")

    def close(self):
        super().close()
        self.group = None


class Row(collectives.Row):
    """The results of one operation at one size."""

    def __init__(self, operation, size, world):
        super().__init__(operation, size, world)
        #: Microseconds of the collective alone, by contender.
        self.alone = {}
        #: The form of the calls in `alone`, by contender.
        self.alone_forms = {}
        #: The number of products in a step.
        self.products = 0

    def cost(self, name):
        """Microseconds of a step beyond those of its products; None if either is missing."""
        step, least = self.microseconds(name), self.microseconds(PRODUCTS)
        return step - least if step and least else None

    def not_longer(self, ours, others):
        """Returns, by name of ours, whether a step takes no longer than beside the best of the others. Empty
        where one has no figure."""
        _, least = self.best(others)
        times = {name: self.microseconds(name) for name in ours}
        return {name: time <= least for name, time in times.items() if time and least}

    def to_json(self):
        def more(name):
            form = self.alone_forms.get(name)
            return {"alone_us": self.alone.get(name), **({"alone_form": form} if form else {})}

        figures = self.figures(more)
        whole = {"operation": self.operation, "bytes": self.size, "products": self.products}
        names = [name for name in self.rounds if name != PRODUCTS]
        ours = [name for name in names if name.split()[0] == "ours"]
        whole["not_longer"] = self.not_longer(ours, [name for name in names if name not in ours])
        return {**whole, "figures": figures, "missing": self.missing}


class Products:
    """Products of two square matrices of random values, as power, and so the clock, depends on values."""

    def __init__(self, ranks, order, dtype):
        torch = self.torch = ranks.torch
        self.left, self.right = (torch.randn(order, order, device=ranks.device).to(dtype) for _ in range(2))
        self.out = torch.empty_like(self.left)

    def run(self, count):
        for _ in range(count):
            self.torch.mm(self.left, self.right, out=self.out)

    def microseconds(self, ranks):
        """Microseconds of one product on the slowest rank."""
        graph = ranks.insist(lambda: timing.capture(self.torch, lambda: self.run(1), 20))
        ranks.meet()
        form = timing.Form(timing.graph_name(20), 20, graph.replay)
        return max(ranks.gather(form.time(self.torch, 9)))


def step_of(torch, side, call, products, count):
    """A function that runs `call` on the stream `side` while `count` products run."""

    def step():
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            call()
        products.run(count)
        main.wait_stream(side)

    return step


def measure(ranks, options, contenders, products, side, operation, bytes_, report_progress):
    """Measures one operation at one size: every collective alone, and then during products, on the stream
    `side`."""
    row = Row(operation, bytes_, ranks.world)

    def progress_of(what):
        report_progress(f"{operation}, {table.show_size(bytes_)}, {what}")

    def measured(running):
        rounds.measure(ranks, options, running, row, lambda case: None, progress_of)

    alone = rounds.prepare_all(
        contenders, row, lambda contender: collectives.prepare(ranks, options, contender, row)
    )
    measured(alone)
    row.alone = {name: row.microseconds(name) for name in alone}
    row.alone_forms = dict(row.forms)
    longest = max(row.alone.values(), default=0)
    row.products = max(1, math.ceil(options.times * longest / products.microseconds(ranks)))

    def forms(call):
        return timing.forms(ranks, call, bytes_, options)

    def with_matmuls(name):
        case = alone[name][0]
        return case, forms(step_of(ranks.torch, side, case.call, products, row.products))

    together = rounds.prepare_all({name: name for name in alone}, row, with_matmuls)
    plain = forms(lambda: products.run(row.products))
    measured({PRODUCTS: (None, plain), **together})
    rounds.confirm(ranks, contenders, together, row)
    return row


def set_up(ranks, options, dtype, count):
    """The contenders that could be set up, symmpool first, and by name the reasons why others could not."""
    pools = peers.Pools()

    def ours(name, concurrent):
        return Ours(name, ranks, dtype, count, pools.get(ranks), options.windows, concurrent)

    if options.backend:
        plans = {"ours": partial(OnBackend, "ours", ranks, dtype, count, options.windows)}
    else:
        names = {"ours" if each == 1 else f"ours {each}": each for each in options.concurrent}
        plans = {name: partial(ours, name, concurrent) for name, concurrent in names.items()}
    plans["NCCL"] = partial(collectives.Distributed, "NCCL", ranks, dtype, count)
    if options.windows:
        plans["NCCL window"] = partial(collectives.DistributedWindow, "NCCL window", ranks, dtype, count)
    found, missing = ranks.attempt_each(plans)
    return found, missing, pools


def cells(rows, names):
    """The table's heading and lines: for each contender the collective alone, and what it costs a step."""
    heading = ["operation", "size", PRODUCTS]
    heading += [f"{name} {what}" for name in names for what in ("alone", "cost")]
    lines = []
    for row in rows:
        pairs = [
            table.with_form(time, forms.get(name))
            for name in names
            for time, forms in ((row.alone.get(name), row.alone_forms), (row.cost(name), row.forms))
        ]
        lines.append([row.operation, table.show_size(row.size), row.shown(PRODUCTS), *pairs])
    return heading, lines


def verdicts(rows, ours, others):
    """A line for each row and each of ours: whether the step takes no longer than beside the best of the
    others."""
    lines = []
    for row in rows:
        rival, least = row.best(others)
        for name, right in row.not_longer(ours, others).items():
            found = f"{row.operation} of {table.show_size(row.size)}: a step beside {name} takes"
            found += f" {table.figure(row.microseconds(name))} us, beside {rival} {table.figure(least)}"
            lines.append(f"{found}: {'not longer' if right else 'LONGER'}")
    return lines


def run(options, arguments):
    ranks = session.connect(options)
    dtype = getattr(ranks.torch, session.DTYPES[options.dtype])
    sizes = options.sizes or size_list("4M,32M,128M")
    session.require_parts(options, sizes, dtype, ranks.world)
    contenders, missing, pools = set_up(ranks, options, dtype, max(sizes) // dtype.itemsize)
    products = ranks.insist(lambda: Products(ranks, options.order, dtype))
    # One for all contenders: streams share a few queues of the device, and which one a stream gets matters.
    side = ranks.torch.cuda.Stream(priority=-1)
    cases = [(operation, size) for operation in options.operations for size in sizes]
    progress = session.Progress(2 * len(cases) * (options.rounds + 1), ranks.rank == 0)
    try:
        rows = [measure(ranks, options, contenders, products, side, *case, progress.step) for case in cases]
    finally:
        progress.close()
    facts = session.describe("overlap", ranks, arguments, contenders, missing)

    def print_report(ours, others):
        print(f"collectives of {options.dtype} during matrix products, {session.where(facts)}")
        forms = session.describe_forms(facts).replace("calls", "steps")
        print(f"microseconds, slowest rank, median of rounds; cost: a step without its products{forms}\n")
        print(table.format_table(*cells(rows, [*ours, *others])))
        print("\n" + "\n".join(verdicts(rows, ours, others)))
        session.print_missing(facts, rows, lambda row: f"{row.operation} of {table.show_size(row.size)}")
        session.write(options, facts, rows)
        if options.plot:
            title = f"collectives of {options.dtype} during matrix products, {session.devices(facts)}"
            panels = plot.panels_by(rows, lambda row: f"{row.operation}, added to the products")
            value, axis = Row.cost, "bytes of the whole"
            plot.save(options.plot, panels, ours, others, title, facts, value, axis)

    return session.end(ranks, contenders, pools, rows, print_report)
