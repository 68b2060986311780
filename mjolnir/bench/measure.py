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
from mjolnir.bench.peers import Peer, Prepared
from mjolnir.bench.pool import KVPool
from mjolnir.bench.results import Failure, Row
from mjolnir.bench.shapes import Shape

MAX_REL_ERR = 5e-3
"""A row of ours above it is a failure, not a time: rounding O to bf16 alone makes about 1.7e-3."""


NO_FIXED_SPLIT = "peers are not timed beside batch-invariant rows"

MAX_NOTE = 600
"""Characters of a peer's error."""

PENDING = "the run ended before"
"""Note of a peer that a row still waits for: a peer that takes the process with it is not tried again there."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Of one peer on one case; times in µs."""

    us: timing.Spread
    rel_err: float
    calls: int
    replays: int


@dataclasses.dataclass(frozen=True)
class HostTimes:
    """Of ours; median µs."""

    call_us: float
    plan_us: float | None


@dataclasses.dataclass
class Outcome:
    """What became of the shapes of a run."""

    rows: list[Row] = dataclasses.field(default_factory=list)
    failures: list[Failure] = dataclasses.field(default_factory=list)
    skipped: list[str] = dataclasses.field(default_factory=list)  # the budget was spent, or the device was lost


def measure(
    prepared: Prepared, case: Case, repeat: int = 1, measured_ms: float | None = None, least: int | None = None
) -> Measurement:
    """Time ``repeat`` graphs of a prepared peer, and check what a replay of the last one wrote.

    Raises:
        ArithmeticError: an output that is not finite, of any slot.
    """
    shape = case.shape
    times: list[float] = []
    with timing.no_hang():
        for _ in range(repeat):
            captured = timing.capture(prepared.call, shape.slots, timing.rotations(shape.slots, shape.target_us))
            times += timing.replay_times(captured, measured_ms, least)
        outputs = timing.replay_poisoned(captured)
    for slot, out in enumerate(outputs):
        if not bool(torch.isfinite(out).all()):
            raise ArithmeticError(f"the output over cache {slot} of {shape.slots} is not finite, or was not written")
    return Measurement(
        us=timing.Spread.of(times),
        rel_err=case.rel_err(outputs[-1], shape.slots - 1),
        calls=captured.calls,
        replays=len(times),
    )


def measure_host(prepared: Prepared, case: Case, call_us: float) -> HostTimes:
    plan_us = None if prepared.plan is None else timing.host_plan_us(prepared.plan)
    return HostTimes(timing.host_call_us(prepared.call, case.shape.slots, call_us), plan_us)


def run(
    shapes: Sequence[Shape],
    device: torch.device,
    *,
    ours: Mjolnir,
    peers: Sequence[Peer] = (),
    repeat: int = 1,
    budget_s: float = math.inf,
    progress: Callable[[Row | Failure], None] = lambda _: None,
    save: Callable[[Outcome], None] = lambda _: None,
) -> Outcome:
    """Measure every shape; none is started once ``budget_s`` seconds have passed. A shape that fails is recorded, and
    the next one is measured, unless the device is lost. ``save`` is called whenever there is something new."""
    deadline = time.monotonic() + budget_s
    outcome = Outcome()
    pool = KVPool(shapes, device)
    for i, shape in enumerate(shapes):
        if time.monotonic() > deadline or not _alive(device):
            outcome.skipped = [later.name for later in shapes[i:]]
            break
        try:
            case = Case(shape, pool)
            row = _measure_ours(ours, case, peers, repeat)
        except Exception as error:  # whatever a kernel can fail with: reported, and part of the exit code
            outcome.failures.append(Failure(shape.name, ours.name, f"{type(error).__name__}: {error}"))
            progress(outcome.failures[-1])
            save(outcome)
            continue
        outcome.rows.append(row)
        save(outcome)
        for peer in peers:
            row = outcome.rows[-1] = _with_peer(row, peer, case, repeat)
            if not _alive(device):
                outcome.failures.append(Failure(shape.name, peer.name, "the device was lost"))
                progress(outcome.failures[-1])
                break
            save(outcome)
        progress(row)
    save(outcome)
    return outcome


def _measure_ours(ours: Mjolnir, case: Case, peers: Sequence[Peer], repeat: int) -> Row:
    prepared = ours.prepare(case)
    measured = measure(prepared, case, repeat)
    if not measured.rel_err <= MAX_REL_ERR:
        raise ArithmeticError(f"relative error {measured.rel_err:.2e}, expected at most {MAX_REL_ERR:.0e}")
    row = _row(case, measured, measure_host(prepared, case, measured.us.median))
    names = [peer.name for peer in peers]
    return dataclasses.replace(row, peers=dict.fromkeys(names), peer_notes=dict.fromkeys(names, PENDING))


def _with_peer(row: Row, peer: Peer, case: Case, repeat: int) -> Row:
    """The row with a peer's time, or with the reason why there is none."""
    us, rel_err, notes = dict(row.peers), dict(row.peer_rel_err), dict(row.peer_notes)
    if case.shape.fixed_split:
        reason: str | None = NO_FIXED_SPLIT
    else:
        reason = "no caches below 8 bits" if case.shape.low_bit else peer.refuses(case.shape)
    if reason is None:
        try:
            measured = measure(peer.prepare(case), case, repeat, timing.PEER_MEASURED_MS, timing.PEER_MIN_REPLAYS)
            us[peer.name] = round(measured.us.median, 3)
            rel_err[peer.name] = float(f"{measured.rel_err:.3g}")
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:MAX_NOTE]
    notes.pop(peer.name)
    if reason is not None:
        notes[peer.name] = reason
    return dataclasses.replace(row, peers=us, peer_rel_err=rel_err, peer_notes=notes)


def _row(case: Case, measured: Measurement, host: HostTimes) -> Row:
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
        fixed_split=shape.fixed_split,
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
        host_us=round(host.call_us, 2),
        plan_us=round(host.plan_us or 0.0, 2),
        caches=shape.slots,
        calls=measured.calls,
        replays=measured.replays,
        peers={},
        peer_rel_err={},
        peer_notes={},
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
