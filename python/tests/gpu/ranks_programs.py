"""Random programs of calls on groups of symmpool's backend.

    python -m torch.distributed.run --nproc-per-node N python/tests/gpu/ranks_programs.py [--count 100]

On a GPU a rank; with `--device cpu` on the CPU. A program is a sequence of collectives and messages on
several groups, of random types and sizes, on tensors of any layout and kind of memory, waited for at once,
later in some order of the rank's own, or never; on GPUs also on several streams. What is to come of a call
follows from what all ranks hold, which each rank makes for itself. Exits with 1 if anything was wrong; a
line says which program, and `--begin THAT --count 1` runs it alone.
"""

import datetime
import random
import sys
import time
from dataclasses import dataclass, field

import ranks_start
import torch
import torch.distributed as dist

import symmpool

REDUCED = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.int8]
MOVED = [*REDUCED, torch.bool, torch.complex64, torch.int16]
#: Of calls that go to gloo and NCCL.
PLAIN = [torch.float32, torch.int64]


TIMEOUT = datetime.timedelta(seconds=60)
#: Steps of a program at most.
LONGEST = 25


@dataclass
class Step:
    """A call, the same on every rank of its group."""

    nth: int
    name: str
    group: int
    dtype: torch.dtype
    count: int
    sizes: list
    op: str
    root: int
    shift: int
    #: Whether it is a call of the module, and not of torch.distributed.
    module: bool


@dataclass
class Made:
    """A call that has been made: tensors that are to hold something, and its Work."""

    step: Step
    pairs: list = field(default_factory=list)
    works: list = field(default_factory=list)
    #: What must stay until it is done.
    held: list = field(default_factory=list)


def values(count, dtype, device, seed, small=False):
    """A rank's data: whole numbers, of which sums and products are exact in every type."""
    at = torch.arange(count, device=device)
    found = (at * (2 * (seed % 50) + 1) + seed) % (2 if small else 3) + (0 if small else -1)
    return found.to(dtype)


