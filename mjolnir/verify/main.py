"""Run the matrix against the oracle; a table, an exit status, a record."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from mjolnir import evidence
from mjolnir.backends import REFERENCE
from mjolnir.runner import DecodeRunner
from mjolnir.signature import DTYPES
from mjolnir.verify import compare
from mjolnir.verify.compare import Deviation
from mjolnir.verify.matrix import Case, cases
from mjolnir.verify.problem import Problem, make_problem

METHOD = (
    "Each case runs once over random Q, K and V in a paged cache whose dead rows, pages and block-table entries are "
    "poisoned, and is compared with fp64 attention over the exact values of the cache's bytes. row_error: the worst "
    "row (token and head) of O, beyond the rounding of the output's dtype, relative to the row's norm. rel_error: all "
    "of O, rounding included. lse_error: relative to max(1, |LSE|). Probes, with descales of 1: V = 1 must give 1, "
    "Q = 0 the mean of V, Q = 0 with one-hot rows of V the share of each element. NaN, Inf and zero rows must be "
    "where the oracle has them, and rows past the batch untouched."
)

PROBES = ("ones", "mean", "one_hot")


@dataclasses.dataclass(frozen=True)
class Row:
    """What became of one case."""

    name: str
    backend: str
    row_error: float
    rel_error: float
    lse_error: float
    probes: dict[str, bool]
    faults: list[str]  # what is out of bounds, in words

    @property
    def passed(self) -> bool:
        return not self.faults


def run_verify(
    device: torch.device | str = "cuda",
    *,
    quick: bool = False,
    json_path: Path | None = None,
    console: Console | None = None,
    matrix: Iterable[Case] | None = None,
) -> bool:
    """Verify the backend that a runner uses on ``device``, print a table, and write the record to ``json_path``.

    Args:
        device: on "cpu" it is the reference backend that is verified, and the table says so.
        quick: a sixth of the matrix.
        console: to print to; None: standard output.
        matrix: cases to run instead of ``matrix.cases(quick)``.

    Returns:
        Whether every case passed.
    """
    device, console = torch.device(device), console or Console()
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)  # where it cannot be made, fails before the first case
    todo = list(cases(quick) if matrix is None else matrix)
    rows = []
    with console.status("") as status:
        for i, case in enumerate(todo):
            status.update(f"{i + 1} of {len(todo)}: {case.name}")
            rows.append(verify_case(case, device, seed=i))
    failed = sum(not row.passed for row in rows)
    backend = ", ".join(sorted({row.backend for row in rows}))
    console.print(_render(rows, backend))
    if backend == REFERENCE:
        console.print("No kernel ran: this verified the reference backend, which is what a runner uses here.")
    console.print(f"{len(rows) - failed} of {len(rows)} cases passed")
    if json_path is not None:
        record = _record(rows, device, backend)
        json_path.write_text(json.dumps(record, indent=2) + "\n")
    return bool(rows) and not failed


def verify_case(case: Case, device: torch.device, seed: int = 0) -> Row:
    """One case. What it raises is a failure of that case and does not stop the others."""
    backend = "none"
    try:
        runner = make_runner(case, device)
        backend = runner.backend
        problem = make_problem(case, device, seed)
        deviation, faults = _check(problem, runner)
        probes = {probe: _probe(problem, runner, probe, seed) for probe in PROBES}
    except Exception as error:
        faults = [f"{type(error).__name__}: {error}"]
        return Row(case.name, backend, math.inf, math.inf, math.inf, dict.fromkeys(PROBES, False), faults)
    faults += [f"probe {probe} failed" for probe, passed in probes.items() if not passed]
    return Row(case.name, backend, deviation.row, deviation.total, deviation.lse, probes, faults)


def make_runner(case: Case, device: torch.device) -> DecodeRunner:
    """The runner that a case asks for."""
    return DecodeRunner(
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_size=case.head_size,
        page_size=case.page_size,
        out_dtype=DTYPES[case.out_dtype],
        max_num_seqs=128,
        max_q_len=case.q_len,
        kv_format=case.kv_format,
        v_format=case.v_format,
        kv_layout=case.kv_layout,
        max_splits=case.max_splits,
        device=device,
    )


def _check(problem: Problem, runner: DecodeRunner) -> tuple[Deviation, list[str]]:
    """The deviation of one run, and what is wrong with it."""
    out, lse = problem.run(runner)
    deviation = compare.compare(out[: problem.tokens], lse[: problem.tokens], *problem.oracle())
    faults = deviation.faults(out.dtype)
    if not (out[problem.tokens :].isnan().all() and lse[problem.tokens :].isnan().all()):
        faults.append("rows past the batch were written")
    return deviation, faults


def _probe(problem: Problem, runner: DecodeRunner, probe: str, seed: int) -> bool:
    """Whether a probe's known answer comes out. Overwrites V, the descales and the factors, and Q but for "ones"."""
    gen = torch.Generator().manual_seed(seed)
    device = problem.query.device
    one = torch.ones(1, device=device)
    problem.k_scale, problem.v_scale, problem.q_mul, problem.o_mul = one, one, None, None
    heads, head_size = problem.case.num_kv_heads, problem.case.head_size
    shape = (len(problem.pages), heads, head_size)
    if probe == "ones":
        values = torch.ones(shape)
    else:
        problem.query.zero_()
        values = torch.zeros(shape)
        if probe == "mean":
            values = torch.randint(-8, 9, shape, generator=gen).float()  # exact in every format, and so are their sums
        else:
            values.scatter_(2, torch.randint(head_size, (*shape[:2], 1), generator=gen), 1.0)
    problem.write_v(values.to(device))
    out, lse = (t[: problem.tokens] for t in problem.run(runner))
    expected, expected_lse = problem.oracle()
    if probe == "ones":
        # P is rounded to f16 and its sum is not: 2^-11 at worst, which bf16 rounds away.
        slack = 0.0 if out.dtype == torch.bfloat16 else 2.0**-10
        exact = expected.to(out.dtype).double()  # 1, or what V's block scales make of it
        return bool(((out.double() - exact).abs() <= slack).all())
    deviation = compare.compare(out, lse, expected, expected_lse)
    return not deviation.faults(out.dtype, row_tolerance=compare.PROBE_TOLERANCE)


