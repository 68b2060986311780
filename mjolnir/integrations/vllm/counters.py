"""How many steps went which way, and why: the answer to "is it on?"."""

from __future__ import annotations

import collections
import contextlib
import functools
import multiprocessing.util
import threading
import time
from collections.abc import Iterator

from mjolnir.integrations.vllm.log import logger

DECODE, RAGGED, SPLIT, FALLBACK = "decode", "ragged", "split", "fallback"
"""A step's path: all of it on Mjolnir, with one q_len or several; its decode part on Mjolnir; none of it."""

ON_MJOLNIR = (DECODE, RAGGED, SPLIT)

LOG_EVERY_S = 60.0
"""Counts are logged while the engine works, because `vllm serve` kills its workers when it stops."""


class StepCounters:
    """Counts of one process. A step counts once per metadata builder: models with several kinds of layers, drafters
    and micro-batches have several. Steps built for the capture of a CUDA graph are counted apart."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()
        self._capturing = False
        self._logged = 0.0

    def record(self, path: str, reason: str | None = None) -> None:
        """Count a step of a metadata builder, or another event (shadow checks). What is counted for the first time is
        logged, and all counts every LOG_EVERY_S of steps."""
        key = f"{path}: {reason}" if reason else path
        now = time.monotonic()
        with self._lock:
            if self._capturing:
                self._counts[f"capture {key}"] += 1
                return
            is_due = key not in self._counts or now - self._logged >= LOG_EVERY_S
            self._counts[key] += 1
            if is_due:
                self._logged = now
        if is_due:
            self.log()

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Steps recorded inside were built for a capture."""
        before, self._capturing = self._capturing, True
        try:
            yield
        finally:
            self._capturing = before

    def snapshot(self) -> dict[str, int]:
        """Counts by ``path`` or ``path: reason``, largest first."""
        with self._lock:
            return dict(self._counts.most_common())

    def on_mjolnir(self) -> int:
        """Steps of which Mjolnir did all or the decode part."""
        return sum(count for key, count in self.snapshot().items() if key in ON_MJOLNIR)

    def reset(self) -> None:
        with self._lock:
            self._counts.clear()

    def log(self) -> None:
        if self.snapshot():
            logger.info("mjolnir: steps by path: %s", str(self))  # as they are now, whenever a handler formats it

    def __str__(self) -> str:
        return ", ".join(f"{key} {count}" for key, count in self.snapshot().items()) or "none"


COUNTERS = StepCounters()
"""The process's counters. In a vLLM engine with worker processes, read them there:
``llm.collective_rpc(lambda worker: COUNTERS.snapshot())``."""


@functools.cache
def log_at_exit() -> None:
    """Log this process's totals when it ends. Not by atexit, which processes that multiprocessing forks do not run."""
    multiprocessing.util.Finalize(None, COUNTERS.log, exitpriority=0)
