"""A runner's launch choices, and the check of them."""

from __future__ import annotations

import dataclasses

from mjolnir.checks import check_choice, check_positive_int
from mjolnir.plan import PLAN_TILE

MAX_L2_PREFETCH = 1024
"""Tiles ahead; far more than L2 holds, and no overflow where the kernel counts tokens."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """As the arguments of ``DecodeRunner``; None is the tuned choice.

    Raises:
        ValueError, TypeError: an argument out of its range, named.
    """

    ctas_per_sm: int | None = None
    max_splits: int | None = None
    kv_stages: int | None = None
    pdl: bool = True
    l2_prefetch: int = 0
    kv_evict_first: bool = True
    sm_count: int | None = None
    fixed_split: int | None = None
    max_step_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("ctas_per_sm", "max_splits", "kv_stages", "sm_count", "fixed_split", "max_step_tokens"):
            if getattr(self, name) is not None:
                self._keep(name, check_positive_int(name, getattr(self, name)))
        for name in ("pdl", "kv_evict_first"):
            self._keep(name, check_choice(name, getattr(self, name), (True, False)))
        self._keep("l2_prefetch", check_positive_int("l2_prefetch", self.l2_prefetch, minimum=0))
        if self.l2_prefetch > MAX_L2_PREFETCH:
            raise ValueError(f"l2_prefetch must be at most {MAX_L2_PREFETCH}, got {self.l2_prefetch}")
        if (self.fixed_split is None) != (self.max_step_tokens is None):
            raise ValueError(
                "fixed_split and max_step_tokens must be given together, got "
                f"{self.fixed_split} and {self.max_step_tokens}"
            )
        if self.fixed_split is not None and self.fixed_split % PLAN_TILE:
            raise ValueError(f"fixed_split must be a multiple of {PLAN_TILE} tokens, got {self.fixed_split}")
        if self.fixed_split is not None and self.max_splits is not None:
            raise ValueError(f"fixed_split and max_splits exclude each other, got max_splits = {self.max_splits}")

    def _keep(self, name: str, checked: int) -> None:
        """Python's number in place of NumPy's, which would overflow where it is reckoned with."""
        object.__setattr__(self, name, checked)