class Runner:
    """A rank's groups and memory, and what it has found."""

    def __init__(self, device, seed, most):
        self.device, self.seed, self.most = device, seed, most
        self.me, self.world = dist.get_rank(), dist.get_world_size()
        members = [range(self.world), range(self.world), range(1, self.world), range(self.world - 1)]
        self.groups = []
        for ranks in [ranks for ranks in members if len(ranks) > 1]:
            self.groups.append((dist.new_group(list(ranks), timeout=TIMEOUT), list(ranks)))
        # Each step of a program has a stretch of the windows, the same on every rank.
        self.stretch = 32 * self.world * most
        self.pool = symmpool.Pool(self.groups[0][0], device)
        self.windows = self.pool.empty(LONGEST * self.stretch, torch.uint8)
        self.pool.commit()
        self.wrong, self.calls = 0, 0
        on_cuda = device.type == "cuda"
        self.streams = [torch.cuda.Stream() for _ in range(2)] if on_cuda else []
        # First calls of groups, in one order.
        for group, ranks in self.groups:
            if self.me in ranks:
                dist.all_reduce(torch.zeros(1, device=device), group=group)

    def program(self, nth):
        """The steps, by the program's number."""
        luck = random.Random(f"{self.seed}/{nth}")
        names = [name[3:] for name in dir(self) if name.startswith("do_")]
        if self.streams and ranks_start.SHARED:
            # gloo has none of CUDA tensors.
            names = [name for name in names if KINDS.get(name) != "message"]
        steps = []
        for at in range(luck.randrange(5, LONGEST)):
            name, group = luck.choice(names), luck.randrange(len(self.groups))
            world = len(self.groups[group][1])
            count = int(2 ** luck.uniform(0, self.most.bit_length())) * luck.choice([1, 1, 1, 0])
            if self.streams and KINDS.get(name) in ("rest", "message"):
                # NCCL's: several large ones that wait fill a device by themselves.
                count = min(count, 4096)
            sizes = [luck.choice([count, count // 2, 0, 3]) for _ in range(world)]
            if luck.random() < 0.5:
                sizes = [count] * world
            kinds = {"rest": PLAIN, "message": PLAIN, "reduces": REDUCED}
            dtype = luck.choice(kinds.get(KINDS.get(name, ""), MOVED))
            op = luck.choice(["sum", "prod", "min", "max"])
            root, shift = luck.randrange(world), luck.randrange(1, world)
            module = luck.random() < 0.3
            steps.append(Step(at, name, group, dtype, count, sizes, op, root, shift, module))
        return steps

    def run(self, nth):
        own = random.Random(f"{self.seed}/{nth}/{self.me}")
        self.own, self.nth = own, nth
        pending = []
        for step in self.program(nth):
            group, ranks = self.groups[step.group]
            if self.me not in ranks:
                continue
            self.calls += 1
            made = Made(step)
            self.seeds = [hash((nth, step.nth, rank)) % 1000 for rank in ranks]
            stream = own.choice([None, *self.streams])
            if stream is None:
                self.call(made, group, ranks)
            else:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    self.call(made, group, ranks)
                torch.cuda.current_stream().wait_stream(stream)
            pending.append(made)
            how = own.random()
            if how < 0.4:
                self.wait(made)
            elif how < 0.5:
                waiting = [each for each in pending if each.works]
                own.shuffle(waiting)
                for each in waiting:
                    self.wait(each)
        for made in pending:
            # Results of collectives come to their places without it.
            if KINDS.get(made.step.name) in ("message", "rest") or own.random() < 0.7:
                self.wait(made)
        for group, ranks in self.groups:
            if self.me in ranks:
                dist.barrier(group=group)
        if self.streams:
            torch.cuda.synchronize()
            for group, ranks in self.groups:
                if self.me in ranks:
                    symmpool.communicator(group, str(self.device)).synchronize()
        for made in pending:
            self.judge(made)

    def call(self, made, group, ranks):
        self.shared, self.used = random.Random(f"{self.seed}/{self.nth}/{made.step.nth}"), 0
        self.at = made.step.nth
        getattr(self, "do_" + made.step.name)(made, group, ranks, ranks.index(self.me))
        made.works = [work for work in made.works if work is not None]

    def wait(self, made):
        for work in made.works:
            work.wait()
        made.works = []

    def judge(self, made):
        for found, right in made.pairs:
            if not torch.equal(found, right):
                self.wrong += 1
                if self.wrong <= 10:
                    some = (found != right).sum().item()
                    print(
                        f"WRONG rank {self.me}, program {self.nth}: {some} elements: {made.step}", flush=True
                    )

    def place(self, like):
        """Memory like a tensor's, as a tensor that holds something else, of whatever layout. Windows are
        windows on every rank."""
        count, dtype = like.numel(), like.dtype
        kind, bytes_ = self.own.randrange(4), count * dtype.itemsize
        if self.shared.random() < 0.3 and self.used + bytes_ <= self.stretch:
            at = self.at * self.stretch + self.used
            self.used += -(-bytes_ // 64) * 64
            found = self.windows[at : at + bytes_].view(dtype)
        elif kind == 1:
            found = torch.empty(count + 3, dtype=dtype, device=self.device)[3:]
        elif kind == 2:
            found = torch.empty(count, 2, dtype=dtype, device=self.device)[:, 1]
        else:
            found = torch.empty(count, dtype=dtype, device=self.device)
        return found.fill_(1)

    def input(self, like):
        return self.place(like).copy_(like)

    def data(self, step, which, count, dtype=None):
        """Returns the data of rank `which` of the group."""
        small = step.op == "prod"
        return values(count, dtype or step.dtype, self.device, self.seeds[which], small)

    def reduced(self, step, parts):
        total = parts[0].clone()
        for part in parts[1:]:
            if step.op in ("min", "max"):
                total = getattr(torch, step.op + "imum")(total, part)
            else:
                total = total + part if step.op == "sum" else total * part
        return total

    def op(self, step):
        return getattr(dist.ReduceOp, {"prod": "PRODUCT"}.get(step.op, step.op.upper()))

    # Functions that make the calls: each takes the call, its group, the group's ranks and this one's place
    # there.

    def do_all_reduce(self, made, group, ranks, me):
        step = made.step
        parts = [self.data(step, rank, step.count) for rank in range(len(ranks))]
        x = self.input(parts[me])
        made.pairs = [(x, self.reduced(step, parts))]
        if step.module and x.is_contiguous():
            made.works = [symmpool.all_reduce(x, step.op, group=group, async_op=True)]
        else:
            made.works = [dist.all_reduce(x, self.op(step), group, async_op=True)]

    def do_broadcast(self, made, group, ranks, me):
        step = made.step
        x = self.input(self.data(step, me, step.count))
        made.pairs = [(x, self.data(step, step.root, step.count))]
        made.works = [dist.broadcast(x, ranks[step.root], group, async_op=True)]

    def do_all_gather(self, made, group, ranks, me):
        step = made.step
        parts = [self.data(step, rank, step.count) for rank in range(len(ranks))]
        x, out = self.input(parts[me]), self.place(torch.cat(parts))
        made.pairs = [(out, torch.cat(parts)), (x, parts[me])]
        made.works = [dist.all_gather_into_tensor(out, x, group, async_op=True)]
        made.held = [x]

    def do_all_gather_list(self, made, group, ranks, me):
        step = made.step
        parts = [self.data(step, rank, size) for rank, size in enumerate(step.sizes)]
        x, outs = self.input(parts[me]), [self.place(part) for part in parts]
        made.pairs = list(zip(outs, parts, strict=True))
        made.works = [dist.all_gather(outs, x, group, async_op=True)]
        made.held = [x]

    def do_reduce_scatter(self, made, group, ranks, me):
        step, world = made.step, len(ranks)
        parts = [self.data(step, rank, step.count * world) for rank in range(world)]
        x, right = (
            self.input(parts[me]),
            self.reduced(step, [part.chunk(world)[me] if step.count else part for part in parts]),
        )
        out = self.place(right)
        made.pairs = [(out, right), (x, parts[me])]
        made.works = [dist.reduce_scatter_tensor(out, x, self.op(step), group, async_op=True)]
        made.held = [x]

    def do_reduce_scatter_list(self, made, group, ranks, me):
        step = made.step
        split = [self.data(step, rank, sum(step.sizes)).split(step.sizes) for rank in range(len(ranks))]
        right = self.reduced(step, [parts[me] for parts in split])
        x, out = [self.input(part) for part in split[me]], self.place(right)
        made.pairs = [(out, right)]
        made.works = [dist.reduce_scatter(out, x, self.op(step), group, async_op=True)]
        made.held = x

    def exchanged(self, step, ranks, me):
        """Returns the rows that this rank sends by rank, those that it receives of each, and the numbers of
        both: `a` sends sizes[(a + b) % n] to `b`."""
        n = len(ranks)
        rows = [[step.sizes[(a + b) % n] for b in range(n)] for a in range(n)]
        split = [self.data(step, a, sum(rows[a])).split(rows[a]) for a in range(n)]
        return split[me], [parts[me] for parts in split], rows[me], [row[me] for row in rows]

    def do_all_to_all(self, made, group, ranks, me):
        sent, came, send, receive = self.exchanged(made.step, ranks, me)
        x, right = self.input(torch.cat(sent)), torch.cat(came)
        out = self.place(right)
        made.pairs = [(out, right)]
        run = symmpool.all_to_all_single if made.step.module else dist.all_to_all_single
        if run is symmpool.all_to_all_single and not (x.is_contiguous() and out.is_contiguous()):
            x, out = x.contiguous(), out.contiguous()
            made.pairs = [(out, right)]
        made.works = [run(out, x, receive, send, group=group, async_op=True)]
        made.held = [x]

    def do_all_to_all_list(self, made, group, ranks, me):
        sent, came, _, _ = self.exchanged(made.step, ranks, me)
        # NCCL takes dense ones alone.
        dense = [part.clone() for part in sent], [torch.empty_like(part) for part in came]
        x, outs = dense if self.streams else ([self.input(p) for p in sent], [self.place(p) for p in came])
        made.pairs = list(zip(outs, came, strict=True))
        made.works = [dist.all_to_all(outs, x, group, async_op=True)]
        made.held = x

    def do_reduce(self, made, group, ranks, me):
        step = made.step
        parts = [self.data(step, rank, step.count) for rank in range(len(ranks))]
        x = parts[me].clone()
        made.pairs = [(x, self.reduced(step, parts))] if me == step.root else []
        made.works = [dist.reduce(x, ranks[step.root], self.op(step), group, async_op=True)]
        made.held = [x]

    def do_gather(self, made, group, ranks, me):
        step = made.step
        parts = [self.data(step, rank, step.count + 1) for rank in range(len(ranks))]
        outs = [torch.empty_like(part) for part in parts] if me == step.root else None
        made.pairs = list(zip(outs or [], parts))
        x = parts[me].clone()
        made.works = [dist.gather(x, outs, ranks[step.root], group, async_op=True)]
        made.held = [x]

    def do_scatter(self, made, group, ranks, me):
        step, world = made.step, len(ranks)
        parts = list(self.data(step, step.root, (step.count + 1) * world).chunk(world))
        out = torch.empty_like(parts[me])
        made.pairs = [(out, parts[me])]
        sent = [part.clone() for part in parts] if me == step.root else None
        made.works = [dist.scatter(out, sent, ranks[step.root], group, async_op=True)]
        made.held = sent or []

    def do_barrier(self, made, group, ranks, me):
        made.works = [dist.barrier(group, async_op=True)]

    def do_messages(self, made, group, ranks, me):
        """To a rank and from another, in the order that this rank likes."""
        step, world = made.step, len(ranks)
        to, source = (me + step.shift) % world, (me - step.shift) % world
        x = self.data(step, me, step.count + 1)
        right = self.data(step, source, step.count + 1)
        out = torch.empty_like(right)
        made.pairs, made.held = [(out, right)], [x]
        begin = [
            lambda: dist.isend(x, ranks[to], group),
            lambda: dist.irecv(out, ranks[source], group),
        ]
        self.own.shuffle(begin)
        made.works = [each() for each in begin]

    def do_batch(self, made, group, ranks, me):
        step, world = made.step, len(ranks)
        right, operations = [], []
        for peer in [rank for rank in range(world) if rank != me]:
            x, came = self.data(step, me, step.count + 1), self.data(step, peer, step.count + 1)
            out = torch.empty_like(came)
            right.append((out, came))
            made.held.append(x)
            operations.append(dist.P2POp(dist.isend, x, ranks[peer], group))
            operations.append(dist.P2POp(dist.irecv, out, ranks[peer], group))
        made.pairs, made.works = right, dist.batch_isend_irecv(operations)

    def do_functional(self, made, group, ranks, me):
        from torch.distributed import _functional_collectives as funcol

        step = made.step
        parts = [self.data(step, rank, step.count) for rank in range(len(ranks))]
        x = parts[me].clone()
        if step.module:
            made.pairs = [
                (funcol.all_reduce(x, step.op.replace("prod", "product"), group), self.reduced(step, parts))
            ]
        else:
            made.pairs = [(funcol.all_gather_tensor(x, 0, group), torch.cat(parts))]
        # They are waited for when they are looked at.
        made.pairs = [(torch.ops._c10d_functional.wait_tensor(a), b) for a, b in made.pairs]


#: What limits the types of a call's tensors.
KINDS = {
    "all_reduce": "reduces",
    "reduce_scatter": "reduces",
    "reduce_scatter_list": "reduces",
    "functional": "reduces",
    "all_to_all_list": "rest",
    "reduce": "rest",
    "gather": "rest",
    "scatter": "rest",
    "messages": "message",
    "batch": "message",
}


def programs(device, count, begin=0, seed=1, most=1 << 12, kind=Runner, limit=None):
    """Whether all was right, on every rank. torch.distributed is initialised, with symmpool's backend.
    Ends after `limit` seconds, by rank 0's clock."""
    runner = kind(device, seed, most)
    began = last = time.perf_counter()
    done = 0
    for nth in range(begin, begin + count):
        runner.run(nth)
        done, now = done + 1, time.perf_counter()
        if runner.me == 0 and now - last > 10:
            last = now
            print(f"      {done} of {count} after {now - began:.0f} s", flush=True)
        if limit is not None and done % 5 == 0:
            over = [now - began > limit]
            dist.broadcast_object_list(over, 0)
            if over[0]:
                break
    observed = [None] * runner.world
    dist.all_gather_object(observed, runner.wrong)
    spent, wrong = time.perf_counter() - began, sum(observed)
    if runner.me == 0:
        print(
            f"{'ok   ' if not wrong else 'WRONG'} {done} programs on {runner.world} ranks and "
            f"{len(runner.groups)} groups, {runner.calls} calls a rank, {wrong} wrong, in {spent:.1f} s",
            flush=True,
        )
    return wrong == 0


def main():
    it = ranks_start.parser("Random programs of calls on symmpool's backend.", 100, "programs")
    it.add_argument("--most", type=int, default=1 << 20, help="elements of a part (default 1M)")
    it.add_argument("--seconds", type=float, help="ends after so many")
    options = it.parse_args()
    device = ranks_start.device_of(options.device)
    if device is None:
        return
    backend = "cuda:symmpool,cpu:gloo" if options.device == "cuda" else "symmpool"
    dist.init_process_group(backend, timeout=TIMEOUT)
    given = (options.count, options.begin, options.seed, options.most)
    right = programs(device, *given, limit=options.seconds)
    dist.destroy_process_group()
    if not right:
        sys.exit(1)


if __name__ == "__main__":
    main()
