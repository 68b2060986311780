"""The cases that ``mjolnir verify`` runs. Each section varies one thing and holds the others at a common setting."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

LENGTHS = {
    "edges": (129, 0, 1, 15, 16, 17, 63, 64, 65, 127, 1000),
    "uniform": (1024,) * 8,
    "skewed": (9000, 700, 130, 5, 1, 1, 64, 0, 300),
    "single": (16_384,),
    "one token": (1,),
    "many": tuple(1 + 7 * i % 300 for i in range(96)),
    "empty": (0, 0, 0),
}
"""Mixes of tokens per sequence: the edges of pages and tiles, skew, and batches of one and of many."""

LAYOUTS = ("separate", "layer packed", "BHN2D", "BNH2D", "B2NHD", "B2HND", "2BNHD", "2BHND")
"""Two tensors, one layer of a pool of several, or a layout of ``mjolnir.layouts``."""

SCALES = ("one", "head", "sequence", "negative", "zero", "denormal", "huge")
"""Descales: of 1 element, per KV head, per sequence and KV head (strided); a negative one; of K: 0, 1e-40, 1e30."""

QUICK_STRIDE = 6


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the matrix. ``factors`` passes q_mul and o_mul."""

    num_heads: int = 8
    num_kv_heads: int = 2
    head_size: int = 128
    page_size: int = 64
    kv_format: str = "fp8"
    v_format: str | None = None  # None: as K's
    q_dtype: str = "bf16"
    out_dtype: str = "fp16"
    q_len: int = 1
    causal: bool = True
    layout: str = "separate"
    lengths: str = "edges"
    scales: str = "one"
    factors: bool = False
    max_splits: int | None = None
    kv_layout: str | None = None  # what the runner is promised

    @property
    def name(self) -> str:
        """Everything that is not the common setting, after the shape."""
        shape = f"{self.num_heads}/{self.num_kv_heads} d{self.head_size} page {self.page_size}"
        formats = self.kv_format + (f" and {self.v_format}" if self.v_format else "")
        parts = [shape, f"{self.q_dtype} × {formats} → {self.out_dtype}", self.lengths, self.layout]
        if self.q_len > 1:
            parts.append(f"q_len {self.q_len}" + ("" if self.causal else " not causal"))
        if self.scales != "one":
            parts.append(f"scales {self.scales}")
        if self.factors:
            parts.append("q_mul, o_mul")
        if self.max_splits is not None:
            parts.append(f"max_splits {self.max_splits}")
        if self.kv_layout is not None:
            parts.append(f"known to be {self.kv_layout}")
        return ", ".join(parts)


def cases(quick: bool = False) -> list[Case]:
    """The matrix, or every QUICK_STRIDE-th of its rows, which touches every section."""
    every = list(dict.fromkeys(_sections()))
    return every[::QUICK_STRIDE] if quick else every


def _sections() -> Iterator[Case]:
    for group in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 32):
        yield Case(num_heads=2 * group)
    yield Case(num_heads=9, num_kv_heads=3)
    yield Case(num_heads=8, num_kv_heads=1)
    yield Case(num_heads=32, num_kv_heads=8)

    for head_size in (64, 128, 256):
        for page_size in (16, 32, 64, 128, 256):
            yield Case(head_size=head_size, page_size=page_size)

    for q_len, group in ((2, 4), (3, 5), (4, 4), (4, 8), (7, 9), (8, 8), (16, 1), (16, 4), (2, 32)):
        for causal in (True, False):
            yield Case(num_heads=2 * group, q_len=q_len, causal=causal)
    for head_size in (64, 256):
        yield Case(head_size=head_size, q_len=4)
        yield Case(head_size=head_size, q_len=16, page_size=16)

    for layout in LAYOUTS:
        yield Case(layout=layout, page_size=16)
    for scales in SCALES:
        # bf16 reaches as far as fp32 does, so that the huge ones overflow nothing.
        yield Case(scales=scales, out_dtype="bf16" if scales == "huge" else "fp16")
    for lengths in LENGTHS:
        yield Case(lengths=lengths, page_size=32)
    for max_splits in (1, 2, 3):
        yield Case(lengths="skewed", max_splits=max_splits)
    yield Case(factors=True)

    for q_len in (1, 4, 8, 16):
        yield Case(out_dtype="bf16", q_len=q_len, lengths="uniform")
    yield Case(out_dtype="bf16", head_size=64)
    yield Case(out_dtype="bf16", head_size=256)
    yield Case(q_dtype="fp16")
    for layout in ("separate", "BHN2D"):
        yield Case(kv_format="bf16", layout=layout)
        yield Case(kv_format="fp16", q_dtype="fp16", layout=layout)
    yield Case(kv_format="bf16", out_dtype="bf16", lengths="uniform")
    yield Case(kv_format="bf16", q_len=8)
    yield Case(kv_format="bf16", head_size=64, page_size=16)
    yield Case(kv_format="bf16", head_size=256, q_len=4)
    yield Case(kv_format="bf16", q_dtype="fp16")
    yield Case(kv_format="bf16", factors=True)
    yield Case(kv_format="fp16", q_dtype="fp16", q_len=16)
    yield Case(kv_format="fp16", q_dtype="fp16", head_size=64, q_len=4, page_size=16)
    yield Case(kv_format="fp16", q_dtype="fp16", head_size=256)
    yield from _low_bit()
    yield from _joined()
    yield from _wide()


