"""The README's example runs as it stands, and gives what the oracle gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from mjolnir.reference import decode_attention_oracle

README = Path(__file__).parents[1] / "README.md"


def test_example_runs_and_is_right(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch.manual_seed(0)
    (code,) = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(compile(code, str(README), "exec"), names)
    expected, _ = decode_attention_oracle(
        names["query"],
        names["k_cache"],
        names["v_cache"],
        names["descale"],
        names["descale"],
        names["block_table"],
        names["seq_lens"],
        q_len=1,
        softmax_scale=128**-0.5,
    )
    torch.testing.assert_close(names["out"].double(), expected, rtol=2**-8, atol=1e-6)


def test_example_is_short():
    (code,) = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert sum(1 for line in code.splitlines() if line.strip()) <= 15


def test_links_lead_somewhere():
    for document in (README, *sorted((README.parent / "docs").glob("*.md"))):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
