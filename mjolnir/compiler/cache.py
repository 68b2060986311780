"""Compiled kernels of this process, in front of the folder on disk: a variant is loaded or compiled once."""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from mjolnir import env
from mjolnir.compiler import key
from mjolnir.compiler.build import Kernel, KernelUnavailable, compile_kernel
from mjolnir.compiler.disk import DiskCache, DiskStats
from mjolnir.variant import Variant


class Built(Protocol):
    """What a builder returns; build.Build is one."""

    @property
    def function(self) -> Kernel: ...

    def write_library(self, path: Path) -> str: ...


Builder = Callable[[Variant], Built]


@dataclasses.dataclass
class CacheStats:
    """Lookups since the cache was made. Each is one of the first four, a thread that waited for another's a hit."""

    memory_hits: int = 0  # found in this process; counted without a lock, so racing threads may lose a few
    disk_hits: int = 0  # loaded from the folder
    compiles: int = 0  # compiled
    compile_failures: int = 0  # neither found nor compiled
    rejected: int = 0  # entries of the folder not used: corrupt, foreign, or writable by others
    cache_failures: int = 0  # other troubles with the folder: refused, not writable, no lock, no linker

    @property
    def misses(self) -> int:
        """Lookups that found no compiled kernel."""
        return self.compiles + self.compile_failures


@dataclasses.dataclass(frozen=True)
class CacheReport:
    """What ``mjolnir doctor`` shows of a cache."""

    folder: Path | None
    state: str  # "off", "absent" (made when first written), "ready", "refused"
    reason: str | None  # why it is refused
    entries: int  # libraries in the folder
    size_bytes: int  # of these
    set_aside: int  # corrupt files kept for a look
    source: str  # digest of this package's source, part of every key
    toolchain: dict[str, str] | None  # versions of the CuTe DSL, None where it is not installed


class KernelCache:
    """Callables by variant.

    Args:
        folder: of compiled kernels; None keeps nothing on disk.
        builder: compiles a variant.
        disk: the folder, opened; replaces ``folder`` in tests.
    """

    def __init__(
        self, folder: Path | None = None, *, builder: Builder = compile_kernel, disk: DiskCache | None = None
    ) -> None:
        self._disk = disk if disk is not None or folder is None else DiskCache.open(folder)
        self._builder = builder
        self._kernels: dict[Variant, Kernel] = {}
        self._pending: dict[Variant, Future[Kernel]] = {}
        self._lock = threading.Lock()
        self._stats = CacheStats()

    def get(self, variant: Variant) -> Kernel:
        """The function of ``variant``: one dict lookup once it is here, else from the folder, else compiled (seconds).

        Threads that ask while it is made wait for it. A failure reaches all of them and is not remembered.

        Raises:
            KernelUnavailable: not in the folder, and the CuTe DSL is not installed.
            Exception: whatever the compiler raises.
        """
        kernel = self._kernels.get(variant)
        if kernel is None:
            future, mine = self._claim(variant)
            if mine:
                return self._make(variant, future)
            kernel = future.result()
        self._stats.memory_hits += 1
        return kernel

    def is_compiled(self, variant: Variant) -> bool:
        """Whether ``get`` would return at once."""
        return variant in self._kernels

    @property
    def stats(self) -> CacheStats:
        """A copy of the counters as they are now."""
        disk = self._disk.stats if self._disk is not None else DiskStats()
        return dataclasses.replace(self._stats, rejected=disk.rejected, cache_failures=disk.failures)

    def describe(self) -> CacheReport:
        """The state of the folder and what its keys are made of. Loads and creates nothing."""
        source, toolchain = key.OWN_SOURCE, key.dsl_toolchain()
        if self._disk is None:
            return CacheReport(None, "off", None, 0, 0, 0, source, toolchain)
        folder = self._disk.folder
        reason = self._disk.refusal()
        if reason is not None:
            return CacheReport(folder, "refused", reason, 0, 0, 0, source, toolchain)
        if not folder.exists():
            return CacheReport(folder, "absent", None, 0, 0, 0, source, toolchain)
        sizes = [path.lstat().st_size for path in folder.glob("*.so")]
        set_aside = sum(1 for _ in folder.glob("*.so.corrupt-*"))
        state = "ready" if os.access(folder, os.W_OK) else "read-only"
        return CacheReport(folder, state, None, len(sizes), sum(sizes), set_aside, source, toolchain)

    def _claim(self, variant: Variant) -> tuple[Future[Kernel], bool]:
        """The future of a variant, and whether the caller is the one to fulfil it."""
        with self._lock:
            future = self._pending.get(variant)
            if future is not None:
                return future, False
            future = Future()
            if variant in self._kernels:  # made between the caller's look and the lock
                future.set_result(self._kernels[variant])
                return future, False
            self._pending[variant] = future
            return future, True

    def _make(self, variant: Variant, future: Future[Kernel]) -> Kernel:
        """Load or build, and hand the outcome to every thread that waits for it."""
        try:
            kernel = self._obtain(variant)
        except BaseException as error:
            self._count("compile_failures")
            with self._lock:
                del self._pending[variant]
            # An interrupt is meant for this thread alone; those that wait learn what became of their kernel.
            interrupted = RuntimeError(f"compiling {variant.name} was interrupted in another thread: {error!r}")
            future.set_exception(error if isinstance(error, Exception) else interrupted)
            raise
        with self._lock:
            self._kernels[variant] = kernel
            del self._pending[variant]
        future.set_result(kernel)
        return kernel

    def _obtain(self, variant: Variant) -> Kernel:
        disk = self._disk
        if disk is None or not disk.usable():
            return self._build(variant).function
        kernel = disk.load(variant)
        if kernel is None:
            with disk.lock(variant):
                kernel = disk.load(variant, repair=True)  # another process may have written it while we waited
                if kernel is None:
                    built = self._build(variant)
                    stored = disk.store(variant, built.write_library)
                    # The library rather than the JIT function, so that every process runs the same thing.
                    return (disk.load(variant, repair=True) if stored else None) or built.function
        self._count("disk_hits")
        return kernel

    def _build(self, variant: Variant) -> Built:
        try:
            built = self._builder(variant)
        except KernelUnavailable as error:
            raise KernelUnavailable(f"{variant.name}: {self._not_found(variant)}, and {error}") from error
        self._count("compiles")
        return built

    def _not_found(self, variant: Variant) -> str:
        """Why there is no compiled kernel to load, in words."""
        if self._disk is None:
            return f"the kernel cache is off ({env.KERNEL_CACHE.name}=0)"
        reason = self._disk.refusal()
        if reason is not None:
            return f"the kernel cache {self._disk.folder} is refused ({reason})"
        others = self._disk.near_misses(variant)
        hint = f" ({others} built from another version of this package)" if others else ""
        return f"not in the kernel cache {self._disk.folder}{hint}"

    def _count(self, event: str) -> None:
        with self._lock:  # variants are made by several threads at once
            setattr(self._stats, event, getattr(self._stats, event) + 1)


@functools.cache
def kernel_cache() -> KernelCache:
    """The cache of this process, on the folder that MJOLNIR_KERNEL_CACHE named when it was first asked for."""
    return KernelCache(env.kernel_cache_folder())