def _low_bit() -> Iterator[Case]:
    for kv_format in ("e2m3", "nvfp4"):
        for head_size in (64, 128, 256):
            yield Case(kv_format=kv_format, head_size=head_size)
            yield Case(kv_format=kv_format, head_size=head_size, page_size=16, q_len=4)
        yield Case(kv_format=kv_format, q_len=16, page_size=128)
        yield Case(kv_format=kv_format, q_len=4, causal=False)
        for group in (5, 16):
            yield Case(kv_format=kv_format, num_heads=2 * group)
        for layout in ("layer packed", "BHN2D", "B2HND"):
            yield Case(kv_format=kv_format, layout=layout, page_size=16)
        for scales in ("sequence", "negative", "zero"):
            yield Case(kv_format=kv_format, scales=scales)
        for lengths in ("skewed", "single"):
            yield Case(kv_format=kv_format, lengths=lengths, page_size=32)
        yield Case(kv_format=kv_format, factors=True)
        yield Case(kv_format=kv_format, out_dtype="bf16", lengths="uniform")
        yield Case(kv_format=kv_format, q_dtype="fp16")
    for kv_format, v_format in (("fp8", "nvfp4"), ("e2m3", "fp8"), ("nvfp4", "e2m3"), ("bf16", "fp8")):
        yield Case(kv_format=kv_format, v_format=v_format)
        yield Case(kv_format=kv_format, v_format=v_format, head_size=64)
    yield Case(kv_format="fp8_e5m2")


def _joined() -> Iterator[Case]:
    """Neighbours that are read together: two heads or two tokens of 64 bytes as one row, two heads side by side."""
    for kv_layout, layouts in (("NHD", ("separate", "2BNHD")), ("HND", ("B2HND", "2BHND"))):
        common = Case(head_size=64, kv_layout=kv_layout, layout=layouts[0])
        odd = dataclasses.replace(common, num_heads=9, num_kv_heads=3)
        for page_size in (16, 256):
            yield dataclasses.replace(odd, page_size=page_size)
        for group, q_len in ((1, 1), (4, 4), (8, 4), (16, 4)):
            yield dataclasses.replace(common, num_heads=2 * group, q_len=q_len)
        yield dataclasses.replace(odd, q_len=3, causal=False, layout=layouts[1])
        for scales in ("sequence", "negative"):
            yield dataclasses.replace(odd, scales=scales)
        yield dataclasses.replace(odd, factors=True, lengths="skewed")
        yield dataclasses.replace(odd, lengths="skewed", max_splits=1)
        yield dataclasses.replace(common, out_dtype="bf16", lengths="uniform")
    nvfp4 = Case(kv_format="nvfp4", kv_layout="HND", layout="B2HND")
    for page_size, q_len in ((16, 1), (64, 4)):
        yield dataclasses.replace(nvfp4, page_size=page_size, q_len=q_len)
    yield dataclasses.replace(nvfp4, scales="sequence", factors=True)
    for kv_format, head_size in (("fp8", 128), ("e2m3", 128), ("e2m3", 64), ("nvfp4", 128), ("nvfp4", 256)):
        side_by_side = Case(kv_format=kv_format, head_size=head_size, kv_layout="NHD")
        odd = dataclasses.replace(side_by_side, num_heads=9, num_kv_heads=3)
        yield dataclasses.replace(odd, scales="sequence", factors=True)
        yield dataclasses.replace(odd, page_size=16, lengths="skewed", scales="negative")
        for group, q_len, page_size in ((8, 1, 256), (4, 2, 32), (1, 8, 64)):
            yield dataclasses.replace(side_by_side, num_heads=2 * group, q_len=q_len, page_size=page_size)


def _wide() -> Iterator[Case]:
    """32 and 64 q rows over pieces of many tiles, which the warps of a group work on together."""
    for q_len in (4, 8):
        common = Case(num_heads=16, q_len=q_len)
        for lengths in ("single", "skewed", "many"):
            yield dataclasses.replace(common, lengths=lengths, page_size=16)
        for scales in ("negative", "zero", "huge"):
            out_dtype = "bf16" if scales == "huge" else "fp16"
            yield dataclasses.replace(common, lengths="skewed", scales=scales, factors=True, out_dtype=out_dtype)
        yield dataclasses.replace(common, lengths="skewed", causal=False)
    yield Case(head_size=64, kv_layout="NHD", num_heads=8, q_len=8, lengths="skewed")
