"""Attention over K and V that have been through the codec: what a decode step computes, for all tokens of a text at
once.

Every token attends to the quantised K and V of all tokens up to itself, as if each had been decoded in a step of its
own. ``stepwise`` checks that.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mjolnir.accuracy.setting import Setting
from mjolnir.calibration.scales import KvScales, LayerScales
from mjolnir.demo.model import Attend, causal_attention
from mjolnir.formats import KvFormat, get_format
from mjolnir.formats.base import over
from mjolnir.page_views import broadcastable


def round_trip(x: Tensor, fmt: KvFormat, scale: Tensor) -> Tensor:
    """x (tokens, h_k, d) as a cache gives it back, in fp32; ``scale`` as ``write_kv`` takes it."""
    scale = broadcastable(scale)
    blocks = fmt.block_scales(x, scale)
    return fmt.decode(fmt.encode(x, scale, blocks), blocks) * scale


def round_trip_query(query: Tensor, num_kv_heads: int) -> Tensor:
    """A query (tokens, h_q, d) as ``q_mode="fp8"`` makes it of each token: e4m3 with a descale per KV head."""
    fp8 = get_format("fp8")
    rows = query.float().unflatten(1, (num_kv_heads, -1))
    scale = over(rows.abs().amax((2, 3), keepdim=True), fp8.max_value)
    return (fp8.decode(fp8.encode(rows, scale)) * scale).flatten(1, 2)


def cached_attention(
    setting: Setting,
    scales: KvScales,
    softmax_scale: float,
    on_output: Callable[[int, Tensor, Tensor], None] | None = None,
) -> Attend:
    """The model's attention under a setting. K, V, Q and O are bf16 around it, as engines have them.

    ``on_output`` receives, per layer, O and what O would be over the same Q and the exact bf16 K and V.
    """
    k_format, v_format = get_format(setting.k_format), get_format(setting.v_format)
    layers: dict[int, LayerScales] = {}

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if layer not in layers:
            layers[layer] = scales.layer(layer)
        own = layers[layer]
        exact_q, exact_k, exact_v = (x.bfloat16().float() for x in (query, key, value))
        q = round_trip_query(exact_q, key.shape[1]) if setting.q_mode == "fp8" else exact_q
        k = round_trip(exact_k, k_format, own.k_write)
        v = round_trip(exact_v, v_format, own.v_write)
        out = causal_attention(q, k, v, softmax_scale).bfloat16().to(query.dtype)
        if on_output is not None:
            on_output(layer, out, causal_attention(exact_q, exact_k, exact_v, softmax_scale))
        return out

    return attend
