"""DeepEP's names over hosts, which this machine pretends to be."""

import pytest
import test_torch_deep_ep as on_one_host
import test_torch_deep_ep_engines as engines
import torch
from deep_ep_model import check_received, counted, difference, routing_of, same
from test_torch_experts_over_hosts import over

import symmpool
from symmpool import deep_ep


def between_hosts(group, hosts):
    """Holds what DeepEP's own test between hosts does, by the names of calls between hosts."""
    me, world = group.rank, group.world
    buffer = deep_ep.Buffer(group, int(1e9), int(1e9), num_qps_per_rank=24)
    config = deep_ep.Config(24, 8, 512, 16, 128)
    for seed in (1, 2):
        routing = routing_of(seed, world, hidden=256, experts=2 * world)
        x, ids, weights = routing.x[me], routing.ids[me], routing.weights[me]
        of_ranks, of_hosts, of_experts, in_rank, _ = buffer.get_dispatch_layout(ids, routing.experts)
        wanted = counted(routing, me)
        assert same(of_ranks, wanted[0]) and same(of_experts, wanted[1]) and same(in_rank, wanted[2])
        on_hosts = [int(in_rank[:, list(ranks)].any(1).sum()) for ranks in hosts]
        assert of_hosts.dtype == torch.int32 and of_hosts.tolist() == on_hosts
        given = {
            "num_tokens_per_rank": of_ranks,
            "num_tokens_per_rdma_rank": of_hosts,
            "is_token_in_rank": in_rank,
            "num_tokens_per_expert": of_experts,
            "config": config,
        }
        with pytest.raises(symmpool.Error):
            # Every rank refuses it, or hears that another one has.
            wrong = {**given, "num_tokens_per_rdma_rank": of_hosts.long()}
            buffer.internode_dispatch(x, **wrong, topk_idx=ids, topk_weights=weights)
        for with_topk in (True, False):
            chosen = {"topk_idx": ids, "topk_weights": weights} if with_topk else {}
            *found, event = buffer.internode_dispatch(x, **given, **chosen, async_finish=True)
            event.current_stream_wait()
            rows, handle = found[0], found[4]
            check_received(routing, me, found, 1, with_topk)
            assert len(handle) == 10 and same(handle[0], in_rank) and handle[1] is None
            assert handle[-4].tolist() == routing.received(me)[3][1:] and "of 10 parts" in repr(handle)
            again, *_ = buffer.internode_dispatch(x * 2, handle=handle, config=config)
            assert same(again, rows * 2)
            biases = torch.randn_like(x), torch.randn_like(x)
            row_weights = found[2] if with_topk else None
            sums, of_weights, _ = buffer.internode_combine(
                rows, handle, topk_weights=row_weights, bias=biases
            )
            reached = wanted[2].sum(1, keepdim=True)
            torch.testing.assert_close(sums, x * reached + biases[0] + biases[1], rtol=3e-2, atol=3e-2)
            sums, _, _ = buffer.internode_combine(rows, handle)
            assert difference(sums, x * reached) < 1e-5
            if with_topk:
                assert difference(of_weights, torch.where(ids >= 0, weights, 0)) < 1e-9
                most = 40 * world
                worst = buffer.internode_dispatch(x, **given, **chosen, num_worst_tokens=most)
                assert len(worst[0]) == most and worst[3] == [] and same(worst[0][: len(rows)], rows)
    assert config.get_rdma_buffer_size_hint(512, world) == 0


@pytest.mark.parametrize("ids", ["aabb", "aab"])
def test_calls_between_hosts_are_what_a_reference_computes(ids):
    hosts = [[rank for rank, each in enumerate(ids) if each == host] for host in sorted(set(ids))]
    over(ids, between_hosts, hosts)


def test_low_latency_calls_and_both_modes_cross_hosts():
    over("abb", on_one_host.low_latency_mode, 5, 6, 12)
    over("ab", on_one_host.both_modes)
    over("aab", on_one_host.masks)


@pytest.mark.parametrize("name", ["VllmHighThroughputAsync", "VllmLowLatencyHooks", "SglangAuto"])
def test_what_engines_call_between_hosts(name):
    over("ab", engines.serve, name)


def waits(group):
    """Statistics of waits are of one host: all ranks are told, and go on."""
    buffer = deep_ep.Buffer(group, low_latency_mode=True)
    x, ids = torch.ones(4, 128, dtype=torch.bfloat16), torch.zeros(4, 1, dtype=torch.int64)
    costs = torch.zeros(group.world, dtype=torch.int64)
    with pytest.raises(symmpool.UnsupportedError, match="2 hosts"):
        buffer.low_latency_dispatch(x, ids, 4, 2, dispatch_wait_recv_cost_stats=costs)
    rows, *_ = buffer.low_latency_dispatch(x, ids, 4, 2, use_fp8=False)
    return rows.shape


def test_statistics_of_waits_are_of_one_host():
    assert over("ab", waits) == [(1, 8, 128)] * 2
