"""The backend class that vLLM loads: the fallback's, with a builder and an impl that decode on Mjolnir."""

from __future__ import annotations

import dataclasses
from typing import Any

from mjolnir.integrations.vllm import compat, own_cache
from mjolnir.integrations.vllm.builder import DecodeBuilder
from mjolnir.integrations.vllm.eligibility import OWN_NAMES
from mjolnir.integrations.vllm.impl import DecodeImpl


class BackendNames:
    """Mixin in front of a backend of vLLM's: its name and the sizes that blocks are cut into differ, and some caches
    are Mjolnir's own; what else it supports is the fallback's to say."""

    mjolnir_class: Any = None  # the class itself: vLLM derives from backends to rewrite what they are told
    builder_class: Any = None
    impl_class: Any = None

    @staticmethod
    def get_name() -> str:
        """vLLM looks this up among its backends' names."""
        return "CUSTOM"

    @classmethod
    def get_supported_kernel_block_sizes(cls, *kv_cache_spec: Any) -> list[Any]:
        """From 0.33 on vLLM passes the layer's spec, or none. Padded blocks cannot be cut."""
        sizes: list[Any] = super().get_supported_kernel_block_sizes(*kv_cache_spec)  # type: ignore[misc]
        padded = any(getattr(spec, "page_size_padded", None) is not None for spec in kv_cache_spec)
        return sizes if padded else compat.page_sizes(sizes)

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype in OWN_NAMES or bool(super().supports_kv_cache_dtype(kv_cache_dtype))  # type: ignore[misc]

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: Any, kv_cache_dtype: str | None, *more: Any, **named: Any
    ) -> Any:
        """The fallback does not see caches of Mjolnir's own, only 16-bit copies."""
        seen = "auto" if kv_cache_dtype in OWN_NAMES else kv_cache_dtype
        return super().supports_combination(head_size, dtype, seen, *more, **named)  # type: ignore[misc]

    @classmethod
    def get_kv_cache_shape(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Until 0.26."""
        if cache_dtype_str in OWN_NAMES:
            return (num_blocks, num_kv_heads, block_size, own_cache.row_bytes(cache_dtype_str, head_size))
        shape: tuple[int, ...] = super().get_kv_cache_shape(  # type: ignore[misc]
            num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str
        )
        return shape

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """From 0.33 on: the bytes of a row, where vLLM would not know them."""
        own = compat.own_cache_dtype(spec.kv_quant_mode)
        if own is not None and spec.state_content_bytes is None:
            return dataclasses.replace(spec, state_content_bytes=own_cache.row_bytes(own, spec.head_size))
        return super().customize_spec(spec)  # type: ignore[misc]

    @classmethod
    def get_builder_cls(cls) -> Any:
        return cls.builder_class

    @classmethod
    def get_impl_cls(cls) -> Any:
        return cls.impl_class


def make_backend(fallback: Any, name: str = "MjolnirBackend") -> Any:
    """A backend over ``fallback``, a backend class of vLLM's.

    Deriving from its three classes keeps everything that vLLM asks a backend for, in each release: cache shapes and
    strides, specs, block sizes, layouts, what is supported, and tests by ``isinstance``.
    """
    made = {"__module__": __name__}
    builder = type("MjolnirMetadataBuilder", (DecodeBuilder, fallback.get_builder_cls()), dict(made))
    impl = type("MjolnirImpl", (DecodeImpl, fallback.get_impl_cls()), made | {"fallback": fallback})
    backend = type(name, (BackendNames, fallback), made | {"builder_class": builder, "impl_class": impl})
    for derived in (builder, backend):
        derived.mjolnir_class = derived  # type: ignore[attr-defined]
    return backend


MjolnirBackend = make_backend(compat.fallback_backend())