def _render(rows: list[Row], backend: str) -> Table:
    table = Table(title=f"mjolnir verify: {backend} against the fp64 oracle", title_justify="left")
    table.add_column("case", overflow="fold")
    for column in ("row error", "LSE error", "probes"):
        table.add_column(column, justify="right")
    table.add_column("")
    for row in rows:
        verdict = "pass" if row.passed else "[bold red]FAIL[/]: " + "; ".join(row.faults)
        probes = f"{sum(row.probes.values())}/{len(row.probes)}"
        table.add_row(row.name, f"{row.row_error:.1e}", f"{row.lse_error:.1e}", probes, verdict)
    return table


def _record(rows: list[Row], device: torch.device, backend: str) -> dict[str, Any]:
    """Plain JSON values; an infinite error is null, since JSON has no Inf."""
    entries = []
    for row in rows:
        entry = dataclasses.asdict(row) | {"passed": row.passed}
        entries.append({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in entry.items()})
    return {
        **evidence.header(device),
        "backend": backend,
        "method": METHOD,
        "tolerances": {
            "row_error": compare.ROW_TOLERANCE,
            "rel_error": {name: compare.TOTAL_TOLERANCE[dtype] for name, dtype in DTYPES.items()},
            "lse_error": compare.LSE_TOLERANCE,
            "probe_row_error": compare.PROBE_TOLERANCE,
        },
        "passed": all(row.passed for row in rows),
        "rows": entries,
    }
