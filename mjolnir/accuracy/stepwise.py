"""The same setting token by token: written by ``write_kv`` into pages, read by ``DecodeRunner``."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mjolnir.accuracy.attend import cached_attention
from mjolnir.accuracy.setting import Setting
from mjolnir.calibration.scales import KvScales
from mjolnir.demo.generate import CachedDecoder, Difference
from mjolnir.demo.model import Llama

PAGE_SIZE = 16


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How far logits of token-by-token decoding are from those of the batched evaluation."""

    setting: str
    tokens: int
    max_abs: float
    mean_abs: float
    kl: float
    same_top: float


def decode_logits(model: Llama, setting: Setting, scales: KvScales, text: Tensor) -> Tensor:
    """Logits (tokens, vocabulary) of a text that is decoded one token at a time from an empty cache."""
    decoder = CachedDecoder(
        model,
        kv_format=setting.k_format,
        v_format=setting.v_format,
        q_mode=setting.q_mode,
        page_size=PAGE_SIZE,
        max_tokens=len(text),
        scales=scales,
        kv_dtype=torch.bfloat16,
    )
    return torch.stack([decoder.step(token) for token in text.tolist()])


def check_stepwise(model: Llama, setting: Setting, scales: KvScales, text: Tensor) -> Agreement:
    """Compare the two over a short text (tokens,)."""
    batched = model.forward(text, 0, cached_attention(setting, scales, model.config.softmax_scale))
    gap = Difference.between(decode_logits(model, setting, scales, text), batched)
    return Agreement(setting.name, len(text), gap.max_abs, gap.mean_abs, gap.kl, gap.same_top)
