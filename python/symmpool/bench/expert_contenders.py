"""Contenders of `bench experts`: symmpool's buffers, all-to-alls and all-gathers of torch.distributed, and
DeepEP."""

from functools import partial

from symmpool.bench import expert_low_latency, expert_routing, peers

#: Up to so many tokens a rank decodes, rather than reads.
DECODED = 128


class Exchange:
    """One case of one contender: a call without arguments, and `wrong`, which counts wrong elements after it.
    `outputs` are tensors that every call writes, which are overwritten before a check; in `found` a call
    keeps what it made: a graph writes the same tensors whenever it is replayed, and other graphs others."""

    def __init__(self, call, wrong, *outputs, found=None):
        self.call, self.wrong, self.outputs = call, wrong, outputs
        self.found = {} if found is None else found

    def poison(self):
        for output in self.outputs:
            output.fill_(77)


class Contender:
    """One implementation, for up to `most` tokens of each rank."""

    def __init__(self, ranks, options, most):
        self.ranks, self.options, self.most = ranks, options, most
        self.torch, self.dist = ranks.torch, ranks.dist
        self.calls_of_low_latency = None

    def low_latency(self, module, case, routing):
        """An exchange of the low-latency calls of a module with DeepEP's names."""
        if self.calls_of_low_latency is None:
            most = min(self.most, expert_low_latency.MAX_TOKENS)
            shape = self.options.hidden, self.options.experts, most
            self.calls_of_low_latency = expert_low_latency.LowLatency(self.ranks, module, *shape)
        call, wrong, outputs, found = self.calls_of_low_latency.calls(case, routing, self.differ)
        return Exchange(call, wrong, *outputs, found=found)

    def differ(self, found, wanted):
        """The number of wrong elements."""
        torch = self.torch
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            return max(found.numel(), wanted.numel(), 1)
        # Copies are contiguous, which a view as another type needs.
        copies = (each.clone(memory_format=torch.contiguous_format) for each in (found, wanted))
        found, wanted = (each.view(torch.uint8) for each in copies)
        return int((found != wanted).sum())

    def confirm(self):
        pass

    def close(self):
        pass


class Ours(Contender):
    """Rows by rank, in the buffer's memory; the host waits for nothing."""

    def __init__(self, ranks, options, most, pools):
        from symmpool import experts

        super().__init__(ranks, options, most)
        shape = {"hidden": options.hidden, "experts": options.experts, "top_k": options.top_k}
        # A program has a buffer for decoding too: with few tokens at most, kernels are smaller.
        self.buffers = [
            experts.ExpertBuffer(pools.get(ranks), **shape, max_tokens=each, num_sms=options.num_sms)
            for each in sorted({min(most, DECODED), most})
        ]

    def exchange(self, case, routing):
        if case in expert_low_latency.CASES:
            from symmpool import deep_ep

            return self.low_latency(deep_ep, case, routing)
        buffer = self.buffers[0 if routing.tokens <= DECODED else -1]
        x = routing.x[routing.rank]
        ids, weights = routing.ids[routing.rank], routing.weights[routing.rank]
        received, handle = buffer.dispatch(x, ids, weights, copy=False)
        count = int(handle.num_rows)
        found, out = {}, self.torch.empty_like(x)

        def dispatch(quantize):
            found["received"], _ = buffer.dispatch(x, handle=handle, quantize=quantize, copy=False)

        def wrong_dispatch(quantize):
            wanted, found_rows = routing.received(), found["received"].x[:count]
            if quantize is None:
                return self.differ(found_rows, wanted)
            rows, scales = expert_routing.quantized(self.torch, wanted)
            return self.differ(found_rows, rows) + self.differ(found["received"].scales[:count], scales)

        def combine(rows):
            buffer.combine(rows, handle, out=out)

        def routed(exact=False):
            received, new = buffer.dispatch(x, ids, weights, exact=exact, copy=False)
            buffer.combine(received.x, new, out=out)

        def routed_fp8(rows):
            _, new = buffer.dispatch(x, ids, weights, quantize="fp8", copy=False)
            # The rows stand for the experts' results, as if those were done at once.
            buffer.combine(rows, new, out=out)

        def wrong_sums():
            return self.differ(out, routing.combined())

        if case == "combine":
            return Exchange(partial(combine, received.x.clone()), wrong_sums, out)
        if case == "routed_fp8":
            return Exchange(partial(routed_fp8, received.x.clone()), wrong_sums, out)
        if case in ("routed", "exact"):
            return Exchange(partial(routed, case == "exact"), wrong_sums, out)
        quantize = "fp8" if case == "dispatch_fp8" else None
        # `received.x` is the memory of all results, also where those are seen as other elements.
        return Exchange(partial(dispatch, quantize), partial(wrong_dispatch, quantize), received.x)

    def confirm(self):
        for buffer in self.buffers:
            buffer.synchronize()

    def close(self):
        self.buffers = self.calls_of_low_latency = None


