"""KV-cache formats by name.

docs/formats.md says what each of them stores, bit by bit, and what a new one takes: a module here, a name in FORMATS,
its branches in in_triton/, a class in kernels/unpack.py, and its place in the catalogue, the checks and the benchmarks.
"""

from __future__ import annotations

from mjolnir.formats.base import KvFormat
from mjolnir.formats.e2m3 import E2M3
from mjolnir.formats.fp8 import FP8, FP8_E5M2
from mjolnir.formats.half import BF16, FP16
from mjolnir.formats.nvfp4 import NVFP4

__all__ = ["FORMATS", "KvFormat", "get_format"]

FORMATS: dict[str, KvFormat] = {kv_format.name: kv_format for kv_format in (FP8, FP8_E5M2, E2M3, NVFP4, BF16, FP16)}


def get_format(name: str, argument: str = "kv_format") -> KvFormat:
    """The format called ``name``, which ``argument`` asked for.

    Raises:
        ValueError: an unknown name.
    """
    try:
        return FORMATS[name]
    except (KeyError, TypeError):  # a list has no hash
        raise ValueError(f"{argument} must be one of {', '.join(FORMATS)}, got {name!r}") from None


def get_formats(kv_format: str, v_format: str | None) -> tuple[KvFormat, KvFormat]:
    """The formats of K and of V; without ``v_format`` V has K's.

    Raises:
        ValueError: an unknown name.
    """
    k = get_format(kv_format)
    return k, k if v_format is None else get_format(v_format, "v_format")
