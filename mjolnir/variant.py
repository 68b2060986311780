"""The frozen key of one compiled decode kernel: every choice that is made before run time."""

from __future__ import annotations

import dataclasses

ROW_CLASSES = (8, 16, 32, 64)
"""q rows (q_len × group) are padded to one of these; 8 is the N of one mma.sync tile."""

PANEL_ROWS = 8
"""Rows of each of two heads whose tiles lie side by side as panels; both together are the class of twice as many."""

HEAD_SIZES = (64, 128, 256)
MAX_ROWS = ROW_CLASSES[-1]


@dataclasses.dataclass(frozen=True, order=True)
class Variant:
    """Compile-time choices of one decode kernel. Page size, strides, lengths, scales, group, q_len and
    causality are run-time arguments and have no place here."""

    arch: str  # "sm_90a"
    kv_format: str  # name in mjolnir.formats: of K, and of V unless v_format says another
    q_dtype: str  # "bf16" or "fp16": the query as it lies in memory
    out_dtype: str  # "bf16" or "fp16"
    head_size: int  # 64, 128, 256
    rows: int  # one of ROW_CLASSES
    split: bool = True  # the merge across CTAs is compiled in
    pdl: bool = True  # programmatic dependent launch
    q_split: bool = False  # bf16 caches only: Q as a sum of two bf16 terms (fp16 Q, or Q times q_mul)
    stages: int = 0  # ring depth; 0: the kernel's own choice
    ctas_per_sm: int = 0  # 0: the kernel's own choice
    v_format: str = ""  # "": V has K's format
    crowd: bool = False  # six consumer warps a half, see choice.py
    l2_prefetch: bool = False  # the producer also asks L2 for tiles beyond the ring
    joined: str = ""  # "tokens", "heads" or "panels": neighbours that are read together, see choice.py and heads.py

    @property
    def name(self) -> str:
        """A C identifier, unique per variant: the exported symbol and the stem of file names."""
        names = {
            "crowd": self.crowd,
            "split": self.split,
            "pdl": self.pdl,
            "qsplit": self.q_split,
            "l2": self.l2_prefetch,
        }
        flags = "".join(f"_{name}" for name, chosen in names.items() if chosen)
        tuned = (f"_s{self.stages}" if self.stages else "") + (f"_c{self.ctas_per_sm}" if self.ctas_per_sm else "")
        v_format = f"_v_{self.v_format}" if self.v_format else ""
        joined = f"_{self.joined}" if self.joined else ""
        return (
            f"decode_{self.arch}_{self.kv_format}{v_format}_q{self.q_dtype}_o{self.out_dtype}"
            f"_d{self.head_size}_r{self.rows}{joined}{flags}{tuned}"
        )


def rows_class(rows: int) -> int:
    """The smallest row class that holds ``rows`` = q_len × group.

    Raises:
        ValueError: more than MAX_ROWS rows.
    """
    for padded in ROW_CLASSES:
        if rows <= padded:
            return padded
    raise ValueError(f"q_len * group = {rows}: at most {MAX_ROWS} q rows per KV head are supported")
