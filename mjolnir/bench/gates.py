"""What a full run must show: the release's bounds over all rows, as values beside their limits. Like results.py, this
imports neither torch nor NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mjolnir.bench.results import Row, geometric_mean

MAX_GEOMEAN, MAX_RATIO = 1.03, 1.15
"""Bounds of us / target: the geometric mean over all rows, and every row."""

NOISE = 1.03
"""A row may take this many times the fastest peer's time."""

MIN_LEAD = 1.35
"""Bound of the geometric mean of fastest peer / ours."""


@dataclasses.dataclass(frozen=True)
class Gate:
    """One bound.

    Attributes:
        what: which number it bounds.
        value: that number; None where no row has what it takes.
        limit: the bound.
        at_most: whether it is an upper one.
        passed: None where there is no value.
        rows: how many rows it is over.
        missed: names of the rows that miss it, where it is a bound of each row; the worst first.
    """

    what: str
    value: float | None
    limit: float
    at_most: bool
    passed: bool | None
    rows: int
    missed: list[str] = dataclasses.field(default_factory=list)


def fastest_peer(row: Row) -> tuple[str, float] | None:
    """(name, µs) of the fastest one; None where no peer has a time."""
    times = [(us, name) for name, us in row.peers.items() if us is not None]
    return (min(times)[1], min(times)[0]) if times else None


COUNTED = ("fp8", "bf16", "fp16")


def counted(rows: Sequence[Row]) -> list[Row]:
    """The rows that bounds are over: normal data, formats of 8 and 16 bits, splits that follow from balance."""
    return [row for row in rows if row.data == "normal" and not row.fixed_split and row.kv_format in COUNTED]


def gates(rows: Sequence[Row]) -> list[Gate]:
    """The four bounds, over the rows that count."""
    rows = counted(rows)
    ratios = {row.name: row.ratio for row in rows}
    leads = {row.name: fastest[1] / row.us for row in rows if (fastest := fastest_peer(row)) is not None}
    slower = {name: 1 / lead for name, lead in leads.items()}
    return [
        _mean("us / target, geometric mean", ratios, MAX_GEOMEAN, at_most=True),
        _each("us / target, worst row", ratios, MAX_RATIO),
        _each("us / fastest peer, worst row", slower, NOISE),
        _mean("fastest peer / us, geometric mean", leads, MIN_LEAD, at_most=False),
    ]


def _mean(what: str, values: dict[str, float], limit: float, at_most: bool) -> Gate:
    if not values:
        return Gate(what, None, limit, at_most, None, 0)
    mean = geometric_mean(list(values.values()))
    return Gate(what, round(mean, 4), limit, at_most, mean <= limit if at_most else mean >= limit, len(values))


def _each(what: str, values: dict[str, float], limit: float) -> Gate:
    if not values:
        return Gate(what, None, limit, True, None, 0)
    missed = sorted((name for name, value in values.items() if value > limit), key=lambda name: -values[name])
    return Gate(what, round(max(values.values()), 4), limit, True, not missed, len(values), missed)
