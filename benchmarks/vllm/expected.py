"""What a faster kernel must save per decode step: the difference of the kernels' times in decode.json, times layers."""

from __future__ import annotations

import json
from pathlib import Path

PEERS = {"FLASH_ATTN": "fa3", "TRITON_ATTN": "vllm-triton"}
"""Names that decode.json has for the kernels of vLLM's backends."""

ATTENTION = ("mjolnirkernels", "flash::", "kernel_unified_attention", "reduce_segments")
"""What names of attention kernels contain, as a profiler gives them."""


def attention_ms(kernels: dict[str, list[float]]) -> float:
    """ms per step of the attention kernels of a profile, of µs and launches per step by name."""
    return sum(us for name, (us, _) in kernels.items() if any(part in name for part in ATTENTION)) / 1e3


def kernel_times(decode_json: Path, page_size: int) -> dict[tuple[int, int], dict[str, float]]:
    """µs of one layer's attention by (requests, context), 32 / 8 heads of 128 over fp8, by kernel: "ours" and PEERS'.
    Of each kernel, pages of ``page_size`` where they were measured, else of another size."""
    rows = json.loads(decode_json.read_text(encoding="utf-8"))["rows"]
    times: dict[tuple[int, int], dict[str, float]] = {}
    wanted = {"heads_q": 32, "heads_kv": 8, "head_dim": 128, "kv_format": "fp8", "q_len": 1, "data": "normal"}
    rows = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    for row in sorted(rows, key=lambda row: (row["page_size"] == page_size, row["layout"] == "NHD")):
        if len(set(row["lens"])) == 1:
            measured = {name: us for name, us in row["peers"].items() if us is not None}
            times.setdefault((len(row["lens"]), row["lens"][0]), {}).update(measured, ours=row["us"])
    return times


def saved_ms(
    times: dict[tuple[int, int], dict[str, float]], backend: str, batch: int, context: int, layers: int
) -> float | None:
    """ms per step that Mjolnir's kernel saves over ``backend``'s; between two measured contexts, on the line through
    them. None where decode.json does not reach."""
    peer = PEERS[backend]
    known = {length: t[peer] - t["ours"] for (seqs, length), t in times.items() if seqs == batch and peer in t}
    if context in known:
        return known[context] * layers / 1e3
    below = max((length for length in known if length < context), default=None)
    above = min((length for length in known if length > context), default=None)
    if below is None or above is None:
        return None
    share = (context - below) / (above - below)
    return (known[below] * (1 - share) + known[above] * share) * layers / 1e3
