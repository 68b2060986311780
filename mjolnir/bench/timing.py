"""Times of one call: inside a CUDA graph of many, and on the host."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

GRAPH_US = 2000
"""Length of a graph in target time: what launching a graph costs is then well below a percent of it."""

WARM_MS = 20.0
"""Replays before the timed ones, so that clocks have settled."""

MEASURED_MS = 100.0
MIN_REPLAYS, MAX_REPLAYS = 15, 100

PEER_MEASURED_MS, PEER_MIN_REPLAYS = 50.0, 7
"""Peers are many, and the slow ones take the time of a dozen rows of ours."""

HANG_S = 100.0
"""A capture and its replays that take longer have hung: a shape takes about a second, a Triton compile ten."""

HOST_CALLS, HOST_MS = 50, 5.0
"""Eager calls whose host time is taken, and the GPU time that may be queued: a host that has to wait times the GPU."""


@dataclasses.dataclass(frozen=True)
class Captured:
    """A graph whose calls rotate over the slots, and the output that each slot's call leaves."""

    graph: torch.cuda.CUDAGraph
    outputs: list[torch.Tensor]
    calls: int


@dataclasses.dataclass(frozen=True)
class Spread:
    """µs over replays."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, times: list[float]) -> Spread:
        p10, median, p90 = np.quantile(times, (0.1, 0.5, 0.9)).tolist()
        return cls(median, p10, p90)


def rotations(slots: int, call_us: float) -> int:
    """How often a graph goes round all slots: whole rotations only, so that replays in a row keep the rotation."""
    return max(1, round(GRAPH_US / (slots * call_us)))


def capture(call: Callable[[int], torch.Tensor], slots: int, count: int) -> Captured:
    """A graph of ``count`` rotations, after one eager rotation."""
    for slot in range(slots):
        call(slot)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            outputs = [call(slot) for slot in range(slots)]
    return Captured(graph, outputs, count * slots)


def replay_times(captured: Captured, measured_ms: float | None = None, least: int | None = None) -> list[float]:
    """µs per call of each of many replays, queued back to back: for ``measured_ms``, but ``least`` of them."""
    measured_ms = MEASURED_MS if measured_ms is None else measured_ms
    least = MIN_REPLAYS if least is None else least
    graph = captured.graph
    graph.replay()
    start, end = _event(), _event()
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    each_ms = max(start.elapsed_time(end), 1e-3)
    for _ in range(int(WARM_MS / each_ms)):
        graph.replay()
    count = min(max(int(measured_ms / each_ms), least), MAX_REPLAYS)
    pairs = [(_event(), _event()) for _ in range(count)]
    for start, end in pairs:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 / captured.calls for start, end in pairs]


def replay_poisoned(captured: Captured) -> list[torch.Tensor]:
    """The outputs of one more replay, all NaN before it: what it does not write shows."""
    for out in captured.outputs:
        out.fill_(torch.nan)
    captured.graph.replay()
    torch.cuda.synchronize()
    return captured.outputs


@contextlib.contextmanager
def no_hang(seconds: float = HANG_S) -> Iterator[None]:
    """End the process, with a traceback, if the body takes longer: a kernel that waits for ever cannot be stopped
    otherwise. What was saved before stays."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def host_call_us(call: Callable[[int], torch.Tensor], slots: int, call_us: float) -> float:
    """Median host time of HOST_CALLS eager calls, issued back to back as a model's layers do: in batches of HOST_MS of
    the GPU's time, whose first calls count too; the device is waited for between batches, not within a call's time."""
    batch = max(int(HOST_MS * 1e3 / call_us), 1)
    times = []
    for i in range(HOST_CALLS):
        if i % batch == 0:
            torch.cuda.synchronize()
        times.append(_host_us(functools.partial(call, i % slots)))
    torch.cuda.synchronize()
    return float(np.median(times))


def host_plan_us(plan: Callable[[], object], count: int = 15) -> float:
    """Median host time of a plan; the device is idle before each, as it is between steps that wait for tokens."""
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        times.append(_host_us(plan))
    torch.cuda.synchronize()
    return float(np.median(times))


def _host_us(function: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    function()
    return (time.perf_counter_ns() - start) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
