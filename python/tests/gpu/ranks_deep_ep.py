"""DeepEP's names with one GPU for each rank: what DeepEP's own tests hold, streams, hooks, events and graphs.

    python -m torch.distributed.run --nproc-per-node N python/tests/gpu/ranks_deep_ep.py [--tokens 4096]

Rank 0 prints a line for each part, and the program exits with 1 if anything was wrong. On ranks of the CPU
(`--device cpu`) there are neither streams nor graphs. Without GPUs it says so and ends.
"""

import argparse
import datetime
import os
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import deep_ep_model as reference
import expert_model as model
import torch
import torch.distributed as dist
from deep_ep_model import FORMATS, difference, same

import symmpool
import symmpool.deep_ep

symmpool.deep_ep.install()

import deep_ep  # noqa: E402 (found only after that)


def cpu(value):
    """A result on the CPU, with the tensors of a handle."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, (tuple, list)):
        return tuple(cpu(each) for each in value)
    return value


class Parts:
    def __init__(self, device, tokens, hidden):
        self.device, self.tokens, self.hidden = device, tokens, hidden
        self.me, self.world = dist.get_rank(), dist.get_world_size()
        self.cuda = device.type == "cuda"
        # DeepEP's own tests set these defaults too.
        torch.set_default_device(device)
        torch.set_default_dtype(torch.bfloat16)

    def routing(self, seed, everywhere=True, low_latency=False, tokens=None):
        """A routing on the CPU, and this rank's part of it on the device."""
        torch.set_default_dtype(torch.float32)
        torch.set_default_device("cpu")
        make = reference.low_latency_routing if low_latency else reference.routing_of
        options = (seed, self.world, self.hidden, 8, 16 * self.world, tokens or self.tokens)
        routing = make(*options) if low_latency else make(*options, everywhere)
        torch.set_default_device(self.device)
        torch.set_default_dtype(torch.bfloat16)
        mine = (each[self.me].to(self.device) for each in (routing.x, routing.ids, routing.weights))
        return routing, *mine

    def busy(self):
        """Work on the current stream that takes a while."""
        if self.cuda:
            torch.cuda._sleep(20_000_000)

    def layout(self, buffer, ids, weights, experts):
        of_ranks, _, of_experts, in_rank, _ = buffer.get_dispatch_layout(ids, experts)
        given = {"num_tokens_per_rank": of_ranks, "num_tokens_per_expert": of_experts}
        given["is_token_in_rank"] = in_rank
        return given, {**given, "topk_idx": ids, "topk_weights": weights}

    def check_normal(self, routing, found, with_topk):
        with default_of("cpu"):
            rows, ids, weights, counts, handle = cpu(found[:3]) + (found[3], cpu(found[4]))
            reference.check_received(routing, self.me, (rows, ids, weights, counts, handle), 1, with_topk)

    def normal(self):
        """Normal mode, asynchronous or not, with events before or not, in each type."""
        buffer = deep_ep.Buffer(dist.group.WORLD, int(1e9), explicitly_destroy=True)
        routing, x, ids, weights = self.routing(1)
        plain, with_ids = self.layout(buffer, ids, weights, routing.experts)
        with default_of("cpu"):
            counts, of_experts, in_rank = reference.counted(routing, self.me)
            sent = [model.quantized(each, "fp8") for each in routing.x]
            back, back_scales = model.quantized(routing.received(self.me)[0], "fp8")
        for found, wanted in zip(cpu(tuple(plain.values())), (counts, of_experts, in_rank)):
            assert torch.equal(found, wanted)
        reached = in_rank.sum(1, keepdim=True)
        fp8 = tuple(each.to(self.device) for each in sent[self.me])
        for previous in (False, True):
            for asynchronous in (False, True):
                how = {"config": deep_ep.Config(24, 8, 256), "async_finish": asynchronous}
                for given in (plain, with_ids):
                    if previous:
                        how["previous_event"] = buffer.capture()
                    with_topk = given is with_ids
                    found = buffer.dispatch(x, **given, **how)
                    found[5].current_stream_wait()
                    self.check_normal(routing, found, with_topk)
                    rows, _, row_weights, _, handle, _ = found
                    (quantized, scales), *_, event = buffer.dispatch(
                        (fp8[0], fp8[1].T.contiguous().T), **given, **how
                    )
                    event.current_stream_wait()
                    assert same(quantized.cpu(), back) and same(scales.cpu(), back_scales)
                    again, *_, event = buffer.dispatch(x, handle=handle, **how)
                    event.current_stream_wait()
                    assert same(again, rows)
                    if with_topk:
                        most = self.tokens * self.world
                        worst = buffer.dispatch(x, num_worst_tokens=most, **given, **how)
                        worst[5].current_stream_wait()
                        count = len(rows)
                        assert len(worst[0]) == len(worst[1]) == len(worst[2]) == most and worst[3] == []
                        assert all(same(a[:count], b) for a, b in zip(worst[:3], found[:3]))
                        assert bool((worst[1][count:] == -1).all())
                    sums, sum_weights, event = buffer.combine(rows, handle, topk_weights=row_weights, **how)
                    event.current_stream_wait()
                    assert difference(sums.cpu(), routing.x[self.me].float() * reached) < 5e-6
                    if with_topk:
                        assert difference(sum_weights, weights) < 1e-9
        held = buffer.memory()
        buffer.destroy()
        return f"{held['total'] / 1e6:.0f} MB on a rank for {self.tokens} tokens of {self.hidden}"

    def refusals(self):
        """A first dispatch where no rank has a token, and a rank whose arguments are wrong: all ranks raise
        at once."""
        kinds = (symmpool.DivergedError, symmpool.InvalidArgumentError, TypeError)
        for wrong in ({"x": 7}, {"num_worst_tokens": "5"}, {"expert_alignment": 2**70}, {"topk_idx": None}):
            buffer = deep_ep.Buffer(dist.group.WORLD)
            x = torch.ones((0, self.hidden), dtype=torch.bfloat16, device=self.device)
            ids = torch.zeros((0, 2), dtype=torch.int64, device=self.device)
            weights = torch.zeros((0, 2), dtype=torch.float32, device=self.device)
            of_ranks, _, of_experts, in_rank, _ = buffer.get_dispatch_layout(ids, 2 * self.world)
            call = {
                "x": x, "num_tokens_per_rank": of_ranks, "num_tokens_per_expert": of_experts,
                "is_token_in_rank": in_rank, "topk_idx": ids, "topk_weights": weights,
            }  # fmt: skip
            rows, *_ = buffer.dispatch(**call)
            assert rows.shape == (0, self.hidden)
            try:
                buffer.dispatch(**{**call, **(wrong if self.me == self.world - 1 else {})})
            except kinds:
                pass
            else:
                raise AssertionError(f"no error of {wrong}")
            rows, *_ = buffer.dispatch(**call)
            buffer.synchronize()

    def low_latency(self):
        """Low-latency mode in each format, with hooks or events, twice with the same bits."""
        tokens = 128
        routing, x, ids, weights = self.routing(2, low_latency=True, tokens=tokens)
        experts = routing.experts
        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(tokens, self.hidden, self.world, experts)
        buffer = deep_ep.Buffer(dist.group.WORLD, 0, size, low_latency_mode=True, num_qps_per_rank=16)
        used = torch.where(ids >= 0, weights, 0).sum(1, keepdim=True)
        bits = {}
        for hooked in (False, True):
            for nth, formats in enumerate(FORMATS):
                received, count, handle, _, _ = reference.low_latency_dispatch(
                    buffer, x, ids, experts, hooked, formats, meanwhile=self.busy
                )
                exact = not formats["use_fp8"]
                rows = received if exact else reference.dequantized(*received, self.hidden)
                with default_of("cpu"):
                    reference.check_low_latency(routing, self.me, rows.cpu(), count.cpu(), cpu(handle), exact)
                for zero_copy in (False, True):
                    sums = reference.low_latency_combine(
                        buffer, rows, ids, weights, handle, hooked, zero_copy
                    )
                    assert difference(sums, x.float() * used) < (1e-5 if exact else 9e-4)
                    assert same(bits.setdefault(nth, sums), sums)
        return f"{buffer.memory()['low_latency'] / 1e6:.0f} MB on a rank for {tokens} tokens"

    def streams(self):
        """Producers and consumers on the current stream, and memory that is let go of at once."""
        buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
        routing, x, ids, weights = self.routing(3, tokens=256)
        _, with_ids = self.layout(buffer, ids, weights, routing.experts)
        with default_of("cpu"):
            wanted = routing.received(self.me)[0]
            reached = reference.counted(routing, self.me)[2].sum(1, keepdim=True)
        for turn in range(20):
            self.busy()
            late = x * (turn % 4 + 1)
            previous = buffer.capture()
            found = buffer.dispatch(
                late, **with_ids, previous_event=previous, async_finish=True, allocate_on_comm_stream=True
            )
            # Other calls take this memory, if it is free too early.
            late = None
            junk = [torch.full_like(x, 7) for _ in range(4)]
            rows, handle, event = found[0], found[4], found[5]
            with event:
                del junk
            answers = rows * 1
            del rows, found
            sums, _, event = buffer.combine(
                answers, handle, previous_event=buffer.capture(), async_finish=True
            )
            del answers, handle
            junk = [torch.full_like(x, 9) for _ in range(4)]
            event.current_stream_wait()
            del junk
            scaled = routing.x[self.me].float() * reached * (turn % 4 + 1)
            assert difference(sums.cpu(), scaled) < 5e-6, f"turn {turn}"
        rows, *_ = buffer.dispatch(x, **with_ids)
        buffer.dispatch(x * 0, **with_ids)
        assert same(rows.cpu(), wanted), "received rows were overwritten by the next call"
        if self.cuda:
            assert buffer.get_comm_stream() != torch.cuda.current_stream()

    def hooks(self):
        """Several hooks pending at once, hooks that nobody calls, and a buffer that goes before its hook."""
        routing, x, ids, weights = self.routing(4, low_latency=True, tokens=64)
        used = torch.where(ids >= 0, weights, 0).sum(1, keepdim=True)
        for _ in range(5):
            buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
            calls = [
                buffer.low_latency_dispatch(x, ids, 64, routing.experts, use_fp8=False, return_recv_hook=True)
                for _ in range(3)
            ]
            self.busy()
            sums = []
            for found, _, handle, _, hook in calls[:2]:
                hook()
                sums.append(buffer.low_latency_combine(found, ids, weights, handle, return_recv_hook=True))
            sums[1][2]()
            sums[0][2]()
            for out, _, _ in sums:
                assert difference(out, x.float() * used) < 1e-5
            last = calls[2][4]
            del buffer, calls, found, handle, hook, sums, out
            last()

    def graphs(self):
        """Captured calls, replayed with other routings."""
        if not self.cuda:
            return "left out: there are none on the CPU"
        tokens = 64
        routing, x, ids, weights = self.routing(5, low_latency=True, tokens=tokens)
        experts = routing.experts
        buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
        refused = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(refused, capture_error_mode="thread_local"):
                buffer.low_latency_dispatch(x, ids, tokens, experts)
            raise AssertionError("a first call was captured")
        except symmpool.InvalidStateError as error:
            assert "call it once before" in str(error)
        most = tokens * self.world
        given, with_ids = self.layout(buffer, ids, weights, experts)
        for hooked in (False, True):

            def low_latency(hooked=hooked):
                found, count, handle, _, hook = buffer.low_latency_dispatch(
                    x, ids, tokens, experts, use_fp8=False, return_recv_hook=hooked
                )
                hook() if hooked else None
                sums, _, hook = buffer.low_latency_combine(
                    found, ids, weights, handle, return_recv_hook=hooked
                )
                hook() if hooked else None
                return found, count, handle, sums

            def normal(hooked=hooked):
                how = {"async_finish": hooked}
                if hooked:
                    how["previous_event"] = buffer.capture()
                rows, row_ids, _, _, handle, event = buffer.dispatch(
                    x, num_worst_tokens=most, **with_ids, **how
                )
                event.current_stream_wait()
                sums, _, event = buffer.combine(rows, handle, async_finish=hooked)
                event.current_stream_wait()
                return rows, row_ids, handle, sums

            low_latency(), normal()
            torch.cuda.synchronize()
            dist.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                low, worst = low_latency(), normal()
            for seed in (6, 7, 8):
                other, other_x, other_ids, other_weights = self.routing(seed, low_latency=True, tokens=tokens)
                x.copy_(other_x), ids.copy_(other_ids), weights.copy_(other_weights)
                graph.replay()
                torch.cuda.synchronize()
                used = torch.where(ids >= 0, weights, 0).sum(1, keepdim=True)
                assert difference(low[3], x.float() * used) < 1e-5
                with default_of("cpu"):
                    reference.check_low_latency(other, self.me, low[0].cpu(), low[1].cpu(), cpu(low[2]), True)
                    wanted, wanted_ids, *_ = other.received(self.me)
                    reached = reference.counted(other, self.me)[2].sum(1, keepdim=True)
                count = len(wanted)
                assert same(worst[0].cpu()[:count], wanted)
                assert torch.equal(worst[1].cpu()[:count], wanted_ids)
                assert bool((worst[1][count:] == -1).all())
                assert difference(worst[3].cpu(), other.x[self.me].float() * reached) < 5e-6
            buffer.synchronize()

    def errors(self):
        """An id that is no expert, other shapes, and more rows than there is room for."""
        buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
        routing, x, ids, weights = self.routing(9, tokens=32)
        _, with_ids = self.layout(buffer, ids, weights, routing.experts)
        bad = {**with_ids, "topk_idx": ids.clone()}
        last = self.world - 1
        if self.me == last:
            bad["topk_idx"][3, 1] = routing.experts
        self.expect(symmpool.InvalidArgumentError, f"3 of rank {last}", lambda: buffer.dispatch(x, **bad))
        hidden = self.hidden // 2 if self.me == last else self.hidden
        other = x[:, :hidden].contiguous()
        if self.world > 1:
            self.expect(symmpool.DivergedError, "hidden is", lambda: buffer.dispatch(other, **with_ids))

        def overflow():
            buffer.dispatch(x, num_worst_tokens=3, **with_ids)
            buffer.synchronize()

        self.expect(symmpool.OverflowError, "room for 3", overflow)
        found = buffer.dispatch(x, **with_ids)
        self.check_normal(routing, found, True)

    def expect(self, kind, text, call):
        try:
            call()
        except kind as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"no {kind.__name__}")


