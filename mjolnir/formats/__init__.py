"""KV-cache formats by name. A new format is a module here, a line below, and the kernel's unpack."""

from __future__ import annotations

from mjolnir.formats.base import KvFormat
from mjolnir.formats.fp8 import FP8
from mjolnir.formats.half import BF16, FP16

__all__ = ["FORMATS", "KvFormat", "get_format"]

FORMATS: dict[str, KvFormat] = {kv_format.name: kv_format for kv_format in (FP8, BF16, FP16)}

PLANNED = ("e2m3", "nvfp4")
"""Names that are taken but not implemented yet."""


def get_format(name: str) -> KvFormat:
    """The format called ``name``.

    Raises:
        NotImplementedError: a low-bit format that comes later.
        ValueError: an unknown name.
    """
    if name in PLANNED:
        raise NotImplementedError(f"kv_format={name!r} comes later; available now: {', '.join(FORMATS)}")
    if name not in FORMATS:
        raise ValueError(f"kv_format must be one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[name]
