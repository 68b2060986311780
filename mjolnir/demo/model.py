"""A Llama-architecture decoder as a function of its weights; attention is the caller's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, query, key, value) -> output``: query and output (tokens, h_q, d), key and value (tokens, h_k, d),
of the tokens in this forward call, positions already rotated in."""


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes and constants of one model; max_tokens is its context length, rope_base the θ of its rotary positions."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rope_base: float
    norm_eps: float
    max_tokens: int

    @classmethod
    def from_metadata(cls, metadata: dict[str, Any]) -> LlamaConfig:
        """From GGUF metadata. Raises ValueError for another architecture than llama."""
        architecture = metadata["general.architecture"]
        if architecture != "llama":
            raise ValueError(f"metadata: general.architecture is {architecture!r}, expected 'llama'")
        heads = metadata["llama.attention.head_count"]
        return cls(
            num_layers=metadata["llama.block_count"],
            num_heads=heads,
            num_kv_heads=metadata["llama.attention.head_count_kv"],
            head_size=metadata["llama.embedding_length"] // heads,
            rope_base=metadata["llama.rope.freq_base"],
            norm_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
            max_tokens=metadata["llama.context_length"],
        )

    @property
    def softmax_scale(self) -> float:
        return self.head_size**-0.5


@dataclasses.dataclass(frozen=True)
class Block:
    """Weights of one layer, (out, in); q, k and v in one matrix, gate and up in one: fewer, larger products."""

    attention_norm: Tensor
    qkv: Tensor
    attention_output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Llama:
    """RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied embeddings.

    Args:
        weights: by GGUF name, as ``read_gguf`` returns them.
        dtype: of weights and activations.
    """

    def __init__(
        self, config: LlamaConfig, weights: dict[str, Tensor], device: torch.device, dtype: torch.dtype
    ) -> None:
        def load(*names: str) -> Tensor:
            return torch.cat([weights[f"{name}.weight"] for name in names]).to(device, dtype)

        def load_block(b: str) -> Block:
            return Block(
                attention_norm=load(f"{b}.attn_norm"),
                qkv=load(f"{b}.attn_q", f"{b}.attn_k", f"{b}.attn_v"),
                attention_output=load(f"{b}.attn_output"),
                mlp_norm=load(f"{b}.ffn_norm"),
                gate_up=load(f"{b}.ffn_gate", f"{b}.ffn_up"),
                down=load(f"{b}.ffn_down"),
            )

        self.config, self.device, self.dtype = config, device, dtype
        self.embedding = load("token_embd")
        self.blocks = [load_block(f"blk.{layer}") for layer in range(config.num_layers)]
        self.final_norm = load("output_norm")
        exponents = torch.arange(0, config.head_size, 2, device=device, dtype=torch.float32) / config.head_size
        self.frequencies = config.rope_base**-exponents  # (d / 2,), radians per token

    def forward(self, tokens: Tensor, first_position: int, attend: Attend) -> Tensor:
        """fp32 logits (tokens, vocabulary) of consecutive tokens (int64), the first at ``first_position``."""
        return self.logits(self.hidden(tokens, first_position, attend))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits (tokens, vocabulary) of what ``hidden`` returned."""
        return functional.linear(hidden, self.embedding).float()

    @torch.inference_mode()
    def hidden(self, tokens: Tensor, first_position: int, attend: Attend) -> Tensor:
        """What logits are made of: the last layer's output, normalised, (tokens, hidden size)."""
        c = self.config
        positions = torch.arange(first_position, first_position + len(tokens), device=self.device)
        angles = positions[:, None, None] * self.frequencies  # (tokens, 1, d / 2)
        cos, sin = angles.cos(), angles.sin()
        x = self.embedding[tokens]
        for layer, block in enumerate(self.blocks):
            qkv = functional.linear(self._norm(x, block.attention_norm), block.qkv).unflatten(-1, (-1, c.head_size))
            q, k, v = qkv.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
            o = attend(layer, rotate(q, cos, sin), rotate(k, cos, sin), v)
            x = x + functional.linear(o.flatten(1), block.attention_output)
            gate, up = functional.linear(self._norm(x, block.mlp_norm), block.gate_up).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, block.down)
        return self._norm(x, self.final_norm)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), (x.shape[-1],), eps=self.config.norm_eps).to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x (tokens, heads, d) by angles (tokens, 1, d / 2).

    Neighbours (2i, 2i + 1) are a pair: GGUF stores the q and k rows of llama models in that order, where the
    original checkpoint pairs i with i + d / 2. Scores are the same, since q and k share the order.
    """
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, softmax_scale: float) -> Tensor:
    """Full causal self-attention by PyTorch: what prefill uses, and what decoding is checked against."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    o = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=softmax_scale, enable_gqa=True)
    return o[0].transpose(0, 1)
