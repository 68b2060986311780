"""What the vLLM proof computes by itself: agreement of outputs, expected savings, the weights' order."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks" / "vllm"))

import expected  # noqa: E402
import models  # noqa: E402
from agreement import Generated, compare  # noqa: E402


def test_agreement_up_to_a_near_tie() -> None:
    same = Generated([5, 6], [{5: -0.1, 6: -3.0}, {6: -0.2, 5: -2.0}])
    shifted = Generated([5, 6], [{5: -0.3, 6: -3.0}, {6: -0.25, 5: -2.0}])
    ours = Generated([5, 7], [{5: -0.1}, {7: -0.6, 8: -0.9}])
    theirs = Generated([5, 8], [{5: -0.2}, {8: -0.7, 7: -0.8}])
    report = compare([same, ours], [shifted, theirs])
    assert (report["identical"], report["near_ties"], report["faults"], report["positions"]) == (1, 1, [], 3)
    assert report["widest_tie"] == pytest.approx(0.3)  # in our run; 0.1 in theirs
    assert report["chosen_diff_max"] == pytest.approx(0.2)
    assert report["chosen_diff_mean"] == pytest.approx((0.2 + 0.05 + 0.1) / 3)


@pytest.mark.parametrize(
    "ours, theirs, gap",
    [
        ({7: -0.1, 8: -0.7}, {8: -0.3, 7: -0.4}, pytest.approx(0.6)),  # too far apart
        ({7: -0.1, 9: -0.2}, {8: -0.3, 7: -0.4}, None),  # not among our best
    ],
)
def test_what_is_no_near_tie(ours, theirs, gap) -> None:
    report = compare([Generated([7], [ours])], [Generated([8], [theirs])])
    assert report["faults"] == [{"prompt": 0, "position": 0, "tokens": [7, 8], "gap": gap}]
    assert report["near_ties"] == report["identical"] == 0


def test_outputs_of_other_lengths_are_faults() -> None:
    top = [{5: -0.1}, {5: -0.1}]
    assert compare([Generated([5, 5], top)], [Generated([5], top[:1])])["faults"] == [{"prompt": 0, "lengths": [2, 1]}]


def test_expected_savings(tmp_path: Path) -> None:
    def row(batch: int, length: int, us: float, fa3: float | None, **other: object) -> dict[str, object]:
        base = {"heads_q": 32, "heads_kv": 8, "head_dim": 128, "kv_format": "fp8", "q_len": 1, "data": "normal",
                "page_size": 64, "layout": "NHD"}  # fmt: skip
        return base | {"lens": [length] * batch, "us": us, "peers": {"fa3": fa3}} | other

    rows = [row(16, 8192, 60.0, 100.0), row(16, 16384, 120.0, 220.0), row(16, 8192, 61.0, 103.0, page_size=16),
            row(16, 8192, 1.0, 2.0, q_len=4), row(1, 8192, 10.0, None)]  # fmt: skip
    (tmp_path / "decode.json").write_text(json.dumps({"rows": rows}))
    times = expected.kernel_times(tmp_path / "decode.json", page_size=16)
    assert times[16, 8192] == {"ours": 61.0, "fa3": 103.0}
    assert expected.saved_ms(times, "FLASH_ATTN", 16, 8192, 36) == pytest.approx(36 * 0.042)
    assert expected.saved_ms(times, "FLASH_ATTN", 16, 12288, 36) == pytest.approx(36 * (0.042 + 0.100) / 2)
    assert expected.saved_ms(times, "FLASH_ATTN", 16, 32768, 36) is None
    assert expected.saved_ms(times, "FLASH_ATTN", 1, 8192, 36) is None


def test_rotary_pairs_in_the_checkpoints_order() -> None:
    """Element i of a head of 4 is paired with i + 2 there, with its neighbour in GGUF."""
    rows = torch.arange(8.0)[:, None].expand(8, 3)
    assert models.halves_first(rows, heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
