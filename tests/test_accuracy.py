"""The accuracy study: its measures on known numbers, and on the real model that the batched evaluation is what pages,
writer and runner give."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
from test_bench import load_script
from test_cli import invoke
from test_demo import needs_model

from mjolnir.accuracy.attend import cached_attention, round_trip, round_trip_query
from mjolnir.accuracy.evaluate import OutputErrors, Sums
from mjolnir.accuracy.setting import BF16, STUDY, Setting
from mjolnir.calibration.observe import AmaxObserver
from mjolnir.calibration.scales import KvScales
from mjolnir.calibration.scales_file import ScalesFile
from mjolnir.demo.kv import PagedKVCache
from mjolnir.demo.model import causal_attention
from mjolnir.demo.text import CALIBRATION, EVALUATION, english_text
from mjolnir.formats import get_format
from mjolnir.query_fp8 import quantise_query
from mjolnir.runner import DecodeRunner

CPU = torch.device("cpu")


def test_settings_have_names_and_sizes() -> None:
    assert len({setting.name for setting in STUDY}) == len(STUDY)
    assert Setting("fp8", "nvfp4", "channel").name == "fp8 K, nvfp4 V, per channel"
    assert Setting("fp8", "fp8", q_mode="fp8").name == "fp8, fp8 Q"
    sizes = {name: Setting(name, name).bytes_per_token(30, 3, 64) for name in ("bf16", "fp8", "e2m3", "nvfp4")}
    assert sizes == {"bf16": 23040, "fp8": 11520, "e2m3": 8640, "nvfp4": 6480}
    assert Setting("fp8", "nvfp4").bytes_per_token(30, 3, 64) == (11520 + 6480) // 2
    with pytest.raises(ValueError, match="v_format must be one of"):
        Setting("fp8", "fp7")
    with pytest.raises(ValueError, match="granularity"):
        Setting("fp8", "fp8", "row")


def test_the_two_parts_of_the_text_share_no_topic() -> None:
    one, two = english_text(CALIBRATION), english_text(EVALUATION)
    assert len(one) > 100_000 and len(two) > 200_000
    assert not {p for p in one.split("\n\n\n") if len(p) > 400} & {p for p in two.split("\n\n\n") if len(p) > 400}
    with pytest.raises(ValueError, match="part must be"):
        english_text("everything")


class Logits:
    """A model whose hidden states are its logits."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def test_measures_of_known_distributions() -> None:
    reference = torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.9, 0.1]]).log()
    ours = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.2, 0.8]]).log() + 3  # logits are up to a constant
    sums = Sums()
    sums.add(ours, reference, torch.tensor([1, 0, 0]), Logits())  # type: ignore[arg-type]
    kls = [0.25 * math.log(0.5) + 0.75 * math.log(1.5), 0, 0.9 * math.log(4.5) + 0.1 * math.log(0.125)]
    assert sums.kls[0].tolist() == pytest.approx(kls, abs=1e-6)
    assert sums.nll == pytest.approx(-math.log(0.5 * 0.5 * 0.2)) and sums.tokens == 3
    assert sums.reference_nll == pytest.approx(-math.log(0.75 * 0.5 * 0.9))
    assert torch.cat(sums.nll_gaps).tolist() == pytest.approx([math.log(1.5), 0, math.log(4.5)], abs=1e-6)
    assert sums.same_top == 1, "of the ties the first is taken, which is not the reference's"


def test_errors_of_o_are_relative_and_per_layer() -> None:
    errors = OutputErrors(2)
    errors.add(0, torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0]))
    errors.add(0, torch.tensor([4.0]), torch.tensor([4.0]))
    errors.add(1, torch.tensor([1.0]), torch.tensor([2.0]))
    assert errors.relative() == pytest.approx([4 / 5, 0.5])


def test_the_batched_query_is_the_runner_s() -> None:
    query = torch.randn(5, 6, 64).bfloat16()
    values, descale = quantise_query(query, None, 5, 1, 2)
    want = values.float() * descale.repeat_interleave(3, 1)[..., None]
    torch.testing.assert_close(round_trip_query(query.float(), 2), want, rtol=0, atol=0)


