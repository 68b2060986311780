"""The metadata builder: the fallback's, and beside its metadata the plan of the part of the step that decodes."""

from __future__ import annotations

import functools
import logging
from typing import Any

import numpy as np
import torch

from mjolnir import env
from mjolnir.calibration.scales_file import ScalesFile
from mjolnir.integrations.vllm import compat, counters, own_cache
from mjolnir.integrations.vllm.decoder import GroupDecoder, Step
from mjolnir.integrations.vllm.eligibility import OWN_NAMES, LayerShape, why_not_pages
from mjolnir.integrations.vllm.log import logger
from mjolnir.integrations.vllm.plugin import E2M3_NAME
from mjolnir.integrations.vllm.steps import DecodePart, decode_part

STEP = "mjolnir_step"
"""The attribute of the fallback's metadata that carries the ``Step``."""


class DecodeBuilder:
    """Mixin in front of a builder of vLLM's.

    It plans from what is there without waiting for the device: query lengths on the host, sequence lengths on the
    device. A step that a full CUDA graph may replay has one q_len, so whether it decodes here is the same at capture
    and at every replay, and each replay finds its own plan in the fixed buffers.
    """

    counters = counters.COUNTERS
    mjolnir_class: Any = None  # the class itself: vLLM derives from builders to rewrite what they make

    # vLLM takes builders of equal specs for alike, but one may have other query heads, or none that decode here, and
    # graphs of each read its own buffers: each builds.
    supports_update_block_table = False

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device, *args: Any,
                 **kwargs: Any) -> None:  # fmt: skip
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, *args, **kwargs)  # type: ignore[call-arg]
        layers = compat.attention_layers(vllm_config, layer_names)
        made = type(self)
        rewritten = None if made is made.mjolnir_class else f"metadata that {made.__name__} rewrites"
        self.decoder, self.all_here = _make_decoder(layers, kv_cache_spec.block_size, vllm_config, device, rewritten)
        self.shadow_every = env.vllm_shadow_every()
        self._steps = 0
        counters.log_at_exit()
        if self.decoder is not None and getattr(self, "reorder_batch_threshold", None) is None:
            # Requests that decode come first, so that they can be split off.
            self.reorder_batch_threshold = self.decoder.max_q_len

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """At most uniform batches: a graph of a mixed step could be replayed for a step that decodes, and the other way
        round. None at all under shadow checks, which need Python to run."""
        support = super().get_cudagraph_support(vllm_config, kv_cache_spec)  # type: ignore[misc]
        return compat.uniform_graphs_at_most(support, allowed=not env.vllm_shadow_every())

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int | None:
        """None: full graphs hold one q_len."""
        return None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False, **kwargs: Any) -> Any:
        common = common_attn_metadata
        part = self._decode_part(common_prefix_len, common)
        rest_common = None
        if isinstance(part, DecodePart) and not part.is_whole:
            rest_common = compat.rest_of(common, part.num_seqs, part.num_tokens) if self.all_here else None
            if rest_common is None:
                part = "prefill beside decode, which cannot be split here"
        if isinstance(part, str):
            self.counters.record(counters.FALLBACK, part)
            return super().build(common_prefix_len, common, fast_build, **kwargs)  # type: ignore[misc]

        # Where every layer decodes here, nobody reads the schedule that a slow build would make.
        metadata = super().build(common_prefix_len, common, fast_build or self.all_here, **kwargs)  # type: ignore[misc]
        step = self._plan(part, common)
        if rest_common is not None:
            step.rest = super().build(0, rest_common, fast_build, **kwargs)  # type: ignore[misc]
        setattr(metadata, STEP, step)
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        with self.counters.capture():
            return super().build_for_cudagraph_capture(common_attn_metadata)  # type: ignore[misc]

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        """Plan again from the lengths as they are; a graph of draft steps captures it."""
        super().update_draft_decode_metadata(metadata)  # type: ignore[misc]
        step: Step | None = getattr(metadata, STEP, None)
        if step is not None and self.decoder is not None:
            setattr(metadata, STEP, self.decoder.replan(step))

    def _decode_part(self, common_prefix_len: int, common: Any) -> DecodePart | str:
        if self.decoder is None:
            return "no layer decodes on Mjolnir"
        if common_prefix_len > 0:
            return "cascade attention"
        if common.causal is not True:
            return "not causal"
        if common.num_reqs > self.decoder.max_num_seqs:
            return f"more than {self.decoder.max_num_seqs} requests"
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].numpy()
        return decode_part(np.diff(starts).astype(np.int64), common.num_actual_tokens, self.decoder.max_q_len)

    def _plan(self, part: DecodePart, common: Any) -> Step:
        if self.decoder is None:
            raise RuntimeError("a step decodes, but no layer does")  # _decode_part has ruled this out
        step = self.decoder.plan(part, common.block_table_tensor, common.seq_lens)
        self._count(part)
        step.is_shadowed = bool(self.shadow_every) and self._steps % self.shadow_every == 0
        return step

    def _count(self, part: DecodePart) -> None:
        self._steps += 1
        path = counters.DECODE if part.query_lens is None else counters.RAGGED
        self.counters.record(path if part.is_whole else counters.SPLIT)


