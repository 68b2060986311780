"""Every environment variable that Mjolnir reads. Each is read when it is needed, not at import."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import platformdirs


@dataclasses.dataclass(frozen=True)
class Knob:
    """One environment variable.

    Attributes:
        name: the variable, prefixed MJOLNIR_.
        meaning: its values and what an unset one does, in a line (shown by ``mjolnir doctor``).
    """

    name: str
    meaning: str

    def read(self) -> str | None:
        """The value without surrounding blanks; None where it is unset or empty."""
        return os.environ.get(self.name, "").strip() or None


KERNEL_CACHE = Knob(
    "MJOLNIR_KERNEL_CACHE",
    "folder of compiled kernels: unset = the user's cache folder, a path, or 0 or off (compile in every process)",
)

COMMIT = Knob(
    "MJOLNIR_COMMIT",
    "commit hash that results name where the package runs without its git checkout: unset = none is named",
)

VLLM_FALLBACK = Knob(
    "MJOLNIR_VLLM_FALLBACK",
    "backend of vLLM under Mjolnir's, for prefill and for what Mjolnir does not run: unset = FLASH_ATTN",
)

VLLM_SHADOW = Knob(
    "MJOLNIR_VLLM_SHADOW",
    "N: check every Nth decode step against the oracle, slowly and without full CUDA graphs: unset or 0 = never",
)

VLLM_SCALES = Knob(
    "MJOLNIR_VLLM_SCALES",
    "scales file (mjolnir calibrate) for caches that Mjolnir writes: e2m3 needs one, nvfp4 has vLLM's scales without",
)

KNOBS: tuple[Knob, ...] = (KERNEL_CACHE, COMMIT, VLLM_FALLBACK, VLLM_SHADOW, VLLM_SCALES)


def kernel_cache_folder() -> Path | None:
    """The folder that MJOLNIR_KERNEL_CACHE names, absolute; None where the cache on disk is off.

    A relative path counts from the current directory, and ``~`` is the home directory. Nothing is created here.
    """
    value = KERNEL_CACHE.read()
    if value is not None and value.lower() in ("0", "off"):
        return None
    if value is None:
        return Path(platformdirs.user_cache_dir("mjolnir", appauthor=False)) / "kernels"
    return Path(os.path.abspath(os.path.expanduser(value)))


def vllm_shadow_every() -> int:
    """N of MJOLNIR_VLLM_SHADOW, 0 where there are no checks.

    Raises:
        ValueError: it is no integer, or negative.
    """
    value = VLLM_SHADOW.read() or "0"
    if not value.isascii() or not value.isdigit():
        raise ValueError(f"{VLLM_SHADOW.name} must be an integer of at least 0, got {value!r}")
    return int(value)
