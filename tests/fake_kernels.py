"""Stand-ins for compiled kernels: the cache must work the same whatever the compiler made.

Spawned processes import this module by name, so it imports nothing heavy.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from mjolnir.compiler.build import find_c_compiler, link_library
from mjolnir.compiler.disk import DiskCache
from mjolnir.variant import Variant

VARIANT = Variant("sm_90a", "fp8", "bf16", "bf16", 128, 8)
OTHER = dataclasses.replace(VARIANT, rows=16)
SOURCE = "s" * 64
TOOLCHAIN = {"nvidia-cutlass-dsl": "4.8.1"}


@dataclasses.dataclass
class FakeBuild:
    """A 'library' whose text names the variant; the function in memory answers differently from the one on disk."""

    variant: Variant

    @property
    def function(self) -> Callable[[], str]:
        return lambda: f"jit:{self.variant.name}"

    def write_library(self, path: Path) -> str:
        path.write_bytes(b"\x7fELF" + self.variant.name.encode())
        return "static"


def fake_loader(path: Path, name: str, link: str) -> Callable[[], str]:
    content = path.read_bytes()
    assert content.startswith(b"\x7fELF" + name.encode()) and link == "static"
    return lambda: f"disk:{name}"


def open_disk(folder: Path, source: str = SOURCE, toolchain: dict[str, str] | None = TOOLCHAIN) -> DiskCache:
    return DiskCache(folder, source=source, toolchain=toolchain, loader=fake_loader)


class CountingBuilder:
    """Builds FakeBuilds and keeps which; with a log file, over all processes."""

    def __init__(self, log: Path | None = None, seconds: float = 0.0) -> None:
        self.built: list[Variant] = []
        self.log = log
        self.seconds = seconds

    def __call__(self, variant: Variant) -> FakeBuild:
        self.built.append(variant)
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{os.getpid()}\n")
        time.sleep(self.seconds)
        return FakeBuild(variant)


def get_in_process(folder: Path, log: Path, barrier: object, answers: object) -> None:
    """One of several processes that want the same kernel at once."""
    from mjolnir.compiler.cache import KernelCache

    cache = KernelCache(builder=CountingBuilder(log, seconds=0.5), disk=open_disk(folder))
    barrier.wait()  # type: ignore[attr-defined]
    answers.put((cache.get(VARIANT)(), cache.stats.compiles, cache.stats.disk_hits))  # type: ignore[attr-defined]


def die_with_lock(folder: Path) -> None:
    with open_disk(folder).lock(VARIANT):
        os._exit(1)


def c_object(name: str, answer: int) -> bytes:
    """A host object with one tvm_ffi function ``name`` that returns ``answer``, as the DSL would export it."""
    source = f"""
    #include <stdint.h>
    typedef struct {{ int32_t type_index; uint32_t zero_padding; int64_t v_int64; }} TVMFFIAny;
    extern void CuteDSLRT_TVMFFISetRaisedCudaError(void *, int);
    int __tvm_ffi_{name}(void *self, const TVMFFIAny *args, int32_t num_args, TVMFFIAny *result) {{
      if (num_args == 1) {{ CuteDSLRT_TVMFFISetRaisedCudaError(0, (int)args[0].v_int64); return -1; }}
      result->type_index = 1; result->zero_padding = 0; result->v_int64 = {answer};
      return 0;
    }}
    void must_stay_inside(void) {{}}
    """
    compiler = find_c_compiler()
    assert compiler is not None
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "kernel.c").write_text(source)
        subprocess.run([*compiler, "-fPIC", "-c", "kernel.c", "-o", "kernel.o"], cwd=scratch, check=True)
        return (Path(scratch) / "kernel.o").read_bytes()


@dataclasses.dataclass
class CBuild:
    """A real library: it loads through tvm_ffi, and answers with its variant's rows."""

    variant: Variant

    @property
    def function(self) -> Callable[[], int]:
        return lambda: -1

    def write_library(self, path: Path) -> str:
        return link_library(c_object(self.variant.name, self.variant.rows), path)


def c_builder(variant: Variant) -> CBuild:
    if variant.rows == 64:
        raise RuntimeError("too many rows for this compiler")
    return CBuild(variant)
