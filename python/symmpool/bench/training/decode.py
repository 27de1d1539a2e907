"""Decoding with Hugging Face's tensor parallelism: a token at a time, eagerly, in a CUDA graph, or compiled
and in one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from symmpool.bench.training import models

if TYPE_CHECKING:
    import argparse

    from symmpool.bench.training.turn_ranks import TurnRanks

__all__ = ["MODES", "Decoding"]

#: The kinds, and whether a step is captured in a graph, and the model compiled before that.
MODES = {"decode": (False, False), "decode_graph": (True, False), "decode_compiled": (True, True)}


class Decoding:
    """A model with the tensor parallelism of its own plan, a prompt that it has read, and a static cache.
    `fused` is as for `compile_options`."""

    def __init__(
        self, kind: str, turn_ranks: TurnRanks, options: argparse.Namespace, fused: str | None = None
    ):
        from torch.distributed.device_mesh import init_device_mesh
        from transformers import LlamaForCausalLM, StaticCache
        from transformers.distributed import DistributedConfig

        self.turn_ranks, self.options = turn_ranks, options
        self.captured, compiled = MODES[kind]
        mesh = init_device_mesh(turn_ranks.device.type, (turn_ranks.world,))
        model = models.made(options, turn_ranks.device).eval()
        config = DistributedConfig(tp_size=turn_ranks.world, tp_plan="auto")
        self.model = LlamaForCausalLM.maybe_distribute_model(model, config, mesh)
        count = options.prompt + options.warmup + options.tokens * (1 + options.profiled) + 8
        self.cache = StaticCache(config=self.model.config, max_cache_len=count)
        drawn = torch.Generator().manual_seed(1)
        shape = (options.decode_batch, options.prompt)
        prompt = torch.randint(options.vocabulary, shape, generator=drawn).to(turn_ranks.device)
        self.graph: Any = None
        # Steps are given these tokens, and not what the step before has decoded: with random weights that is
        # another sequence as soon as a logit is rounded in another way, and nothing could be compared.
        shape = (options.tokens, options.decode_batch)
        self.given = torch.randint(options.vocabulary, shape, generator=drawn).to(turn_ranks.device)
        # The highest logits of parts of the vocabulary, so that parts of ranks cannot be exchanged unseen.
        self.parts = math.gcd(options.vocabulary, 8)
        self.logits = torch.empty((*shape, self.parts), dtype=model.dtype, device=turn_ranks.device)
        self.place = torch.zeros(1, dtype=torch.int64, device=turn_ranks.device)
        with torch.no_grad():
            self._next(prompt)
        if compiled:
            # Only now, as the prompt has another length than what follows.
            torch._dynamo.reset()
            self.model.model.compile(dynamic=False, options=models.compile_options(fused))

    @property
    def tokens_a_step(self) -> int:
        return self.options.decode_batch

    def _next(self, tokens: torch.Tensor) -> torch.Tensor:
        """The highest logit of each part of the vocabulary, of each sequence."""
        output = self.model(input_ids=tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].unflatten(-1, (self.parts, -1)).amax(-1)

    def _step(self) -> None:
        with torch.no_grad():
            place = self.place % len(self.given)
            logits = self._next(self.given.index_select(0, place).view(-1, 1))
            self.logits.index_copy_(0, place, logits[None])
            self.place.add_(1)

    def capture(self) -> None:
        """Captures a step, after some outside of the graph, on the stream of the capture."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # Other threads, NCCL's watchdog among them, may look at events meanwhile.
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            self._step()

    def step(self, number: int) -> None:
        if self.captured and self.graph is None:
            self.capture()
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()

    def numbers(self, _: object) -> list[float]:
        """Logits of some steps, which libraries should share."""
        return self.logits[:: max(1, len(self.logits) // 8)].flatten().tolist()

    def close(self) -> None:
        if self.graph is not None:
            self.graph.reset()
            self.graph = None
