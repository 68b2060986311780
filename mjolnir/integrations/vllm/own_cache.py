"""Caches that Mjolnir writes, since no backend of vLLM's on Hopper has their formats: nvfp4, and e2m3 where vLLM takes
new cache dtypes. Their pages, their scales, their write, and 16-bit copies for prefill.

A page is contiguous, K's codes first, then V's, then the block scales of either, each head-major: all parts start at
multiples of 16 bytes, which the kernel needs and rows of codes and scales together would not give.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from mjolnir.calibration.scales import KvScales, LayerScales
from mjolnir.calibration.scales_file import ScalesFile
from mjolnir.expand import expand_pages
from mjolnir.formats import KvFormat, get_format
from mjolnir.integrations.vllm.eligibility import LayerShape
from mjolnir.signature import DTYPE_NAMES
from mjolnir.write import write_kv

KV_LAYOUT = "HND"
"""Of what ``split`` makes."""


class Views(NamedTuple):
    """K and V of a cache as a runner takes them; block scales are None where the format has none."""

    k: torch.Tensor
    v: torch.Tensor
    k_blocks: torch.Tensor | None = None
    v_blocks: torch.Tensor | None = None


def row_bytes(kv_format: str, head_size: int) -> int:
    """Bytes of a token's K and V of one head, block scales included."""
    fmt = get_format(kv_format)
    return 2 * (fmt.row_bytes(head_size) + fmt.scale_width(head_size))


def split(kv_cache: torch.Tensor, kv_format: str, head_size: int) -> Views:
    """Views of vLLM's cache tensor (pages, h_k, page_size, row_bytes), of which only whole pages mean anything.

    Raises:
        ValueError: another shape, or pages that are not contiguous.
    """
    fmt: KvFormat = get_format(kv_format)
    pages, heads, tokens, width = kv_cache.shape
    _, head, token, byte = kv_cache.stride()
    orders = ((tokens * width, width), (width, heads * width))
    contiguous = any(
        (head == by_head or heads == 1) and (token == by_token or tokens == 1) for by_head, by_token in orders
    )
    if width != row_bytes(kv_format, head_size) or byte != 1 or not contiguous:
        raise ValueError(
            f"a cache of {kv_format} must have contiguous pages and rows of {row_bytes(kv_format, head_size)} bytes, "
            f"got shape {tuple(kv_cache.shape)} with strides {kv_cache.stride()}"
        )
    codes, scales = fmt.row_bytes(head_size), fmt.scale_width(head_size)
    at = kv_cache.storage_offset()
    parts = []
    for row in (codes, codes, scales, scales):
        strides = (kv_cache.stride(0), row, tokens * row, 1)
        parts.append(kv_cache.as_strided((pages, tokens, heads, row), strides, at))
        at += heads * tokens * row
    k, v, k_blocks, v_blocks = parts
    if not scales:
        return Views(k, v)
    return Views(k, v, k_blocks.view(torch.float8_e4m3fn), v_blocks.view(torch.float8_e4m3fn))


def scales_of_layer(
    file: ScalesFile, layer_name: str, shape: LayerShape, rank: int, ranks: int, device: torch.device
) -> LayerScales:
    """A layer's part of a scales file: per channel where the file is, else per head; of one of the ranks of tensor
    parallelism, of which several may hold the same KV head.

    Raises:
        ValueError: the file is of a model of another shape, or lacks the layer.
    """
    heads = shape.num_kv_heads
    fits = file.num_kv_heads == heads * ranks or (heads == 1 and file.num_kv_heads < ranks)
    if file.head_size != shape.head_size or not fits:
        raise ValueError(
            f"{layer_name}: the scales are of {file.num_kv_heads} KV heads of {file.head_size}, and the layer has "
            f"{heads} of {shape.head_size} on each of {ranks} ranks"
        )
    numbers = [int(part) for part in layer_name.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise ValueError(f"{layer_name}: scales are by layer, and this name has not one number")
    file.require_layers(numbers)
    amax = file.layers[numbers[0]]
    kind = "channel" if all(isinstance(side[0], list) for side in (amax.k_amax, amax.v_amax)) else "head"
    of_layer = file.model_copy(update={"layers": {numbers[0]: amax}})
    scales = KvScales(of_layer, file.num_kv_heads * shape.group, shape.kv_format, granularity=kind, device=device)
    first = rank * file.num_kv_heads // ranks
    kv, q = slice(first, first + heads), slice(first * shape.group, (first + heads) * shape.group)
    whole = scales.layer(numbers[0])
    return LayerScales(
        whole.k_write[kv].contiguous(),
        whole.v_write[kv].contiguous(),
        whole.k_scale[kv].contiguous(),
        whole.v_scale[kv].contiguous(),
        None if whole.q_mul is None else whole.q_mul[q].contiguous(),
        None if whole.o_mul is None else whole.o_mul[q].contiguous(),
    )


def scales_of_vllm(layer: Any) -> LayerScales:
    """vLLM's own, one each."""
    return LayerScales.alike(layer._k_scale, layer._v_scale)


def write(
    views: Views, kv_format: str, scales: LayerScales, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> None:
    """The cache write of a step."""
    write_kv(
        key, value, views.k, views.v, slots, scales.k_write, scales.v_write,
        kv_format=kv_format, k_block_scale=views.k_blocks, v_block_scale=views.v_blocks,
    )  # fmt: skip


def expand(views: Views, scales: LayerScales, shape: LayerShape, metadata: Any) -> tuple[torch.Tensor, Any]:
    """A cache of the model's dtype with the pages of a step's requests, and the step's metadata for it.

    It is as large as requests × the longest one, 4 · h_k · d bytes a token, for as long as one layer attends. Waits for
    nothing: pages that a request does not have are skipped on the device.
    """
    page_size = views.k.shape[1]
    columns = -(-metadata.max_seq_len // page_size)
    table = metadata.block_table[:, :columns]
    starts = torch.arange(table.shape[1], device=table.device) * page_size
    pages = torch.where(starts < metadata.seq_lens[: len(table), None], table, -1).flatten()
    cache = torch.empty(
        len(pages), shape.num_kv_heads, page_size, 2 * shape.head_size, dtype=shape.dtype, device=table.device
    )
    k_out, v_out = cache.transpose(1, 2).split(shape.head_size, dim=-1)
    expand_pages(
        pages, views.k, views.v, k_out, v_out, scales.k_write, scales.v_write, kv_format=shape.kv_format,
        out_format=DTYPE_NAMES[shape.dtype], k_block_scale=views.k_blocks, v_block_scale=views.v_blocks,
    )  # fmt: skip
    changed = copy.copy(metadata)
    changed.block_table = torch.arange(len(pages), dtype=torch.int32, device=table.device).view(table.shape)
    for schedule in ("scheduler_metadata", "prefix_scheduler_metadata"):
        if hasattr(changed, schedule):
            setattr(changed, schedule, None)  # made for fp8, which vLLM takes every quantised cache for
    return cache, changed


def unscaled(layer: Any, device: torch.device) -> Any:
    """What a fallback asks of a layer, for ``expand``'s copies, which hold values and not codes."""
    one = torch.ones((), dtype=torch.float32, device=device)
    scales = {f"_{which}_scale": one for which in "qkv"} | {f"_{which}_scale_float": 1.0 for which in "qkv"}
    return SimpleNamespace(layer_name=layer.layer_name, **scales)
