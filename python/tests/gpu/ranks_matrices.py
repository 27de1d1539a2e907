"""Random traffic matrices through our all-to-alls and through torch.distributed's.

    python -m torch.distributed.run --nproc-per-node N python/tests/gpu/ranks_matrices.py [--count 10000]

With one GPU for each rank, compared with NCCL; with `--device cpu`, on the CPU, compared with gloo. Every
matrix goes through `all_to_all_single` and, with splits in the device's memory, through `all_to_all_v`; every
byte of both outputs, and what lies around them, is compared on the device with what torch.distributed
brought. The host asks once a batch. Exits with 1 if anything was wrong; a line says which matrix, and
`--begin THAT --count 1` runs it alone."""

import collections
import datetime
import math
import random
import sys
import time
from dataclasses import dataclass

import ranks_start
import torch
import torch.distributed as dist

import symmpool

#: What memory holds that nothing has been written to.
POISON = 0xA5
#: Bytes that are watched before and behind an output, at least.
AROUND = 64
#: Types, and what torch.distributed calls those that gloo or NCCL does not know.
DTYPES = {
    torch.uint8: torch.uint8,
    torch.int8: torch.int8,
    torch.float16: torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.int32: torch.int32,
    torch.int64: torch.int64,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
#: Shapes of rows.
ROWS = [(), (), (3,), (2, 5), (64,)]
ALGORITHMS = ["auto", "lamport", "direct", "ring"]


def matrix(kind, world, most, luck):
    """Rows that each rank sends to each: none more than `most`."""
    special, other = luck.randrange(world), luck.randrange(world)

    def some():
        return luck.randint(0, most)

    def count(a, b):
        return {
            "even": lambda: most,
            "any": some,
            "zero row": lambda: 0 if a == special else some(),
            "zero column": lambda: 0 if b == special else some(),
            "one-hot": lambda: some() if b == special else 0,
            "one pair": lambda: most if (a, b) == (special, other) else 0,
            "all zero": lambda: 0,
            "half empty": lambda: some() * luck.randrange(2),
            "skewed": lambda: some() >> 2 * ((a + b) % world),
            "to itself alone": lambda: some() if a == b else 0,
        }[kind]()

    return [[count(a, b) for b in range(world)] for a in range(world)]


KINDS = [
    "even",
    "any",
    "zero row",
    "zero column",
    "one-hot",
    "one pair",
    "all zero",
    "half empty",
    "skewed",
    "to itself alone",
]


@dataclass
class Case:
    """One matrix and how it is sent: but for the last three, the same on every rank."""

    nth: int
    kind: str
    counts: list
    dtype: torch.dtype
    row: tuple
    algorithm: str
    #: Whether torch.distributed is given no splits, as parts are equal.
    unsplit: bool
    #: One of "call", "module" and "async".
    form: str
    wide: bool
    #: Rows that each rank's output holds in `all_to_all_v`.
    capacities: list
    #: Whether input and output are windows, and elements from an aligned place.
    windows: tuple
    shifts: tuple
    written: bool

    @classmethod
    def make(cls, seed, nth, rank, world, most_bytes):
        luck = random.Random(f"{seed}/{nth}")
        dtype, row = luck.choice(list(DTYPES)), luck.choice(ROWS)
        # Sizes of every magnitude.
        pair = int(2 ** luck.uniform(0, math.log2(most_bytes)))
        kind = KINDS[nth % len(KINDS)]
        counts = matrix(kind, world, pair // (dtype.itemsize * math.prod(row)), luck)

        def capacity(exact):
            return luck.choice([exact, exact, exact + exact // 3 + 1, exact + 100, exact - exact // 4])

        capacities = [capacity(sum(column)) for column in zip(*counts)]
        algorithm = luck.choice(ALGORITHMS)
        form = luck.choice(["call", "module", "async"]) if algorithm == "auto" else "call"
        unsplit, wide = kind == "even" and luck.random() < 0.5, luck.random() < 0.5
        own = random.Random(f"{seed}/{nth}/{rank}")
        windows = (own.random() < 0.5, own.random() < 0.5)
        shifts = tuple(own.choice([0, 1, own.randrange(32)]) for _ in range(2))
        written = own.random() < 0.7
        how = (algorithm, unsplit, form, wide, capacities, windows, shifts, written)
        return cls(nth, kind, counts, dtype, row, *how)

    def overflows(self):
        columns = zip(*self.counts)
        return any(sum(column) > room for column, room in zip(columns, self.capacities))


class Runner:
    """The buffers of a rank, and what it has found."""

    def __init__(self, device, seed, most_bytes):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device, self.seed, self.most_bytes = device, seed, most_bytes
        self.on_cuda = device.type == "cuda"
        self.pool = symmpool.Pool(device=device)
        # Room for a column of the largest, a third more, 100 rows, and shifts.
        room = self.world * most_bytes * 4 // 3 + 256 * 8 * 64
        self.inputs = [self.buffer(room, window) for window in (False, True)]
        self.outputs = [self.buffer(room, window) for window in (False, True)]
        self.theirs = self.buffer(room, False)
        self.pool.commit()
        self.comms = {name: symmpool.Communicator(self.pool, all_to_all=name) for name in ALGORITHMS}
        # That of calls of the module.
        symmpool.barrier(self.pool)
        self.comms["module"] = symmpool.communicator(self.pool, str(device))
        self.cases, self.wrong, self.kinds = 0, 0, collections.Counter()
        # Ranks have other data.
        torch.manual_seed(1000 * seed + self.rank)

    def buffer(self, count, window):
        if window:
            return self.pool.empty(count, torch.uint8)
        return torch.empty(count, dtype=torch.uint8, device=self.device)

    def batch(self, begin, end):
        """Runs matrices, then asks what came of them."""
        rank, world = self.rank, self.world
        cases = [Case.make(self.seed, nth, rank, world, self.most_bytes) for nth in range(begin, end)]
        for buffer in self.inputs:
            buffer.random_(0, 256)
        sends = [case.counts[rank] for case in cases]
        receives = [[row[rank] for row in case.counts] for case in cases]
        offsets = [[sum(row[:at]) for at in range(world)] for row in receives]
        splits = {wide: self.numbers(sends, wide) for wide in (False, True)}
        # Splits and offsets that calls write, by case.
        observed = {wide: torch.full_like(of, -1).repeat(2, 1, 1) for wide, of in splits.items()}
        wrong = torch.zeros(len(cases), 2, dtype=torch.int64, device=self.device)
        overflows = collections.Counter()
        for at, case in enumerate(cases):
            self.run(case, receives[at], splits[case.wide][at], observed[case.wide][:, at], wrong[at])
            self.kinds[case.kind] += 1
        for case in cases:
            overflows[case.algorithm] += case.overflows()
        for name, comm in self.comms.items():
            self.settle(name, comm, overflows[name], cases)
        # The only place where the host waits for the device.
        found, observed = wrong.tolist(), {wide: of.tolist() for wide, of in observed.items()}
        for at, case in enumerate(cases):
            for what, differ in zip(("all_to_all_single", "all_to_all_v"), found[at]):
                self.judge(case, differ == 0, f"{what}: {differ} bytes differ")
            if case.written:
                came, where = (part[at] for part in observed[case.wide])
                right = came == receives[at] and where == offsets[at]
                self.judge(case, right, f"output splits {came}, offsets {where}")

    def numbers(self, rows, wide):
        kind = torch.int64 if wide else torch.int32
        return torch.tensor(rows, dtype=kind).to(self.device)

    def settle(self, name, comm, expected, cases):
        """On a device an overflow is reported here; on the host each call has reported it."""
        observed = 0
        try:
            comm.synchronize()
        except symmpool.OverflowError as error:
            observed = 1
            text = str(error)
            if expected > 1 and f"The last of {expected} such calls" not in text:
                observed = -1
                print(f"rank {self.rank}: {expected} calls overflowed: {text}", flush=True)
        if self.on_cuda and observed != min(expected, 1):
            self.judge(cases[0], False, f"the batch, {name}: {expected} overflows, reported {observed}")

    def run(self, case, receive, splits, observed, wrong):
        send = case.counts[self.rank]
        size = case.dtype.itemsize * math.prod(case.row)
        shifts = [shift * case.dtype.itemsize for shift in case.shifts]
        capacity = case.capacities[self.rank]
        input = self.view(self.inputs[case.windows[0]], shifts[0], sum(send), case)
        before = AROUND + shifts[1]
        region = slice(0, before + max(sum(receive), capacity) * size + AROUND)
        ours, theirs = self.outputs[case.windows[1]][region], self.theirs[region]
        ours.fill_(POISON)
        theirs.fill_(POISON)
        output = self.view(ours, before, sum(receive), case)
        named = DTYPES[case.dtype]
        their_output = self.view(theirs, before, sum(receive), case).view(named)
        sizes = (None, None) if case.unsplit else (receive, send)
        dist.all_to_all_single(their_output, input.view(named), *sizes)
        self.single(case, output, input, *sizes)
        torch.sum(ours != theirs, 0, out=wrong[0])

        ours.fill_(POISON)
        output = self.view(ours, before, capacity, case)
        comm = self.comms[case.algorithm]
        out = (observed[0], observed[1]) if case.written else (None, None)
        try:
            comm.all_to_all_v(output, input, splits, *out)
            overflowed = False
        except symmpool.OverflowError:
            overflowed = True
        if overflowed != (not self.on_cuda and case.overflows()):
            self.judge(case, False, f"overflow reported: {overflowed}")
        # Rows that had no room are not written.
        theirs[before + min(sum(receive), capacity) * size :].fill_(POISON)
        torch.sum(ours != theirs, 0, out=wrong[1])

    def single(self, case, output, input, receive, send):
        if case.form == "call":
            self.comms[case.algorithm].all_to_all_single(output, input, receive, send)
        else:
            later = case.form == "async"
            run = symmpool.all_to_all_single
            work = run(output, input, receive, send, group=self.pool, async_op=later)
            if later:
                work.wait()

    def view(self, buffer, at, rows, case):
        size = case.dtype.itemsize * math.prod(case.row)
        return buffer[at : at + rows * size].view(case.dtype).view(rows, *case.row)

    def judge(self, case, right, what):
        self.cases += 1
        if right:
            return
        self.wrong += 1
        if self.wrong <= 20:
            print(f"WRONG rank {self.rank}: {what}: {case}", flush=True)


def exchange(device, count, begin=0, seed=1, most_bytes=None, batch=200, kind=Runner):
    """Whether all was right, on every rank, with a line for what was not. torch.distributed is
    initialised."""
    most_bytes = most_bytes or (8 << 20) // dist.get_world_size()
    runner = kind(device, seed, most_bytes)
    began = last = time.perf_counter()
    for at in range(begin, begin + count, batch):
        runner.batch(at, min(at + batch, begin + count))
        now = time.perf_counter()
        if runner.rank == 0 and now - last > 10:
            last = now
            print(f"      {at + batch - begin} of {count} after {now - began:.0f} s", flush=True)
    spent = time.perf_counter() - began
    wrong = torch.tensor([runner.wrong], device=device)
    dist.all_reduce(wrong)
    wrong = int(wrong)
    if runner.rank == 0:
        kinds = ", ".join(f"{number} {name}" for name, number in runner.kinds.items())
        peer = dist.get_backend(dist.group.WORLD)
        print(
            f"{'ok   ' if not wrong else 'WRONG'} {count} matrices ({kinds}) compared with {peer}, "
            f"{runner.world} ranks, {runner.cases} comparisons a rank, {wrong} wrong, in "
            f"{spent:.1f} s ({count / spent:.0f} matrices a second)",
            flush=True,
        )
    return wrong == 0


def main():
    it = ranks_start.parser("Random matrices through our all-to-alls and torch's.", 10_000, "matrices")
    it.add_argument("--most-bytes", type=int, help="of a pair (default: 8 MiB by ranks)")
    options = it.parse_args()
    device = ranks_start.device_of(options.device)
    if device is None:
        return
    backend = ranks_start.PEER if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=120))
    right = exchange(device, options.count, options.begin, options.seed, options.most_bytes)
    dist.barrier()
    dist.destroy_process_group()
    if not right:
        sys.exit(1)


if __name__ == "__main__":
    main()