@pytest.mark.parametrize(
    "setting", [Setting("fp8", "fp8"), Setting("e2m3", "nvfp4", "channel"), Setting("nvfp4", "e2m3"), BF16,
                Setting("fp8", "fp8_e5m2", "tensor", "fp8")], ids=lambda s: s.name
)  # fmt: skip
def test_batched_attention_is_decoding_token_by_token(setting: Setting) -> None:
    """One layer over the same Q, K and V: through write_kv, pages and a runner, a token at a time."""
    gen = torch.Generator().manual_seed(0)
    tokens, heads, kv_heads, d = 40, 6, 2, 64
    spread = torch.exp(torch.randn(kv_heads, d, generator=gen))
    key, value = (torch.randn(tokens, kv_heads, d, generator=gen) * spread for _ in range(2))
    query = torch.randn(tokens, heads, d, generator=gen)
    observer = AmaxObserver()
    observer.observe(0, key, value)
    scales = KvScales(ScalesFile.of(observer), heads, setting.k_format, setting.v_format, setting.granularity)
    batched = cached_attention(setting, scales, d**-0.5)(0, query, key, value)
    runner = DecodeRunner(
        num_heads=heads, num_kv_heads=kv_heads, head_size=d, page_size=16, out_dtype=torch.bfloat16, max_num_seqs=1,
        q_mode=setting.q_mode, kv_format=setting.k_format, v_format=setting.v_format, device=CPU,
    )  # fmt: skip
    cache = PagedKVCache(
        num_layers=1, num_kv_heads=kv_heads, head_size=d, page_size=16, max_tokens=tokens, scales=scales,
        kv_format=setting.k_format, v_format=setting.v_format, device=CPU,
    )  # fmt: skip
    for i in range(tokens):
        cache.extend(1)
        cache.write(0, key[i : i + 1].bfloat16(), value[i : i + 1].bfloat16())
        plan = runner.plan([cache.length], 1, 1, cache.block_table, cache.seq_lens)
        out = torch.empty(1, heads, d, dtype=torch.bfloat16)
        cache.attend(runner, plan, 0, query[i : i + 1].bfloat16(), out, d**-0.5)
        # A rounding of bf16 apart at most: fp32 sums in another order fall to either side of a boundary.
        torch.testing.assert_close(out[0].float(), batched[i], rtol=2**-7, atol=1e-6)
    gap = (batched - causal_attention(query, key, value, d**-0.5)).norm() / batched.norm()
    assert gap > (1e-3 if setting == BF16 else 1e-2), "the formats do cost something here"


def test_a_round_trip_is_the_nearest_value() -> None:
    x = torch.linspace(-4, 4, 4 * 64).reshape(4, 1, 64)
    got = round_trip(x, get_format("e2m3"), torch.tensor([0.5]))
    values = torch.tensor([s * v / 16 for s in (1, -1) for v in (*range(16), *range(16, 32, 2), *range(32, 61, 4))])
    nearest = (x.unsqueeze(-1) - values).abs().min(-1).values
    assert torch.equal((x.clamp(-3.75, 3.75) - got).abs(), nearest.where(x.abs() < 3.75, 0 * x))


@needs_model
def test_the_command_writes_a_study(tmp_path: Path) -> None:
    path = tmp_path / "new" / "accuracy.json"
    result = invoke(
        "accuracy", "--k-format", "fp8", "--v-format", "nvfp4", "--tokens", "32", "--context", "16",
        "--calibration-tokens", "32", "--device", "cpu", "--json", str(path),
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "fp8 K, nvfp4 V" in result.output
    study = json.loads(path.read_text())
    assert study["options"]["tokens"] == 32 and study["device"].startswith("cpu")
    assert [row["name"] for row in study["rows"]] == ["bf16", "fp8 K, nvfp4 V"]
    bf16, mixed = study["rows"]
    assert bf16["kl"] == 0 and bf16["same_top"] == 1 and max(bf16["o_error"]) < 3e-3
    assert 1e-4 < mixed["kl"] < 1 and mixed["bytes_per_token"] == (11520 + 6480) // 2
    assert len(mixed["o_error"]) == 30 and 1e-2 < max(mixed["o_error"]) < 0.5
    refusals = [("--v-format", "fp8"), ("--k-format", "fp7"), ("--k-format", "fp8", "--tokens", "10000000")]
    assert [invoke("accuracy", "--device", "cpu", *args).exit_code for args in refusals] == [2, 2, 2]


def test_the_committed_plot_is_of_the_committed_study() -> None:
    results = Path(__file__).parents[1] / "benchmarks" / "results" / "cpu"
    digest = hashlib.sha256((results / "accuracy.json").read_bytes()).hexdigest()
    assert f"sha256 of accuracy.json: {digest}" in (results / "accuracy.svg").read_text(encoding="utf-8")
    study = json.loads((results / "accuracy.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in study["rows"]] == [setting.name for setting in STUDY]


def test_the_plot_leaves_the_reference_out(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    script = load_script("plot_accuracy")
    row = {"k_format": "fp8", "v_format": "fp8", "name": "fp8", "bytes_per_token": 10, "kl": 0.5}
    study = {
        "model": "m x", "options": {"tokens": 8, "context": 8},
        "rows": [row | {"name": "bf16", "kl": 0.0}, row, row | {"name": "mixed", "v_format": "nvfp4"}],
    }  # fmt: skip
    assert script.points(study) == [("fp8", 10, 0.5, True), ("mixed", 10, 0.5, False)]
    path = tmp_path / "accuracy.json"
    assert script.main([str(path), str(tmp_path / "a.svg")]) == 1
    path.write_text(json.dumps(study))
    assert script.main([str(path), str(tmp_path / "a.svg")]) == 0
    assert hashlib.sha256(path.read_bytes()).hexdigest() in (tmp_path / "a.svg").read_text()
