"""What the vLLM proof does by itself: agreement of outputs, expected savings, the weights' order, its processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks" / "vllm"))

import expected  # noqa: E402
import models  # noqa: E402
import proof  # noqa: E402
from agreement import Generated, compare  # noqa: E402
from report import summary  # noqa: E402


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


def test_kernels_are_expected_from_the_pages_each_was_measured_over(tmp_path: Path) -> None:
    base = {"heads_q": 32, "heads_kv": 8, "head_dim": 128, "kv_format": "fp8", "q_len": 1, "data": "normal",
            "layout": "NHD", "lens": [8192]}  # fmt: skip
    rows = [
        base | {"page_size": 64, "us": 9.0, "peers": {"fa3": 15.0}},
        base | {"page_size": 16, "us": 9.5, "peers": {}},
    ]
    (tmp_path / "decode.json").write_text(json.dumps({"rows": rows}))
    assert expected.kernel_times(tmp_path / "decode.json", page_size=16) == {(1, 8192): {"ours": 9.5, "fa3": 15.0}}


def test_attention_in_a_profile() -> None:
    kernels = {
        "kernel_cutlass_kernel_mjolnirkernelsdecodeDecodeKernel_object": [400.0, 36],
        "void cutlass::device_kernel<flash::FlashAttnFwdCombine<": [50.0, 36],
        "void vllm::reshape_and_cache_flash_kernel<": [100.0, 36],
        "nvjet_sm90": [900.0, 36],
    }
    assert expected.attention_ms(kernels) == pytest.approx(0.45)


def test_rotary_pairs_in_the_checkpoints_order() -> None:
    """Element i of a head of 4 is paired with i + 2 there, with its neighbour in GGUF."""
    rows = torch.arange(8.0)[:, None].expand(8, 3)
    assert models.halves_first(rows, heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_summary_of_what_ended_well_and_badly() -> None:
    run = {"agreement": compare([], []), "graphs": "FULL_DECODE_ONLY", "model_runner": 2,
           "steps": {"decode": 40, "capture decode": 3}}  # fmt: skip
    report = {
        "errors": {"smollm": "ValueError: no file"},
        "correctness": {
            "qwen": {
                "fp8": {"runs": {"graphs": run}, "errors": {"eager": "RuntimeError: x"}},
                "nvfp4": {"report": None, "exit": 1, "log": "…"},
                "bfloat16": None,
            }
        },
        "serve": {"report": {"usage": None, "log": []}, "exit": 1, "log": "…"},
        "speed": {
            "CUSTOM": {"rows": [{"batch": 1, "context": 1024, "itl_ms": 5.25}], "errors": {"4x8192": "out of time"}},
            "FLASH_ATTN": {"report": {"rows": [{"batch": 1, "context": 1024, "itl_ms": 6.0}]}, "exit": -9, "log": ""},
            "TRITON_ATTN": None,
        },
    }
    lines = summary(report).splitlines()
    assert lines[0] == "smollm: ValueError: no file"
    assert lines[1].startswith("qwen fp8 graphs: 0/0 identical") and lines[1].endswith("v2; decode 40")
    assert lines[2:4] == ["qwen fp8 eager: RuntimeError: x", "qwen nvfp4: exit 1"]
    assert lines[4] == "serve: None, 0 lines of Mjolnir's; "
    assert lines[6].split() == ["1", "x", "1024", "5.250", "6.000", "-"]
    assert lines[7] == "CUSTOM 4x8192: out of time"


def test_merge_takes_what_a_killed_process_had(tmp_path: Path) -> None:
    rows = {"CUSTOM": 5.0, "FLASH_ATTN": 6.5}
    speed = {
        name: {"rows": [{"batch": 1, "context": 1024, "itl_ms": ms}], "engine": {"page_size": 16}}
        for name, ms in rows.items()
    }
    speed["FLASH_ATTN"] = {"report": speed["FLASH_ATTN"], "exit": -9, "log": ""}
    file = tmp_path / "vllm.json"
    file.write_text(json.dumps({"speed": speed | {"TRITON_ATTN": None}}))
    merged = proof.merge([file], None)
    row = merged["speed"]["FLASH_ATTN"]["report"]["rows"][0]
    assert row["saved_ms"] == 1.5 and row["expected_ms"] is None


def test_merge_keeps_runs_and_drops_errors_that_were_run_again(tmp_path: Path) -> None:
    first = {"reference": 1, "runs": {"eager": {"steps": {"decode": 47, "split": 6}}},
             "errors": {"eager+ngram": "RuntimeError", "graphs+ngram": "RuntimeError"}}  # fmt: skip
    again = {"reference": 2, "runs": {"eager+ngram": {"steps": {"ragged": 41}}}, "errors": {"default": "ValueError"}}
    other = {"reference": 1, "runs": {}, "errors": {"reference": "OSError"}}
    for name, outputs in {
        "1": {"q": {"fp8": first, "bfloat16": first}, "s": {"fp8": first}},
        "2": {"q": {"fp8": again, "nvfp4": other, "bfloat16": {"report": None, "exit": 1, "log": ""}}},
    }.items():
        served = {"1": {"report": None, "exit": 1, "log": ""}, "2": {"usage": {}, "log": []}}[name]
        speed = {name: {"rows": []}}
        (tmp_path / name).write_text(
            json.dumps({"date": name, "errors": {}, "correctness": outputs, "serve": served, "speed": speed})
        )
    merged = proof.merge([tmp_path / "1", tmp_path / "2"], None)
    assert merged["date"] == "2" and merged["correctness"]["s"] == {"fp8": first}
    assert merged["serve"] == {"usage": {}, "log": []} and merged["speed"].keys() == {"1", "2"}
    q = merged["correctness"]["q"]
    assert q["fp8"] == {
        "reference": 2,
        "runs": first["runs"] | again["runs"],
        "errors": {"graphs+ngram": "RuntimeError", "default": "ValueError"},
    }
    assert q["nvfp4"] == other and q["bfloat16"] == {"report": first, "exit": 1, "log": ""}


def test_a_failing_part_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        'import sys\nfrom pathlib import Path\nPath(sys.argv[2]).write_text(\'{"usage": 3, "log": []}\')\n'
        "sys.exit('broken' if 'bad' in sys.argv else 0)\n"
    )
    answer = {"usage": 3, "log": []}
    made = proof.Proof(tmp_path / "out", gguf=None)
    monkeypatch.setattr(made, "qwen", lambda: made.start(("correctness", "q", "fp8"), script, "bad"))
    monkeypatch.setattr(made, "serve", lambda: made.start(("serve",), script))
    made.run(["qwen", "smollm", "serve"], budget_s=60)
    report = json.loads((tmp_path / "out" / "vllm.json").read_text())
    assert report["errors"]["smollm"].startswith("ValueError: --gguf")
    assert report["correctness"]["q"]["fp8"] == {"report": answer, "exit": 1, "log": "broken\n"}
    assert report["serve"] == answer


def test_a_process_that_outlasts_its_time_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "job.py"
    script.write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(proof, "GRACE_S", 0.0)
    made = proof.Proof(tmp_path / "out", gguf=None)
    monkeypatch.setattr(made, "qwen", lambda: made.start(("correctness", "q", "fp8"), script))
    made.run(["qwen"], budget_s=1)
    assert made.report["correctness"]["q"]["fp8"] == {"report": None, "exit": -9, "log": ""}
