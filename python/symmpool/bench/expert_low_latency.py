"""The low-latency calls of DeepEP's names, for the benchmark of dispatch and combine: of
`symmpool.deep_ep`, or of DeepEP itself. Each expert gets a part of its own, and the host waits for nothing.
"""

from functools import partial

from symmpool.bench import expert_routing

CASES = ("low_latency_dispatch", "low_latency_dispatch_fp8", "low_latency_combine")
#: Tokens of a rank. Each expert has room for those of all ranks, so more take gigabytes.
MAX_TOKENS = 512


class LowLatency:
    """A buffer of a module with these names, for up to `most` tokens of each rank."""

    def __init__(self, ranks, module, hidden, experts, most):
        self.torch, self.most, self.experts = ranks.torch, most, experts
        size = module.Buffer.get_low_latency_rdma_size_hint(most, hidden, ranks.world, experts)
        # DeepEP asks for as many queue pairs as experts of a rank.
        pairs = max(experts // ranks.world, 1)
        self.buffer = module.Buffer(
            ranks.dist.group.WORLD, 0, size, low_latency_mode=True, num_qps_per_rank=pairs
        )

    def calls(self, case, routing, differ):
        """A call without arguments, what counts wrong elements after it, tensors that every call writes, and
        where a call keeps what it made. `differ(found, wanted)` counts wrong elements."""
        torch, me = self.torch, routing.rank
        x, ids = routing.x[me], routing.ids[me].to(torch.int64)
        use_fp8 = case == "low_latency_dispatch_fp8"
        found = {}

        def dispatch(use_fp8=use_fp8):
            found["rows"], found["counts"], found["handle"], _, _ = self.buffer.low_latency_dispatch(
                x, ids, self.most, self.experts, use_fp8=use_fp8
            )

        def wrong_rows():
            wrong, counts = 0, found["counts"].tolist()
            for nth, wanted in enumerate(self._by_expert(routing)):
                parts = [(found["rows"], wanted)]
                if use_fp8:
                    rows, scales = found["rows"]
                    parts = list(zip((rows, scales), expert_routing.quantized(torch, wanted)))
                here = slice(0, counts[nth])
                wrong += sum(differ(part[nth, here], expected) for part, expected in parts)
            return wrong

        if case != "low_latency_combine":
            return dispatch, wrong_rows, (), found
        dispatch(False)
        rows, handle, out = found["rows"].clone(), found["handle"], torch.empty_like(x)
        ones = torch.ones(ids.shape, device=x.device)

        def combine(rows, handle):
            self.buffer.low_latency_combine(rows, ids, ones, handle, out=out)

        # Sums of small integers are exact.
        return partial(combine, rows, handle), lambda: differ(out, x * ids.shape[1]), (out,), {}

    def _by_expert(self, routing):
        """The rows of each expert of this rank, by source and there in the order of tokens."""
        local = self.experts // len(routing.x)
        for expert in range(routing.rank * local, (routing.rank + 1) * local):
            yield self.torch.cat([x[(ids == expert).any(1)] for x, ids in zip(routing.x, routing.ids)])
