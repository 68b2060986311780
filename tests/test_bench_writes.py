"""The benchmark of the writers, as far as it runs without a GPU: byte counts, rotation, checks, JSON."""

from __future__ import annotations

import json

import pytest
import torch
from test_cli import invoke

from mjolnir.bench import writes

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("formats", "row"), [(("fp8", "fp8"), 256), (("nvfp4", "nvfp4"), 144), (("e2m3", "bf16"), 352)]
)
def test_a_write_s_bytes_are_what_it_reads_and_writes(formats, row) -> None:
    calls = writes.writes(formats, 10, CPU)
    assert calls.bytes == 10 * 8 * (2 * 128 * 2 + row)
    calls.call(0)
    calls.check()


def test_an_expansion_s_bytes() -> None:
    calls = writes.expansions(("e2m3", "bf16"), 2, CPU)
    assert calls.bytes == 2 * 2 * 64 * 8 * (96 + 256)
    calls.call(0)
    calls.check()


def test_other_bytes_are_noticed() -> None:
    calls = writes.writes(("e2m3", "e2m3"), 10, CPU)
    codes = calls.call(0)
    codes ^= 1
    with pytest.raises(ArithmeticError, match="codes are not PyTorch's"):
        calls.check()


def test_buffers_rotate_through_more_than_l2() -> None:
    assert writes._slots(50_000_000) * 50_000_000 > 240_000_000
    assert writes._slots(6_000) == 8


def test_rows_are_one_a_line_and_the_command_asks_for_a_gpu(monkeypatch, tmp_path) -> None:
    row = writes.WriteRow("write", "fp8 K, fp8 V", 8192, 14.0, 13.0, 15.0, 20.0, 50, 3.5, 12.5, 4.0, 0.89)
    report = {"device": "x", "rows": [vars(row)]}
    text = writes.to_json(report)
    assert json.loads(text) == report and len(text.splitlines()) == 6
    path = tmp_path / "new" / "write.json"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert invoke("bench-writes").exit_code == 2

    def fake(progress):
        progress(row)
        return report

    monkeypatch.setattr(writes, "run_write_bench", fake)
    result = invoke("bench-writes", "--json", str(path))
    assert result.exit_code == 0 and "8192 tokens: 14.00 µs, 3.50 TB/s, 89% of a copy" in result.output
    assert json.loads(path.read_text()) == report
