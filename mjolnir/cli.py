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
    except (ValueError, NotImplementedError, ModuleNotFoundError, PermissionError) as error:
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
    kv_format: Annotated[str, typer.Option(help="Format of the KV cache: fp8, bf16 or fp16.")] = "fp8",
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
    arch: Annotated[str, typer.Option(help="GPU architecture, such as sm_90a.")] = "sm_90a",
    out: Annotated[
        Path, typer.Option(help="Folder to fill; on the GPU machine, MJOLNIR_KERNEL_CACHE names it.")
    ] = Path("mjolnir-kernels"),
    jobs: Annotated[int, typer.Option(min=1, help="Compiling processes, about 1 GiB each.")] = 2,
    list_only: Annotated[bool, typer.Option("--list", help="Print the names and compile nothing.")] = False,
) -> None:
    """Compile kernels, on a machine with or without a GPU, into a folder that serves as a kernel cache."""
    with _user_errors():
        from mjolnir.catalogue import all_variants, select
        from mjolnir.compiler import CompileResult, compile_to_folder

        variants = all_variants(arch)
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
def doctor(as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False) -> None:
    """Versions, device, backend in use and why, kernel cache and environment knobs."""
    with _user_errors():
        from rich.console import Console

        from mjolnir.doctor import collect, render

        report = collect()
        if as_json:
            json.dump(report, sys.stdout, indent=2)
            typer.echo()
        else:
            Console().print(render(report))
