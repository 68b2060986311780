"""The variants that a runner can ask for: what ``mjolnir compile`` builds and what CI compile-checks."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterable

from mjolnir.formats import FORMATS
from mjolnir.variant import HEAD_SIZES, ROW_CLASSES, Variant

FLOAT_DTYPES = ("bf16", "fp16")


def all_variants(arch: str) -> list[Variant]:
    """Every variant of ``arch`` with its tuned choices (ring depth, CTAs per SM, PDL) left to the kernel."""
    variants = []
    for kv_format, q_dtype, out_dtype, head_size, rows, split in itertools.product(
        FORMATS, FLOAT_DTYPES, FLOAT_DTYPES, HEAD_SIZES, ROW_CLASSES, (True, False)
    ):
        for q_split in _q_splits(kv_format, q_dtype):
            variants.append(Variant(arch, kv_format, q_dtype, out_dtype, head_size, rows, split, q_split=q_split))
    return variants


def select(variants: Iterable[Variant], patterns: Iterable[str]) -> list[Variant]:
    """Those whose name matches any of the shell-style patterns, in their order.

    Raises:
        ValueError: a pattern matches no name.
    """
    variants, patterns = list(variants), list(patterns)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(variant.name, pattern) for variant in variants):
            raise ValueError(f"{pattern!r} names none of the {len(variants)} variants; the first is {variants[0].name}")
    return [variant for variant in variants if any(fnmatch.fnmatchcase(variant.name, p) for p in patterns)]


def _q_splits(kv_format: str, q_dtype: str) -> tuple[bool, ...]:
    """A bf16 cache wants Q in bf16: fp16 queries are always split in two terms, bf16 ones where q_mul is given."""
    if kv_format != "bf16":
        return (False,)
    return (True,) if q_dtype == "fp16" else (False, True)