class AllToAll(Contender):
    """torch.distributed's all_to_all_single: a row for each token and rank, sizes known to the host."""

    def exchange(self, case, routing):
        torch, dist, world, me = self.torch, self.dist, self.ranks.world, routing.rank
        x, ids = routing.x[me], routing.ids[me]
        if case in expert_low_latency.CASES:
            raise ValueError("the rows of an all-to-all do not lie by expert")
        if case in ("routed", "routed_fp8") and self.ranks.on_cuda:
            raise ValueError("the host must know the sizes of an all-to-all, which a graph cannot tell it")
        ranks = torch.arange(world, device=x.device)

        def layout():
            here = (ids[:, :, None] // (routing.experts // world) == ranks).any(1)
            send = here.sum(0)
            receive = torch.empty_like(send)
            dist.all_to_all_single(receive, send)
            return here.t().nonzero()[:, 1], *torch.stack([send, receive]).tolist()

        index, send, receive = layout()
        rows = x.new_empty((sum(receive), x.shape[1]))
        out = torch.empty_like(x)
        found = {}

        def dispatch(tokens, rows, index=index, send=send, receive=receive):
            dist.all_to_all_single(rows, tokens[index], receive, send)

        def dispatch_fp8(rows, scale_rows):
            tokens, scales = expert_routing.quantized(torch, x)
            # NCCL and gloo know bytes where they do not know the type.
            dispatch(tokens.view(torch.uint8), rows.view(torch.uint8))
            dispatch(scales, scale_rows)

        def combine(rows, index=index, send=send, receive=receive):
            back = rows.new_empty((sum(send), x.shape[1]))
            dist.all_to_all_single(back, rows, send, receive)
            out.zero_()
            out.index_add_(0, index, back)

        def routed():
            index, send, receive = layout()
            rows = x.new_empty((sum(receive), x.shape[1]))
            dispatch(x, rows, index, send, receive)
            combine(rows, index, send, receive)

        def routed_fp8(given):
            index, send, receive = layout()
            tokens, scales = expert_routing.quantized(torch, x)
            rows = tokens.new_empty((sum(receive), x.shape[1]))
            dispatch(tokens.view(torch.uint8), rows.view(torch.uint8), index, send, receive)
            dispatch(scales, scales.new_empty((sum(receive), scales.shape[1])), index, send, receive)
            combine(given, index, send, receive)

        def wrong_rows():
            return self.differ(rows, routing.received())

        def wrong_sums():
            return self.differ(out, routing.combined())

        def wrong_fp8():
            wanted, scales = expert_routing.quantized(torch, routing.received())
            return self.differ(found["rows"], wanted) + self.differ(found["scales"], scales)

        if case == "dispatch":
            return Exchange(partial(dispatch, x, rows), wrong_rows, rows)
        if case == "combine":
            return Exchange(partial(combine, routing.received()), wrong_sums, out)
        if case == "routed_fp8":
            return Exchange(partial(routed_fp8, routing.received()), wrong_sums, out)
        if case in ("routed", "exact"):
            return Exchange(routed, wrong_sums, out)
        found["rows"] = rows.to(torch.float8_e4m3fn)
        found["scales"] = rows.new_empty((len(rows), x.shape[1] // 128), dtype=torch.float32)
        return Exchange(partial(dispatch_fp8, found["rows"], found["scales"]), wrong_fp8)


class AllGather(Contender):
    """All tokens, ids and weights go to every rank; a reduce-scatter sums up what comes back."""

    def exchange(self, case, routing):
        torch, dist, world, me = self.torch, self.dist, self.ranks.world, routing.rank
        x, ids, weights = routing.x[me], routing.ids[me], routing.weights[me]
        if case in expert_low_latency.CASES:
            raise ValueError("the rows of an all-gather do not lie by expert")
        whole = x.new_empty((world * len(x), x.shape[1]))
        all_ids = ids.new_empty((world * len(ids), ids.shape[1]))
        all_weights = weights.new_empty(all_ids.shape)
        out = torch.empty_like(x)
        scales = whole.new_empty((len(whole), x.shape[1] // 128), dtype=torch.float32)
        quantized = whole.to(torch.float8_e4m3fn)
        here = torch.cat([routing.on(me, source) for source in range(world)])[:, None]

        def gather(to, tokens):
            dist.all_gather_into_tensor(to, tokens)
            dist.all_gather_into_tensor(all_ids, ids)
            dist.all_gather_into_tensor(all_weights, weights)

        def gather_fp8():
            rows, own = expert_routing.quantized(torch, x)
            gather(quantized.view(torch.uint8), rows.view(torch.uint8))
            dist.all_gather_into_tensor(scales, own)

        def scatter(rows):
            dist.reduce_scatter_tensor(out, rows)

        def routed():
            gather(whole, x)
            scatter(torch.where(here, whole, 0))

        def routed_fp8(rows):
            gather_fp8()
            scatter(torch.where(here, rows, 0))

        def wrong_rows():
            return self.differ(whole, torch.cat(routing.x))

        def wrong_fp8():
            rows, wanted = expert_routing.quantized(torch, torch.cat(routing.x))
            return self.differ(quantized, rows) + self.differ(scales, wanted)

        def wrong_sums():
            # A sum that begins with zeros has zeros without a sign.
            return self.differ(out + 0, routing.combined() + 0)

        if case == "dispatch":
            return Exchange(partial(gather, whole, x), wrong_rows, whole)
        if case == "dispatch_fp8":
            return Exchange(gather_fp8, wrong_fp8, scales)
        if case == "combine":
            return Exchange(partial(scatter, torch.where(here, torch.cat(routing.x), 0)), wrong_sums, out)
        if case == "routed_fp8":
            return Exchange(partial(routed_fp8, torch.cat(routing.x)), wrong_sums, out)
        return Exchange(routed, wrong_sums, out)


class DeepEP(Contender):
    """DeepEP's normal mode within a host, where `deep_ep` can be imported."""

    def __init__(self, ranks, options, most):
        import deep_ep

        super().__init__(ranks, options, most)
        if options.num_sms:
            deep_ep.Buffer.set_num_sms(options.num_sms)
        configs = [
            get(ranks.world)
            for get in (deep_ep.Buffer.get_dispatch_config, deep_ep.Buffer.get_combine_config)
        ]
        bytes_ = max(each.get_nvl_buffer_size_hint(2 * options.hidden, ranks.world) for each in configs)
        self.buffer = deep_ep.Buffer(ranks.dist.group.WORLD, bytes_, 0)
        self.ids_type = getattr(deep_ep, "topk_idx_t", ranks.torch.int64)

    def exchange(self, case, routing):
        if case in expert_low_latency.CASES:
            import deep_ep

            return self.low_latency(deep_ep, case, routing)
        torch, buffer, me = self.torch, self.buffer, routing.rank
        x, weights = routing.x[me], routing.weights[me]
        ids = routing.ids[me].to(self.ids_type)

        def route(tokens, worst=0):
            ranks, _, experts, inside, _ = buffer.get_dispatch_layout(ids, routing.experts)
            return buffer.dispatch(
                tokens,
                topk_idx=ids,
                topk_weights=weights,
                num_tokens_per_rank=ranks,
                is_token_in_rank=inside,
                num_tokens_per_expert=experts,
                num_worst_tokens=worst,
            )

        received, _, _, _, handle, _ = route(x)
        found = {}

        def dispatch():
            found["rows"] = buffer.dispatch(x, handle=handle)[0]

        def dispatch_fp8(tokens):
            found["rows"], found["scales"] = buffer.dispatch(tokens, handle=handle)[0]

        def combine():
            found["out"] = buffer.combine(received, handle)[0]

        def routed(worst):
            rows, _, _, _, new, _ = route(x, worst)
            found["out"] = buffer.combine(rows, new)[0]

        def routed_fp8(rows):
            new = route(expert_routing.quantized(torch, x), len(rows))[4]
            found["out"] = buffer.combine(rows, new)[0]

        def wrong_rows():
            return self.differ(found["rows"], routing.received())

        def wrong_fp8():
            rows, scales = expert_routing.quantized(torch, routing.received())
            return self.differ(found["rows"], rows) + self.differ(found["scales"], scales)

        def wrong_sums():
            return self.differ(found["out"], routing.combined())

        if case == "dispatch":
            return Exchange(dispatch, wrong_rows, found=found)
        if case == "dispatch_fp8":
            # It takes tokens that are quantised, and the call has no part in that.
            tokens = expert_routing.quantized(torch, x)
            return Exchange(partial(dispatch_fp8, tokens), wrong_fp8, found=found)
        if case == "combine":
            return Exchange(combine, wrong_sums, found=found)
        most = len(x) * self.ranks.world
        if case == "routed_fp8":
            rows = received.new_zeros((most, received.shape[1]))
            rows[: len(received)] = received
            return Exchange(partial(routed_fp8, rows), wrong_sums, found=found)
        worst = 0 if case == "exact" else most
        return Exchange(partial(routed, worst), wrong_sums, found=found)

    def close(self):
        self.buffer = self.calls_of_low_latency = None


def set_up(ranks, options, most, only):
    """The contenders that could be set up, symmpool first, and by name the reasons why others could not."""
    pools = peers.Pools()
    others = [("all-to-all", AllToAll), ("all-gather", AllGather)]
    if ranks.on_cuda:
        others.append(("DeepEP", DeepEP))
    if unknown := [name for name in only or [] if name not in dict(others)]:
        raise SystemExit(f"--peers {unknown[0]}: there are {', '.join(dict(others))}")
    plans = {"ours": partial(Ours, ranks, options, most, pools)}
    plans |= {
        name: partial(kind, ranks, options, most) for name, kind in others if only is None or name in only
    }
    return *ranks.attempt_each(plans), pools
