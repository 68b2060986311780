"""Tables and numbers from decode.json."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from documents.common import LAYOUTS, LOW_BIT, MISSING, RESULTS, Entries, StaleDocument, origin, table
from mjolnir.bench.gates import Gate, counted, fastest_peer, gates
from mjolnir.bench.results import Report, Row, geometric_mean

SHOWN = (
    *((32, 8, batch, 1) for batch in ("1x1K", "1x8K", "1x128K", "16x8K", "64x8K", "256x1K", "32mixed")),
    (32, 8, "1x128K+63x1K", 1),
    (32, 8, "16x8K", 4),
    (64, 8, "64x8K", 1),
    *((8, 1, batch, 1) for batch in ("1x32K", "16x32K", "32mixed")),
)
"""(heads, KV heads, batch, q_len) of the README's table."""


def decode_table(report: Report) -> str:
    """The common setting only (d = 128, pages of 64 in NHD order, fp8, normal data), and of that SHOWN; peers' µs."""
    common = {
        (row.heads_q, row.heads_kv, row.batch, row.q_len): row
        for row in report.rows
        if (row.head_dim, row.page_size, row.layout, row.kv_format) == (128, 64, "NHD", "fp8") and row in counted([row])
    }
    rows = [common[key] for key in SHOWN if key in common]
    peers = list(dict.fromkeys(name for row in rows for name in row.peers))
    return table(
        ("heads", "batch × length", "floor, µs", "target, µs", "Mjolnir, µs", "ratio", "TB/s", *peers),
        ([_heads(row), _batch(row), *_numbers(row), *(_peer(row, name) for name in peers)] for row in rows),
        origin(report.header),
    )


def decode_all_table(report: Report) -> str:
    return table(
        (
            "heads",
            "batch × length",
            "d",
            "page",
            "KV",
            "floor, µs",
            "target, µs",
            "measured, µs",
            "ratio",
            "TB/s",
            "fastest peer, µs",
            "rel. err.",
            "plan, µs",
        ),  # fmt: skip
        (
            [
                _heads(row),
                _batch(row),
                str(row.head_dim),
                f"{row.page_size} {row.layout}",
                row.kv_format
                + ("" if row.data == "normal" else f", {row.data}")
                + (f", splits of {row.fixed_split}" if row.fixed_split else ""),
                *_numbers(row),
                _fastest(row),
                f"{row.rel_err:.1e}",
                f"{row.plan_us:.0f}",
            ]
            for row in report.rows
        ),
        origin(report.header),
    )


def gates_table(report: Report) -> str:
    return table(
        ("normal data, formats of 8 and 16 bits, balanced splits", "rows", "measured", "must be"),
        (
            [gate.what, str(gate.rows), "–" if gate.value is None else f"{gate.value:.3f}", _bound(gate)]
            for gate in gates(report.rows)
        ),
        origin(report.header),
    )


def fixed_splits_table(report: Report) -> str:
    """What batch-invariant results cost: rows with fixed splits beside the same shapes without."""
    balanced = {row.name: row for row in report.rows if not row.fixed_split}
    pairs = [
        (row, other)
        for row in report.rows
        if row.fixed_split and (other := balanced.get(row.name.removesuffix(f"-split{row.fixed_split}"))) is not None
    ]
    if not pairs:
        return MISSING
    return table(
        ("heads", "batch × length", "tokens per split", "balanced, µs", "fixed splits, µs", "cost"),
        (
            [
                _heads(row),
                _batch(row),
                str(row.fixed_split),
                f"{other.us:.1f}",
                f"{row.us:.1f}",
                f"{100 * (row.us / other.us - 1):+.0f} %",
            ]
            for row, other in pairs
        ),
        origin(report.header),
    )


def low_bit_table(report: Report) -> str:
    """Times of e2m3 and nvfp4 against fp8's over the same shape."""
    changes = {
        (_heads(row), _batch(row), row.layout, row.kv_format): change for row, change in _low_bit_changes(report)
    }
    shapes = dict.fromkeys(key[:2] for key in changes)
    columns = [(layout, kv_format) for layout in LAYOUTS for kv_format in LOW_BIT]

    def percent(change: float | None) -> str:
        return "–" if change is None else f"{change:+.0f} %" if round(change) else "0 %"

    return table(
        ("heads", "batch × length", *(f"{kv_format}, {LAYOUTS[layout]}" for layout, kv_format in columns)),
        ([*shape, *(percent(changes.get((*shape, *column))) for column in columns)] for shape in shapes),
        origin(report.header),
    )


def bandwidth_plot(plot: Path) -> str:
    """The picture that scripts/plot_bandwidth.py made, for a document in the root.

    Raises:
        StaleDocument: it was made from another decode.json.
    """
    digest = hashlib.sha256((plot.parent / "decode.json").read_bytes()).hexdigest()
    if digest not in plot.read_text(encoding="utf-8"):
        raise StaleDocument(f"{plot.name} is not of this decode.json: run scripts/plot_bandwidth.py")
    return f"![Achieved bandwidth against KV bytes of a call]({(RESULTS / plot.name).as_posix()})"


def _shape(report: Report, batch: str, **changes: Any) -> Row:
    """A row of 32/8 heads over fp8, in the setting of ``decode_table`` but for ``changes``."""
    wanted = {
        "heads_q": 32, "heads_kv": 8, "batch": batch, "head_dim": 128, "page_size": 64, "layout": "NHD",
        "kv_format": "fp8", "q_len": 1, "data": "normal", "fixed_split": 0, **changes,
    }  # fmt: skip
    return next(row for row in report.rows if all(getattr(row, name) == value for name, value in wanted.items()))


