"""The layer: the part of a step that decodes runs its plan, everything else the fallback's attention."""

from __future__ import annotations

from typing import Any

import torch

from mjolnir import env
from mjolnir.calibration.scales import LayerScales
from mjolnir.integrations.vllm import compat, own_cache, shadow
from mjolnir.integrations.vllm.builder import STEP
from mjolnir.integrations.vllm.decoder import Step
from mjolnir.integrations.vllm.eligibility import FP8_NAMES, OWN_NAMES, LayerFacts, LayerShape, why_not
from mjolnir.integrations.vllm.plugin import E2M3_NAME
from mjolnir.layouts import split_kv_cache


class DecodeImpl:
    """Mixin in front of an ``AttentionImpl`` of vLLM's. Writing the cache stays the fallback's.

    vLLM quantises queries to fp8 for backends that take them so. Mjolnir reads them in 16 bits, so a layer that can
    decode here gets its queries unquantised, and they are quantised here for the fallback.

    Attributes:
        mjolnir_reason: why the layer cannot decode here; None where it can. The builder knows more and may set it.
        mjolnir_shape: of the runner it needs; None where it cannot decode here.
        mjolnir_scales: of a cache of Mjolnir's own, from a scales file; None: vLLM's.
    """

    fallback: Any = None  # the backend class underneath

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: Any = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **extra: Any,
    ) -> None:
        # Over a cache of Mjolnir's own the fallback attends to 16-bit copies of its pages.
        fallback_dtype = "auto" if kv_cache_dtype in OWN_NAMES else kv_cache_dtype
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, fallback_dtype,  # type: ignore[call-arg]
            logits_soft_cap, attn_type, kv_sharing_target_layer_name, **extra,
        )  # fmt: skip
        from vllm.config import get_current_vllm_config_or_none

        vllm_config = get_current_vllm_config_or_none()
        facts = LayerFacts(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads or num_heads,
            head_size=head_size,
            dtype=torch.get_default_dtype(),  # the model's, while vLLM makes its layers
            kv_cache_dtype=kv_cache_dtype,
            attn_type=str(getattr(attn_type, "value", attn_type)),
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            has_alibi=alibi_slopes is not None,
            has_sinks=extra.get("sinks") is not None,
            other=tuple(name for name, value in extra.items() if name != "sinks" and not _is_unset(value)),
            engine=compat.engine_reasons(vllm_config, self, self.fallback),
        )
        self.mjolnir_reason = why_not(facts)
        if kv_cache_dtype in OWN_NAMES and self.mjolnir_reason is not None:
            raise ValueError(
                f"only Mjolnir reads {kv_cache_dtype} caches here, and not for this layer: {self.mjolnir_reason}"
            )
        if kv_cache_dtype in OWN_NAMES and compat.fallback_name() not in compat.READ_COPIES:
            raise ValueError(
                f"{env.VLLM_FALLBACK.name} must be one of {', '.join(compat.READ_COPIES)} for {kv_cache_dtype} caches, "
                f"of which prefill reads copies, got {compat.fallback_name()}"
            )
        if kv_cache_dtype in OWN_NAMES and compat.transfers_caches(vllm_config):
            raise ValueError(
                f"{kv_cache_dtype} caches cannot be transferred (kv_transfer_config): a head's bytes of a page do not "
                "lie together, and scales do not travel with them"
            )
        if kv_cache_dtype == E2M3_NAME and env.VLLM_SCALES.read() is None:
            raise ValueError(
                f"an e2m3 cache needs scales, for its codes end at 7.5: {env.VLLM_SCALES.name} must name a scales "
                "file, which mjolnir calibrate makes"
            )
        self.mjolnir_shape: LayerShape | None = None if self.mjolnir_reason else facts.shape()
        self.mjolnir_scales: LayerScales | None = None
        self._quantises_query = False
        if self.mjolnir_shape is not None:
            self._quantises_query = bool(self.supports_quant_query_input) and kv_cache_dtype in FP8_NAMES
            self.supports_quant_query_input = False  # read once, by the layer that owns this
        self._views: tuple[torch.Tensor, own_cache.Views] | None = None

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Not where the layer can decode here: Mjolnir writes O in the model's dtype."""
        if self.mjolnir_shape is not None:
            return False
        return bool(super().fused_output_quant_supported(quant_key))  # type: ignore[misc]

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """The fallback's, except into caches of Mjolnir's own."""
        if self._owns_cache():
            views, scales = self._split(kv_cache, kv_cache.shape[2]), self._own_scales(layer)
            own_cache.write(views, self._shape().kv_format, scales, key, value, slot_mapping)
        else:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)  # type: ignore[misc]

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        step: Step | None = getattr(attn_metadata, STEP, None)
        if step is None or self.mjolnir_reason is not None or self.mjolnir_shape not in step.plans:
            return self._fall_back(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("mjolnir does not quantise its output")
        if step.rest is None:
            self._decode(step, layer, query, kv_cache, output)
        else:
            done = step.part.num_tokens
            # Cut, because the number of prefill tokens changes from step to step and a runner checks each layout once.
            self._decode(step, layer, query[:done], kv_cache, output[:done])
            self._fall_back(
                layer,
                query[done:],
                None if key is None else key[done:],
                None if value is None else value[done:],
                kv_cache,
                step.rest,
                output[done:],
            )
        return output

    def _decode(
        self, step: Step, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor
    ) -> None:
        plan = step.plans[self.mjolnir_shape]  # type: ignore[index]
        views = self._split(kv_cache, plan.runner.page_size)
        scales = self._scales(layer, step)
        rows, result = query, output
        if step.gather is not None:
            rows = query.index_select(0, step.gather)
            result = torch.empty_like(rows)
        plan.runner.run(
            plan, rows, result, views.k, views.v, scales.k_scale, scales.v_scale, self.scale,
            q_mul=scales.q_mul, o_mul=scales.o_mul, k_block_scale=views.k_blocks, v_block_scale=views.v_blocks,
        )  # fmt: skip
        if step.is_shadowed:
            shadow.check(plan, rows, result, views, scales, self.scale, layer.layer_name)
        if step.scatter is not None:
            torch.index_select(result, 0, step.scatter, out=output[: step.part.num_tokens])

    def _fall_back(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        *more: Any,
    ) -> torch.Tensor:
        if self._quantises_query and attn_metadata is not None:
            self.supports_quant_query_input = True
            query = compat.quantise_query(query, layer)
        if self._owns_cache() and attn_metadata is not None:
            views = self._split(kv_cache, kv_cache.shape[2])
            kv_cache, attn_metadata = own_cache.expand(views, self._own_scales(layer), self._shape(), attn_metadata)
            layer = own_cache.unscaled(layer, kv_cache.device)
        out: torch.Tensor = super().forward(layer, query, key, value, kv_cache, attn_metadata, *more)  # type: ignore[misc]
        return out

    def _owns_cache(self) -> bool:
        return self.mjolnir_shape is not None and self.mjolnir_shape.kv_format in OWN_NAMES

    def _own_scales(self, layer: Any) -> LayerScales:
        """Of a cache of Mjolnir's own: the scales file's, which the builder has read, or vLLM's."""
        if self.mjolnir_scales is None and self._shape().kv_format == E2M3_NAME:
            raise RuntimeError(f"{layer.layer_name}: no builder has read the scales of its e2m3 cache")
        return self.mjolnir_scales or own_cache.scales_of_vllm(layer)

    def _shape(self) -> LayerShape:
        if self.mjolnir_shape is None:
            raise RuntimeError(f"the layer does not decode here: {self.mjolnir_reason}")
        return self.mjolnir_shape

    def _split(self, kv_cache: torch.Tensor, page_size: int) -> own_cache.Views:
        """K and V of the layer's cache, made once."""
        if self._views is None or self._views[0] is not kv_cache:
            shape = self._shape()
            if self._owns_cache():
                views = own_cache.split(kv_cache, shape.kv_format, shape.head_size)
            else:
                layout = compat.cache_layout(kv_cache, shape, page_size)
                views = own_cache.Views(*split_kv_cache(kv_cache, layout, shape.head_size))
            self._views = kv_cache, views
        return self._views[1]

    def _scales(self, layer: Any, step: Step) -> LayerScales:
        """vLLM writes 16-bit caches unscaled, whatever scales a checkpoint brings."""
        if self._shape().kv_format in ("bf16", "fp16"):
            return LayerScales.alike(step.one, step.one)
        return self._own_scales(layer)

    # What the fallback's class brings.
    scale: float
    supports_quant_query_input: bool


def _is_unset(value: Any) -> bool:
    """Whether an argument of a layer asks for nothing; a tensor does."""
    return value is None or value is False or (isinstance(value, int) and value == -1)
