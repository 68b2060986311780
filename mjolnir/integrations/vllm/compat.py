"""Everything that depends on vLLM's release: 0.26, run on a GPU, and 0.33, checked against its sources.

The backend derives from the fallback's classes, so what a release adds, drops or renames in a backend is inherited:
cache shapes and layouts, specs, kernel block sizes, the cache write. What is left are the few calls below.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from mjolnir import env
from mjolnir.integrations.vllm.eligibility import LayerShape
from mjolnir.integrations.vllm.plugin import E2M3_NAME, OWN_NAME
from mjolnir.layouts import KVLayout, detect_kv_layout
from mjolnir.runner import PAGE_SIZES

TESTED = ("0.26", "0.33")
DEFAULT_FALLBACK = "FLASH_ATTN"

CACHE_LAYOUTS = dict.fromkeys(("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER"), KVLayout.BHN2D)
"""Logical layout of the cache tensors of these backends, in both releases."""

READ_COPIES = ("FLASH_ATTN", "TRITON_ATTN")
"""Backends whose metadata names pages and lengths as ``own_cache.expand`` takes and changes them."""

_PER_REQUEST = frozenset(
    {
        "seq_lens",
        "block_table_tensor",
        "seq_lens_cpu_upper_bound",
        "is_prefilling",
        "req_idx",
        "_seq_lens_cpu",
        "_num_computed_tokens_cpu",
    }
)
_PER_TOKEN = frozenset({"slot_mapping", "positions"})
_CACHES = frozenset({"_num_computed_tokens_cache", "_token_to_req_indices_cache"})
_KEPT = frozenset({"max_query_len", "causal"})
_RESET = frozenset({"query_start_loc", "query_start_loc_cpu", "num_reqs", "num_actual_tokens", "max_seq_len"})


def fallback_name() -> str:
    """The backend underneath.

    Raises:
        ValueError: MJOLNIR_VLLM_FALLBACK names Mjolnir itself.
    """
    name = (env.VLLM_FALLBACK.read() or DEFAULT_FALLBACK).upper()
    if name in ("CUSTOM", OWN_NAME):
        raise ValueError(f"{env.VLLM_FALLBACK.name} must name a backend of vLLM other than Mjolnir, got {name!r}")
    return name


def fallback_backend() -> Any:
    """Its class.

    Raises:
        ValueError: vLLM has no backend of that name.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum[fallback_name()].get_class()


def uniform_graphs_at_most(support: Any, allowed: bool) -> Any:
    """A builder's ``AttentionCGSupport``, capped: full graphs hold steps of one q_len only, or there are none."""
    cap = type(support).UNIFORM_BATCH if allowed else type(support).NEVER
    return support if support.value <= cap.value else cap


def page_sizes(kernel_block_sizes: list[Any]) -> list[Any]:
    """The fallback's kernel block sizes as page sizes of Mjolnir's. Most backends of vLLM's take every multiple of 16,
    and vLLM then leaves blocks whole, of whatever size a hybrid model's state asks for (528, 784, …)."""
    pages: list[Any] = []
    for size in kernel_block_sizes:
        base = getattr(size, "base", None)
        if base is None:
            pages.append(size)
        else:
            pages.extend(page for page in PAGE_SIZES if page % base == 0 and page not in pages)
    return pages or kernel_block_sizes


def cache_layout(kv_cache: torch.Tensor, shape: LayerShape, page_size: int) -> KVLayout:
    """How K and V lie in a cache of the fallback's. Of a backend that is not known, as the shape says.

    Raises:
        ValueError: no known layout has this shape.
    """
    known = CACHE_LAYOUTS.get(fallback_name())
    return detect_kv_layout(kv_cache.shape, shape.num_kv_heads, page_size, shape.head_size, known)


