"""How many steps went which way, and why: the answer to "is it on?"."""

from __future__ import annotations

import atexit
import collections
import contextlib
import threading
from collections.abc import Iterator

from mjolnir.integrations.vllm.log import logger

DECODE, RAGGED, SPLIT, FALLBACK = "decode", "ragged", "split", "fallback"
"""A step's path: all of it on Mjolnir, with one q_len or several; its decode part on Mjolnir; none of it."""

ON_MJOLNIR = (DECODE, RAGGED, SPLIT)


class StepCounters:
    """Counts of one process. A step counts once per metadata builder: models with several kinds of layers, drafters
    and micro-batches have several. Steps built for the capture of a CUDA graph are counted apart."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()
        self._capturing = False

    def record(self, path: str, reason: str | None = None) -> None:
        """Count a step of a metadata builder, or another event (shadow checks)."""
        key = f"{path}: {reason}" if reason else path
        with self._lock:
            self._counts[f"capture {key}" if self._capturing else key] += 1

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

    def __str__(self) -> str:
        return ", ".join(f"{key} {count}" for key, count in self.snapshot().items()) or "none"


COUNTERS = StepCounters()
"""The process's counters. In a vLLM engine with worker processes, read them there:
``llm.collective_rpc(lambda worker: COUNTERS.snapshot())``."""


def _log_at_shutdown() -> None:
    if COUNTERS.snapshot():
        logger.info("mjolnir: steps by path: %s", COUNTERS)


atexit.register(_log_at_shutdown)
