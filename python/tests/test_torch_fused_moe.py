"""`symmpool.engines.fused_moe` on ranks of the CPU, called as vLLM's modular kernels call it."""

import enum
import sys
import types

import deep_ep_model as reference
import pytest
import torch
from deep_ep_model import BFLOAT16, dequantized, difference
from ranks import values
from test_torch_deep_ep_engines import by_expert, factor

import symmpool
from symmpool import experts
from symmpool.engines import fused_moe

FP8 = torch.float8_e4m3fn


def config(quant_dtype=None, block_shape=None):
    return types.SimpleNamespace(
        quant_dtype=quant_dtype, block_shape=block_shape, a1_scale=None, per_act_token_quant=False
    )


def per_tensor(rows, quant_config):
    """Rows as experts take them whose scales are for a whole tensor."""
    assert quant_config.quant_dtype == FP8
    return (rows.float() / 0.02).clamp(-448, 448).to(FP8), torch.tensor([[0.02]])


class Delegate:
    """Stand-in for vLLM's TopKWeightAndReduceDelegate: leaves all to `finalize`."""


class Reduce:
    """Stand-in for its TopKWeightAndReduceContiguous."""

    calls = 0

    def apply(self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input):
        Reduce.calls += 1
        made = fused_expert_output.float()
        return (made if apply_router_weight_on_input else made * topk_weights[:, :, None]).sum(1).to(BFLOAT16)


def experts_of(kernel, rows, scales, counts, ids, buffer, hidden):
    """Returns the experts' answers to the result of `prepare`: unweighted, a row for each expert of a row."""
    if scales is not None:
        single = scales.numel() == 1
        rows = (rows.float() * scales).to(BFLOAT16) if single else dequantized(rows, scales, hidden)
    first = buffer.rank * buffer.local_experts
    if kernel.batched:
        return by_expert(rows, counts.expert_num_tokens, first, buffer.experts)
    here = (ids >= first) & (ids < first + buffer.local_experts)
    return rows[:, None, :] * factor(torch.where(here, ids, -1), buffer.experts)[:, :, None].to(BFLOAT16)


def layers(group, batched, exact, how):
    me, world, hidden, most = group.rank, group.world, 1024, 32
    pool = symmpool.Pool(group, "cpu")
    buffer = experts.ExpertBuffer(pool, hidden=hidden, experts=4 * world, top_k=4, max_tokens=most)
    batch = [0]
    kernel = fused_moe.PrepareAndFinalize(
        buffer, batched=batched, exact=exact, quantize=per_tensor, batch=lambda: batch[0]
    )
    assert kernel.num_dispatchers() == world and kernel.output_is_reduced() and kernel.supports_async()
    assert kernel.max_num_tokens_per_rank() == (most if batched else None)
    quant = {"plain": config(), "blocks": config(FP8, [128, 128]), "tensor": config(FP8)}[how]
    tolerance = 1e-5 if how == "plain" else 9e-4
    begun = []
    for turn in range(4):
        routing = reference.routing_of(turn, world, hidden, tokens=most - 3 * turn)
        x, ids, weights = routing.x[me], routing.ids[me], routing.weights[me]
        if turn % 2:
            ids = ids.int()
        batch[0] = turn % 2
        arguments = (x, weights, ids, 4 * world, None, False, quant)
        if turn < 2:
            given = kernel.prepare(*arguments)
        else:
            hook, receiver = kernel.prepare_async(*arguments)
            hook()
            given = receiver()
        rows, scales, counts, row_ids, row_weights = given
        assert (scales is None) == (how == "plain") and rows.dtype == (BFLOAT16 if how == "plain" else FP8)
        assert (row_ids is None) == batched and (row_weights is None) == batched
        if not batched:
            assert row_ids.dtype == ids.dtype and len(rows) == len(row_ids) == len(row_weights)
            received = len(routing.received(me)[0])
            assert len(rows) == (received if exact else buffer.capacity)
            assert bool((row_ids >= 0).all())
        begun.append((x, ids, weights, given))
        # Batches are under way two at a time, and end in the order in which they began.
        if turn % 2 == 0:
            continue
        for nth, (x, ids, weights, (rows, scales, counts, row_ids, row_weights)) in enumerate(begun):
            batch[0] = nth
            made = experts_of(kernel, rows, scales, counts, row_ids, buffer, hidden)
            out = torch.empty(x.shape, dtype=torch.float32 if turn > 2 else BFLOAT16)
            last = (weights, ids) if batched else (row_weights, row_ids)
            if turn < 2:
                assert kernel.finalize(out, made, *last, False, Delegate()) is None
            else:
                hook, receiver = kernel.finalize_async(out, made, *last, False, None if batched else Reduce())
                hook(), receiver()
            wanted = x.float() * (factor(ids.long(), 4 * world) * weights).sum(1, keepdim=True)
            assert difference(out, wanted) < tolerance, f"batch {turn}"
        begun = []
    assert batched or Reduce.calls > 0


