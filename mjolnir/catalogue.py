"""The variants that a runner asks for: what ``mjolnir compile`` builds and what CI compile-checks.

A runner can ask for others: a query of another dtype than its output, K and V of two formats, its own ring depth or
CTAs per SM, no PDL. Those compile when first used, or by their full name.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import re
from collections.abc import Iterable

from mjolnir.formats import FORMATS
from mjolnir.kernels.choice import takes_crowd
from mjolnir.variant import HEAD_SIZES, PANEL_ROWS, ROW_CLASSES, Variant

QUERIES = {
    "fp8": (("bf16", False), ("fp16", False)),
    "e2m3": (("bf16", False), ("fp16", False)),
    "nvfp4": (("bf16", False), ("fp16", False)),
    "bf16": (("bf16", False), ("bf16", True)),
    "fp16": (("fp16", False),),
}
"""Per KV format, (dtype of Q and O, q_split). Q and O have the model's dtype, and so has a 16-bit cache; over a bf16
cache, Q times q_mul is split in two terms. fp8_e5m2, which engines hardly use, is left to demand."""

LOW_BIT = ("e2m3", "nvfp4")
"""Formats whose kernels without the merge of splits, for max_splits = 1, are left to demand too."""

JOINED = {
    ("fp8", 64): ("tokens", "heads"),
    ("fp8", 128): ("panels",),
    ("e2m3", 64): ("panels",),
    ("e2m3", 128): ("panels",),
    ("nvfp4", 64): ("panels",),
    ("nvfp4", 128): ("tokens", "panels"),
    ("nvfp4", 256): ("panels",),
    ("bf16", 64): ("panels",),
    ("fp16", 64): ("panels",),
}
"""What runners that know their caches' layout join, per KV format and head size."""

_FORMAT = "|".join(FORMATS)
_NAME = re.compile(
    rf"decode_(?P<arch>sm_\d+[a-z]?)_(?P<kv_format>{_FORMAT})(?:_v_(?P<v_format>{_FORMAT}))?"
    r"_q(?P<q_dtype>bf16|fp16)_o(?P<out_dtype>bf16|fp16)"
    rf"_d(?P<head_size>{'|'.join(map(str, HEAD_SIZES))})_r(?P<rows>{'|'.join(map(str, ROW_CLASSES))})"
    r"(?:_(?P<joined>tokens|heads|panels))?(?P<crowd>_crowd)?(?P<split>_split)?(?P<pdl>_pdl)?(?P<q_split>_qsplit)?(?P<l2_prefetch>_l2)?(?:_s(?P<stages>[1-9]\d*))?(?:_c(?P<ctas_per_sm>[1-9]\d*))?"
)


def all_variants(arch: str) -> list[Variant]:
    """Every variant of ``arch`` with its tuned choices (ring depth, CTAs per SM, PDL) left to the kernel."""
    plain = [
        Variant(arch, kv_format, dtype, dtype, head_size, rows, split, q_split=q_split, joined=joined)
        for kv_format in QUERIES
        for (dtype, q_split), head_size, rows, split in itertools.product(
            QUERIES[kv_format], HEAD_SIZES, ROW_CLASSES, (True,) if kv_format in LOW_BIT else (True, False)
        )
        for joined in ("", *JOINED.get((kv_format, head_size), ()))
        if joined != "panels" or rows == 2 * PANEL_ROWS
    ]
    return [*plain, *(dataclasses.replace(v, crowd=True) for v in plain if takes_crowd(v))]


def variant_named(name: str) -> Variant | None:
    """The variant whose ``name`` this is, in the catalogue or not; None where it is no variant's name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return Variant(
        arch=match["arch"],
        kv_format=match["kv_format"],
        q_dtype=match["q_dtype"],
        out_dtype=match["out_dtype"],
        head_size=int(match["head_size"]),
        rows=int(match["rows"]),
        split=match["split"] is not None,
        pdl=match["pdl"] is not None,
        q_split=match["q_split"] is not None,
        l2_prefetch=match["l2_prefetch"] is not None,
        stages=int(match["stages"] or 0),
        ctas_per_sm=int(match["ctas_per_sm"] or 0),
        v_format=match["v_format"] or "",
        crowd=match["crowd"] is not None,
        joined=match["joined"] or "",
    )


def select(variants: Iterable[Variant], patterns: Iterable[str]) -> list[Variant]:
    """Those whose name matches any of the shell-style patterns, in their order; then, for a pattern that is the full
    name of another variant of the same arch, that one.

    Raises:
        ValueError: a pattern matches no name.
    """
    variants = list(variants)
    chosen: set[Variant] = set()
    others: list[Variant] = []
    for pattern in patterns:
        matching = [variant for variant in variants if fnmatch.fnmatchcase(variant.name, pattern)]
        named = variant_named(pattern)
        if not matching and named is not None and named.arch == variants[0].arch:
            others.append(named)
        elif not matching:
            raise ValueError(f"{pattern!r} names none of the {len(variants)} variants; the first is {variants[0].name}")
        chosen.update(matching)
    return [variant for variant in variants if variant in chosen] + list(dict.fromkeys(others))