def _as_in_vllm(report: Report) -> str:
    """µs of FlashAttention 3 and of ours, of the call that was profiled inside vLLM."""
    row = next(row for row in report.rows if row.name == "32/8-16x8K-d128-p16-nhd-fp8-q1")
    return MISSING if row.peers["fa3"] is None else f"{row.peers['fa3']:.0f} and {row.us:.0f}"


def _slower(report: Report, **changes: Any) -> str:
    """How much longer, in percent, 64 x 8K takes with ``changes``."""
    return f"{100 * (_shape(report, '64x8K', **changes).us / _shape(report, '64x8K').us - 1):.0f}"


def _short_pieces(report: Report, kv_format: str) -> str:
    """How much longer, in percent, a token takes in 256 x 1K than in 64 x 8K, head-major."""
    short, long = (_shape(report, batch, kv_format=kv_format, layout="HND") for batch in ("256x1K", "64x8K"))
    return f"{100 * (short.us / sum(short.lens) / (long.us / sum(long.lens)) - 1):.0f}"


def _low_bit_changes(report: Report) -> list[tuple[Row, float]]:
    """Rows of e2m3 and nvfp4 (d = 128, pages of 64, one query token), and their time less fp8's in percent of it."""
    rows = [
        row
        for row in report.rows
        if (row.head_dim, row.page_size, row.q_len, row.data, row.fixed_split) == (128, 64, 1, "normal", 0)
    ]
    fp8 = {(_heads(row), row.batch, row.layout): row.us for row in rows if row.kv_format == "fp8"}
    return [
        (row, 100 * (row.us / fp8[shape] - 1))
        for row in rows
        if row.kv_format in LOW_BIT and (shape := (_heads(row), row.batch, row.layout)) in fp8
    ]


def _low_bit_gains(report: Report) -> list[float]:
    """Percent less time than fp8's, head-major, where every sequence has 8K tokens or more and all have 128K."""
    return [
        -change
        for row, change in _low_bit_changes(report)
        if row.layout == "HND" and min(row.lens) >= 8 * 1024 and sum(row.lens) >= 128 * 1024
    ]


def _ratios(report: Report) -> list[float]:
    return [row.ratio for row in counted(report.rows)]


def _peer(row: Row, name: str) -> str:
    us = row.peers.get(name)
    return "–" if us is None else f"{us:.1f}"


def _fastest(row: Row) -> str:
    fastest = fastest_peer(row)
    return "–" if fastest is None else f"{fastest[1]:.1f} {fastest[0]}"


def _bound(gate: Gate) -> str:
    missed = ", **missed**" if gate.passed is False else ""
    rows = f" by {len(gate.missed)}" if gate.missed else ""
    return f"{'≤' if gate.at_most else '≥'} {gate.limit}{missed}{rows}"


def _heads(row: Row) -> str:
    return f"{row.heads_q}/{row.heads_kv}"


def _batch(row: Row) -> str:
    """ "16x8K" as 16 × 8K; lengths that are not alike are named and counted."""
    if row.batch.endswith("mixed"):
        text = f"{len(row.lens)} × {min(row.lens)} … {max(row.lens):,}"
    else:
        text = row.batch.replace("x", " × ").replace("+", " + ")
    return text + (f", q_len {row.q_len}" if row.q_len > 1 else "")


def _numbers(row: Row) -> list[str]:
    return [f"{row.floor_us:.1f}", f"{row.target_us:.1f}", f"{row.us:.1f}", f"{row.ratio:.2f}", f"{row.tb_s:.2f}"]


TABLES: Entries = {
    "decode": ("decode.json", decode_table),
    "decode-all": ("decode.json", decode_all_table),
    "fixed-splits": ("decode.json", fixed_splits_table),
    "gates": ("decode.json", gates_table),
    "low-bit": ("decode.json", low_bit_table),
    "bandwidth": ("bandwidth.svg", bandwidth_plot),
}

NUMBERS: Entries = {
    "decode.rows": ("decode.json", lambda report: str(len(report.rows))),
    "decode.geomean": ("decode.json", lambda report: f"{geometric_mean(_ratios(report)):.3f}"),
    "decode.worst": ("decode.json", lambda report: f"{max(_ratios(report)):.2f}"),
    "decode.best-tb-s": ("decode.json", lambda report: f"{max(row.tb_s for row in report.rows):.2f}"),
    "decode.rel-err": ("decode.json", lambda report: f"{max(row.rel_err for row in report.rows):.1e}"),
    "decode.in-vllm": ("decode.json", _as_in_vllm),
    "decode.small-pages": ("decode.json", lambda report: _slower(report, page_size=16)),
    "low-bit.long-least": ("decode.json", lambda report: f"{min(_low_bit_gains(report)):.0f}"),
    "low-bit.pieces-nvfp4": ("decode.json", lambda report: _short_pieces(report, "nvfp4")),
    "low-bit.pieces-fp8": ("decode.json", lambda report: _short_pieces(report, "fp8")),
    "low-bit.long-most": ("decode.json", lambda report: f"{max(_low_bit_gains(report)):.0f}"),
    "decode.host-us": ("decode.json", lambda report: f"{max(row.host_us for row in report.rows):.1f}"),
}
