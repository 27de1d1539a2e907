"""`bench order`: collectives as programs call them, compared with a fresh communicator, and with NCCL in the
same order.

The other benchmarks measure a communicator that is alone in its process and has made its calls before
anything was captured. Programs capture small calls first, have several groups that rest, send messages, and
train after they have decoded. Here each order makes its calls anew, with a new communicator in each round.
Then the call is timed: in a graph, by the device.

A figure is the ratio to the fresh order. It should be 1: no order is to cost more than 3%, or 0.3 us.
Calls of a communicator that is alone overlap a little where one follows the other. In programs kernels stand
between them. So there are two orders with a kernel before each call: the second is compared with the first.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
from datetime import timedelta
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from symmpool.bench import peers, session, table, timing
from symmpool.bench.arguments import add_measuring, comma_separated, positive, size_list
from symmpool.bench.order_programs import (
    EXPERTS,
    FRESH,
    HIDDEN,
    KERNELS,
    KERNELS_RESTING,
    MAX_CALLS,
    Library,
    Program,
    buffers,
    calls_for,
    of_nccl,
    ours,
    time_replays,
)

if TYPE_CHECKING:
    import torch
    import torch.distributed

    from symmpool._symmpool import Pool

#: Bytes of tokens for experts at most: a buffer for more takes much of a device.
MAX_EXPERTS = 64 << 20
#: How much more than fresh is within the noise: a ratio, or microseconds.
RATIO, MICROSECONDS = 0.03, 0.3
#: Seconds after which a cell that does not end ends the process, with where its threads are.
CELL_LIMIT = 120

#: The orders by name: what was done before the call that is timed.
ORDERS = {
    FRESH: "a communicator that is alone, and whose call was made before it was captured",
    "small first": "a small call of the communicator is captured first",
    "all captured": "the call itself is captured, and none was made outside of graphs before",
    "1 rests": "one other communicator has captured a call, and rests",
    "3 rest": "three others",
    "7 rest": "seven others",
    "same graph": "each call follows a small one of another communicator in the graph",
    KERNELS: "each call follows a kernel of the program in the graph, whose time is taken off",
    KERNELS_RESTING: "the same beside three communicators that rest",
    "eager between": "an eager call between two replays",
    "after tp": "another communicator has decoded with tensor parallelism, this one trained as FSDP2",
    "messages": "the communicator has sent messages (last, as what they leave may stay)",
}
#: Orders that are compared with another one than fresh, as they differ from that one alone.
BASES = {KERNELS_RESTING: KERNELS}
#: Those that are measured behind all others.
LAST = ("messages",)
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", EXPERTS)
MEMORIES = ("torch", "windows")
QUICK = {"sizes": "4K,4M,64M", "rounds": 3, "replays": 5}
USUAL = {"cuda": "4K,64K,1M,4M,16M,64M,256M", "cpu": "4K,64K"}


def add_options(commands: Any) -> None:
    command = commands.add_parser(
        "order", help="calls in the order in which programs make them, compared with fresh ones"
    )
    command.add_argument(
        "--sizes", type=size_list, help=f"bytes of the whole tensor; default {USUAL['cuda']}"
    )
    for name, known in (("operations", OPERATIONS), ("memories", MEMORIES), ("orders", tuple(ORDERS))):
        command.add_argument(
            f"--{name}", type=partial(names_of, known), default=list(known), help="default: all of them"
        )
    command.add_argument("--dtype", choices=session.DTYPES, default="bf16")
    command.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    command.add_argument("--peers", help="only these: NCCL (not where ranks share a GPU); or none")
    command.add_argument(
        "--quick", action="store_true", help=f"{QUICK['sizes']}, in {QUICK['rounds']} rounds"
    )
    command.add_argument(
        "--seconds", type=positive, help="begin no cell after so many, and report what was measured"
    )
    add_measuring(command)
    command.set_defaults(rounds=5, timeout=60)


def names_of(known: tuple[str, ...], text: str) -> list[str]:
    names = comma_separated(text)
    if not names or any(name not in known for name in names):
        raise argparse.ArgumentTypeError(f"{text!r}: names of {', '.join(known)} are needed")
    return names


class Row(table.Row):
    """The results of one operation at one size, in one memory. A contender is an order, ours or NCCL's."""

    def __init__(self, operation: str, memory: str, size: int, world: int):
        super().__init__(size, world)
        self.operation, self.memory = operation, memory
        #: How the call is made in each order, in words.
        self.explained: dict[str, str] = {}

    def ratio(self, name: str, of: str) -> float | None:
        """The median of the ratios of the rounds; of medians where rounds do not alternate."""
        own, other = self.rounds.get(name), self.rounds.get(of)
        if not own or not other:
            return None
        if len(own) == len(other) and not name.endswith(LAST):
            return median(a / b for a, b in zip(own, other, strict=True))
        return median(own) / median(other)

    def costs(self, name: str) -> bool:
        """Whether an order costs more than the noise."""
        base = BASES.get(name, FRESH)
        ratio, own, other = self.ratio(name, base), self.microseconds(name), self.microseconds(base)
        return ratio is not None and ratio > 1 + RATIO and own - other > MICROSECONDS

    def to_json(self) -> dict[str, Any]:
        def more(name: str) -> dict[str, Any]:
            fresh = nccl(FRESH) if name.startswith("NCCL") else FRESH
            found: dict[str, Any] = {"to_fresh": self.ratio(name, fresh)}
            if name in BASES:
                found["base"] = BASES[name]
            if name in self.explained:
                found["explained"] = self.explained[name]
            return found

        whole = {"operation": self.operation, "memory": self.memory, "bytes": self.size}
        return {**whole, "figures": self.figures(more), "missing": self.missing}


