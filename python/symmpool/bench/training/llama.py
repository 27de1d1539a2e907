"""A Llama in plain torch, for machines without transformers. Its modules have the names of Hugging Face's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    import argparse

__all__ = ["Llama"]


class Norm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, shared: int):
        super().__init__()
        self.size = width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, shared * self.size, bias=False)
        self.v_proj = nn.Linear(width, shared * self.size, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, hidden_states: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        # With parallel projections a rank has some of the heads.
        shape = (*hidden_states.shape[:2], -1, self.size)
        q, k, v = (
            project(hidden_states).view(shape).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = turned(q, rotation), turned(k, rotation)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o_proj(seen.transpose(1, 2).flatten(2))


def turned(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding."""
    cos, sin = rotation
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class Hidden(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, options: argparse.Namespace):
        super().__init__()
        self.input_layernorm = Norm(options.width)
        self.self_attn = Attention(options.width, options.heads, options.shared_heads)
        self.post_attention_layernorm = Norm(options.width)
        self.mlp = Hidden(options.width, options.hidden)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(hidden_states=self.input_layernorm(x), rotation=rotation)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    def __init__(self, options: argparse.Namespace):
        super().__init__()
        self.size = options.width // options.heads
        self.embed_tokens = nn.Embedding(options.vocabulary, options.width)
        self.layers = nn.ModuleList(Layer(options) for _ in range(options.layers))
        self.norm = Norm(options.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        steps = torch.arange(0, self.size, 2, device=tokens.device).float() / self.size
        places = torch.arange(tokens.shape[1], device=tokens.device).float()
        angles = torch.outer(places, 10_000.0**-steps).repeat(1, 2)
        rotation = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, rotation)
        return self.norm(x)


class Llama(nn.Module):
    """Takes tokens and returns logits. `options` are those of `bench training`."""

    def __init__(self, options: argparse.Namespace):
        super().__init__()
        self.model = Model(options)
        self.lm_head = nn.Linear(options.width, options.vocabulary, bias=False)
        for each in self.parameters():
            if each.dim() > 1:
                nn.init.normal_(each, std=0.02)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(input_ids))
