"""The command line: what it prints, its exit codes, and that it starts without the heavy libraries."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import mjolnir
from mjolnir import catalogue, cli, cli_support, doctor
from mjolnir.backends import KERNEL_ARCHS
from mjolnir.compiler import CompileResult
from mjolnir.formats import FORMATS
from mjolnir.signature import KV_LAYOUTS, RunnerShape
from mjolnir.variant import HEAD_SIZES, ROW_CLASSES, Variant


def invoke(*args: str):
    return CliRunner().invoke(cli.app, list(args))


def test_version_and_help():
    assert invoke("--version").output == f"mjolnir {mjolnir.__version__}\n"
    result = invoke("--help")
    assert result.exit_code == 0
    assert all(command in result.output for command in ("demo", "compile", "doctor"))


def test_every_option_has_a_help_text():
    commands = typer.main.get_command(cli.app).commands
    assert {"demo", "compile", "bench", "bench-writes", "verify", "calibrate", "accuracy", "doctor"} == commands.keys()
    bare = [f"{name} {option.name}" for name, command in commands.items() for option in command.params
            if not (option.help or "").strip()]  # fmt: skip
    assert bare == []


@pytest.mark.parametrize(
    "args",
    [
        ("bench", "--suite", "quick", "--json"),
        ("bench-writes", "--json"),
        ("verify", "--device", "cpu", "--json"),
        ("accuracy", "--device", "cpu", "--json"),
        ("calibrate", "--device", "cpu", "--out"),
    ],
)
def test_files_that_cannot_be_written_are_said_before_the_work(monkeypatch, tmp_path, args):
    for work in (
        "bench.command.run_bench", "bench.writes.run_write_bench", "verify.main.run_verify", "accuracy.study.run_study",
        "calibration.calibrate.observe_demo_model",
    ):  # fmt: skip
        monkeypatch.setattr(f"mjolnir.{work}", lambda *_, **__: pytest.fail("the work began"))
    result = invoke(*args, str(tmp_path))
    assert (result.exit_code, result.stderr) == (2, f"error: {args[-1]} must name a file, got the folder {tmp_path}\n")
    (tmp_path / "file").touch()
    result = invoke(*args, str(tmp_path / "file" / "out.json"))
    assert result.exit_code == 2 and str(tmp_path / "file") in result.stderr
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests may run as root, who can write anywhere
    result = invoke(*args, str(tmp_path / "out.json"))
    assert (result.exit_code, result.stderr) == (2, f"error: {args[-1]}: cannot write to {tmp_path / 'out.json'}\n")


def test_looking_whether_a_file_can_be_written_leaves_it_alone(tmp_path):
    path = tmp_path / "new" / "out.json"
    cli_support.check_output("--json", path)
    assert path.parent.is_dir() and not path.exists()
    path.write_text("kept")
    cli_support.check_output("--json", path)
    cli_support.check_output("--json", None)
    assert path.read_text() == "kept"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("accuracy", "--v-format", "fp8"), "--v-format needs --k-format"),
        (("accuracy", "--per", "channel"), "--per needs --k-format"),
        (("accuracy", "--q-mode", "fp8"), "--q-mode needs --k-format"),
        (("accuracy", "--k-format", "fp8", "--per", "x"), "--per must be one of 'tensor', 'head', 'channel', got 'x'"),
        (("accuracy", "--headroom", "nan"), "headroom must be a positive factor that fits fp32, got nan"),
        (("calibrate", "--per", "x"), "--per must be one of 'channel', 'head', got 'x'"),
        (("calibrate", "--headroom", "0"), "headroom must be a positive factor that fits fp32, got 0.0"),
        (("calibrate", "--headroom", "-1"), "headroom must be a positive factor that fits fp32, got -1.0"),
        (("doctor", "--kv-cache-dtype", "fp8"), "--kv-cache-dtype needs --model"),
        (("doctor", "--vllm", "--tensor-parallel", "2"), "--tensor-parallel needs --model"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_the_work(monkeypatch, tmp_path, args, message):
    monkeypatch.chdir(tmp_path)
    for work in ("accuracy.study.run_study", "calibration.calibrate.observe_demo_model", "doctor.collect"):
        monkeypatch.setattr(f"mjolnir.{work}", lambda *_, **__: pytest.fail("the work began"))
    result = invoke(*args)
    assert (result.exit_code, result.stderr) == (2, f"error: {message}\n")


def test_a_reader_that_goes_away_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONPATH": str(Path(mjolnir.__file__).parents[1])}
    command = [sys.executable, "-c", "import mjolnir.cli; mjolnir.cli.app()", "compile", "--list"]
    run = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment, text=True, timeout=120)
    os.close(writer)
    assert (run.returncode, run.stderr) == (1, "")


def test_help_loads_neither_torch_nor_numpy():
    code = (
        "import sys, mjolnir, mjolnir.cli\n"
        "try: mjolnir.cli.app(['demo', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'cutlass', 'triton'} & sys.modules.keys(), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, stdout=subprocess.DEVNULL)


def test_public_names_load_on_use():
    for name in mjolnir.__all__:
        assert getattr(mjolnir, name) is not None
    assert mjolnir.KVLayout.B2NHD.value == "B2NHD"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = mjolnir.nonsense


# demo


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--device", "tpu"), "error: device must be one of auto, cpu, cuda, got 'tpu'"),
        (("--kv-format", "fp7"), "error: kv_format must be one of fp8, fp8_e5m2, e2m3, nvfp4, bf16, fp16, got 'fp7'"),
        (("--page-size", "0"), "error: page_size must be one of 16, 32, 64, 128, 256, got 0"),
    ],
)
def test_demo_refuses(args, message):
    result = invoke("demo", "Hi", *args)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_demo_refuses_cuda_without_a_device():
    result = invoke("demo", "--device", "cuda")
    assert result.exit_code == 2
    assert "torch.cuda.is_available() is False" in result.stderr


def test_demo_passes_its_options_and_prints_text_then_numbers(monkeypatch):
    from mjolnir.demo import generate

    seen = {}

    def fake(prompt, *, emit, **options):
        seen.update(options, prompt=prompt)
        emit("Hel")
        emit("lo\n")
        difference = generate.Difference(max_abs=0.5, mean_abs=0.0625, kl=0.001, same_top=0.75)
        return generate.DemoResult(
            kv_format="fp8",
            page_size=32,
            device="cpu",
            backend="reference",
            prompt_tokens=7,
            answer="Hello",
            answer_tokens=2,
            load_s=1.0,
            prefill_s=0.5,
            tokens_per_s=12.34,
            cache_bytes_per_token=11520,
            bf16_cache_bytes_per_token=23040,
            against_bf16_cache=difference,
            against_full_attention=None,
        )

    monkeypatch.setattr(generate, "run_demo", fake)
    result = invoke("demo", "Say hello", "--page-size", "32", "--device", "cpu", "--max-tokens", "2")
    assert result.exit_code == 0
    assert seen == {
        "prompt": "Say hello",
        "kv_format": "fp8",
        "page_size": 32,
        "device": torch.device("cpu"),
        "max_tokens": 2,
    }
    lines = " ".join(result.output.split())
    assert lines.startswith("Hello tokens 7 prompt + 2 answer")
    assert "12.3 tokens/s on cpu, backend reference" in lines
    assert "KV cache fp8, 32 tokens per page bytes per token 11,520 (50% of bf16's 23,040)" in lines
    assert "max |Δ| 0.500, mean 0.0625, KL 1.00e-03, same top 75.0%" in lines
    assert "no token was decoded through the cache" in lines


# compile


def test_catalogue_has_every_shape_once_and_splits_q_only_for_bf16_caches():
    variants = catalogue.all_variants("sm_90a")
    assert len({variant.name for variant in variants}) == len(variants)
    assert {variant.kv_format for variant in variants if variant.q_split} == {"bf16"}
    # fp8 with two dtypes, fp16, bf16 with q_split or not; each: 3 head sizes · 4 row classes · split or not
    # e2m3 and nvfp4 with two dtypes, split
    # joined: fp8 of head size 64, tokens or heads; nvfp4 of 128, tokens; panels of one row class: fp8, with and without
    # split, two e2m3, three nvfp4; bf16 with three queries, and fp16, of 64
    panels = 2 * 2 + 2 * (2 + 3) + (2 + 1) * 2
    crowds = 2 * 2  # e2m3 of head size 128, alone or in panels
    assert len(variants) == (2 + 1 + 2) * 3 * 4 * 2 + 2 * 2 * 3 * 4 + 2 * 2 * 4 * 2 + 2 * 4 + panels + crowds
    assert Variant("sm_90a", "fp8", "bf16", "bf16", 128, 8) in variants


def test_catalogue_has_what_runners_join():
    """Of many sequences, whose q rows are few; 16-bit K and V have one dtype."""
    for kv_format, head_size in itertools.product(catalogue.QUERIES, HEAD_SIZES):
        shapes = (
            RunnerShape(8, 8, head_size, 64, torch.bfloat16, kv_format, kv_layout=layout, max_num_seqs=256)
            for layout in KV_LAYOUTS
        )
        joined = {shape.joined(1) for shape in shapes} - {""}
        assert joined == set(catalogue.JOINED.get((kv_format, head_size), ()))


@given(
    st.builds(
        Variant,
        arch=st.sampled_from(sorted(KERNEL_ARCHS.values())),
        kv_format=st.sampled_from(sorted(FORMATS)),
        q_dtype=st.sampled_from(["bf16", "fp16"]),
        out_dtype=st.sampled_from(["bf16", "fp16"]),
        head_size=st.sampled_from(HEAD_SIZES),
        rows=st.sampled_from(ROW_CLASSES),
        split=st.booleans(),
        pdl=st.booleans(),
        q_split=st.booleans(),
        l2_prefetch=st.booleans(),
        stages=st.integers(0, 64),
        ctas_per_sm=st.integers(0, 4),
        v_format=st.sampled_from(["", *sorted(FORMATS)]),
        joined=st.sampled_from(["", "tokens", "heads", "panels"]),
    )
)
def test_a_full_name_names_any_variant(variant):
    assert catalogue.variant_named(variant.name) == variant
    assert variant in catalogue.select(catalogue.all_variants(variant.arch), [variant.name])
    for wrong in (variant.name + "_", variant.name.replace("_d", "_d1"), variant.name.replace("decode", "encode")):
        assert catalogue.variant_named(wrong) is None


def test_a_full_name_is_of_the_arch_that_is_asked_for():
    name = "decode_sm_90a_fp8_qbf16_obf16_d128_r8_s8"
    assert [v.stages for v in catalogue.select(catalogue.all_variants("sm_90a"), [name, name])] == [8]
    with pytest.raises(ValueError, match="names none of the 228 variants"):
        catalogue.select(catalogue.all_variants("sm_100a"), [name])


def test_compile_lists_what_patterns_name():
    result = invoke(
        "compile", "--list", "--arch", "sm_100a", "*_fp8_qbf16_obf16_d128_r8_*", "*_d64_r64_split_pdl_qsplit"
    )
    names = result.output.split()
    assert result.exit_code == 0
    assert "decode_sm_100a_fp8_qbf16_obf16_d128_r8_split_pdl" in names
    assert "decode_sm_100a_fp8_qbf16_obf16_d128_r8_pdl" in names
    assert "decode_sm_100a_bf16_qbf16_obf16_d64_r64_split_pdl_qsplit" in names
    assert len(names) == 2 + 1


def test_compile_refuses_a_pattern_without_a_match():
    result = invoke("compile", "--list", "decode_sm_90a_fp7*")
    assert result.exit_code == 2
    assert "'decode_sm_90a_fp7*' names none of the" in result.stderr


def test_compile_refuses_an_arch_that_the_kernels_do_not_compile_for():
    result = invoke("compile", "--list", "--arch", "sm_80")
    assert result.exit_code == 2
    assert "error: arch must be one of 'sm_90a', 'sm_100a', 'sm_110a', 'sm_120a', got 'sm_80'" in result.stderr


def test_compile_fills_the_folder_and_fails_if_any_variant_does(monkeypatch, tmp_path):
    def fake(variants, folder, *, jobs, progress):
        assert (folder, jobs) == (tmp_path, 3)
        results = [
            CompileResult(variant, 2.0, error=None if variant.split else "BuildError: no linker")
            for variant in variants
        ]
        for i, result in enumerate(results, 1):
            progress(result, i, len(results))
        return results

    monkeypatch.setattr("mjolnir.compiler.compile_to_folder", fake)
    pattern = "decode_sm_90a_fp8_qbf16_obf16_d128_r8_*"
    result = invoke("compile", pattern, "--out", str(tmp_path), "--jobs", "3")
    assert result.exit_code == 1
    assert "[1/2] decode_sm_90a_fp8_qbf16_obf16_d128_r8_split_pdl: 2.0 s" in result.output
    assert "[2/2] decode_sm_90a_fp8_qbf16_obf16_d128_r8_pdl: BuildError: no linker" in result.output
    assert f"1 of 2 kernels for sm_90a in {tmp_path}" in result.output
    assert invoke("compile", pattern.replace("*", "split_pdl"), "--out", str(tmp_path), "--jobs", "3").exit_code == 0


# doctor


def test_doctor_reports_as_json(monkeypatch, tmp_path):
    monkeypatch.setenv("MJOLNIR_KERNEL_CACHE", str(tmp_path / "kernels"))
    doctor.kernel_cache.cache_clear()
    try:
        report = json.loads(invoke("doctor", "--json").stdout)
    finally:
        doctor.kernel_cache.cache_clear()
    assert report["versions"]["mjolnir"] == mjolnir.__version__
    assert report["versions"]["torch"] == torch.__version__
    assert report["backend"]["name"] and report["backend"]["reason"]
    on_gpu = torch.cuda.is_available()
    assert report["backend"]["writers"] == ("Triton kernels" if on_gpu else "PyTorch: device is cpu")
    assert report["kernel cache"]["folder"] == str(tmp_path / "kernels")
    assert report["kernel cache"]["state"] == "absent"
    assert report["environment"]["MJOLNIR_KERNEL_CACHE"] == str(tmp_path / "kernels")
    assert not (tmp_path / "kernels").exists(), "looking changes nothing"


def test_doctor_prints_a_table(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = invoke("doctor")
    assert result.exit_code == 0
    for word in (
        "versions",
        "device",
        "backend",
        "kernel cache",
        "environment",
        "MJOLNIR_KERNEL_CACHE",
        torch.__version__,
    ):
        assert word in result.output


def test_doctor_shows_packages_that_are_missing(monkeypatch):
    monkeypatch.setattr(doctor, "PACKAGES", ("torch", "no-such-package-for-mjolnir"))
    assert doctor.collect()["versions"]["no-such-package-for-mjolnir"] is None
