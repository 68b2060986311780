"""The suites: which shapes are measured. One place, plain data."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mjolnir.bench.ours import Knobs, variant_of
from mjolnir.bench.shapes import HARD, Shape
from mjolnir.variant import Variant

MIN_KV_BYTES, MAX_KV_BYTES = 2_000_000, 20_000_000_000
"""Bounds of the full suite's grid: below it a call is all launch, above it memory runs out."""


def shapes(heads: str, batches: str, **options: Any) -> Iterator[Shape]:
    """Every pair of the space-separated ``heads`` ("32/8 64/8") and ``batches`` ("1x8K 16x8K")."""
    for pair in heads.split():
        heads_q, heads_kv = map(int, pair.split("/"))
        for batch in batches.split():
            yield Shape(heads_q, heads_kv, batch, **options)


def core() -> Iterator[Shape]:
    """What every release is measured on."""
    for layout in ("NHD", "HND"):
        yield from shapes("32/8", "1x1K 1x8K 1x128K 16x8K 64x8K 256x1K 32mixed 16x32K", layout=layout)
        yield from shapes("32/8", "16x8K", layout=layout, q_len=4)
        yield from shapes("64/8", "128x2K", layout=layout)
        yield from shapes("32/8", "64x8K", layout=layout, page_size=16)
        yield from shapes("32/8", "64x8K", layout=layout, page_size=128)
    yield from shapes("64/8", "64x8K")
    yield from shapes("8/1", "1x32K 16x32K 32mixed")
    yield from shapes("32/8", "1x8K 32mixed", page_size=16)
    yield from shapes("32/8", "1x8K", page_size=128)
    yield from shapes("9/3 32/8", "1x8K 64x8K", head_dim=64)
    yield from shapes("32/8", "1x8K 64x8K", head_dim=64, layout="HND")
    yield from shapes("16/4", "1x32K 16x8K", head_dim=256)
    yield from shapes("8/1", "1x32K 64x8K", head_dim=256)
    yield from shapes("32/8", "1x8K 16x8K 64x8K 256x1K", kv_format="bf16")
    yield from low_bit()
    yield from shapes("32/8", "64x8K", data=HARD)


def low_bit() -> Iterator[Shape]:
    """e2m3 and nvfp4, on shapes that have rows in fp8 too."""
    for kv_format in ("e2m3", "nvfp4"):
        for layout in ("NHD", "HND"):
            yield from shapes(
                "32/8", "1x8K 1x128K 16x8K 64x8K 256x1K 32mixed 16x32K", layout=layout, kv_format=kv_format
            )
            yield from shapes("64/8", "128x2K", layout=layout, kv_format=kv_format)
        yield from shapes("32/8", "16x8K", q_len=4, kv_format=kv_format)
        yield from shapes("32/8", "64x8K", page_size=16, kv_format=kv_format)
        yield from shapes("32/8", "64x8K", head_dim=64, kv_format=kv_format)
        yield from shapes("16/4", "16x8K", head_dim=256, kv_format=kv_format)


def quick() -> Iterator[Shape]:
    """Eight shapes of core, for work on the kernel."""
    yield from shapes("32/8", "1x8K 16x8K 64x8K 256x1K 32mixed")
    yield from shapes("64/8", "128x2K", layout="HND")
    yield from shapes("8/1", "1x32K")
    yield from shapes("32/8", "16x8K", q_len=4)


def full() -> Iterator[Shape]:
    """Every class of shape over its whole range, the most telling first: a run that is cut short has lost the least.
    Peers that have to build modules come late, so that the builds are done by then. What only core has is last."""
    grid = " ".join(f"{batch}x{length}" for batch in (1, 4, 16, 64, 256) for length in ("1K", "8K", "32K", "128K"))
    corners = "1x8K 1x32K 1x128K 16x8K 64x8K 256x1K"

    def bounded(heads: str, **options: Any) -> Iterator[Shape]:
        every = shapes(heads, grid, **options)
        return (shape for shape in every if MIN_KV_BYTES < shape.kv_bytes <= MAX_KV_BYTES)

    yield from bounded("32/8")
    yield from shapes("32/8", "32mixed 1x128K+63x1K")
    yield from shapes("8/1", "32mixed")
    yield from bounded("8/1 64/8 32/4 16/2")
    for q_len in (2, 4, 8):
        yield from shapes("32/8", "1x128K 16x8K 64x8K", q_len=q_len)
    yield from shapes("64/8", "16x8K 64x8K", q_len=8)  # 64 rows, the most there are
    yield from bounded("32/8", layout="HND")
    for page_size in (16, 128):
        yield from shapes("32/8", corners, page_size=page_size)
    yield from shapes("16/4 8/1", corners, head_dim=256)
    yield from shapes("32/8", "1x8K 1x32K 1x128K 16x8K 64x8K 256x1K", kv_format="bf16")
    yield from shapes("64/8", "128x2K 64x8K", kv_format="bf16")
    yield from shapes("9/3 32/8", corners, head_dim=64)
    # Groups 5, 6, 7, 12 and 16, each with the heads of a model that is in use.
    yield from shapes("40/8 48/8 28/4 96/8 64/4", "1x8K 16x8K 64x8K")
    yield from core()
    yield from shapes("32/8", "1x8K 1x128K 16x8K 64x8K 32mixed", fixed_split=2048)  # what batch invariance costs


SUITES = {"quick": quick, "core": core, "full": full, "lowbit": low_bit}


def suite(name: str) -> list[Shape]:
    """The shapes of a suite, each once, in its order.

    Raises:
        ValueError: no such suite.
    """
    if name not in SUITES:
        raise ValueError(f"suite must be one of {', '.join(SUITES)}, got {name!r}")
    return list(dict.fromkeys(SUITES[name]()))


def select(candidates: Iterable[Shape], patterns: Iterable[str]) -> list[Shape]:
    """The shapes whose name contains any of the shell-style patterns; all of them without patterns.

    Raises:
        ValueError: a pattern matches no name.
    """
    candidates, patterns = list(candidates), [f"*{pattern}*" for pattern in patterns]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(shape.name, pattern) for shape in candidates):
            raise ValueError(f"{pattern[1:-1]!r} is in none of {len(candidates)} names, such as {candidates[0].name}")
    return [s for s in candidates if not patterns or any(fnmatch.fnmatchcase(s.name, p) for p in patterns)]


def shard(candidates: Sequence[Shape], part: str) -> list[Shape]:
    """Every n-th shape from the i-th on, for ``part`` "i/n"; the parts of one n have every shape once.

    Raises:
        ValueError: not "i/n" with 1 ≤ i ≤ n.
    """
    first, _, every = part.partition("/")
    if not (first.isdecimal() and every.isdecimal() and 1 <= int(first) <= int(every)):
        raise ValueError(f"shard must be i/n with i from 1 to n, got {part!r}")
    return list(candidates[int(first) - 1 :: int(every)])


def variants_for_suite(name: str, arch: str = "sm_90a", knobs: Knobs | None = None) -> list[Variant]:
    """The kernels that a suite runs, so that a machine without the compiler can be prepared for it."""
    knobs = knobs or Knobs()
    return list(dict.fromkeys(variant_of(shape, arch, knobs) for shape in suite(name)))
