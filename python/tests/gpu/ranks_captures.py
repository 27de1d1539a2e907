"""Random programs of calls in graphs and outside of them, waited for and not, on one communicator.

    python -m torch.distributed.run --nproc-per-node N python/tests/gpu/ranks_captures.py [--seconds 300]

A program is a sequence of collectives, the same on every rank: on streams, with `async_op`, captured in
graphs that are launched several times, through `symmpool` and through the backend of torch.distributed, on
plain memory and on a pool's. Each result is compared, element by element, with what follows from what all
ranks hold. Exits with 1 if anything was wrong; `--begin THAT --count 1` runs a program alone.
"""

import datetime
import random
import sys
import time
from functools import partial

import ranks_start
import torch
import torch.distributed as dist
from ranks_programs import values

import symmpool

TIMEOUT = datetime.timedelta(seconds=60)
DTYPES = [torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8]


class Call:
    """A collective with its memory: `fill` makes its input of a seed, `make` calls it, `judge` compares."""

    def __init__(self, runner, luck):
        self.world, self.me = runner.world, runner.me
        self.name = luck.choice(["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"])
        self.dtype = luck.choice(DTYPES)
        self.count = int(2 ** luck.uniform(0, runner.most.bit_length()))
        self.root = luck.randrange(self.world)
        self.module = luck.random() < 0.5
        self.group = runner.group
        whole, part = self.count * self.world, self.count
        sizes = {
            "all_reduce": (part, 0),
            "broadcast": (part, 0),
            "all_gather": (part, whole),
            "reduce_scatter": (whole, part),
            "all_to_all": (whole, whole),
        }
        taken, given = sizes[self.name]
        make = runner.window if luck.random() < 0.5 else runner.plain
        self.input = make(taken, self.dtype)
        self.output = make(given, self.dtype) if given else self.input
        self.wrong = torch.zeros(1, dtype=torch.int64, device=self.input.device)

    def __str__(self):
        return f"{self.name} of {self.count} {self.dtype}, root {self.root}, module {self.module}"

    def of_rank(self, rank, seed):
        return values(self.input.numel(), self.dtype, self.input.device, (seed * 31 + rank) % 1000)

    def fill(self, seed):
        self.seed = seed
        self.input.copy_(self.of_rank(self.me, seed))
        if self.output is not self.input:
            self.output.fill_(77)

    def make(self, async_op):
        x, y, group = self.input, self.output, self.group
        api = symmpool if self.module else dist
        if self.name == "all_reduce":
            return api.all_reduce(x, group=group, async_op=async_op)
        if self.name == "broadcast":
            return api.broadcast(x, self.root, group=group, async_op=async_op)
        if self.name == "all_gather":
            return api.all_gather_into_tensor(y, x, group=group, async_op=async_op)
        if self.name == "reduce_scatter":
            return api.reduce_scatter_tensor(y, x, group=group, async_op=async_op)
        return api.all_to_all_single(y, x, group=group, async_op=async_op)

    def right(self):
        parts = [self.of_rank(rank, self.seed) for rank in range(self.world)]
        if self.name == "broadcast":
            return parts[self.root]
        if self.name == "all_gather":
            return torch.cat(parts)
        if self.name == "all_to_all":
            return torch.cat([part.chunk(self.world)[self.me] for part in parts])
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total.chunk(self.world)[self.me] if self.name == "reduce_scatter" else total

    def judge(self):
        self.wrong += (self.output != self.right()).sum()