def _make_decoder(
    layers: dict[str, Any], page_size: int, vllm_config: Any, device: torch.device, rewritten: str | None
) -> tuple[GroupDecoder | None, bool]:
    """The decoder of a builder's layers, and whether it has all of them. Tells every layer's impl, and logs, which
    decode on Mjolnir and why the others do not. ``rewritten``: a reason that holds for all."""
    against: dict[str, list[str]] = {}
    shapes: dict[LayerShape, list[str]] = {}
    for name, layer in layers.items():
        reason = _why_not_layer(layer) or rewritten or why_not_pages(page_size)
        if reason is None:
            shapes.setdefault(layer.impl.mjolnir_shape, []).append(name)
        else:
            against.setdefault(reason, []).append(name)
    decoder = None
    if shapes:
        drafts = compat.speculative_tokens(vllm_config)
        try:
            decoder = GroupDecoder(
                list(shapes),
                page_size=page_size,
                max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
                max_q_len=1 + drafts,
                margin=drafts,
                device=device,
            )
        except Exception as error:  # the compiler's, of many kinds: whatever it is, the fallback serves
            reason = f"no kernel: {type(error).__name__}: {error}"
            against.setdefault(reason, []).extend(name for names in shapes.values() for name in names)
            shapes = {}
    own = {name: layer for name, layer in layers.items() if getattr(layer, "kv_cache_dtype", None) in OWN_NAMES}
    if own:
        # The fallback could attend to copies, but a graph of it would hold copies of the longest sequences there are.
        if against or decoder is None or decoder.max_q_len < 1 + compat.speculative_tokens(vllm_config):
            reasons = "; ".join(against) or f"{1 + compat.speculative_tokens(vllm_config)} query tokens per request"
            dtype = next(iter(own.values())).kv_cache_dtype
            raise ValueError(f"only Mjolnir reads {dtype} caches here, and it cannot decode every layer: {reasons}")
        _read_scales(own, vllm_config, device)
    for reason, names in against.items():
        for name in names:
            if hasattr(layers[name].impl, "mjolnir_reason"):
                layers[name].impl.mjolnir_reason = reason
        _log_once(
            logging.WARNING if reason.startswith("no kernel") else logging.INFO,
            f"{_names(names)} on {compat.fallback_name()}: {reason}",
        )
    for shape, names in shapes.items():
        pages = f"pages of {page_size}, up to {decoder.max_q_len if decoder else 1} query tokens"
        _log_once(
            logging.INFO, f"{_names(names)} decode on Mjolnir ({shape}, {pages}), else on {compat.fallback_name()}"
        )
    return decoder, bool(shapes) and not against


def _read_scales(layers: dict[str, Any], vllm_config: Any, device: torch.device) -> None:
    """Give layers with caches of Mjolnir's own their scales, before any graph is captured.

    A draft model's nvfp4 layers keep vLLM's: the file is of the target, whose layers may have the same numbers.

    Raises:
        OSError: the scales file cannot be read.
        ValueError: it is none, or does not fit a layer; or a draft model has e2m3 caches.
    """
    # Once: another builder of the same layers must not free what graphs read.
    layers = {name: layer for name, layer in layers.items() if layer.impl.mjolnir_scales is None}
    path = env.VLLM_SCALES.read()
    if path is None or not layers:
        return
    file = ScalesFile.load(path)
    rank, ranks = compat.tensor_parallel()
    for name, layer in layers.items():
        if compat.is_draft(layer, name, vllm_config):
            if layer.kv_cache_dtype == E2M3_NAME:
                raise ValueError(
                    f"{name}: the scales file is not of a draft model: give it another cache, by kv_cache_dtype in "
                    "--speculative-config"
                )
            continue
        writer = getattr(layer, "kv_sharing_target_layer_name", None) or name
        shape = layer.impl.mjolnir_shape
        layer.impl.mjolnir_scales = own_cache.scales_of_layer(file, writer, shape, rank, ranks, device)


def _why_not_layer(layer: Any) -> str | None:
    impl: Any = getattr(layer, "impl", None)
    if not hasattr(impl, "mjolnir_reason"):
        return f"attention of {type(impl).__name__}"
    backend = layer.get_attn_backend()
    if backend.mjolnir_class is not backend:  # chunked local, cross, static sinks: they rewrite the step's metadata
        return f"layers of {type(layer).__name__}"
    if getattr(layer, "head_size_v", None) not in (None, layer.head_size):
        return f"values of head size {layer.head_size_v}"
    reason: str | None = impl.mjolnir_reason
    return reason


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:2]) + (", …" if len(names) > 2 else "")
    return f"{len(names)} attention layer{'s' * (len(names) > 1)} ({shown})"


@functools.lru_cache(maxsize=256)
def _log_once(level: int, message: str) -> None:
    """vLLM makes a group's builder several times: to profile, per micro-batch, for a drafter."""
    logger.log(level, "mjolnir: %s", message)
