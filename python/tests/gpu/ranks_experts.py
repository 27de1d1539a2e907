"""Dispatch to experts and combine, with one GPU for each rank, compared with plain PyTorch.

    python -m torch.distributed.run --nproc-per-node N python/tests/gpu/ranks_experts.py [--seeds 1000]

Each seed is a routing, a type, a hidden size, a layout and a way of quantising: eager, by a handle again,
with hooks, and captured in a graph that is replayed with other routings. Rank 0 prints what was wrong, and
the program exits with 1 if anything was. On ranks of the CPU (`--device cpu`) there are no graphs.
"""

import argparse
import datetime
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import expert_model as model
import torch
import torch.distributed as dist

import symmpool
from symmpool import experts

HIDDEN = [64, 128, 256, 1024, 4096, 7168, 16384]
QUANTIZE = [None, "fp8", None, "fp8_pow2", "fp8_ue8m0"]
LAYOUTS = [("rank", 1), ("expert", 1), ("expert", 128)]
SMS = [None, None, 8, 24]


def bytes_of(tensor):
    # A new tensor: a single column may have any stride, and is contiguous all the same.
    return torch.cat([tensor.reshape(-1)]).view(torch.uint8)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bytes_of(a), bytes_of(b))


def expect(right, why):
    if not right:
        raise AssertionError(why)


