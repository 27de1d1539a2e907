"""Checks that work which belongs to a call and follows its kernel comes before the next call, on any streams.

    SYMMPOOL_CONCURRENT=2 python -m torch.distributed.run --nproc-per-node N python/tests/gpu/ranks_order.py

Calls follow each other on two streams, and one rank in turn is held up where the first call reads memory that
peers write in the second one: products of what has arrived, copies of received rows; in graphs, too.
Every result is compared with that of the same call alone. Blocks of a pool that another stream still uses are
given out again, and must not change. Exits with 1 if anything was wrong; `--only fused` runs a part alone.
"""

import contextlib
import datetime
import importlib
import os
import sys

# Calls wait for the last call's kernel alone where other communicators' calls may be under way.
os.environ.setdefault("SYMMPOOL_CONCURRENT", "2")

import ranks_start
import torch
import torch.distributed as dist

import symmpool
from symmpool import experts, fused
from symmpool.communicators.entry import CommunicatorEntry
from symmpool.deep_ep import Buffer, normal
from symmpool.experts import gradients
from symmpool.fused import pipeline
from symmpool.fused.matmuls import Matmul

#: Clock cycles for which a stream is held up, about 0.1 s.
PAUSE = 150_000_000
TIMEOUT = datetime.timedelta(seconds=60)


@contextlib.contextmanager
def held_up(owner, name, late, stream_of=lambda arguments: None):
    """Has a function of the package wait on its stream before it does anything, on the rank that is late."""
    usual = getattr(owner, name)

    def slow(*arguments, **options):
        if late:
            number = stream_of(arguments)
            stream = None if number is None else torch.cuda.ExternalStream(number)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(PAUSE)
        return usual(*arguments, **options)

    setattr(owner, name, slow)
    try:
        yield
    finally:
        setattr(owner, name, usual)


def is_close(found, wanted):
    """Whether two results of one call are alike: their sums may have another order, and are rounded."""
    close = 1e-3 if found.dtype == torch.float32 else 2e-2
    scale = wanted.float().abs().max().item()
    difference = (found.float() - wanted.float()).abs().max().item()
    right = difference <= close * scale
    if not right:
        print(f"rank {dist.get_rank()}: differs by {difference:.3g} of {scale:.3g}", flush=True)
    return right