def nccl(order: str) -> str:
    return f"NCCL, {order}"


def connect(options: argparse.Namespace) -> tuple[peers.Ranks, bool]:
    """This process's ranks, and whether each has a GPU of its own. Ranks that share one meet by gloo, as NCCL
    refuses them."""
    torch, device = session.find_device(options, "--nproc-per-node 2 -m symmpool bench order")
    has_own = device.type == "cuda" and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=options.timeout)
    if has_own:
        torch.distributed.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        torch.distributed.init_process_group("gloo", timeout=timeout)
    return peers.Ranks(torch, device, options.timeout), has_own


class Bench:
    def __init__(
        self,
        options: argparse.Namespace,
        ranks: peers.Ranks,
        pool: Pool,
        dtype: torch.dtype,
        groups: list[torch.distributed.ProcessGroup] | None,
    ):
        self.options, self.ranks, self.pool, self.dtype, self.groups = options, ranks, pool, dtype, groups
        self.begun = time.monotonic()
        self.done, self.left_out = 0, 0

    def say(self, text: str) -> None:
        if self.ranks.rank == 0:
            print(text, file=sys.stderr, flush=True)

    def is_over(self) -> bool:
        """Whether no cell is to be begun any more. The same on every rank."""
        late = self.options.seconds and time.monotonic() - self.begun > self.options.seconds
        return any(self.ranks.gather(bool(late)))

    def libraries(self, operation: str, memory: str) -> list[Library]:
        found = [ours(self.ranks, self.pool, self.dtype, memory)]
        # NCCL's figures are on torch's memory, which its groups take as it is.
        if self.groups and memory == "torch" and operation != EXPERTS:
            found.append(of_nccl(self.ranks, self.groups, self.dtype))
        return found

    def has_experts(self, size: int) -> bool:
        """Whether a size is one of whole tokens, and of no more than a buffer is made for in each round."""
        floats = self.dtype.is_floating_point and self.dtype.itemsize in (2, 4)
        return floats and size % (HIDDEN * self.dtype.itemsize) == 0 and size <= MAX_EXPERTS

    def one(self, program: Program, order: str, calls: int) -> tuple[float, str | None]:
        """Microseconds of a call in an order, which is made anew; and how it is made."""
        ranks = self.ranks
        program.count = 0
        made = ranks.insist(lambda: program.make(order, calls))
        # Short graphs vary more, and cost little.
        replays = self.options.replays * (4 if calls == MAX_CALLS else 1)
        took = ranks.insist(lambda: time_replays(ranks, made, replays))
        explained = made.explained[0] if made.explained else None
        # Graphs end before communicators, on all ranks before the next ones are made.
        made.forget()
        ranks.synchronize()
        ranks.insist(program.library.end)
        return max(ranks.gather(took)), explained

    def cell(self, row: Row, orders: list[str]) -> None:
        """Times all orders in alternating rounds."""
        ranks, options = self.ranks, self.options
        # A collective that hangs ends the process.
        faulthandler.dump_traceback_later(CELL_LIMIT + options.rounds * options.timeout, exit=True)
        count, calls = row.size // self.dtype.itemsize, calls_for(row.size)
        for library in self.libraries(row.operation, row.memory):
            name = (lambda order: order) if library.name == "ours" else nccl
            read, written = ranks.insist(partial(buffers, library, row.operation, count, ranks.world))
            self.pool.commit()
            program = Program(ranks, library, row.operation, read, written)
            self.pool.commit()
            running = list(orders)
            for number in range(options.rounds):
                for order in timing.order(list(running), number):
                    try:
                        took, explained = self.one(program, order, calls)
                    except ValueError as why:
                        row.missing[name(order)] = str(why)
                        row.rounds.pop(name(order), None)
                        running.remove(order)
                        continue
                    row.rounds.setdefault(name(order), []).append(took)
                    if explained is not None:
                        row.explained[name(order)] = explained
            del program, read, written
        faulthandler.cancel_dump_traceback_later()
        self.done += 1
        figures = [f"{order} {shown(row, order)}" for order in orders]
        where = f"{row.operation}, {row.memory}, {table.show_size(row.size)}"
        self.say(f"[{self.done}, {time.monotonic() - self.begun:.0f} s] {where}: {', '.join(figures)}")

    def run(self) -> list[Row]:
        options = self.options
        rows: dict[Any, Row] = {}
        for last in (False, True):
            orders = [order for order in options.orders if (order in LAST) == last]
            if FRESH not in orders and not last:
                orders.insert(0, FRESH)
            for operation in options.operations if orders else []:
                for size in options.sizes:
                    if operation == EXPERTS and not self.has_experts(size):
                        continue
                    for memory in options.memories:
                        key = (operation, memory, size)
                        if self.is_over():
                            self.left_out += 1
                            continue
                        row = rows.setdefault(key, Row(*key, self.ranks.world))
                        self.cell(row, orders)
        for (operation, memory, size), row in rows.items():
            beside = rows.get((operation, "torch", size))
            if memory != "torch" and beside is not None:
                named = {name: each for name, each in beside.rounds.items() if name.startswith("NCCL")}
                row.rounds |= named
        return list(rows.values())