class Runner:
    def __init__(self, device, seed, most):
        self.device, self.seed, self.most = device, seed, most
        self.me, self.world = dist.get_rank(), dist.get_world_size()
        self.group = dist.group.WORLD
        self.pool = symmpool.Pool(self.group, device)
        self.streams = [torch.cuda.Stream() for _ in range(3)]
        self.capturing = torch.cuda.Stream()
        self.wrong, self.calls, self.graphs = 0, 0, 0
        dist.all_reduce(torch.zeros(1, device=device))

    def window(self, count, dtype):
        # Committed by the next collective outside of graphs.
        return self.pool.empty(count, dtype)

    def plain(self, count, dtype):
        return torch.empty(count, dtype=dtype, device=self.device)

    def run(self, nth):
        luck = random.Random(f"{self.seed}/{nth}")
        own = random.Random(f"{self.seed}/{nth}/{self.me}")
        made = [Call(self, luck) for _ in range(luck.randrange(4, 20))]
        self.pool.commit()
        at = 0
        left = []
        while at < len(made):
            if luck.random() < 0.4:
                some = made[at : at + luck.randrange(1, 6)]
                # Also what is not waited for must not keep a capture from following.
                if own.random() < 0.5:
                    self.end(left)
                torch.cuda.synchronize()
                self.graph(some, luck, own)
            else:
                some = made[at : at + 1]
                self.eager(some[0], luck, own, left)
            at += len(some)
        self.end(left)
        torch.cuda.synchronize()
        symmpool.communicator(self.group, str(self.device)).synchronize()
        self.report(nth, made)

    def eager(self, call, luck, own, left):
        call.fill(luck.randrange(1000))
        self.calls += 1
        async_op = luck.random() < 0.6
        stream = own.choice([None, *self.streams])
        current = torch.cuda.current_stream()
        if stream is None:
            work = call.make(async_op)
        else:
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                work = call.make(async_op)
            current.wait_stream(stream)
        if work is None or own.random() < 0.5:
            if work is not None:
                work.wait()
            call.judge()
        else:
            left.append((work, call))

    def end(self, left):
        while left:
            work, call = left.pop(0)
            work.wait()
            call.judge()

    def graph(self, some, luck, own):
        """The calls in a graph, launched several times with new data."""
        graph, waits = torch.cuda.CUDAGraph(), luck.random() < 0.5
        # Before the first replay, as nothing in a graph may be made for the first time.
        with torch.cuda.graph(graph, stream=self.capturing):
            works = []
            for call in some:
                work = call.make(luck.random() < 0.5)
                if work is not None:
                    works.append(work)
                    if waits:
                        work.wait()
            own.shuffle(works)
            for work in works:
                work.wait()
        self.graphs += 1
        for _ in range(luck.randrange(1, 4)):
            for call in some:
                call.fill(luck.randrange(1000))
                self.calls += 1
            graph.replay()
            for call in some:
                call.judge()
        torch.cuda.synchronize()

    def report(self, nth, made):
        for call in made:
            count = int(call.wrong)
            if count:
                self.wrong += 1
                print(f"WRONG rank {self.me}, program {nth}: {count} elements: {call}", flush=True)


def main():
    it = ranks_start.parser("Random programs of calls in graphs and outside of them.", 100, "programs")
    it.add_argument("--most", type=int, default=1 << 20, help="elements of a part (default 1M)")
    it.add_argument("--seconds", type=float, help="ends after so many")
    options = it.parse_args()
    device = ranks_start.device_of(options.device)
    if device is None:
        return
    dist.init_process_group("cuda:symmpool,cpu:gloo", timeout=TIMEOUT)
    runner = Runner(device, options.seed, options.most)
    began, done = time.perf_counter(), 0
    over = partial(lambda limit: limit is not None and time.perf_counter() - began > limit, options.seconds)
    for nth in range(options.begin, options.begin + options.count):
        runner.run(nth)
        done += 1
        if done % 5 == 0:
            # The clock of rank 0 decides.
            stop = [over()]
            dist.broadcast_object_list(stop, 0)
            if stop[0]:
                break
    found = [None] * runner.world
    dist.all_gather_object(found, runner.wrong)
    if runner.me == 0:
        print(
            f"{'WRONG' if sum(found) else 'ok   '} {done} programs on {runner.world} ranks, "
            f"{runner.calls} calls a rank, {runner.graphs} graphs, {sum(found)} wrong, in "
            f"{time.perf_counter() - began:.1f} s",
            flush=True,
        )
    dist.destroy_process_group()
    if sum(found):
        sys.exit(1)


if __name__ == "__main__":
    main()
