"""Which attention layers can decode on Mjolnir, and the reason of those that cannot. Knows no vLLM."""

from __future__ import annotations

import dataclasses

import torch

from mjolnir.integrations.vllm.plugin import E2M3_NAME
from mjolnir.runner import PAGE_SIZES
from mjolnir.signature import DTYPE_NAMES
from mjolnir.variant import HEAD_SIZES, MAX_ROWS

FP8_NAMES = ("fp8", "fp8_e4m3")
OWN_NAMES = ("nvfp4", E2M3_NAME)
"""Cache dtypes that Mjolnir writes itself, called as its formats; vLLM takes e2m3 from 0.33 on."""
HALF_NAMES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """What layers must share to share a runner."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    kv_format: str
    dtype: torch.dtype  # of Q and O

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def max_q_len(self) -> int:
        """Query tokens per sequence that the kernel takes."""
        return MAX_ROWS // self.group

    def __str__(self) -> str:
        return f"{self.kv_format}, {self.num_heads}/{self.num_kv_heads} heads of {self.head_size}"


@dataclasses.dataclass(frozen=True)
class LayerFacts:
    """What a layer asks of its backend, in plain values.

    Attributes:
        dtype: of the query, the model's.
        kv_cache_dtype: vLLM's name: "auto", "bfloat16", "fp8", …
        attn_type: "decoder", "encoder", "encoder_only" or "encoder_decoder".
        sliding_window: tokens, or None.
        logits_soft_cap: None or 0 where scores are not capped.
        other: names of further arguments that the layer passes to its backend.
        engine: reasons that hold for every layer of the engine.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    kv_cache_dtype: str
    attn_type: str = "decoder"
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    has_alibi: bool = False
    has_sinks: bool = False
    other: tuple[str, ...] = ()
    engine: tuple[str, ...] = ()

    def shape(self) -> LayerShape:
        """The runner's shape of a layer that ``why_not`` finds nothing against."""
        kv_format = kv_format_of(self.kv_cache_dtype, self.dtype)
        if kv_format is None:
            raise ValueError(f"kv_cache_dtype {self.kv_cache_dtype!r} has no Mjolnir format")
        return LayerShape(self.num_heads, self.num_kv_heads, self.head_size, kv_format, self.dtype)


def kv_format_of(kv_cache_dtype: str, dtype: torch.dtype) -> str | None:
    """Mjolnir's name of vLLM's cache dtype for a model of ``dtype``; None where there is none."""
    if kv_cache_dtype in FP8_NAMES:
        return "fp8"
    if kv_cache_dtype in OWN_NAMES:
        return kv_cache_dtype
    if kv_cache_dtype == "auto":
        return DTYPE_NAMES.get(dtype)
    # Queries and a 16-bit cache have one dtype in every vLLM backend.
    return DTYPE_NAMES[dtype] if HALF_NAMES.get(kv_cache_dtype) == dtype else None


def why_not(layer: LayerFacts) -> str | None:
    """The first reason for which the layer cannot decode on Mjolnir; None where it can."""
    if layer.engine:
        return layer.engine[0]
    if layer.attn_type != "decoder":
        return f"{layer.attn_type.replace('_', '-')} attention"
    if layer.sliding_window is not None:
        return f"sliding window of {layer.sliding_window}"
    if layer.logits_soft_cap:
        return f"scores capped at {layer.logits_soft_cap:g}"
    if layer.has_alibi:
        return "ALiBi"
    if layer.has_sinks:
        return "attention sinks"
    if layer.other:
        return f"argument {layer.other[0]}"
    if layer.dtype not in DTYPE_NAMES:
        return f"queries of {layer.dtype}".replace("torch.", "")
    if kv_format_of(layer.kv_cache_dtype, layer.dtype) is None:
        return f"KV cache dtype {layer.kv_cache_dtype}"
    if layer.head_size not in HEAD_SIZES:
        return f"head size {layer.head_size}"
    if layer.num_heads % layer.num_kv_heads:
        return f"{layer.num_heads} query heads on {layer.num_kv_heads} KV heads"
    if layer.num_heads // layer.num_kv_heads > MAX_ROWS:
        return f"{layer.num_heads // layer.num_kv_heads} query heads per KV head"
    return None


def why_not_pages(page_size: int) -> str | None:
    """The reason for which caches with pages of so many tokens cannot be read; None where they can."""
    return None if page_size in PAGE_SIZES else f"pages of {page_size} tokens"