@pytest.mark.parametrize("how", ["plain", "blocks", "tensor"])
@pytest.mark.parametrize("batched, exact", [(False, True), (False, False), (True, True)])
def test_layers(batched, exact, how):
    values(2, layers, batched, exact, how)


def weights_on_input_and_errors(group):
    me, world, hidden = group.rank, group.world, 256
    pool = symmpool.Pool(group, "cpu")
    buffer = experts.ExpertBuffer(pool, hidden=hidden, experts=4 * world, top_k=1, max_tokens=32)
    for batched in (False, True):
        kernel = fused_moe.PrepareAndFinalize(buffer, batched=batched)
        routing = reference.routing_of(1, world, hidden, top_k=1)
        x, ids, weights = routing.x[me], routing.ids[me], routing.weights[me]
        rows, scales, counts, row_ids, row_weights = kernel.prepare(
            x, weights, ids, 4 * world, None, True, config(FP8, [128, 128]), True
        )
        assert scales is None and rows.dtype == BFLOAT16
        made = experts_of(kernel, rows, scales, counts, row_ids, buffer, hidden)
        out = torch.empty_like(x)
        kernel.finalize(out, made, *((weights, ids) if batched else (row_weights, row_ids)), True)
        wanted = (x * weights.to(BFLOAT16)).float() * factor(ids, 4 * world)
        assert difference(out, wanted) < 1e-5
        bad = [
            ("num_experts=5", (x, weights, ids, 5, None, False, config())),
            ("2 experts a token", (x, weights, ids.repeat(1, 2), 4 * world, None, True, config())),
        ]
        for text, arguments in bad:
            if me == 1:
                with pytest.raises(symmpool.InvalidArgumentError, match=text):
                    kernel.prepare(*arguments)
            else:
                with pytest.raises(symmpool.DivergedError):
                    kernel.prepare(x, weights, ids, 4 * world, None, False, config())
        with pytest.raises(symmpool.InvalidStateError, match="no prepare"):
            fused_moe.PrepareAndFinalize(buffer, batched=batched).finalize(out, made, weights, ids, False)
        with pytest.raises(symmpool.UnsupportedError, match="pass quantize="):
            kernel.prepare(x, weights, ids, 4 * world, None, False, config(torch.int8))
    with pytest.raises(TypeError, match="a symmpool.experts.ExpertBuffer"):
        fused_moe.PrepareAndFinalize(7)


def test_weights_on_input_and_errors():
    values(2, weights_on_input_and_errors)


def with_vllms_classes(group, modular):
    """vLLM's module, stood in for."""

    class Format(enum.Enum):
        Standard = 1
        BatchedExperts = 2

    class Metadata:
        def __init__(self, expert_num_tokens, expert_num_tokens_cpu):
            self.expert_num_tokens = expert_num_tokens

    class Base:
        @property
        def activation_format(self):
            raise NotImplementedError

        def supports_deferred_moe_finalize(self):
            return False

    name = "FusedMoEPrepareAndFinalizeModular" if modular else "FusedMoEPrepareAndFinalize"
    kernels = types.ModuleType(fused_moe._KERNELS)
    kernels.FusedMoEActivationFormat, kernels.ExpertTokensMetadata = Format, Metadata
    setattr(kernels, name, Base)
    parts = fused_moe._KERNELS.split(".")
    for end in range(1, len(parts)):
        sys.modules[".".join(parts[:end])] = types.ModuleType(".".join(parts[:end]))
    sys.modules[fused_moe._KERNELS] = kernels
    made = fused_moe.for_vllm()
    assert issubclass(made, Base) and fused_moe.for_vllm() is made
    pool = symmpool.Pool(group, "cpu")
    buffer = experts.ExpertBuffer(pool, hidden=256, experts=4, top_k=2, max_tokens=8)
    kernel = made(buffer, batched=True)
    assert kernel.activation_format is Format.BatchedExperts and not kernel.supports_deferred_moe_finalize()
    x, ids = torch.ones(3, 256, dtype=BFLOAT16), torch.tensor([[0, 1], [2, 3], [-1, 0]])
    given = kernel.prepare(x, torch.ones(3, 2), ids, 4, None, False, config())
    assert isinstance(given[2], Metadata) and given[2].expert_num_tokens.tolist() == [2, 1, 1, 1]


@pytest.mark.parametrize("modular", [True, False])
def test_the_class_for_vllm(modular):
    values(1, with_vllms_classes, modular)


def test_without_vllm_there_is_no_class_for_it():
    with pytest.raises(symmpool.UnsupportedError, match="cannot be imported"):
        fused_moe.for_vllm()
