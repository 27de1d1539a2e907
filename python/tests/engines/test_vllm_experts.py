"""vLLM's own managers of experts, `deepep_high_throughput` and `deepep_low_latency`, on ranks of the CPU with
our `deep_ep`. vLLM makes them on GPUs only, so the test makes them itself, in vLLM's own groups. The experts
between dispatch and combine multiply a token by a number of their own."""

import os

import torch
import torch.distributed as dist
from ranks import values

WORLD, EXPERTS, TOKENS, TOP = 2, 8, 24, 2
HIDDEN = 2048  # the smallest that vLLM's low-latency experts take


def tokens(rank):
    chance = torch.Generator().manual_seed(rank)
    ids = torch.rand(TOKENS, EXPERTS, generator=chance).topk(TOP).indices
    weights = torch.rand(TOKENS, TOP, generator=chance) + 0.1
    return torch.randn(TOKENS, HIDDEN, generator=chance).bfloat16(), ids, weights


def expected(x, ids, weights):
    return x.float() * ((ids + 1) * weights).sum(1, keepdim=True)


def close(what, found, wanted, wrong, limit):
    error = ((found.float() - wanted).norm() / wanted.norm()).item()
    if not error < limit:
        wrong.append((what, error))


def mixtures(group, folder):
    """Sends tokens to their experts and back by both managers. Returns what went otherwise than it should."""
    os.environ["VLLM_RPC_BASE_PATH"] = folder
    from symmpool import deep_ep

    deep_ep.install()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators.all2all import (
        DeepEPHTAll2AllManager,
        DeepEPLLAll2AllManager,
    )
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
        TopKWeightAndReduceDelegate,
        TopKWeightAndReduceNoOP,
    )
    from vllm.plugins import load_general_plugins

    load_general_plugins()

    me, wrong = group.rank, []
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            WORLD, me, f"file://{folder}/meeting", me, backend="symmpool"
        )
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=WORLD, backend="symmpool")
        cpu_group = parallel_state.get_tp_group().cpu_group
        x, ids, weights = tokens(me)
        first, each = me * (EXPERTS // WORLD), EXPERTS // WORLD
        given = (EXPERTS, None, False, FUSED_MOE_UNQUANTIZED_CONFIG)

        high = DeepEPHTAll2AllManager(cpu_group)
        from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ht import (
            DeepEPHTPrepareAndFinalize,
        )

        buffer = high.get_handle({})
        if high.internode or type(buffer) is not deep_ep.Buffer or high.get_handle({}) is not buffer:
            wrong.append(("buffer", high.internode, type(buffer)))
        layer = DeepEPHTPrepareAndFinalize(buffer, WORLD, 1, first)
        for turn in ("at once", "later"):
            prepare = (x, weights, ids, *given)
            rows, _, meta, at, row_weights = (
                layer.prepare(*prepare) if turn == "at once" else layer.prepare_async(*prepare)()
            )
            here = (at >= first) & (at < first + each)
            if meta.expert_num_tokens.sum() != here.sum():
                wrong.append((turn, "counts", meta.expert_num_tokens.tolist()))
            factor = (torch.where(here, at + 1, 0) * row_weights).sum(1, keepdim=True)
            out, made = torch.empty_like(x), (rows.float() * factor).bfloat16()
            arguments = (out, made, weights, ids, False, TopKWeightAndReduceNoOP())
            if turn == "at once":
                layer.finalize(*arguments)
            else:
                layer.finalize_async(*arguments)()
            close(f"high throughput, {turn}", out, expected(x, ids, weights), wrong, 0.01)

        low = DeepEPLLAll2AllManager(cpu_group)
        from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ll import (
            DeepEPLLPrepareAndFinalize,
        )

        sizes = {"max_num_tokens_per_dp_rank": TOKENS, "token_hidden_size": HIDDEN, "num_ep_ranks": WORLD}
        sizes |= {"num_global_experts": EXPERTS, "num_local_experts": each}
        for eight_bits in (False, True):
            layer = DeepEPLLPrepareAndFinalize(low.get_handle(sizes), TOKENS, WORLD, eight_bits)
            rows, _, meta, _, _ = layer.prepare(x, weights, ids, *given)
            numbers = torch.arange(first + 1, first + each + 1).reshape(each, 1, 1)
            out, made = torch.empty_like(x), (rows.float() * numbers).bfloat16()
            total = torch.tensor([int(meta.expert_num_tokens.sum())])
            dist.all_reduce(total, group=cpu_group)
            if total.item() != WORLD * TOKENS * TOP:
                wrong.append(("low latency", "counts", total.item()))
            layer.finalize(out, made, weights, ids, False, TopKWeightAndReduceDelegate())
            what = f"low latency, {'8-bit' if eight_bits else 'bfloat16'}"
            close(what, out, expected(x, ids, weights), wrong, 0.05 if eight_bits else 0.01)
        high.destroy()
        low.destroy()
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    return wrong


def test_vllms_managers_of_experts_have_our_buffers(tmp_path):
    assert values(WORLD, mixtures, str(tmp_path)) == [[]] * WORLD