class Trial:
    """A buffer, and tensors of a fixed number of tokens whose routing may change between replays."""

    def __init__(self, seed, pool, device):
        self.seed, self.device, self.me = seed, device, pool.rank
        self.dtype = [torch.bfloat16, torch.bfloat16, torch.float32, torch.float16][seed % 4]
        hidden = HIDDEN[seed // 7 % len(HIDDEN)]
        self.routing, self.hidden, self.top_k, most = model.random(
            seed, pool.world, self.dtype, hidden, tokens=64
        )
        self.layout, self.alignment = LAYOUTS[seed % 3]
        self.quantize = QUANTIZE[seed % 5] if hidden % 128 == 0 else None
        self.num_sms = SMS[seed // 3 % len(SMS)]
        self.buffer = experts.ExpertBuffer(
            pool,
            hidden=hidden,
            experts=self.routing.experts,
            top_k=self.top_k,
            # In a buffer for few tokens kernels are others.
            max_tokens=most + (512 if seed // 2 % 2 else 0),
            dtype=self.dtype,
            num_sms=self.num_sms,
        )
        ids = torch.int64 if seed % 2 else torch.int32
        self.x = self.routing.x[self.me].to(device)
        self.ids = self.routing.ids[self.me].to(device, ids)
        self.weights = self.routing.weights[self.me].to(device)
        self.rows = self.buffer.capacity
        if self.layout == "expert":
            self.rows = self.buffer._core.capacity(True, self.alignment)
        self.answer = torch.zeros((self.rows, hidden), dtype=self.dtype, device=device)

    def __str__(self):
        return (
            f"seed {self.seed}: {self.buffer}, layout {self.layout}, alignment {self.alignment}, "
            f"quantize {self.quantize}, num_sms {self.num_sms}, tokens {[len(x) for x in self.routing.x]}"
        )

    def options(self):
        return {"quantize": self.quantize, "layout": self.layout, "alignment": self.alignment}

    def fill(self, routing, seed):
        """Other tokens, ids and weights of the same number, and what the experts answer to them."""
        self.x.copy_(routing.x[self.me])
        self.ids.copy_(routing.ids[self.me])
        self.weights.copy_(routing.weights[self.me])
        by_expert = self.alignment if self.layout == "expert" else None
        answers = model.answers_of(routing, seed, self.hidden, self.dtype, by_expert)
        self.answer.zero_()
        self.answer[: len(answers[self.me])] = answers[self.me].to(self.device)
        return answers

    def check_received(self, routing, received, handle, known=False):
        x, ids, weights, offsets, index = routing.received(self.me)
        count, scales = len(x), None
        if self.quantize is not None:
            x, scales = model.quantized(x, self.quantize)
        expect(int(handle.num_received) == count, "rows received")
        expect(handle.source_offsets.tolist() == offsets, "source offsets")
        expect(torch.equal(handle.source_index[:count].long().cpu(), index), "source index")
        rows = received.x.cpu()
        found_scales = None if received.scales is None else received.scales.cpu()
        counts = [int((ids == expert).sum()) for expert in range(routing.local)]
        expect(received.expert_counts.tolist() == counts, "expert counts")
        if self.layout == "rank":
            expect(same(rows[:count], x), "rows")
            expect(scales is None or same(found_scales[:count], scales), "scales")
            if not known:
                expect(torch.equal(received.topk_ids[:count].long().cpu(), ids), "ids")
                there = ids >= 0
                found = torch.where(there, received.topk_weights[:count].cpu(), 0)
                expect(torch.equal(found, torch.where(there, weights, 0)), "weights")
            return
        places, begins = routing.by_expert(self.me, self.alignment)
        expect(received.expert_offsets.tolist() == begins, "expert offsets")
        row, k = (places >= 0).nonzero(as_tuple=True)
        expect(same(rows[places[row, k]], x[row]), "rows by expert")
        expect(scales is None or same(found_scales[places[row, k]], scales[row]), "scales by expert")

    def wanted(self, routing, answers):
        if self.layout == "expert":
            answers = [
                routing.weighted(rank, each, self.alignment, self.dtype) for rank, each in enumerate(answers)
            ]
        return routing.combined(self.me, answers, self.dtype)

    def other(self, nth):
        """A routing of as many tokens as the first one has."""
        generator = torch.Generator().manual_seed(100_000 * (nth + 1) + self.seed)
        x = [torch.randn(each.shape, generator=generator).to(self.dtype) for each in self.routing.x]
        ids = [
            torch.randint(-1, self.routing.experts, each.shape, generator=generator)
            for each in self.routing.ids
        ]
        weights = [torch.rand(each.shape, generator=generator) for each in self.routing.weights]
        return model.Routing(x, ids, weights, self.routing.experts)

    def eager(self):
        answers = self.fill(self.routing, self.seed)
        received, handle = self.buffer.dispatch(self.x, self.ids, self.weights, **self.options())
        self.check_received(self.routing, received, handle)
        wanted = self.wanted(self.routing, answers)
        expect(same(self.buffer.combine(self.answer, handle).cpu(), wanted), "sums")
        out = torch.empty_like(wanted, device=self.device)
        again, wait = self.buffer.combine(self.answer, handle, out=out, hook=True)
        wait()
        expect(again is out and same(out.cpu(), wanted), "sums with a hook")
        received, _, wait = self.buffer.dispatch(self.x, handle=handle, hook=True, **self.options())
        wait()
        self.check_received(self.routing, received, handle, known=True)
        received, exact = self.buffer.dispatch(self.x, self.ids, self.weights, exact=True, **self.options())
        expect(len(received.x) == int(exact.num_rows), "an exact size")
        self.check_received(self.routing, received, exact)
        expect(same(self.buffer.combine(self.answer, exact).cpu(), wanted), "sums of an exact dispatch")
        self.buffer.synchronize()

    def copies(self):
        """Where autograd is on, what was received stays as it is in later calls, on any stream."""
        self.fill(self.routing, self.seed)
        received, handle = self.buffer.dispatch(self.x, self.ids, self.weights, **self.options())
        hooked, again, wait = self.buffer.dispatch(
            self.x, self.ids, self.weights, hook=True, **self.options()
        )
        wait()
        other = torch.zeros_like(self.x)
        for _ in range(3):
            self.buffer.dispatch(other, self.ids, **self.options())
        self.check_received(self.routing, received, handle)
        self.check_received(self.routing, hooked, again)
        with torch.no_grad():
            view, _ = self.buffer.dispatch(self.x, self.ids, self.weights, **self.options())
        if self.layout == "rank":
            memory = self.buffer._memory["rows"].data_ptr()
            expect(view.x.data_ptr() == memory, "a view without autograd")
            expect(received.x.data_ptr() != memory, "a copy with autograd")
        self.buffer.synchronize()

    def spoilt(self):
        """A handle that was written to is an error of this rank, and touches no other memory."""
        options = {"layout": self.layout, "alignment": self.alignment}
        for part, value in [("num_received", 2**30), ("num_received", -1), ("places", 2**30), ("places", -9)]:
            if part == "places" and self.layout == "rank":
                continue
            _, handle = self.buffer.dispatch(self.x, self.ids, self.weights, **options)
            if self.layout == "expert" and part == "places" and int(handle.num_received) == 0:
                spoilt = False
            else:
                spoilt = True
                getattr(handle, part)[0 if part == "places" else ...].fill_(value)
            self.buffer.combine(self.answer, handle)
            try:
                self.buffer.synchronize()
            except symmpool.InvalidArgumentError as error:
                expect(spoilt and "the handle of rank" in str(error), f"another error: {error}")
            else:
                expect(not spoilt, f"no error where {part} is {value}")
        self.eager()

    def gradients(self):
        """Those of a matrix, of tokens that need none and of such that do, through the operators too."""
        if self.dtype != torch.float32 or self.quantize is not None:
            return
        x = self.x.clone()
        found = []
        for compiled in (False, True):
            for needs in (False, True):
                matrix = torch.eye(self.hidden, device=self.device).requires_grad_()
                rows = x.clone().requires_grad_(needs)
                if compiled:
                    call = (self.buffer.name, self.layout, self.alignment)
                    got, _, _, _, memory = torch.ops.symmpool.experts_dispatch(
                        rows, self.ids, None, *call, None
                    )
                    made = torch.nn.functional.linear(got, matrix)
                    sums = torch.ops.symmpool.experts_combine(made, memory, None, len(x), *call)
                else:
                    options = {"layout": self.layout, "alignment": self.alignment}
                    received, handle = self.buffer.dispatch(rows, self.ids, **options)
                    made = torch.nn.functional.linear(received.x, matrix)
                    sums = self.buffer.combine(made, handle)
                sums.square().sum().backward()
                found.append((matrix.grad.cpu(), rows.grad.cpu() if needs else None))
        local = self.routing.on
        reached = torch.zeros(len(x))
        for rank in range(self.routing.world):
            there = local(rank)[self.me] >= 0
            reached += there.sum(1) if self.layout == "expert" else there.any(1)
        wanted = 2 * x.cpu() * reached[:, None] ** 2
        for matrix, rows in found:
            expect(torch.allclose(matrix, found[0][0], rtol=1e-4, atol=1e-4), "gradients of a matrix")
            expect(rows is None or torch.allclose(rows, wanted, rtol=1e-4, atol=1e-4), "gradients of tokens")
        self.buffer.synchronize()

    def captured(self):
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        dist.barrier()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            received, handle = self.buffer.dispatch(self.x, self.ids, self.weights, **self.options())
            out = self.buffer.combine(self.answer, handle)
        for nth in range(3):
            routing = self.other(nth)
            answers = self.fill(routing, self.seed + nth)
            graph.replay()
            torch.cuda.synchronize()
            self.check_received(routing, received, handle)
            expect(same(out.cpu(), self.wanted(routing, answers)), f"sums of replay {nth}")
        self.buffer.synchronize()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--begin", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    device = torch.device("cpu")
    if options.device != "cpu":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    pool = symmpool.Pool(dist.group.WORLD, str(device))
    failed = 0
    for seed in range(options.begin, options.begin + options.seeds):
        trial, why = Trial(seed, pool, device), None
        steps = [trial.eager, trial.copies, trial.gradients]
        for step in [*steps, trial.spoilt, trial.captured] if device.type == "cuda" else steps:
            try:
                step()
            except Exception as error:
                why = f"{step.__name__}: {type(error).__name__}: {error}"
            every = [None] * dist.get_world_size()
            dist.all_gather_object(every, why)
            if any(every):
                failed += 1
                if dist.get_rank() == 0:
                    print(f"WRONG {trial}: {every}", flush=True)
                break
        del trial
        if dist.get_rank() == 0 and (seed + 1) % 50 == 0:
            print(f"{seed + 1 - options.begin} routings, {failed} wrong", flush=True)
        if failed > 5:
            break
    if dist.get_rank() == 0:
        print(f"{'WRONG' if failed else 'ok'}: {options.seeds} routings, {failed} wrong")
    dist.destroy_process_group()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
