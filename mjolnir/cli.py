"""The command line. Each command is a thin call; what it needs is imported when it runs, so that --help is instant."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

import mjolnir
from mjolnir.bench.cli import bench, bench_writes
from mjolnir.cli_support import check_output, pick_device, refuse_without, user_errors

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mjolnir {mjolnir.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Decode attention over paged, low-precision KV caches."""


@app.command()
def demo(
    prompt: Annotated[str, typer.Argument(help="What the model answers.")] = "What is gravity?",
    kv_format: Annotated[str, typer.Option(help="Format of the KV cache; docs/formats.md lists them.")] = "fp8",
    page_size: Annotated[int, typer.Option(help="Tokens per page of the KV cache.")] = 16,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of the answer at most.")] = 128,
) -> None:
    """SmolLM2-135M-Instruct answers a prompt, decoding over a paged, quantised KV cache."""
    with user_errors():
        from rich.console import Console

        from mjolnir.demo.generate import run_demo
        from mjolnir.demo.report import render

        result = run_demo(
            prompt,
            kv_format=kv_format,
            page_size=page_size,
            device=pick_device(device),
            max_tokens=max_tokens,
            emit=lambda text: print(text, end="", flush=True),
        )
        Console().print(render(result))


@app.command("compile")
def compile_(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Full names of variants, or shell-style patterns that match a whole name, such as "
            "'*_fp8_*_d128_*' (in quotes); --list shows the names. All variants without any."
        ),
    ] = None,
    arch: Annotated[str, typer.Option(help="GPU architecture: sm_90a, sm_100a, sm_110a or sm_120a.")] = "sm_90a",
    out: Annotated[
        Path, typer.Option(help="Folder to fill; on the GPU machine, MJOLNIR_KERNEL_CACHE names it.")
    ] = Path("mjolnir-kernels"),
    jobs: Annotated[int, typer.Option(min=1, help="Compiling processes, about 1 GiB each.")] = 2,
    suite: Annotated[str | None, typer.Option(help="Only what this suite of `mjolnir bench` runs.")] = None,
    list_only: Annotated[bool, typer.Option("--list", help="Print the names and compile nothing.")] = False,
) -> None:
    """Compile kernels, on a machine with or without a GPU, into a folder that serves as a kernel cache."""
    with user_errors():
        from mjolnir.backends import KERNEL_ARCHS
        from mjolnir.catalogue import all_variants, select
        from mjolnir.checks import check_choice
        from mjolnir.compiler import CompileResult, compile_to_folder

        variants = all_variants(check_choice("arch", arch, tuple(KERNEL_ARCHS.values())))
        if suite is not None:
            from mjolnir.bench.suites import variants_for_suite

            variants = variants_for_suite(suite, arch)
        if names:
            variants = select(variants, names)
        if list_only:
            typer.echo("\n".join(variant.name for variant in variants))
            return

        def progress(result: CompileResult, done: int, total: int) -> None:
            outcome = result.error or ("there already" if result.cached else f"{result.seconds:.1f} s")
            typer.echo(f"[{done}/{total}] {result.variant.name}: {outcome}")

        results = compile_to_folder(variants, out, jobs=jobs, progress=progress)
    failed = [result for result in results if not result.ok]
    typer.echo(f"{len(results) - len(failed)} of {len(results)} kernels for {arch} in {out}")
    if failed:
        raise typer.Exit(1)


app.command()(bench)
app.command()(bench_writes)


@app.command()
def verify(
    device: Annotated[str, typer.Option(help="auto, cpu (the reference backend) or cuda.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A sixth of the matrix.")] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="File for the record: commit, device, method, tolerances, rows.")
    ] = None,
) -> None:
    """Kernel against the fp64 oracle over a stated matrix; exit code 1 if any case fails."""
    with user_errors():
        from mjolnir.verify.main import run_verify

        check_output("--json", json_path)
        passed = run_verify(pick_device(device), quick=quick, json_path=json_path)
    if not passed:
        raise typer.Exit(1)


