"""Tables and numbers from verify.json, write.json and the accuracy study."""

from __future__ import annotations

from typing import Any

from documents.common import LOW_BIT, Entries, origin, share, table

ACCURACY = "../cpu/accuracy.json"


def verify_table(record: dict[str, Any]) -> str:
    rows, allowed = record["rows"], record["tolerances"]

    def worst(field: str) -> str:
        errors = [row[field] for row in rows]
        return "not finite" if None in errors else f"{max(errors):.1e}"

    return table(
        ("against the fp64 oracle", "measured", "allowed"),
        (
            ("cases passed", share([row["passed"] for row in rows]), "all"),
            ("O, worst row, beyond the output's rounding", worst("row_error"), f"{allowed['row_error']:.0e}"),
            ("LSE, relative to max(1, LSE)", worst("lse_error"), f"{allowed['lse_error']:.0e}"),
            ("exact probes passed", share([ok for row in rows for ok in row["probes"].values()]), "all"),
        ),
        origin(record),
    )


def accuracy_table(study: dict[str, Any]) -> str:
    return table(
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

    return table(
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
    return table(
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

    return table(
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
        origin(record),
    )


def _write_us(record: dict[str, Any]) -> list[float]:
    """Of the largest writes: fp8, e2m3 and nvfp4 in both K and V."""
    rows = {(row["formats"], row["tokens"]): row["us"] for row in record["rows"] if row["what"] == "write"}
    most = max(tokens for _, tokens in rows)
    return [float(rows[f"{name} K, {name} V", most]) for name in ("fp8", *LOW_BIT)]


def _study_origin(study: dict[str, Any]) -> str:
    """The study runs anywhere: what decides its numbers is the text and the model."""
    commit, options = (study.get("commit") or "unknown")[:9], study["options"]
    return (
        f"{study['model']}, {options['tokens']:,} tokens in contexts of {options['context']:,}, {study['device']}, "
        f"commit {commit}, {study['date'][:10]}"
    )


TABLES: Entries = {
    "verify": ("verify.json", verify_table),
    "write": ("write.json", write_table),
    "accuracy": (ACCURACY, accuracy_table),
    "accuracy-quarters": (ACCURACY, accuracy_quarters_table),
    "accuracy-stepwise": (ACCURACY, stepwise_table),
}

NUMBERS: Entries = {
    "write.us": ("write.json", lambda record: ", ".join(f"{us:.1f}" for us in _write_us(record))),
}
