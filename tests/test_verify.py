"""``mjolnir verify``: that it passes on a sound backend, and fails on each way of being wrong."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from running import ARCH, GPU_VARIANTS
from typer.testing import CliRunner

from mjolnir import cli, evidence, runner
from mjolnir.backends import torch_ref
from mjolnir.backends.cute import kernel_variant
from mjolnir.formats import FORMATS
from mjolnir.signature import DTYPES
from mjolnir.tuning import Tuning
from mjolnir.verify import compare
from mjolnir.verify.main import make_runner, run_verify, verify_case
from mjolnir.verify.matrix import LAYOUTS, LENGTHS, SCALES, Case, cases
from mjolnir.verify.problem import make_problem

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_thread")


# The measure


def rounded(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return values.to(dtype), torch.zeros(values.shape[:2]), torch.zeros(values.shape[:2], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_rounding_is_no_error(dtype: torch.dtype) -> None:
    """Over all magnitudes of the dtype, subnormal and overflowing ones too."""
    gen = torch.Generator().manual_seed(0)
    exponents = torch.randint(-150, 127, (50, 8, 1), generator=gen).double()
    values = torch.randn(50, 8, 64, generator=gen).double() * torch.exp2(exponents)
    out, lse, expected_lse = rounded(values, dtype)
    assert compare.row_errors(out, values).max() == 0
    ordinary = torch.randn(50, 8, 64, generator=gen).double()
    deviation = compare.compare(*rounded(ordinary, dtype)[:2], ordinary, expected_lse)
    assert deviation.row == 0 and not deviation.faults(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_an_error_before_the_rounding_shows(dtype: torch.dtype) -> None:
    """Never more than it is; and an error of a few units in the last place shows almost whole."""
    gen = torch.Generator().manual_seed(1)
    expected = torch.randn(200, 4, 128, generator=gen).double()
    for size in (1e-4, 2.5e-4, 1e-3, 1e-2, 1e-1):
        error = torch.randn(expected.shape, generator=gen).double()
        error *= size * expected.norm(dim=-1, keepdim=True) / error.norm(dim=-1, keepdim=True)
        measured = compare.row_errors((expected + error).to(dtype), expected)
        assert measured.max() <= size * 1.0001
        if size > 2 * torch.finfo(dtype).eps:
            assert measured.min() > 0.5 * size


def test_one_wrong_row_among_many_is_found_and_named() -> None:
    expected = torch.randn(1000, 8, 64, generator=torch.Generator().manual_seed(2)).double()
    out, lse, expected_lse = rounded(expected, torch.float16)
    out[123, 5] *= 1.002
    deviation = compare.compare(out, lse, expected, expected_lse)
    assert deviation.worst == (123, 5) and deviation.total < compare.TOTAL_TOLERANCE[torch.float16]
    assert deviation.faults(torch.float16)[0].startswith("O of token 123, head 5 is off by ")


@pytest.mark.parametrize(
    ("got", "want"),
    [(math.nan, 0.5), (0.5, math.nan), (math.inf, 0.5), (0.5, -math.inf), (math.inf, -math.inf), (math.nan, math.inf)],
)
def test_nan_and_inf_must_stand_where_the_oracle_has_them(got: float, want: float) -> None:
    expected = torch.ones(3, 2, 64, dtype=torch.float64)
    out, lse, expected_lse = rounded(expected, torch.bfloat16)
    out[1, 1, 7], expected[1, 1, 7] = got, want
    assert compare.compare(out, lse, expected, expected_lse).row == math.inf
    out[1, 1, 7] = want  # and where it has them they are no error
    assert compare.compare(out, lse, expected, expected_lse).row == 0
    lse[2, 0], expected_lse[2, 0] = got, want
    assert compare.compare(out, lse, expected, expected_lse).lse == math.inf
    lse[2, 0] = want
    assert compare.compare(out, lse, expected, expected_lse).lse == 0


def test_a_row_without_keys_must_be_zero() -> None:
    expected = torch.zeros(2, 2, 64, dtype=torch.float64)
    out, lse, expected_lse = rounded(expected, torch.float16)
    assert not compare.compare(out, lse, expected, expected_lse).faults(torch.float16)
    out[0, 1, 3] = 1e-3
    assert compare.compare(out, lse, expected, expected_lse).row == math.inf


def test_lse_is_measured_relative_to_its_size() -> None:
    expected = torch.tensor([[0.1, -1e30, 50.0]], dtype=torch.float64)
    for factor, passes in ((1 + 5e-6, True), (1 + 3e-5, False)):
        errors = compare.lse_errors((expected * factor).float(), expected)
        assert errors[0, 0] < compare.LSE_TOLERANCE  # of 1 below 1
        assert bool((errors[0, 1:] < compare.LSE_TOLERANCE).all()) is passes


def test_shapes_must_agree() -> None:
    out = torch.zeros(2, 2, 64)
    with pytest.raises(ValueError, match=r"lse must have the oracle's shape \(2, 2\), got \(2, 3\)"):
        compare.compare(out, torch.zeros(2, 3), out.double(), torch.zeros(2, 2).double())


# The matrix


def test_the_matrix_covers_what_it_says() -> None:
    every, quick = cases(), cases(quick=True)
    assert 120 <= len(every) <= 220 and 20 <= len(quick) <= 40 and set(quick) < set(every)
    assert len({case.name for case in every}) == len(every)
    assert {case.num_heads // case.num_kv_heads for case in every} >= {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 32}
    shapes = {(case.head_size, case.page_size) for case in every}
    assert shapes >= {(d, page) for d in (64, 128, 256) for page in (16, 32, 64, 128, 256)}
    for field, wanted in (
        ("layout", LAYOUTS),
        ("scales", SCALES),
        ("lengths", LENGTHS),
        ("kv_format", FORMATS),
        ("causal", (True, False)),
        ("max_splits", (None, 1, 2, 3)),
    ):
        assert {getattr(case, field) for case in every} == set(wanted), field


def test_every_case_has_its_kernel_among_those_compiled_for_gpu_machines() -> None:
    for case in cases():
        two_terms = case.kv_format == "bf16" and (case.q_dtype == "fp16" or case.factors)
        shape = make_runner(case, CPU)._shape
        variant = kernel_variant(shape, ARCH, Tuning(max_splits=case.max_splits), case.q_len, case.q_dtype, two_terms)
        assert variant in GPU_VARIANTS, case.name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_dead_in_a_problem_is_nan(layout: str) -> None:
    problem = make_problem(Case(layout=layout, kv_format="fp16"), CPU, seed=0)
    live = len(problem.pages) * 2 * 128
    for cache in (problem.k_cache, problem.v_cache):
        assert int(cache.isfinite().sum()) == live and cache[problem.pages, problem.slots].isfinite().all()
        assert int(cache.isnan().sum()) == cache.numel() - live > 0
    assert ((problem.block_table < 0) | (problem.block_table == 2**31 - 1)).sum() >= len(problem.lengths)


# The command


SOME = [
    Case(),
    Case(q_len=4, layout="BHN2D", page_size=16, scales="sequence"),
    Case(out_dtype="bf16", head_size=64, causal=False, q_len=2, lengths="skewed"),
]


def test_a_sound_backend_passes_and_the_record_says_so(tmp_path: Path) -> None:
    console = Console(width=160, record=True, quiet=True)
    path = tmp_path / "results" / "verify.json"
    assert run_verify("cpu", json_path=path, console=console, matrix=SOME) is True
    record = json.loads(path.read_text())
    assert {"commit", "dirty", "source", "device", "driver", "versions", "date"} <= record.keys()
    assert record["backend"] == "reference" and record["passed"] is True and "fp64" in record["method"]
    assert record["tolerances"]["row_error"] == 3e-4 and record["tolerances"]["rel_error"]["bf16"] == 2e-3
    assert [row["name"] for row in record["rows"]] == [case.name for case in SOME]
    for row in record["rows"]:
        assert row["passed"] and row["probes"] == {"ones": True, "mean": True, "one_hot": True}
        assert 0 <= row["row_error"] <= 3e-4 and 0 < row["rel_error"] <= 2e-3 and row["lse_error"] <= 1e-5


Decode = Callable[..., None]


def corrupt(change: Callable[[torch.Tensor, torch.Tensor, dict[str, Any]], None]) -> Decode:
    """The reference backend, and then a change to its O and LSE."""

    def decode(query: torch.Tensor, out: torch.Tensor, *tensors: torch.Tensor, **options: Any) -> None:
        torch_ref.decode(query, out, *tensors, **options)
        change(out, options["lse"], options)

    return decode


def one_key_short(query: torch.Tensor, out: torch.Tensor, *tensors: torch.Tensor, **options: Any) -> None:
    *others, seq_lens = tensors
    torch_ref.decode(query, out, *others, (seq_lens - (seq_lens > 500).int()), **options)


def pages_swapped(query: torch.Tensor, out: torch.Tensor, *tensors: torch.Tensor, **options: Any) -> None:
    """Two pages of one sequence change places: nothing moves but for the causal mask and the last page."""
    *others, table, seq_lens = tensors
    table = table.clone()
    longest = int(seq_lens.argmax())
    page_size = others[0].shape[1]
    last = (int(seq_lens[longest]) - 1) // page_size
    table[longest, [0, last]] = table[longest, [last, 0]]
    torch_ref.decode(query, out, *others, table, seq_lens, **options)


def scale_of_the_wrong_head(query: torch.Tensor, out: torch.Tensor, *tensors: torch.Tensor, **options: Any) -> None:
    k_cache, v_cache, k_scale, v_scale, *rest = tensors
    if v_scale.dim() == 2:
        v_scale = v_scale.roll(1, dims=1)
    torch_ref.decode(query, out, k_cache, v_cache, k_scale, v_scale, *rest, **options)


def always_causal(query: torch.Tensor, out: torch.Tensor, *tensors: torch.Tensor, **options: Any) -> None:
    torch_ref.decode(query, out, *tensors, **{**options, "causal": True})


def set_one(value: float) -> Callable[..., None]:
    def change(out: torch.Tensor, lse: torch.Tensor, options: dict[str, Any]) -> None:
        out[3, 5, 7] = value

    return change


@pytest.mark.parametrize(
    ("decode", "failing", "fault"),
    [
        (corrupt(lambda out, lse, _: out[2, 3].mul_(1.01)), {0, 1, 2}, "O of token 2, head 3 is off"),
        (corrupt(lambda out, lse, _: out.mul_(1.002)), {0, 1, 2}, "O of token"),
        (corrupt(set_one(math.nan)), {0, 1, 2}, "O of token 3, head 5 is off by inf"),
        (corrupt(lambda out, lse, _: lse[0, 0].add_(1e-3)), {0, 1, 2}, "LSE is off"),
        (corrupt(lambda out, lse, _: lse.nan_to_num_(neginf=-1e38)), {0, 1, 2}, "LSE is off by inf"),
        (corrupt(lambda out, lse, _: out[-1].fill_(0)), {0, 1, 2}, "rows past the batch were written"),
        (corrupt(lambda out, lse, _: out[:3].copy_(out[1:4].clone())), {0, 1, 2}, "O of token"),
        (one_key_short, {0, 1, 2}, "probe one_hot failed"),
        (pages_swapped, {0, 1, 2}, "O of token"),
        (scale_of_the_wrong_head, {1}, "O of token"),
        (always_causal, {2}, "O of token"),
    ],
    ids=["row", "factor", "nan", "lse", "sentinel", "padding", "neighbour", "key", "pages", "scale", "mask"],
)
def test_every_way_of_being_wrong_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, decode: Decode, failing: set[int], fault: str
) -> None:
    monkeypatch.setattr(runner, "torch_ref", type("Backend", (), {"decode": staticmethod(decode)}))
    path = tmp_path / "verify.json"
    console = Console(quiet=True)
    assert run_verify("cpu", json_path=path, console=console, matrix=SOME) is False
    record = json.loads(path.read_text())
    assert record["passed"] is False
    failed = {i: row for i, row in enumerate(record["rows"]) if not row["passed"]}
    assert failed.keys() == failing
    assert all(fault in "; ".join(row["faults"]) for row in failed.values()), failed


def test_a_case_that_raises_fails_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(query: torch.Tensor, *tensors: torch.Tensor, **options: Any) -> None:
        if options["q_len"] == 4:
            raise RuntimeError("launch failed")
        torch_ref.decode(query, *tensors, **options)

    monkeypatch.setattr(runner, "torch_ref", type("Backend", (), {"decode": staticmethod(decode)}))
    rows = [verify_case(case, CPU) for case in SOME]
    assert [row.passed for row in rows] == [True, False, True]
    assert rows[1].faults == ["RuntimeError: launch failed"]


def test_no_case_is_no_success() -> None:
    assert run_verify("cpu", console=Console(quiet=True), matrix=[]) is False


def test_a_weight_lost_from_the_sum_fails_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """V = 1 must give exactly 1 in bf16: one unit in the last place less is a failure."""
    lossy = corrupt(lambda out, lse, _: out.mul_(1 - 2.0**-8))
    monkeypatch.setattr(runner, "torch_ref", type("Backend", (), {"decode": staticmethod(lossy)}))
    assert verify_case(Case(out_dtype="bf16"), CPU).probes["ones"] is False


@pytest.mark.parametrize(("passes", "code"), [(True, 0), (False, 1)])
def test_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, passes: bool, code: int) -> None:
    from mjolnir.verify import main

    monkeypatch.setattr(main, "cases", lambda quick: SOME[: 1 if quick else 3])
    if not passes:
        broken = corrupt(set_one(1.0))
        monkeypatch.setattr(runner, "torch_ref", type("Backend", (), {"decode": staticmethod(broken)}))
    path = tmp_path / "verify.json"
    result = CliRunner().invoke(cli.app, ["verify", "--quick", "--device", "cpu", "--json", str(path)])
    assert result.exit_code == code, result.output
    assert f"{int(passes)} of 1 cases passed" in result.output
    assert "this verified the reference backend" in " ".join(result.output.split())
    assert ("FAIL" in result.output) is not passes
    assert len(json.loads(path.read_text())["rows"]) == 1


def test_a_record_that_cannot_be_written_is_said_before_any_case_runs(monkeypatch, tmp_path):
    monkeypatch.setattr("mjolnir.verify.main.verify_case", lambda *_, **__: pytest.fail("a case ran"))
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "verify.json"
    result = CliRunner().invoke(cli.app, ["verify", "--device", "cpu", "--json", str(path)])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert str(path.parent) in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_cuda_is_refused() -> None:
    result = CliRunner().invoke(cli.app, ["verify", "--device", "cuda"])
    assert result.exit_code == 2 and "torch.cuda.is_available() is False" in result.stderr


@pytest.mark.gpu
def test_the_quick_matrix_passes_on_a_gpu() -> None:
    assert run_verify("cuda", quick=True, console=Console(width=160))


# Where a result comes from


def test_evidence_names_the_commit() -> None:
    header = evidence.header("cpu")
    assert header["device"].startswith("cpu") and header["versions"]["torch"] == torch.__version__
    assert len(header["source"]) == 64 and header["date"].endswith("+00:00")
    json.dumps(header)
    if (evidence.CHECKOUT / ".git").exists():
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=evidence.CHECKOUT, capture_output=True, text=True)
        if head.returncode == 0:
            assert header["commit"] == head.stdout.strip() and isinstance(header["dirty"], bool)


def test_evidence_without_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installed package lies in no checkout, even if its folder lies in somebody else's."""
    monkeypatch.setattr(evidence, "CHECKOUT", tmp_path)
    monkeypatch.delenv("MJOLNIR_COMMIT", raising=False)
    assert evidence.header()["commit"] is None and evidence.header()["dirty"] is None
    monkeypatch.setenv("MJOLNIR_COMMIT", "0123abc")
    assert evidence.header()["commit"] == "0123abc"


def test_dtype_names_cover_the_tolerances() -> None:
    assert set(DTYPES.values()) == compare.TOTAL_TOLERANCE.keys()
