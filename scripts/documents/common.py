"""What tables have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Entries = dict[str, tuple[str, Callable[[Any], str]]]
"""By name: the file, and what to make of it."""

RESULTS = Path("benchmarks/results/h200")
MISSING = "not measured yet"

LOW_BIT = ("e2m3", "nvfp4")

LAYOUTS = {"HND": "head-major", "NHD": "token-major"}


class StaleDocument(Exception):
    """A marker that cannot be followed, or a plot of other results."""


def share(passed: list[bool]) -> str:
    return f"{sum(passed)} of {len(passed)}"


def origin(header: dict[str, Any]) -> str:
    """A line that says where the numbers come from."""
    commit = (header.get("commit") or "unknown")[:9]
    return f"{header['device']}, driver {header['driver']}, commit {commit}, {str(header.get('date', ''))[:10]}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], origin: str) -> str:
    lines = [head, ["---" if i < 2 else "---:" for i in range(len(head))], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n<sub>{origin}</sub>"
