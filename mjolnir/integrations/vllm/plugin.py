"""The entry point in ``vllm.general_plugins``. vLLM calls it in each of its processes, some of which never attend: it
names the backend's class and a cache dtype, and imports nothing else of Mjolnir's."""

from __future__ import annotations

from typing import Any

from mjolnir.integrations.vllm.log import logger

BACKEND_PATH = "mjolnir.integrations.vllm.backend.MjolnirBackend"
OWN_NAME = "MJOLNIR"
E2M3_NAME = "e2m3"


def register() -> None:
    """Register the backend and, where vLLM's release takes new ones, the cache dtype."""
    _register_backend()
    _register_cache_dtype()


def _register_backend() -> None:
    """Make ``--attention-backend CUSTOM`` mean Mjolnir, and ``MJOLNIR`` too where vLLM's release takes new names."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND_PATH:
        logger.warning(
            "mjolnir leaves --attention-backend CUSTOM to %s, which another plugin registered; VLLM_PLUGINS=mjolnir "
            "loads this one only",
            custom.get_path(),
        )
    else:
        register_backend(custom, BACKEND_PATH)
    if hasattr(AttentionBackendEnum, "register") and OWN_NAME not in AttentionBackendEnum.__members__:
        register_backend(OWN_NAME, BACKEND_PATH)


def _register_cache_dtype() -> None:
    """``--kv-cache-dtype e2m3``, from vLLM 0.33 on: bytes, of which only the backend knows more."""
    try:
        from vllm.config.cache import is_known_kv_cache_dtype, register_kv_cache_dtype
    except ImportError:
        return
    if is_known_kv_cache_dtype(E2M3_NAME):  # vLLM may load plugins again
        return

    class Handler:
        name = E2M3_NAME

        def torch_dtype(self) -> Any:
            import torch

            return torch.uint8

        def quant_mode(self) -> Any:
            from vllm.v1.kv_cache_interface import KVQuantMode

            return KVQuantMode.CUSTOM

    register_kv_cache_dtype(E2M3_NAME)(Handler)