class default_of:
    """Inside, tensors are made on a device, in float32."""

    def __init__(self, device):
        self.device = device

    def __enter__(self):
        self.before = torch.get_default_device()
        torch.set_default_device(self.device)
        torch.set_default_dtype(torch.float32)

    def __exit__(self, *error):
        torch.set_default_device(self.before)
        torch.set_default_dtype(torch.bfloat16)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", help="of the process group; nccl on GPUs")
    options = parser.parse_args()
    device = torch.device("cpu")
    if options.device != "cpu":
        if not torch.cuda.is_available():
            print("skipped: there is no GPU")
            return
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend = options.backend or ("nccl" if device.type == "cuda" else "gloo")
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=60))
    parts, failed = Parts(device, options.tokens, options.hidden), 0
    beside = dist.new_group(backend="gloo")
    for name in ("normal", "refusals", "low_latency", "streams", "hooks", "graphs", "errors"):
        why = said = None
        try:
            said = getattr(parts, name)()
        except Exception:
            why = traceback.format_exc()
        every = [None] * parts.world
        with default_of("cpu"):
            dist.all_gather_object(every, why, group=beside)
        failed += any(every)
        if parts.me == 0:
            print(f"{'WRONG' if any(every) else 'ok   '} {name}{': ' + said if said else ''}", flush=True)
            for rank, each in enumerate(every):
                print(f"rank {rank}: {each}" if each else "", end="", flush=True)
        if any(every):
            break
    dist.destroy_process_group()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
