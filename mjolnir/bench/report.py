"""What ``mjolnir bench`` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from mjolnir.bench.results import Failure, Report, Row, geometric_mean
from mjolnir.bench.shapes import NORMAL

WORST = 5


def render(report: Report) -> RenderableType:
    """The table of all rows, then the geometric mean, the worst rows, and what gave no row."""
    parts: list[RenderableType] = [_table(report.rows)] if report.rows else []
    parts += summary(report.rows)
    parts += [f"FAILED {describe(failure)}" for failure in report.failures]
    if report.skipped:
        parts.append(f"not measured, no time left: {', '.join(report.skipped)}")
    return Group(*parts)


def describe(result: Row | Failure) -> str:
    """One line, as soon as there is one."""
    if isinstance(result, Failure):
        return f"{result.name} ({result.peer}): {result.error}"
    return f"{result.name}: {result.us:.1f} µs, {result.ratio:.2f} x target, rel. err. {result.rel_err:.1e}"


def summary(rows: Sequence[Row]) -> list[str]:
    """Lines over all rows of normal data: geometric mean of us / target, and the worst; none without such rows."""
    normal = [row for row in rows if row.data == NORMAL]
    if not normal:
        return []
    worst = sorted(normal, key=lambda row: row.ratio, reverse=True)[:WORST]
    return [
        f"us / target over {len(normal)} rows of normal data: geometric mean "
        f"{geometric_mean([row.ratio for row in normal]):.3f}, worst {worst[0].ratio:.3f}",
        "worst: " + ", ".join(f"{row.name} {row.ratio:.2f}" for row in worst),
    ]


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
            row.kv_format + " hard" * (row.data != NORMAL),
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
            *(f"{row.peers[name]:.1f}" if name in row.peers else "–" for name in peers),
        )
    return table
