"""Expected results of `symmpool.deep_ep`: routings, and checks that know the answers."""

import expert_model as model
import torch

BFLOAT16 = torch.bfloat16


def same(a, b):
    a, b = a.contiguous(), b.contiguous()
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def difference(x, y):
    """1 minus the similarity of two tensors, as the field measures it."""
    x, y = x.double() + 1, y.double() + 1
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def routing_of(seed, world, hidden=128, top_k=4, experts=None, tokens=24, everywhere=False):
    """Tokens, ids and weights of all ranks, the same on every rank. Some ids are -1."""
    generator, experts = torch.Generator().manual_seed(seed), experts or 4 * world
    x, ids, weights = [], [], []
    for rank in range(world):
        count = tokens - 5 * rank if not everywhere else tokens
        x.append(torch.randn((count, hidden), generator=generator).to(BFLOAT16))
        scores = torch.rand((count, experts), generator=generator)
        chosen = scores.topk(top_k).indices
        if not everywhere:
            chosen[torch.rand(chosen.shape, generator=generator) < 0.2] = -1
        ids.append(chosen)
        weights.append(torch.rand((count, top_k), generator=generator))
    return model.Routing(x, ids, weights, experts)


def counted(routing, me):
    """(tokens for each rank, for each expert, which go where) of a rank."""
    in_rank = torch.stack([(routing.on(rank)[me] >= 0).any(1) for rank in range(routing.world)], 1)
    of_experts = torch.stack([(routing.ids[me] == expert).sum() for expert in range(routing.experts)])
    return in_rank.sum(0).int(), of_experts.int(), in_rank


def layout_arguments(routing, me, with_topk, buffer):
    of_ranks, _, of_experts, in_rank, _ = buffer.get_dispatch_layout(routing.ids[me], routing.experts)
    given = {
        "num_tokens_per_rank": of_ranks,
        "num_tokens_per_expert": of_experts,
        "is_token_in_rank": in_rank,
    }
    if with_topk:
        given.update(topk_idx=routing.ids[me], topk_weights=routing.weights[me])
    return given


def check_received(routing, me, found, scale, with_topk, alignment=1):
    """Compares a dispatch of `scale` times the tokens with the reference."""
    rows, ids, weights, counts, handle = found
    wanted, wanted_ids, wanted_weights, offsets, index = routing.received(me)
    assert same(rows, wanted * scale)
    at_least = [int((wanted_ids == expert).sum()) for expert in range(routing.local)]
    assert counts == [-(-count // alignment) * alignment for count in at_least]
    if len(handle) == 10:
        # Over hosts.
        assert handle[-4].tolist() == offsets[1:] and handle[-4].dtype == torch.int32
        assert torch.equal(handle.kept.source_index[: len(index)].long(), index)
    else:
        assert handle[0][:, me].tolist() == offsets[1:]
        assert handle[0].shape == (routing.world, routing.world) and handle[0].dtype == torch.int32
        assert torch.equal(handle[3].long(), index) and len(handle) == 6
    if with_topk:
        assert ids.dtype == torch.int64 and torch.equal(ids, wanted_ids)
        assert same(weights, torch.where(wanted_ids >= 0, wanted_weights, 0))
    else:
        assert ids is None and weights is None


def low_latency_routing(seed, world, hidden, top_k, experts, tokens):
    routing = routing_of(seed, world, hidden, top_k, experts, tokens, everywhere=True)
    for rank in range(world):
        routing.x[rank][:] = rank - 128
        routing.x[rank][:, -128:] = torch.arange(tokens).to(BFLOAT16)[:, None]
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        for _ in range(10):
            token = int(torch.randint(tokens, (), generator=generator))
            routing.ids[rank][token, int(torch.randint(top_k, (), generator=generator))] = -1
    return routing


def dequantized(rows, scales, hidden):
    if scales.dtype == torch.int32:
        scales = (scales.contiguous().view(torch.uint8).to(torch.int32) << 23).view(torch.float32)
    groups = rows.float().unflatten(-1, (-1, 128))
    return (groups * scales.contiguous().view(*groups.shape[:-1], 1)).flatten(-2).to(BFLOAT16)


def check_low_latency(routing, me, rows, count, handle, exact):
    """Checks the results of a dispatch by expert."""
    world, tokens = routing.world, len(routing.x[0])
    src_info, layout_range, most, hidden, experts = handle
    assert (most, hidden, experts) == (tokens, rows.shape[2], routing.experts)
    assert src_info.dtype == torch.int32 and src_info.shape == rows.shape[:2]
    assert layout_range.dtype == torch.int64 and layout_range.shape == (routing.local, world)
    for expert in range(routing.local):
        named = [(ids == me * routing.local + expert) for ids in routing.ids]
        assert int(count[expert]) == sum(int(each.sum()) for each in named)
        end = 0
        for source in range(world):
            begin, many = (int(part) for part in divmod(int(layout_range[expert, source]), 1 << 32))
            assert begin == end and many == int(named[source].sum())
            end = begin + many
            assert torch.equal(src_info[expert, begin:end].long(), named[source].any(1).nonzero()[:, 0])
            wanted = routing.x[source][src_info[expert, begin:end].long()]
            if exact:
                assert same(rows[expert, begin:end], wanted)
            else:
                assert difference(rows[expert, begin:end], wanted) < 9e-4
        assert end == int(count[expert])


FORMATS = [
    {"use_fp8": False},
    {"use_fp8": True},
    {"use_fp8": True, "round_scale": True},
    {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
]


def low_latency_dispatch(buffer, x, ids, experts, hooked, formats, meanwhile=lambda: None):
    """`(received, count, handle, event, hook)` of a dispatch whose tokens have come, by hook or event.
    Statistics that a caller keeps are the counts. `meanwhile` is called before the wait."""
    statistics = torch.zeros(experts // buffer.group_size, dtype=torch.int32, device=x.device)
    found = buffer.low_latency_dispatch(
        x,
        ids,
        len(x),
        experts,
        cumulative_local_expert_recv_stats=statistics,
        async_finish=not hooked,
        return_recv_hook=hooked,
        **formats,
    )
    _, count, _, event, hook = found
    meanwhile()
    hook() if hooked else event.current_stream_wait()
    assert torch.equal(statistics, count)
    return found


def low_latency_combine(buffer, rows, ids, weights, handle, hooked, zero_copy, **options):
    """The sums of rows, in a tensor that was given for them. With `zero_copy` the rows are not passed but
    lie in the buffer for them."""
    out = torch.empty((len(ids), rows.shape[-1]), dtype=rows.dtype, device=rows.device)
    if zero_copy:
        buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = rows
        rows = torch.zeros_like(rows)
    sums, event, hook = buffer.low_latency_combine(
        rows,
        ids,
        weights,
        handle,
        zero_copy=zero_copy,
        async_finish=not hooked,
        return_recv_hook=hooked,
        out=out,
        **options,
    )
    hook() if hooked else event.current_stream_wait()
    assert sums is out and not sums.isnan().any()
    return sums
