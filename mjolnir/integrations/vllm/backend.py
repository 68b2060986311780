"""The backend class that vLLM loads: the fallback's, with a builder and an impl that decode on Mjolnir."""

from __future__ import annotations

from typing import Any

from mjolnir.integrations.vllm import compat
from mjolnir.integrations.vllm.builder import DecodeBuilder
from mjolnir.integrations.vllm.impl import DecodeImpl


class BackendNames:
    """Mixin in front of a backend of vLLM's: its name and the sizes that blocks are cut into differ, what it supports
    is the fallback's to say."""

    mjolnir_class: Any = None  # the class itself: vLLM derives from backends to rewrite what they are told
    builder_class: Any = None
    impl_class: Any = None

    @staticmethod
    def get_name() -> str:
        """vLLM looks this up among its backends' names."""
        return "CUSTOM"

    @classmethod
    def get_supported_kernel_block_sizes(cls, *kv_cache_spec: Any) -> list[Any]:
        """From 0.33 on vLLM passes the layer's spec, or none."""
        sizes: list[Any] = super().get_supported_kernel_block_sizes(*kv_cache_spec)  # type: ignore[misc]
        return compat.page_sizes(sizes)

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
    backend.mjolnir_class = backend  # type: ignore[attr-defined]
    return backend


MjolnirBackend = make_backend(compat.fallback_backend())
