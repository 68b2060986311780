#!/usr/bin/env python3
"""Plot bytes per token against quality, from a committed accuracy.json.

    python scripts/plot_accuracy.py [accuracy.json] [accuracy.svg]

Needs matplotlib, which is among the dev extras. The picture names the hash of the file that it was made from.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cpu"
GOLD, MUTED = "#d1980b", "#4477aa"


def points(study: dict[str, Any]) -> list[tuple[str, int, float, bool]]:
    """(name, bytes per token, KL, whether K and V have one format) of every setting but bf16."""
    return [
        (row["name"], row["bytes_per_token"], row["kl"], row["k_format"] == row["v_format"])
        for row in study["rows"]
        if row["kl"] > 0
    ]


def plot(study: dict[str, Any], target: Path, digest: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "mjolnir"  # the same file for the same rows
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, size, kl, same in points(study):
        axes.scatter([size], [kl], s=28, color=GOLD if same else MUTED, zorder=3, linewidths=0)
        axes.annotate(name, (size, kl), textcoords="offset points", xytext=(6, 3), fontsize="x-small")
    axes.set(yscale="log", xlabel="bytes of K and V per token", ylabel="KL(bf16 cache ‖ setting), nats")
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    options = study["options"]
    axes.set_title(
        f"{study['model'].split(' ')[0]}, {options['tokens']:,} tokens in contexts of {options['context']:,}",
        fontsize="small",
    )
    figure.savefig(target, format="svg", metadata={"Date": None, "Description": f"sha256 of accuracy.json: {digest}"})
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Plot bytes per token against quality from an accuracy study.")
    parser.add_argument("study", type=Path, nargs="?", default=RESULTS / "accuracy.json")
    parser.add_argument("target", type=Path, nargs="?", default=RESULTS / "accuracy.svg")
    options = parser.parse_args(arguments)
    if not options.study.exists():
        print(f"{options.study} is not there: mjolnir accuracy --json makes it", file=sys.stderr)
        return 1
    content = options.study.read_bytes()
    plot(json.loads(content), options.target, hashlib.sha256(content).hexdigest())
    print(f"{options.target} made")
    return 0


if __name__ == "__main__":
    sys.exit(main())