class Checks:
    def __init__(self, device):
        self.device = device
        self.me, self.world = dist.get_rank(), dist.get_world_size()
        self.pool = symmpool.Pool(device=str(device))
        self.streams = [torch.cuda.Stream(device) for _ in range(2)]
        self.cases, self.wrong = 0, 0

    def judge(self, what, right):
        self.cases += 1
        if not right:
            self.wrong += 1
            print(f"rank {self.me}: {what}", flush=True)

    def random(self, shape, seed, dtype=torch.float32):
        generator = torch.Generator(device=self.device).manual_seed(1000 * seed + self.me)
        return torch.randn(shape, generator=generator, device=self.device).to(dtype)

    def on_both(self, call, first, second):
        """Two calls on two streams, one right behind the other on the host."""
        results = []
        for stream, given in zip(self.streams, (first, second)):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                results.append(call(given))
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)
        return results

    def follow(self, what, call, inputs, slow, turns=4):
        """Compares calls that follow each other on two streams with the same calls alone."""
        alone = []
        for given in inputs:
            alone.append([each.clone() for each in call(given)])
            torch.cuda.synchronize()
        for turn in range(turns):
            with slow(turn % self.world == self.me):
                found = self.on_both(call, *inputs)
                torch.cuda.synchronize()
            for nth, (a, b) in enumerate(zip(found, alone)):
                right = all(is_close(x, y) for x, y in zip(a, b))
                self.judge(f"{what}: call {nth}, rank {turn % self.world} is late", right)
        return alone

    def follow_captured(self, what, call, inputs, slow, alone):
        for late in range(self.world):
            graph = torch.cuda.CUDAGraph()
            with slow(late == self.me), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                found = self.on_both(call, *inputs)
            for _ in range(3):
                for each in (tensor for result in found for tensor in result):
                    each.fill_(7)
                graph.replay()
                torch.cuda.synchronize()
                for nth, (a, b) in enumerate(zip(found, alone)):
                    right = all(is_close(x, y) for x, y in zip(a, b))
                    self.judge(f"{what}, captured: call {nth}, rank {late} is late", right)

    def fused(self):
        """Products of gathered rows, products whose sums are scattered, and copies by copy engines."""
        rows, inner, columns = 64, 256, 384
        right = self.random((inner, columns), 3)
        lefts = [self.random((rows, inner), seed) for seed in (1, 2)]

        def gather(left):
            whole, (found,) = fused.fused_all_gather_matmul(left, [right], 0, self.pool)
            return whole, found

        def slow(late):
            return held_up(Matmul, "make", late)

        alone = self.follow("gathered rows", gather, lefts, slow)
        self.follow_captured("gathered rows", gather, lefts, slow, alone)
        lefts = [self.random((rows * self.world, inner), seed) for seed in (4, 5)]

        def scatter(left):
            return (fused.fused_matmul_reduce_scatter(left, right, "sum", 0, self.pool),)

        def slow_copies(late):
            return held_up(pipeline, "_pull", late, lambda arguments: arguments[3])

        alone = self.follow("scattered sums", scatter, lefts, slow_copies)
        self.follow_captured("scattered sums", scatter, lefts, slow_copies, alone)

        def copies(left):
            return (fused.low_contention_all_gather(left, self.pool),)

        alone = self.follow("copies", copies, lefts, slow_copies)
        self.follow_captured("copies", copies, lefts, slow_copies, alone)

    def groups(self):
        """Products of two pools, each on a stream of its own, in another order on every other rank."""
        other = symmpool.Pool(device=str(self.device))
        right = self.random((256, 384), 3)
        lefts = [self.random((64, 256), seed) for seed in (1, 2)]
        made = list(zip(self.streams, (self.pool, other), lefts))

        def call(pool, left):
            whole, (found,) = fused.fused_all_gather_matmul(left, [right], 0, pool)
            return whole, found

        alone = []
        for _, pool, left in made:
            alone.append([each.clone() for each in call(pool, left)])
            torch.cuda.synchronize()
        for turn in range(6):
            found = {}
            for nth in (0, 1) if (self.me + turn) % 2 == 0 else (1, 0):
                stream, pool, left = made[nth]
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    found[nth] = call(pool, left)
            torch.cuda.synchronize()
            for nth, wanted in enumerate(alone):
                right_ones = all(torch.allclose(a, b, rtol=1e-3) for a, b in zip(found[nth], wanted))
                self.judge(f"two groups in another order: group {nth}, turn {turn}", right_ones)

    def tensor_cores(self):
        """The kernels of products, whose copies to peers end behind them. More ranks than two would take them
        for larger parts only."""
        if torch.cuda.get_device_capability(self.device) != (9, 0) or self.world > 2:
            return
        rows, inner, columns = 768, 512, 1024
        right = self.random((inner, columns), 3, torch.bfloat16)
        lefts = [self.random((rows * self.world, inner), seed, torch.bfloat16) for seed in (1, 2)]

        def scatter(left):
            return (fused.fused_matmul_reduce_scatter(left, right, "sum", 0, self.pool),)

        self.follow("tensor cores", scatter, lefts, lambda late: contextlib.nullcontext(), 20)

    def deep_ep(self):
        """A dispatch by a handle, and behind it one that waits for an older event alone."""
        buffer = Buffer(self.pool)
        tokens, hidden, count = 64, 256, 4 * self.world
        ids = torch.stack([torch.randperm(count, device=self.device)[:4] for _ in range(tokens)])
        weights = torch.ones((tokens, 4), device=self.device)
        x, y = (self.random((tokens, hidden), seed, torch.bfloat16) for seed in (1, 2))
        of_ranks, _, of_experts, in_rank, _ = buffer.get_dispatch_layout(ids, count)
        handle = buffer.dispatch(
            x,
            num_tokens_per_rank=of_ranks,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=of_experts,
            topk_idx=ids,
            topk_weights=weights,
        )[4]
        alone = []
        for given in (x, y):
            alone.append(buffer.dispatch(given, handle=handle)[0])
            torch.cuda.synchronize()
        for turn in range(4):
            older = buffer.capture()
            with held_up(normal, "_rows", turn % self.world == self.me):
                first = buffer.dispatch(x, handle=handle)[0]
                second, *_, event = buffer.dispatch(y, handle=handle, previous_event=older, async_finish=True)
                event.current_stream_wait()
                torch.cuda.synchronize()
            for nth, (found, wanted) in enumerate(zip((first, second), alone)):
                what = f"deep_ep: dispatch {nth}, rank {turn % self.world} is late"
                self.judge(what, torch.equal(found, wanted))

    def experts(self):
        """Copies of received rows that gradients flow through."""
        tokens, hidden, count = 64, 256, 4 * self.world
        buffer = experts.ExpertBuffer(self.pool, hidden=hidden, experts=count, top_k=4, max_tokens=tokens)
        ids = torch.stack([torch.randperm(count, device=self.device)[:4] for _ in range(tokens)])
        inputs = [self.random((tokens, hidden), seed, torch.bfloat16).requires_grad_() for seed in (1, 2)]

        def dispatch(x):
            received, _ = buffer.dispatch(x, ids)
            return (received.x.detach(),)

        copies = importlib.import_module("symmpool.experts.buffer")
        owner, name = (copies, "copied") if hasattr(copies, "copied") else (gradients, "_used")
        self.follow("experts", dispatch, inputs, lambda late: held_up(owner, name, late))

    def records(self):
        """Blocks of the pool that another stream writes when they are let go of."""
        count = 1 << 20
        main, side = torch.cuda.current_stream(), self.streams[0]
        for turn in range(6):
            x = self.pool.empty(count, dtype=torch.int32)
            self.pool.commit()
            place = x.data_ptr()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                torch.cuda._sleep(PAUSE)
                x.fill_(-1)
            self.pool.record_stream(x, side)
            del x
            self.pool.commit()
            y = self.pool.empty(count, dtype=torch.int32)
            self.judge("a block's place does not depend on who recorded it", y.data_ptr() == place)
            y.fill_(turn)
            torch.cuda.synchronize()
            self.judge("a block that another stream wrote when it was let go of", bool((y == turn).all()))
            del y
            self.pool.commit()
        self.hooks(main)

    def hooks(self, main):
        """A tensor of the pool that a dispatch beside the current stream still reads."""
        tokens, hidden, count = 64, 512, 4 * self.world
        buffer = experts.ExpertBuffer(self.pool, hidden=hidden, experts=count, top_k=4, max_tokens=tokens)
        ids = torch.stack([torch.randperm(count, device=self.device)[:4] for _ in range(tokens)])
        x = self.random((tokens, hidden), 1, torch.bfloat16)
        wanted, handle = buffer.dispatch(x, ids, exact=True)
        wanted = wanted.x.clone()
        torch.cuda.synchronize()
        for _ in range(4):
            given = self.pool.empty((tokens, hidden), dtype=torch.bfloat16)
            self.pool.commit()
            place = given.data_ptr()
            given.copy_(x)
            if buffer._side is not None:
                with torch.cuda.stream(buffer._side):
                    torch.cuda._sleep(PAUSE)
            received, _, wait = buffer.dispatch(given, handle=handle, hook=True)
            del given
            self.pool.commit()
            other = self.pool.empty((tokens, hidden), dtype=torch.bfloat16)
            self.judge("a hook's input: the place is given out again", other.data_ptr() == place)
            other.fill_(3)
            wait()
            torch.cuda.synchronize()
            right = torch.equal(received.x[: len(wanted)], wanted)
            self.judge("a hook's input, whose place is given out again", right)
            del other
            self.pool.commit()


PARTS = ("fused", "groups", "tensor_cores", "deep_ep", "experts", "records")


def main():
    parser = ranks_start.parser(__doc__, 1, "rounds")
    parser.add_argument("--only", choices=PARTS, help="one part alone")
    parser.add_argument("--without", action="store_true", help="calls end with their kernels: much is wrong")
    options = parser.parse_args()
    if options.without:
        CommunicatorEntry.extend_order = lambda entry: None
    if options.device == "cpu":
        print("skipped: the CPU has no streams")
        return 0
    device = ranks_start.device_of(options.device)
    if device is None:
        return 0
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group(ranks_start.PEER, timeout=TIMEOUT)
    checks = Checks(device)
    for _ in range(options.count):
        for part in PARTS if options.only is None else [options.only]:
            if dist.get_rank() == 0:
                print(part, flush=True)
            getattr(checks, part)()
    counts = torch.tensor([checks.cases, checks.wrong])
    dist.all_reduce(counts if ranks_start.SHARED else counts.to(device))
    print(f"rank {checks.me}: {checks.cases} cases, {checks.wrong} wrong", flush=True)
    dist.destroy_process_group()
    return 1 if checks.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
