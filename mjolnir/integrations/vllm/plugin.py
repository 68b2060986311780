"""The entry point in ``vllm.general_plugins``. vLLM calls it in each of its processes, some of which never attend: it
names the backend's class and imports nothing else."""

from __future__ import annotations

from mjolnir.integrations.vllm.log import logger

BACKEND_PATH = "mjolnir.integrations.vllm.backend.MjolnirBackend"
OWN_NAME = "MJOLNIR"


def register() -> None:
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
