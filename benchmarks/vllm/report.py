"""The report's file, and a short table of what is in it. Plain Python, no engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Readers see the old file or the whole new one."""
    beside = path.with_name(f"{path.name}.writing")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def body(part: Any) -> dict[str, Any]:
    """What a process wrote, whether it ended well or not; empty where it wrote nothing."""
    if isinstance(part, dict) and "exit" in part:
        part = part["report"]
    return part or {}


def summary(report: dict[str, Any]) -> str:
    """A line per correctness run and per speed case, and what failed."""
    lines = [f"{part}: {error}" for part, error in report.get("errors", {}).items()]
    for model, parts in report.get("correctness", {}).items():
        for key, part in parts.items():
            if isinstance(part, dict) and "exit" in part:
                lines.append(f"{model} {key}: exit {part['exit']}")
            for name, run in body(part).get("runs", {}).items():
                lines.append(f"{model} {key} {name}: {_agreement(run['agreement'])}; {run['graphs']}, "
                             f"v{run['model_runner']}; {_counts(run['steps'])}")  # fmt: skip
            lines += [f"{model} {key} {name}: {error[:300]}" for name, error in body(part).get("errors", {}).items()]
    if serve := body(report.get("serve")):
        lines.append(f"serve: {serve['usage']}, {len(serve['log'])} lines of Mjolnir's; {(serve['log'] or [''])[-1]}")
    lines += _speed_table({name: body(part) for name, part in report.get("speed", {}).items()})
    return "\n".join(lines)


def _agreement(found: dict[str, Any]) -> str:
    return (
        f"{found['identical']}/{found['prompts']} identical, {found['near_ties']} ties <= {found['widest_tie']:.3f}, "
        f"{len(found['faults'])} faults, diff <= {found['chosen_diff_max']:.4f} (mean {found['chosen_diff_mean']:.5f})"
    )


def _counts(steps: dict[str, int]) -> str:
    return ", ".join(f"{path} {count}" for path, count in steps.items() if not path.startswith("capture")) or "no steps"


def _speed_table(parts: dict[str, dict[str, Any]]) -> list[str]:
    """ms per step, a column per backend."""
    times = {
        name: {(row["batch"], row["context"]): row["itl_ms"] for row in part.get("rows", [])}
        for name, part in parts.items()
    }
    cases = list(dict.fromkeys(case for column in times.values() for case in column))
    lines = ["ms per step: " + ", ".join(times)] if cases else []
    for case in cases:
        cells = (f"{column[case]:8.3f}" if case in column else f"{'-':>8}" for column in times.values())
        lines.append(f"{case[0]:4} x {case[1]:6}{''.join(cells)}")
    for name, part in parts.items():
        lines += [f"{name} {case}: {error[:200]}" for case, error in part.get("errors", {}).items()]
    return lines
