"""The model that is trained and decoded: Hugging Face's Llama, or one of our own where transformers is not
installed. Weights are random and the same on every rank; they are drawn on the device."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import argparse

__all__ = ["compile_options", "has_transformers", "logits_of", "made"]

SEED = 2026


def has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


def made(options: argparse.Namespace, device: torch.device) -> Any:
    """A new model on the device."""
    dtype = getattr(torch, options.dtype_name)
    torch.manual_seed(SEED)
    with _default_dtype(dtype), torch.device(device):
        if options.model == "own":
            from symmpool.bench.training.llama import Llama

            return Llama(options)
        # Nothing is fetched: the model is made of its configuration.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=options.vocabulary,
            hidden_size=options.width,
            intermediate_size=options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=options.heads,
            num_key_value_heads=options.shared_heads,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
        return LlamaForCausalLM(config)


def compile_options(fused: str | None) -> dict[str, Any]:
    """Options of `torch.compile`. With `fused` of "ours" or "torch" its graphs have fused calls of ours or of
    torch's in the place of collectives and what is next to them."""
    if fused == "ours":
        from symmpool.fused import inductor_pass

        return {"post_grad_custom_pre_pass": inductor_pass()}
    if fused == "torch":
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        whole: Any = torch.distributed.group.WORLD
        enable_symm_mem_for_group(whole.group_name)
        return {"_micro_pipeline_tp": True}
    return {}


def logits_of(output: torch.Tensor) -> Any:
    """The logits among what a model returned."""
    return output if isinstance(output, torch.Tensor) else output.logits


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
