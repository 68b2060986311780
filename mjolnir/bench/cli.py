"""The commands ``mjolnir bench`` and ``mjolnir bench-writes``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mjolnir.cli_support import check_output, user_errors


def bench(
    suite: Annotated[
        str, typer.Option(help="quick, core, full or lowbit: mjolnir/bench/suites.py lists them.")
    ] = "core",
    shape: Annotated[
        list[str] | None, typer.Option(help="Only shapes whose name has this shell-style pattern in it; repeatable.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="K and V: normal, or hard (fp8 only); as the suite says without it.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="File to write the rows to.")] = None,
    budget_s: Annotated[float, typer.Option(min=0, help="Seconds after which no further shape is started.")] = 600,
    repeat: Annotated[int, typer.Option(min=1, help="Graphs captured and timed per shape.")] = 1,
    list_only: Annotated[bool, typer.Option("--list", help="Print the shapes and measure nothing.")] = False,
    peers: Annotated[
        Path | None, typer.Option(help="Folder of other kernels to time too; benchmarks/README.md says how to fill it.")
    ] = None,
    peer: Annotated[list[str] | None, typer.Option(help="Only this kernel of --peers, by name; repeatable.")] = None,
    shard: Annotated[str, typer.Option(help="i/n: only every n-th shape, from the i-th on.")] = "1/1",
    skip_done: Annotated[
        bool, typer.Option("--skip-done", help="Keep the rows of --json's file, measure the rest.")
    ] = False,
    gate: Annotated[bool, typer.Option("--gate", help="Exit code 3 if a bound of the release is missed.")] = False,
    ctas_per_sm: Annotated[
        int | None, typer.Option(min=1, help="Workers per multiprocessor; tuned without it.")
    ] = None,
    kv_stages: Annotated[
        int | None, typer.Option(min=1, help="Stages of the ring of K and V; tuned without it.")
    ] = None,
    l2_prefetch: Annotated[int, typer.Option(min=0, help="Tiles beyond the ring to prefetch into L2.")] = 0,
    max_splits: Annotated[
        int | None, typer.Option(min=1, help="Most splits of a sequence and KV head (1: no merge); tuned without it.")
    ] = None,
    pdl: Annotated[
        bool, typer.Option(help="Start while the kernel before ends (programmatic dependent launch).")
    ] = True,
    q_mode: Annotated[str, typer.Option(help="bf16 or fp8, as DecodeRunner takes it.")] = "bf16",
) -> None:
    """Time per call against the memory floor, L2 cold, on a GPU."""
    with user_errors():
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
        check_output("--json", json_path)
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


def bench_writes(
    json_path: Annotated[Path | None, typer.Option("--json", help="File to write the rows to.")] = None,
) -> None:
    """Time and bandwidth of write_kv, expand_pages and the query quantiser against copies, on a GPU."""
    with user_errors():
        from mjolnir.bench.writes import WriteRow, run_write_bench, to_json

        def show(row: WriteRow) -> None:
            share = "" if row.share is None else f", {row.tb_s:.2f} TB/s, {row.share:.0%} of a copy"
            typer.echo(f"{row.what} {row.formats}, {row.tokens} tokens: {row.us:.2f} µs{share}")

        check_output("--json", json_path)
        report = run_write_bench(show)
        if json_path is not None:
            json_path.write_text(to_json(report), encoding="utf-8")
