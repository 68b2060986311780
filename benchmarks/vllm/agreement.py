"""Two greedy runs over the same prompts, compared: log-probabilities up to where they part, and whether they part at a
near tie. Plain Python, no engine."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

TIE_NATS = 0.5
"""How far apart two tokens may be for a divergence to count as a near tie."""


@dataclasses.dataclass(frozen=True)
class Generated:
    """One prompt's output: the chosen tokens, and per position the most likely ones and their log-probabilities."""

    tokens: list[int]
    top: list[dict[int, float]]


def compare(ours: list[Generated], theirs: list[Generated]) -> dict[str, Any]:
    """Numbers over all prompts.

    ``chosen_diff``: |log-probability of the chosen token, ours − theirs| over all positions before the first
    divergence of each prompt. A divergence is a near tie if each run's token is among the other's most likely, at most
    TIE_NATS apart in both.
    """
    diffs: list[float] = []
    ties: list[float] = []
    faults: list[dict[str, Any]] = []
    identical = 0
    for prompt, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        length = min(len(a.tokens), len(b.tokens))
        part = next((i for i in range(length) if a.tokens[i] != b.tokens[i]), None)
        shared = length if part is None else part
        diffs += [abs(a.top[i][a.tokens[i]] - b.top[i][b.tokens[i]]) for i in range(shared)]
        if part is None:
            identical += len(a.tokens) == len(b.tokens)
            if len(a.tokens) != len(b.tokens):
                faults.append({"prompt": prompt, "lengths": [len(a.tokens), len(b.tokens)]})
            continue
        gap = _gap(a.top[part], b.top[part], a.tokens[part], b.tokens[part])
        if gap is None or gap > TIE_NATS:
            faults.append({"prompt": prompt, "position": part, "tokens": [a.tokens[part], b.tokens[part]], "gap": gap})
        else:
            ties.append(gap)
    return {
        "prompts": len(ours),
        "identical": identical,
        "near_ties": len(ties),
        "widest_tie": max(ties, default=0.0),
        "faults": faults,
        "positions": len(diffs),
        "chosen_diff_mean": statistics.fmean(diffs) if diffs else 0.0,
        "chosen_diff_p99": sorted(diffs)[int(0.99 * (len(diffs) - 1))] if diffs else 0.0,
        "chosen_diff_max": max(diffs, default=0.0),
    }


def _gap(a: dict[int, float], b: dict[int, float], a_token: int, b_token: int) -> float | None:
    """How far apart the two tokens are, in the run where they are farther; None where one is not among the other run's
    most likely."""
    if b_token not in a or a_token not in b:
        return None
    return max(abs(a[a_token] - a[b_token]), abs(b[a_token] - b[b_token]))
