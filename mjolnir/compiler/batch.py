"""Fill a folder with compiled kernels, in parallel: for a machine without the CuTe DSL, or before a first start."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from mjolnir.compiler.build import compile_kernel, dsl_missing_reason
from mjolnir.compiler.cache import Builder
from mjolnir.compiler.disk import DiskCache
from mjolnir.variant import Variant


@dataclasses.dataclass(frozen=True)
class CompileResult:
    """What became of one variant."""

    variant: Variant
    seconds: float
    cached: bool = False  # a sound entry was there already
    path: Path | None = None  # the new entry
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None


Progress = Callable[[CompileResult, int, int], None]  # (the variant just finished, how many are, of how many)


def compile_to_folder(
    variants: Iterable[Variant],
    folder: Path,
    arch: str | None = None,
    jobs: int = 2,
    progress: Progress | None = None,
    builder: Builder = compile_kernel,
) -> list[CompileResult]:
    """Compile ``variants`` into ``folder``, which can then be copied and named by MJOLNIR_KERNEL_CACHE elsewhere.

    Entries that are there already are kept. A variant that fails does not stop the others: look at ``error``.

    Args:
        variants: duplicates are compiled once.
        folder: created with mode 0700.
        arch: compile for this arch instead of each variant's own.
        jobs: processes; each takes about 1 GiB. They import the caller's main module, as multiprocessing's spawn does.
        progress: called in this process after each variant.
        builder: replaced in tests; importable by name.

    Returns:
        One result for each distinct variant, in their order.

    Raises:
        ValueError: ``jobs`` is not positive.
        PermissionError: the folder could be written by other users (its kernels would be refused).
        ModuleNotFoundError: the CuTe DSL is not installed.
    """
    if jobs < 1:
        raise ValueError(f"jobs = {jobs}: expected at least 1")
    wanted = [dataclasses.replace(variant, arch=arch) if arch is not None else variant for variant in variants]
    wanted = list(dict.fromkeys(wanted))
    reason = DiskCache.open(folder).refusal()
    if reason is not None:
        raise PermissionError(f"folder = {folder}: {reason}")
    missing = dsl_missing_reason()
    if wanted and missing is not None:
        raise ModuleNotFoundError(missing)
    results: dict[Variant, CompileResult] = {}
    # A fresh interpreter for each: the DSL is not thread-safe, and its state must not reach this process.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(max(1, min(jobs, len(wanted))), mp_context=context) as pool:
        running = {pool.submit(_compile_one, variant, folder, builder): variant for variant in wanted}
        for future in concurrent.futures.as_completed(running):
            variant = running[future]
            try:
                result = future.result()
            except Exception as error:  # the process died, and with it the pool
                result = CompileResult(variant, 0.0, error=f"{type(error).__name__}: {error}")
            results[variant] = result
            if progress is not None:
                progress(result, len(results), len(wanted))
    return [results[variant] for variant in wanted]


def _compile_one(variant: Variant, folder: Path, builder: Builder) -> CompileResult:
    """Runs in a process of the pool."""
    start = time.monotonic()
    disk = DiskCache.open(folder)
    try:
        with disk.lock(variant):
            if disk.load(variant, repair=True) is not None:
                return CompileResult(variant, time.monotonic() - start, cached=True)
            path = disk.put(variant, builder(variant).write_library)
            if disk.load(variant, repair=True) is None:
                raise RuntimeError("the new library cannot be loaded; the log says why")
    except Exception as error:
        return CompileResult(variant, time.monotonic() - start, error=f"{type(error).__name__}: {error}")
    return CompileResult(variant, time.monotonic() - start, path=path)
