"""The command line. Each command is a thin call; what it needs is imported when it runs, so that --help is instant."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import mjolnir

if TYPE_CHECKING:
    import torch

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

DEVICES = ("auto", "cpu", "cuda")


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


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    """What a user can put right is one line on stderr and exit code 2; anything else is a traceback."""
    try:
        yield
    except (ValueError, NotImplementedError, ModuleNotFoundError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


def _pick_device(name: str) -> torch.device:
    import torch

    if name not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {name!r}")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("device is 'cuda', but torch.cuda.is_available() is False: see `mjolnir doctor`")
    if name == "auto":
        name = "cuda" if available else "cpu"
    return torch.device(name)


@app.command()
def demo(
    prompt: Annotated[str, typer.Argument(help="What the model answers.")] = "What is gravity?",
    kv_format: Annotated[str, typer.Option(help="Format of the KV cache; docs/formats.md lists them.")] = "fp8",
    page_size: Annotated[int, typer.Option(help="Tokens per page of the KV cache.")] = 16,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of the answer at most.")] = 128,
) -> None:
    """SmolLM2-135M-Instruct answers a prompt, decoding over a paged, quantised KV cache."""
    with _user_errors():
        from rich.console import Console

        from mjolnir.demo.generate import run_demo
        from mjolnir.demo.report import render

        result = run_demo(
            prompt,
            kv_format=kv_format,
            page_size=page_size,
            device=_pick_device(device),
            max_tokens=max_tokens,
            emit=lambda text: print(text, end="", flush=True),
        )
        Console().print(render(result))


@app.command("compile")
def compile_(
    names: Annotated[
        list[str] | None, typer.Argument(help="Variants by name or shell-style pattern; all of them without any.")
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
    with _user_errors():
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


@app.command()
def bench(
    suite: Annotated[
        str, typer.Option(help="quick, core, full or lowbit: mjolnir/bench/suites.py lists them.")
    ] = "core",
    shape: Annotated[
        list[str] | None, typer.Option(help="Only shapes whose name has this shell-style pattern in it; repeatable.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="normal or hard; as the suite says without it.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="File to write the rows to.")] = None,
    budget_s: Annotated[float, typer.Option(min=0, help="Seconds after which no further shape is started.")] = 600,
    repeat: Annotated[int, typer.Option(min=1, help="Graphs captured and timed per shape.")] = 1,
    list_only: Annotated[bool, typer.Option("--list", help="Print the shapes and measure nothing.")] = False,
    peers: Annotated[
        Path | None, typer.Option(help="Folder of other kernels to time too, as benchmarks/README.md says.")
    ] = None,
    peer: Annotated[list[str] | None, typer.Option(help="Only this peer of the folder; repeatable.")] = None,
    shard: Annotated[str, typer.Option(help="i/n: every n-th shape from the i-th on.")] = "1/1",
    skip_done: Annotated[bool, typer.Option("--skip-done", help="Keep the rows that --json's file has.")] = False,
    gate: Annotated[bool, typer.Option("--gate", help="Exit code 3 if a bound of the release is missed.")] = False,
    ctas_per_sm: Annotated[int | None, typer.Option(help="As DecodeRunner takes it; so are the next four.")] = None,
    kv_stages: Annotated[int | None, typer.Option()] = None,
    l2_prefetch: Annotated[int, typer.Option()] = 0,
    max_splits: Annotated[int | None, typer.Option()] = None,
    pdl: Annotated[bool, typer.Option()] = True,
    q_mode: Annotated[str, typer.Option(help="bf16 or fp8, as DecodeRunner takes it.")] = "bf16",
) -> None:
    """Time per call against the memory floor, L2 cold, on a GPU."""
    with _user_errors():
        from rich.console import Console

        from mjolnir.bench.command import Options, run_bench, write
        from mjolnir.bench.gates import gates
        from mjolnir.bench.ours import Knobs
        from mjolnir.bench.peers import NAMES
        from mjolnir.bench.report import describe, render

        knobs = Knobs(ctas_per_sm, max_splits, kv_stages, pdl, l2_prefetch, q_mode)
        names = tuple(peer or NAMES) if peers is not None else tuple(peer or ())
        options = Options(suite, tuple(shape or ()), data, repeat, budget_s, knobs, shard, names)
        if list_only:
            typer.echo("\n".join(candidate.name for candidate in options.shapes()))
            return
        if json_path is not None:
            json_path.parent.mkdir(parents=True, exist_ok=True)
        report = run_bench(
            options,
            progress=lambda result: typer.echo(describe(result), err=True),
            peers_folder=peers,
            json_path=json_path,
            skip_done=skip_done,
        )
        console = Console()
        # A log has no width: the table needs more than the default of 80.
        (console if console.is_terminal else Console(width=200)).print(render(report))
        if json_path is not None:
            write(json_path, report)
    if report.failures:
        raise typer.Exit(1)
    if gate and not all(bound.passed for bound in gates(report.rows) if bound.value is not None):
        raise typer.Exit(3)


@app.command()
def bench_writes(
    json_path: Annotated[Path | None, typer.Option("--json", help="File to write the rows to.")] = None,
) -> None:
    """Time and bandwidth of write_kv, expand_pages and the query quantiser against copies, on a GPU."""
    with _user_errors():
        from mjolnir.bench.writes import WriteRow, run_write_bench, to_json

        def show(row: WriteRow) -> None:
            share = "" if row.share is None else f", {row.tb_s:.2f} TB/s, {row.share:.0%} of a copy"
            typer.echo(f"{row.what} {row.formats}, {row.tokens} tokens: {row.us:.2f} µs{share}")

        if json_path is not None:
            json_path.parent.mkdir(parents=True, exist_ok=True)
        report = run_write_bench(show)
        if json_path is not None:
            json_path.write_text(to_json(report), encoding="utf-8")


@app.command()
def verify(
    device: Annotated[str, typer.Option(help="auto, cpu (the reference backend) or cuda.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A sixth of the matrix.")] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="File for the record: commit, device, method, tolerances, rows.")
    ] = None,
) -> None:
    """Kernel against the fp64 oracle over a stated matrix; exit code 1 if any case fails."""
    with _user_errors():
        from mjolnir.verify.main import run_verify

        passed = run_verify(_pick_device(device), quick=quick, json_path=json_path)
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
    with _user_errors():
        from mjolnir.calibration.calibrate import observe_demo_model, observe_dump
        from mjolnir.calibration.scales_file import ScalesFile
        from mjolnir.checks import check_choice

        check_choice("per", per, ("channel", "head"))
        if dump is not None:
            observer, model, source = observe_dump(dump), "", dump.name
        else:
            observer = observe_demo_model(
                tokens, _pick_device(device), lambda done: typer.echo(f"{done} of {tokens} tokens", err=True), context
            )
            model, source = "SmolLM2-135M-Instruct", "pydoc topics, calibration part"
        file = ScalesFile.of(observer, per_channel=per == "channel", headroom=headroom, model=model, source=source)
        file.save(out)
        typer.echo(f"{len(file.layers)} layers, {file.tokens} tokens: {out}")


@app.command()
def accuracy(
    k_format: Annotated[str | None, typer.Option(help="K's format; without it the whole study runs.")] = None,
    v_format: Annotated[str | None, typer.Option(help="V's format, if not K's.")] = None,
    per: Annotated[str, typer.Option(help="tensor, head or channel: what shares a descale.")] = "head",
    q_mode: Annotated[str, typer.Option(help="bf16 or fp8: what Q is.")] = "bf16",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens evaluated.")] = 8192,
    context: Annotated[int, typer.Option(min=8, help="Tokens of a text: the longest context.")] = 2048,
    scales: Annotated[Path | None, typer.Option(help="A scales file, instead of calibrating first.")] = None,
    headroom: Annotated[float, typer.Option(help="Room above the largest magnitude, a factor.")] = 1.1,
    calibration_tokens: Annotated[int, typer.Option(min=1, help="Tokens that calibration reads.")] = 16384,
    json_path: Annotated[Path | None, typer.Option("--json", help="File to write the study to.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """What KV formats cost in quality: SmolLM2 over English text, against the bf16 cache."""
    with _user_errors():
        from rich.console import Console

        from mjolnir.accuracy.report import describe, render
        from mjolnir.accuracy.setting import STUDY, Setting
        from mjolnir.accuracy.study import Options, run_study

        if k_format is None and v_format is not None:
            raise ValueError(f"v_format is {v_format!r} without a k_format: give both, or neither for the whole study")
        settings = STUDY if k_format is None else (Setting(k_format, v_format or k_format, per, q_mode),)
        options = Options(settings, tokens, context, calibration_tokens, headroom, scales)
        study = run_study(
            options,
            _pick_device(device),
            progress=lambda text: typer.echo(text, err=True),
            on_result=lambda result: typer.echo(describe(result), err=True),
        )
        console = Console()
        (console if console.is_terminal else Console(width=140)).print(render(study))
        if json_path is not None:
            json_path.parent.mkdir(parents=True, exist_ok=True)
            json_path.write_text(study.to_json(), encoding="utf-8")


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
    vllm: Annotated[bool, typer.Option("--vllm", help="Also what vLLM would use, and why not.")] = False,
    model: Annotated[
        Path | None, typer.Option(help="With --vllm: a folder with config.json, whose layers are listed.")
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="With --model, as vllm serve takes it.")] = "auto",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="With --model: ranks.")] = 1,
) -> None:
    """Versions, device, backend in use and why, kernel cache and environment knobs."""
    with _user_errors():
        from rich.console import Console

        from mjolnir.doctor import collect, render

        report = collect()
        if vllm or model is not None:
            from mjolnir.integrations.vllm.doctor import describe

            report["vLLM"] = describe(
                report["backend"]["name"], report["backend"]["reason"], model=model, kv_cache_dtype=kv_cache_dtype,
                tensor_parallel=tensor_parallel,
            )  # fmt: skip
        if as_json:
            json.dump(report, sys.stdout, indent=2)
            typer.echo()
        else:
            Console().print(render(report))