@app.command()
def calibrate(
    dump: Annotated[
        Path | None, typer.Argument(help=".npz or .pt with k.<layer> and v.<layer>; without it the demo's model runs.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The scales file to write.")] = Path("kv_scales.json"),
    per: Annotated[str, typer.Option(help="channel or head: what a magnitude is kept of.")] = "channel",
    headroom: Annotated[float, typer.Option(help="Room above the largest magnitude, a factor.")] = 1.1,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that the demo's model reads.")] = 16384,
    context: Annotated[int, typer.Option(min=1, help="At a time: as long as the contexts to come.")] = 2048,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Largest magnitudes of K and V over real activations, as a scales file."""
    with user_errors():
        from mjolnir.calibration.calibrate import observe_demo_model, observe_dump
        from mjolnir.calibration.scales_file import ScalesFile, check_headroom
        from mjolnir.checks import check_choice

        check_choice("--per", per, ("channel", "head"))
        check_headroom(headroom)
        check_output("--out", out)
        if dump is not None:
            observer, model, source = observe_dump(dump), "", dump.name
        else:
            observer = observe_demo_model(
                tokens, pick_device(device), lambda done: typer.echo(f"{done} of {tokens} tokens", err=True), context
            )
            model, source = "SmolLM2-135M-Instruct", "pydoc topics, calibration part"
        file = ScalesFile.of(observer, per_channel=per == "channel", headroom=headroom, model=model, source=source)
        file.save(out)
        typer.echo(f"{len(file.layers)} layers, {file.tokens} tokens: {out}")


@app.command()
def accuracy(
    k_format: Annotated[str | None, typer.Option(help="K's format; without it the whole study runs.")] = None,
    v_format: Annotated[str | None, typer.Option(help="With --k-format: V's format, if it is not K's.")] = None,
    per: Annotated[
        str | None, typer.Option(help="With --k-format: tensor, head (the default) or channel, what shares a descale.")
    ] = None,
    q_mode: Annotated[str | None, typer.Option(help="With --k-format: bf16 (the default) or fp8, what Q is.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens evaluated.")] = 8192,
    context: Annotated[int, typer.Option(min=8, help="Tokens of a text: the longest context.")] = 2048,
    scales: Annotated[Path | None, typer.Option(help="A scales file, instead of calibrating first.")] = None,
    headroom: Annotated[float, typer.Option(help="Room above the largest magnitude, a factor.")] = 1.1,
    calibration_tokens: Annotated[int, typer.Option(min=1, help="Tokens that calibration reads.")] = 16384,
    json_path: Annotated[Path | None, typer.Option("--json", help="File to write the study to.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """What KV formats cost in quality: SmolLM2 over English text, against the bf16 cache."""
    with user_errors():
        from rich.console import Console

        from mjolnir.accuracy.report import describe, render
        from mjolnir.accuracy.setting import STUDY, Setting
        from mjolnir.accuracy.study import Options, run_study
        from mjolnir.calibration.scales import GRANULARITIES
        from mjolnir.checks import check_choice

        if k_format is None:
            refuse_without("--k-format", {"--v-format": v_format, "--per": per, "--q-mode": q_mode})
            settings: tuple[Setting, ...] = STUDY
        else:
            per = check_choice("--per", per or "head", GRANULARITIES)
            settings = (Setting(k_format, v_format or k_format, per, q_mode or "bf16"),)
        check_output("--json", json_path)
        options = Options(settings, tokens, context, calibration_tokens, headroom, scales)
        study = run_study(
            options,
            pick_device(device),
            progress=lambda text: typer.echo(text, err=True),
            on_result=lambda result: typer.echo(describe(result), err=True),
        )
        console = Console()
        (console if console.is_terminal else Console(width=140)).print(render(study))
        if json_path is not None:
            json_path.write_text(study.to_json(), encoding="utf-8")


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
    vllm: Annotated[bool, typer.Option("--vllm", help="Also what vLLM would use, and why not.")] = False,
    model: Annotated[
        Path | None, typer.Option(help="Implies --vllm: a folder with config.json, whose layers are listed.")
    ] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="With --model: dtype of the KV cache as vllm serve takes it, auto without it.")
    ] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(min=1, help="With --model: number of ranks, 1 without it.")
    ] = None,
) -> None:
    """Versions, device, backend in use and why, kernel cache and environment knobs."""
    with user_errors():
        from rich.console import Console

        from mjolnir.doctor import collect, render

        if model is None:
            refuse_without("--model", {"--kv-cache-dtype": kv_cache_dtype, "--tensor-parallel": tensor_parallel})
        report = collect()
        if vllm or model is not None:
            from mjolnir.integrations.vllm.doctor import describe

            report["vLLM"] = describe(
                report["backend"]["name"], report["backend"]["reason"], model=model,
                kv_cache_dtype=kv_cache_dtype or "auto", tensor_parallel=tensor_parallel or 1,
            )  # fmt: skip
        if as_json:
            json.dump(report, sys.stdout, indent=2)
            typer.echo()
        else:
            Console().print(render(report))
