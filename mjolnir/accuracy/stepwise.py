"""The same setting token by token: written by ``write_kv`` into pages, read by ``DecodeRunner``."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mjolnir.accuracy.attend import cached_attention
from mjolnir.accuracy.setting import Setting
from mjolnir.calibration.scales import KvScales
from mjolnir.demo.generate import Difference
from mjolnir.demo.kv import PagedKVCache
from mjolnir.demo.model import Llama
from mjolnir.runner import DecodeRunner, StepPlan

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
    c = model.config
    runner = DecodeRunner(
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_size=c.head_size,
        page_size=PAGE_SIZE,
        out_dtype=torch.bfloat16,
        max_num_seqs=1,
        q_mode=setting.q_mode,
        kv_format=setting.k_format,
        v_format=setting.v_format,
        device=model.device,
    )
    cache = PagedKVCache(
        num_layers=c.num_layers,
        num_kv_heads=c.num_kv_heads,
        head_size=c.head_size,
        page_size=PAGE_SIZE,
        max_tokens=len(text),
        kv_format=setting.k_format,
        v_format=setting.v_format,
        scales=scales,
        device=model.device,
    )
    logits = []
    for position, token in enumerate(text):
        cache.extend(1)
        plan = runner.plan([cache.length], 1, 1, cache.block_table, cache.seq_lens)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, plan: StepPlan = plan) -> Tensor:
            cache.write(layer, key.bfloat16(), value.bfloat16())
            query = query.bfloat16()
            out = torch.empty_like(query)
            cache.attend(runner, plan, layer, query, out, c.softmax_scale)
            return out.to(model.dtype)

        logits.append(model.forward(token.reshape(1), position, attend)[0])
    return torch.stack(logits)


def check_stepwise(model: Llama, setting: Setting, scales: KvScales, text: Tensor) -> Agreement:
    """Compare the two over a short text (tokens,)."""
    batched = model.forward(text, 0, cached_attention(setting, scales, model.config.softmax_scale))
    gap = Difference.between(decode_logits(model, setting, scales, text), batched)
    return Agreement(setting.name, len(text), gap.max_abs, gap.mean_abs, gap.kl, gap.same_top)