def shown(row: Row, order: str) -> str:
    """A time in microseconds for the fresh order, and otherwise the ratio to that, or to the order's base."""
    took, ratio = row.microseconds(order), row.ratio(order, BASES.get(order, FRESH))
    if took is None:
        return "-"
    if order == FRESH or ratio is None:
        return f"{table.figure(took)} us"
    return f"{ratio:.2f}{'!' if row.costs(order) else ''}"


def cells(rows: list[Row], orders: list[str], with_nccl: bool) -> tuple[list[str], list[list[str]]]:
    """The table's heading and lines: fresh in microseconds, other orders as ratios (`shown`), and behind each
    NCCL's time in the same order divided by ours."""
    heading = ["operation", "memory", "size"]
    for order in orders:
        heading += [f"{order}, us" if order == FRESH else order, *(["NCCL/ours"] if with_nccl else [])]
    lines = []
    for row in rows:
        line = [row.operation, row.memory, table.show_size(row.size)]
        for order in orders:
            took = row.microseconds(order)
            line.append(table.figure(took) if order == FRESH else shown(row, order))
            if with_nccl:
                theirs = row.microseconds(nccl(order))
                line.append(table.figure(theirs / took if took and theirs else None))
        lines.append(line)
    return heading, lines


def worst(rows: list[Row], orders: list[str]) -> list[str]:
    """A line for each order: the largest ratio, where it is, and in how many cells it is above the noise."""
    lines = []
    for order in orders:
        ratios = [(row.ratio(order, BASES.get(order, FRESH)), row) for row in rows]
        found = [(ratio, row) for ratio, row in ratios if ratio is not None]
        if order == FRESH or not found:
            continue
        ratio, row = max(found, key=lambda each: each[0])
        many = sum(each.costs(order) for _, each in found)
        where = f"{row.operation}, {row.memory}, {table.show_size(row.size)}"
        lines.append(
            f"{order}: at most {ratio:.2f} ({where}); more than the noise in {many} of {len(found)} cells"
        )
    return lines


