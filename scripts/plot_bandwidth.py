#!/usr/bin/env python3
"""Plot achieved bandwidth against the KV bytes of a call, ours and the peers', from a committed decode.json.

    python scripts/plot_bandwidth.py [decode.json] [bandwidth.svg]

Needs matplotlib, which is among the dev extras. The picture names the hash of the file that it was made from, so that
scripts/update_docs.py can tell a stale one.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mjolnir.bench.gates import counted  # noqa: E402
from mjolnir.bench.results import Report, Row  # noqa: E402
from mjolnir.bench.shapes import floor_us, target_us  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "h200"
OURS = "mjolnir"
GOLD, MUTED = "#d1980b", ("#4477aa", "#66ccee", "#228833", "#aa3377", "#888888")
Point = tuple[int, float]


def points(rows: Sequence[Row]) -> dict[str, list[Point]]:
    """(KV bytes, TB/s) of every row of normal data, by kernel; ours last, so that it lies on top."""
    rows = counted(rows)
    peers = dict.fromkeys(name for row in rows for name in row.peers)
    series = {
        name: [(row.kv_bytes, row.kv_bytes / us / 1e6) for row in rows if (us := row.peers.get(name)) is not None]
        for name in peers
    }
    series[OURS] = [(row.kv_bytes, row.tb_s) for row in rows]
    return {name: sorted(pairs) for name, pairs in series.items() if pairs}


def bound(kv_bytes: Sequence[float], of: Callable[[int], float]) -> list[float]:
    """TB/s of a call that takes what ``of`` (floor_us or target_us) says."""
    return [size / of(round(size)) / 1e6 for size in kv_bytes]


def plot(report: Report, target: Path, digest: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "mjolnir"  # the same file for the same rows
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    series = points(report.rows)
    colours = iter(MUTED)
    for name, pairs in series.items():
        sizes, speeds = zip(*pairs, strict=True)
        style = dict(color=GOLD, s=22, zorder=3) if name == OURS else dict(color=next(colours, "#bbbbbb"), s=10)
        axes.scatter(sizes, speeds, label=name, linewidths=0, **style)
    low, high = min(p[0] for p in series[OURS]), max(p[0] for p in series[OURS])
    line = [low * (high / low) ** (i / 200) for i in range(201)]
    axes.plot(line, bound(line, target_us), color="black", linewidth=1, label="target: 1.04 × floor + 4 µs")
    axes.plot(line, bound(line, floor_us), color="black", linewidth=1, linestyle=":", label="floor: 4.60 TB/s")
    axes.set(xscale="log", xlabel="K and V of a call, bytes", ylabel="TB/s", ylim=(0, 5))
    axes.legend(fontsize="small", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    commit = (report.header.get("commit") or "unknown")[:9]
    axes.set_title(f"{report.header['device']}, commit {commit}, {len(series[OURS])} shapes", fontsize="small")
    figure.savefig(target, format="svg", metadata={"Date": None, "Description": f"sha256 of decode.json: {digest}"})
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Plot achieved bandwidth against KV bytes from a bench report.")
    parser.add_argument("report", type=Path, nargs="?", default=RESULTS / "decode.json")
    parser.add_argument("target", type=Path, nargs="?", default=RESULTS / "bandwidth.svg")
    options = parser.parse_args(arguments)
    if not options.report.exists():
        print(f"{options.report} is not there: mjolnir bench --json makes it", file=sys.stderr)
        return 1
    digest = hashlib.sha256(options.report.read_bytes()).hexdigest()
    plot(Report.load(options.report), options.target, digest)
    print(f"{options.target} made")
    return 0


if __name__ == "__main__":
    sys.exit(main())
