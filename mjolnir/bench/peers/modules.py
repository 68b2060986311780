"""FlashInfer compiles a module per dtype, head size, page size or group. Those that were not shipped are built in the
background, in the order of the shapes, while other rows are measured; a row whose module is not there yet waits."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from queue import SimpleQueue
from typing import Any, Protocol

from mjolnir.bench.shapes import Shape

logger = logging.getLogger(__name__)

WORKERS, JOBS = 4, "3"
"""Modules at a time, and compilers per module: host times are measured meanwhile, so some cores stay free."""

WAIT_S = 150.0
"""Most that a row waits for its module."""


class NeedsModule(Protocol):
    def refuses(self, shape: Shape) -> str | None: ...

    def module(self, shape: Shape) -> Any:
        """FlashInfer's JitSpec of the shape."""


class Modules:
    def __init__(self) -> None:
        self._builds: dict[str, Future[None]] = {}
        self._queue: SimpleQueue[tuple[Any, Future[None]]] = SimpleQueue()

    def start(self, shapes: Iterable[Shape], peers: Sequence[NeedsModule]) -> None:
        """Queue the builds of what the peers need for the shapes. A peer that cannot even be imported is left to
        ``prepare``, which says so row by row."""
        os.environ.setdefault("MAX_JOBS", JOBS)
        for shape in shapes:
            for peer in peers:
                if shape.low_bit or peer.refuses(shape) is not None:
                    continue
                try:
                    self.ask(peer.module(shape))
                except Exception as error:
                    logger.debug("no module for %s: %s", shape.name, error)

    def ask(self, spec: Any) -> None:
        """Queue the build of a module, once, unless it was shipped."""
        if not spec.aot_path.exists() and spec.name not in self._builds:
            self._builds[spec.name] = Future()
            self._queue.put((spec, self._builds[spec.name]))
            if len(self._builds) <= WORKERS:
                # Daemons: a process whose time is up does not wait for builds that no row waits for.
                threading.Thread(target=_work, args=(self._queue,), daemon=True, name="flashinfer-build").start()

    def wait(self, spec: Any, timeout_s: float = WAIT_S) -> None:
        """Until the module can be loaded.

        Raises:
            RuntimeError: its build failed, with the compiler's last lines.
            TimeoutError: it is not built yet.
        """
        self.ask(spec)
        build = self._builds.get(spec.name)
        if build is None:
            return
        try:
            build.result(timeout_s)
        except NotDone as error:
            raise TimeoutError(f"module {spec.name} was not built within {timeout_s:.0f} s") from error
        except Exception as error:
            raise RuntimeError(f"module {spec.name} cannot be built: {str(error)[-600:]}") from error


def _work(queue: SimpleQueue[tuple[Any, Future[None]]]) -> None:
    # Of this thread, and so of the compilers that it starts: they give way to what is measured.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
    while True:
        spec, build = queue.get()
        try:
            _build(spec)
            build.set_result(None)
        except Exception as error:  # of FlashInfer or its compiler: whoever waits for the module is told
            build.set_exception(error)


def _build(spec: Any) -> None:
    spec.build()
    # Where FlashInfer loads modules from without asking its build system again.
    spec.aot_path.parent.mkdir(parents=True, exist_ok=True)
    partial = spec.aot_path.with_suffix(".partial")
    shutil.copyfile(spec.jit_library_path, partial)
    partial.rename(spec.aot_path)