def prepare(options: argparse.Namespace, device: str) -> None:
    """Fills in what was left out."""
    if options.quick:
        options.sizes = options.sizes or size_list(QUICK["sizes"] if device == "cuda" else USUAL["cpu"])
        options.rounds = min(options.rounds, QUICK["rounds"])
        options.replays = min(options.replays, QUICK["replays"])
    options.sizes = options.sizes or size_list(USUAL[device])


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    ranks, has_own = connect(options)
    prepare(options, ranks.device.type)
    dtype = getattr(ranks.torch, session.DTYPES[options.dtype])
    session.require_parts(options, options.sizes, dtype, ranks.world)
    wanted = session.requested_peers(options)
    if unknown := [name for name in wanted or [] if name != "NCCL"]:
        raise SystemExit(f"--peers {unknown[0]}: there is NCCL")
    groups, missing = None, {}
    if wanted is None or "NCCL" in wanted:
        if has_own:
            groups = [ranks.dist.group.WORLD, *(ranks.dist.new_group() for _ in range(7))]
            for group in groups:
                ranks.dist.all_reduce(ranks.torch.zeros(1, device=ranks.device), group=group)
        else:
            missing["NCCL"] = "it needs a GPU for each rank"
    pools = peers.Pools()
    pool = ranks.insist(lambda: pools.get(ranks))
    bench = Bench(options, ranks, pool, dtype, groups)
    rows = bench.run()
    orders = [order for order in ORDERS if any(order in row.rounds for row in rows)]
    facts = session.describe("order", ranks, arguments, dict.fromkeys(orders), missing)
    unwritten = False
    if ranks.rank == 0:
        print(f"calls in the order of programs, {options.dtype}, {session.where(facts)}")
        print("fresh: microseconds of a call in a graph, slowest rank, median of rounds; others: the ratio")
        print(f"(of {KERNELS_RESTING!r} to {KERNELS!r}),")
        print(f"with ! where that is more than the noise ({RATIO:.0%} and {MICROSECONDS} us)\n")
        print(table.format_table(*cells(rows, orders, bool(groups))))
        print("", *worst(rows, orders), sep="\n")
        if bench.left_out:
            print(f"\n{bench.left_out} cells were left out after {options.seconds} s")
        session.print_missing(
            facts, rows, lambda row: f"{row.operation}, {row.memory}, {table.show_size(row.size)}"
        )
        try:
            session.write(options, facts, rows)
        except OSError as error:
            print(f"not everything was written: {error}", file=sys.stderr)
            unwritten = True
    ranks.meet()
    bench.groups = None
    del bench.pool
    pools.close()
    ranks.dist.destroy_process_group()
    ours_missing = any(name in row.missing for row in rows for name in ORDERS)
    return 1 if unwritten or ours_missing or not rows else 0
