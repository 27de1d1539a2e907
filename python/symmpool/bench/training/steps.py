"""Training steps: the same model under FSDP2, DDP, and tensor with sequence parallelism, as it is or with
compiled layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from symmpool.bench.training import models

if TYPE_CHECKING:
    import argparse

    from symmpool.bench.training.turn_ranks import TurnRanks

__all__ = ["KINDS", "Training"]


def fully_sharded(model: Any, turn_ranks: TurnRanks, options: argparse.Namespace) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(turn_ranks.device.type, (turn_ranks.world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def data_parallel(model: Any, turn_ranks: TurnRanks, options: argparse.Namespace) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    devices = [turn_ranks.device.index] if turn_ranks.on_cuda else None
    return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)


def tensor_parallel(model: Any, turn_ranks: TurnRanks, options: argparse.Namespace) -> Any:
    """Norms and what is added to work on parts of the sequence, projections on parts of the heads and of the
    hidden units. The embedding gives whole sequences, which the first layer takes its part of, as Hugging
    Face's model makes positions and masks of what the embedding returns."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(turn_ranks.device.type, (turn_ranks.world,))
    part, whole = Shard(1), Replicate()
    head = ColwiseParallel(input_layouts=part, output_layouts=Shard(-1), use_local_output=False)
    outside = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=whole),
        "model.layers.0": PrepareModuleInput(
            input_layouts=_first(model, whole),
            desired_input_layouts=_first(model, part),
            use_local_output=True,
        ),
        "model.norm": SequenceParallel(),
        "lm_head": head,
    }
    attention = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": part}, desired_input_kwarg_layouts={"hidden_states": whole}
    )
    inside = {
        "input_layernorm": SequenceParallel(),
        "self_attn": attention,
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": RowwiseParallel(output_layouts=part),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=part),
    }
    parallelize_module(model, mesh, outside)
    for layer in model.model.layers:
        parallelize_module(layer, mesh, inside)
    return model


def _first(model: Any, layout: Any) -> tuple[Any, ...]:
    """Layouts of a layer's positional arguments. Our own model's second is no tensor of the sequence."""
    from symmpool.bench.training.llama import Llama

    return (layout, None) if isinstance(model, Llama) else (layout,)


def compile_layers(model: Any, fused: str | None) -> None:
    """Has torch compile each layer by itself; the graph between them would be cut anyway. `fused` is as for
    `compile_options`."""
    options = models.compile_options(fused)
    torch._dynamo.reset()
    layers = model.model.layers
    # All layers have one code, which is compiled for each of them.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(layers))
    for layer in layers:
        layer.compile(dynamic=False, options=options)


#: How a model is made parallel, by the kind's name, and whether all ranks have the same tokens.
KINDS: dict[str, tuple[Callable[..., Any], bool]] = {
    "fsdp": (fully_sharded, False),
    "ddp": (data_parallel, False),
    "tp": (tensor_parallel, True),
    "tp_compiled": (tensor_parallel, True),
}


class Training:
    """A model, its optimizer and its data, for one round. `fused` is as for `compile_options`."""

    def __init__(
        self, kind: str, turn_ranks: TurnRanks, options: argparse.Namespace, fused: str | None = None
    ):
        wrap, self.same_tokens = KINDS[kind]
        self.turn_ranks, self.options = turn_ranks, options
        model = models.made(options, turn_ranks.device)
        self.model = wrap(model, turn_ranks, options)
        if kind == "tp_compiled":
            compile_layers(self.model, fused)
        kernels: dict[str, Any] = {options.optimizer: True} if turn_ranks.on_cuda else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.rate, **kernels)
        drawn = torch.Generator().manual_seed(1 + (0 if self.same_tokens else turn_ranks.rank))
        shape = (options.batch, options.length + 1)
        tokens = [torch.randint(options.vocabulary, shape, generator=drawn) for _ in range(4)]
        self.tokens = [each.to(turn_ranks.device) for each in tokens]
        # Once for both libraries; `loss_parallel` sums over parts of the vocabulary.
        self.losses_in: Callable[[], Any] = contextlib.nullcontext
        if kind in ("tp", "tp_compiled"):
            from torch.distributed.tensor.parallel import loss_parallel

            self.losses_in = loss_parallel

    @property
    def tokens_a_step(self) -> int:
        """Number of tokens of all ranks together."""
        alike = 1 if self.same_tokens else self.turn_ranks.world
        return self.options.batch * self.options.length * alike

    def step(self, number: int) -> torch.Tensor:
        """One step of training; returns its loss, which the device may not have computed yet."""
        tokens = self.tokens[number % len(self.tokens)]
        logits = models.logits_of(self.model(tokens[:, :-1]))
        with self.losses_in():
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def without_windows(self) -> None:
        """Has FSDP's buffers lie in memory of torch's own."""
        from torch.distributed.fsdp import FSDPModule

        for each in self.model.modules():
            if isinstance(each, FSDPModule):
                each.set_allocate_memory_from_process_group_for_comm(False)

    def close(self) -> None:
        """Nothing but the object itself has to go."""

    def numbers(self, losses: list[torch.Tensor]) -> list[float]:
        """Losses as numbers. Collective where they are distributed tensors."""
        return [float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss) for loss in losses]
