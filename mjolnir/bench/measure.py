"""One case measured, and a suite run: ours first, then the peers over the same caches in the same run."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import torch

from mjolnir.bench import timing
from mjolnir.bench.case import Case
from mjolnir.bench.ours import Mjolnir
from mjolnir.bench.peers import Peer
from mjolnir.bench.pool import KVPool
from mjolnir.bench.results import Failure, Row
from mjolnir.bench.shapes import Shape

MAX_REL_ERR = 5e-3
"""A row of ours above it is a failure, not a time: rounding O to bf16 alone makes about 1.7e-3."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Of one peer on one case; times in µs."""

    us: timing.Spread
    rel_err: float
    host_us: float
    plan_us: float | None
    calls: int
    replays: int


@dataclasses.dataclass
class Outcome:
    """What became of the shapes of a run."""

    rows: list[Row] = dataclasses.field(default_factory=list)
    failures: list[Failure] = dataclasses.field(default_factory=list)
    skipped: list[str] = dataclasses.field(default_factory=list)  # the budget was spent, or the device was lost


def measure(peer: Peer, case: Case, repeat: int = 1) -> Measurement:
    """Time ``repeat`` graphs of the peer, and check what a replay of the last one wrote.

    Raises:
        ArithmeticError: an output that is not finite, of any slot.
    """
    shape, prepared = case.shape, peer.prepare(case)
    times: list[float] = []
    for _ in range(repeat):
        captured = timing.capture(prepared.call, shape.slots, timing.rotations(shape.slots, shape.target_us))
        times += timing.replay_times(captured)
    outputs = timing.replay_poisoned(captured)
    for slot, out in enumerate(outputs):
        if not bool(torch.isfinite(out).all()):
            raise ArithmeticError(f"the output over cache {slot} of {shape.slots} is not finite, or was not written")
    us = timing.Spread.of(times)
    return Measurement(
        us=us,
        rel_err=case.rel_err(outputs[-1], shape.slots - 1),
        host_us=timing.host_call_us(prepared.call, shape.slots, us.median),
        plan_us=None if prepared.plan is None else timing.host_plan_us(prepared.plan),
        calls=captured.calls,
        replays=len(times),
    )


def run(
    shapes: Sequence[Shape],
    device: torch.device,
    *,
    ours: Mjolnir,
    peers: Sequence[Peer] = (),
    repeat: int = 1,
    budget_s: float = math.inf,
    progress: Callable[[Row | Failure], None] = lambda _: None,
) -> Outcome:
    """Measure every shape; none is started once ``budget_s`` seconds have passed. A shape that fails is recorded, and
    the next one is measured, unless the device is lost."""
    deadline = time.monotonic() + budget_s
    outcome = Outcome()
    pool = KVPool(shapes, device)
    for i, shape in enumerate(shapes):
        if time.monotonic() > deadline or not _alive(device):
            outcome.skipped = [later.name for later in shapes[i:]]
            break
        try:
            case = Case(shape, pool)
            measurement = measure(ours, case, repeat)
            if not measurement.rel_err <= MAX_REL_ERR:
                raise ArithmeticError(f"relative error {measurement.rel_err:.2e}, expected at most {MAX_REL_ERR:.0e}")
        except Exception as error:  # whatever a kernel can fail with: reported, and part of the exit code
            outcome.failures.append(Failure(shape.name, ours.name, f"{type(error).__name__}: {error}"))
            progress(outcome.failures[-1])
            continue
        times: dict[str, float] = {}
        for peer in peers:
            if peer.supports(shape):
                try:
                    times[peer.name] = measure(peer, case, repeat).us.median
                except Exception as error:
                    outcome.failures.append(Failure(shape.name, peer.name, f"{type(error).__name__}: {error}"))
                    progress(outcome.failures[-1])
        outcome.rows.append(_row(case, measurement, times))
        progress(outcome.rows[-1])
    return outcome


def _row(case: Case, measured: Measurement, peers: dict[str, float]) -> Row:
    shape = case.shape
    return Row(
        name=shape.name,
        heads_q=shape.heads_q,
        heads_kv=shape.heads_kv,
        head_dim=shape.head_dim,
        page_size=shape.page_size,
        layout=shape.layout,
        kv_format=shape.kv_format,
        q_len=shape.q_len,
        data=shape.data,
        batch=shape.batch,
        lens=list(shape.lens),
        us=round(measured.us.median, 3),
        us_p10=round(measured.us.p10, 3),
        us_p90=round(measured.us.p90, 3),
        kv_bytes=shape.kv_bytes,
        floor_us=round(shape.floor_us, 3),
        target_us=round(shape.target_us, 3),
        ratio=round(measured.us.median / shape.target_us, 4),
        tb_s=round(shape.kv_bytes / measured.us.median / 1e6, 4),
        rel_err=float(f"{measured.rel_err:.3g}"),
        rel_err_seqs=case.checked,
        host_us=round(measured.host_us, 2),
        plan_us=round(measured.plan_us or 0.0, 2),
        caches=shape.slots,
        calls=measured.calls,
        replays=measured.replays,
        peers={name: round(us, 3) for name, us in peers.items()},
    )


def _alive(device: torch.device) -> bool:
    """False after a fault that the process cannot recover from."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True
