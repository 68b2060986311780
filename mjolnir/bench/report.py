"""What ``mjolnir bench`` prints."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from mjolnir.bench.gates import Gate, counted, gates
from mjolnir.bench.results import Failure, Report, Row
from mjolnir.bench.shapes import NORMAL

WORST = 5

ROUGH = 0.1
"""Relative error above which a peer's time is marked: fp8 Q and P make 2e-2 to 3e-2."""


def render(report: Report) -> RenderableType:
    """The table of all rows, then the bounds and the worst rows, and what gave no time."""
    parts: list[RenderableType] = [_table(report.rows)] if report.rows else []
    parts += summary(report.rows)
    parts += notes(report.rows)
    parts += [f"FAILED {describe(failure)}" for failure in report.failures]
    if report.skipped:
        parts.append(f"not measured, no time left: {', '.join(report.skipped)}")
    return Group(*parts)


def describe(result: Row | Failure) -> str:
    """One line, as soon as there is one."""
    if isinstance(result, Failure):
        return f"{result.name} ({result.peer}): {result.error}"
    line = f"{result.name}: {result.us:.1f} µs, {result.ratio:.2f} x target, rel. err. {result.rel_err:.1e}"
    times = [f"{name} {_peer_time(result, name)}" for name in result.peers]
    return f"{line} ({', '.join(times)})" if times else line


def summary(rows: Sequence[Row]) -> list[str]:
    """The bounds of gates.py with their values, and the worst rows; none without rows of normal data."""
    normal = counted(rows)
    if not normal:
        return []
    worst = sorted(normal, key=lambda row: row.ratio, reverse=True)[:WORST]
    lines = [describe_gate(gate) for gate in gates(normal) if gate.value is not None]
    return [*lines, "worst: " + ", ".join(f"{row.name} {row.ratio:.2f}" for row in worst)]


def describe_gate(gate: Gate) -> str:
    outcome = "ok" if gate.passed else "MISSED"
    names = f": {', '.join(gate.missed)}" if gate.missed else ""
    count = f", {len(gate.missed)} rows" if gate.missed else ""
    return f"{outcome:6} {gate.what} over {gate.rows} rows: {gate.value:.3f} (limit {gate.limit}){count}{names}"


def notes(rows: Sequence[Row]) -> list[str]:
    """Why peers have no time: each reason once, with the number of rows."""
    reasons = collections.Counter((peer, note) for row in rows for peer, note in row.peer_notes.items())
    return [f"{peer}, {count} rows without a time: {note}" for (peer, note), count in reasons.items()]


def _table(rows: Sequence[Row]) -> Table:
    peers = list(dict.fromkeys(name for row in rows for name in row.peers))
    table = Table(title="mjolnir bench: µs per call, L2 cold", title_justify="left")
    for column in ("heads", "batch"):
        table.add_column(column)
    for column in ("d", "page", "KV", "q_len", "floor", "target", "µs", "p10 … p90", "ratio", "TB/s", "rel. err.",
                   "host µs", "plan µs", *peers):  # fmt: skip
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.heads_q}/{row.heads_kv}",
            row.batch,
            str(row.head_dim),
            f"{row.page_size} {row.layout}",
            row.kv_format + " hard" * (row.data != NORMAL) + (f" split {row.fixed_split}" if row.fixed_split else ""),
            str(row.q_len),
            f"{row.floor_us:.1f}",
            f"{row.target_us:.1f}",
            f"{row.us:.1f}",
            f"{row.us_p10:.1f} … {row.us_p90:.1f}",
            f"{row.ratio:.2f}",
            f"{row.tb_s:.2f}",
            f"{row.rel_err:.1e}",
            f"{row.host_us:.1f}",
            f"{row.plan_us:.0f}",
            *(_peer_time(row, name) for name in peers),
        )
    return table


def _peer_time(row: Row, name: str) -> str:
    """µs; marked where the output is not even roughly the oracle's."""
    us = row.peers.get(name)
    return "–" if us is None else f"{us:.1f}" + "!" * (row.peer_rel_err[name] > ROUGH)