def engine_reasons(vllm_config: Any, impl: Any, fallback: Any) -> tuple[str, ...]:
    """Reasons for which no layer of this engine can decode on Mjolnir. ``vllm_config`` is None in some tests."""
    import vllm.envs as envs

    model = getattr(vllm_config, "model_config", None)
    speculative = getattr(vllm_config, "speculative_config", None)
    found = {
        "decode context parallelism": getattr(impl, "dcp_world_size", 1) > 1,
        "prefill context parallelism": getattr(impl, "pcp_world_size", 1) > 1,
        "batch invariance": bool(envs.VLLM_BATCH_INVARIANT),
        "bidirectional multimodal prefixes": bool(getattr(model, "is_mm_prefix_lm", False)),
        "reference sliding window": getattr(model, "rswa_window", None) is not None,
        # Waking up leaves what builders allocate undefined in 0.26: plans, slots of splits, scales.
        "sleep mode": bool(getattr(model, "enable_sleep_mode", False)),
        "adaptive verification": bool(getattr(speculative, "enable_adaptive_verification", False)),
        "a fallback that writes the cache inside its attention": fallback.forward_includes_kv_cache_update,
    }
    return tuple(reason for reason, holds in found.items() if holds)


def own_cache_dtype(kv_quant_mode: Any) -> str | None:
    """The cache dtype of Mjolnir's own that a ``KVQuantMode`` of vLLM's means; None where it means another. There is
    one that its backend manages, and of those Mjolnir registers e2m3."""
    if getattr(kv_quant_mode, "is_nvfp4", False):
        return "nvfp4"
    return E2M3_NAME if getattr(kv_quant_mode, "is_custom_mode", False) else None


def tensor_parallel() -> tuple[int, int]:
    """This process's rank, of how many."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()


def transfers_caches(vllm_config: Any) -> bool:
    """Whether blocks leave this engine's cache, to another engine, the host or a disk."""
    return getattr(vllm_config, "kv_transfer_config", None) is not None


def is_draft(layer: Any, name: str, vllm_config: Any) -> bool:
    """Whether a layer is a draft model's, whose numbers may be those of the target's layers, or follow them (EAGLE)."""
    parts, layers = name.split("."), vllm_config.model_config.get_total_num_hidden_layers()
    named = not {"draft_model", "mtp"}.isdisjoint(parts) or any(int(n) >= layers for n in parts if n.isdecimal())
    return named or bool(getattr(layer, "is_draft_layer", False))


def speculative_tokens(vllm_config: Any) -> int:
    """Draft tokens that a step may verify per request."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.num_speculative_tokens is None:
        return 0
    return speculative.num_speculative_tokens * (2 if getattr(speculative, "parallel_drafting", False) else 1)


def attention_layers(vllm_config: Any, layer_names: list[str]) -> dict[str, Any]:
    """The layers of these names, as far as vLLM knows them."""
    known = vllm_config.compilation_config.static_forward_context
    return {name: known[name] for name in layer_names if name in known}


def quantise_query(query: torch.Tensor, layer: Any) -> torch.Tensor:
    """Q (tokens, heads, d) as vLLM's layer quantises it for a backend that takes fp8 queries: by its static scales, one
    for all heads or one per group of heads."""
    from vllm import _custom_ops as ops

    scale = layer._q_scale
    group = (-1, query.shape[1] * query.shape[2] // scale.numel()) if scale.numel() > 1 else None
    codes, _ = ops.scaled_fp8_quant(query.flatten(1), scale, group_shape=group)
    return codes.view(query.shape)


def rest_of(common: Any, num_seqs: int, num_tokens: int) -> Any | None:
    """``CommonAttentionMetadata`` of what follows the first num_seqs requests and num_tokens tokens; None where the
    step carries something that is not known to be cut so. Makes one device tensor and waits for nothing."""
    lens = getattr(common, "seq_lens_cpu_upper_bound", None)
    cut: dict[str, Any] = {
        "query_start_loc": common.query_start_loc[num_seqs:] - num_tokens,
        "query_start_loc_cpu": common.query_start_loc_cpu[num_seqs:] - num_tokens,
        "num_reqs": common.num_reqs - num_seqs,
        "num_actual_tokens": common.num_actual_tokens - num_tokens,
        # Copies of an nvfp4 cache are sized by it.
        "max_seq_len": common.max_seq_len if lens is None else int(lens[num_seqs:].max()),
    }
    for field in dataclasses.fields(common):
        name, value = field.name, getattr(common, field.name)
        if name in _CACHES:
            cut[name] = None
        elif value is None or name in _KEPT or name in _RESET:
            continue
        elif name in _PER_REQUEST:
            cut[name] = value[num_seqs:]
        elif name in _PER_TOKEN:
            cut[name] = value[num_tokens:]
        else:
            return None
    return dataclasses.replace(common, **cut)
