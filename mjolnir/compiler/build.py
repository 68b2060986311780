"""From a Variant to a shared library that ``tvm_ffi.load_module`` opens.

Linked statically where possible, so that the library needs only libc and libtvm_ffi and a GPU machine without the
CuTe DSL can load it: the DSL's host runtime comes from libcuda_dialect_runtime_static.a (in the DSL's wheel), the CUDA
runtime from libcudart_static.a (in a toolkit or the nvidia-cuda-runtime wheel). Otherwise against the DSL's shared
runtime, which ties the library to machines that have the DSL.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mjolnir.compiler.cubin import arch_sm, cubin_sm, extract_cubins
from mjolnir.compiler.key import dsl_toolchain, source_changed
from mjolnir.variant import Variant

Kernel = Callable[..., Any]

COMPILE_LOCK = threading.Lock()
"""Held while the DSL traces, compiles or exports. It keeps its options and its MLIR session in process-wide objects:
two threads in it at once raise, or silently get each other's target architecture."""

STATIC, DYNAMIC = "static", "dynamic"

# What generated code calls to report a failed launch; it is in the DSL's shared runtime but not in the static archive.
_ERROR_SHIM = r"""
#include <stdio.h>

extern const char *cudaGetErrorName(int code);
extern const char *cudaGetErrorString(int code);
extern void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message);

void CuteDSLRT_TVMFFISetRaisedCudaError(void *set_raised_from_parts, int code) {
  char message[512];
  (void)set_raised_from_parts;
  snprintf(message, sizeof message, "CUDA error %d (%s): %s", code, cudaGetErrorName(code), cudaGetErrorString(code));
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", message);
}
"""

# Only the entry points leave the library: a second CUDA runtime in the process must not bind to this one.
_EXPORTS = "{ global: __tvm_ffi_*; local: *; };\n"


class BuildError(RuntimeError):
    """A kernel was not compiled for the right target, or could not be linked."""


class KernelUnavailable(RuntimeError):
    """A kernel is neither in a cache nor can it be compiled here."""


@dataclasses.dataclass(frozen=True)
class Build:
    """One compiled kernel.

    Attributes:
        variant: what was compiled.
        function: the DSL's JIT function, callable where this process's GPU can run ``variant.arch``.
        object_code: the exported host object, GPU code inside, whose entry point is ``variant.name``.
    """

    variant: Variant
    function: Kernel
    object_code: bytes

    @property
    def cubin(self) -> bytes:
        """The GPU code.

        Raises:
            BuildError: the object does not hold exactly one cubin.
        """
        cubins = extract_cubins(self.object_code)
        if len(cubins) != 1:
            raise BuildError(f"{self.variant.name}: expected one cubin in the exported object, found {len(cubins)}")
        return cubins[0]

    def write_library(self, path: Path) -> str:
        """Link to ``path`` (ending in .so). Returns STATIC or DYNAMIC.

        Raises:
            BuildError: as link_library; or nobody can say which source this was compiled from.
        """
        if source_changed():
            raise BuildError("the source of mjolnir has changed since this process imported it")
        return link_library(self.object_code, path)


def compile_kernel(variant: Variant) -> Build:
    """Compile and export one variant. Takes seconds; one thread at a time.

    Raises:
        KernelUnavailable: the CuTe DSL is not installed.
        BuildError: the DSL compiled for another arch than ``variant.arch``.
    """
    reason = dsl_missing_reason()
    if reason is not None:
        raise KernelUnavailable(reason)
    with COMPILE_LOCK, tempfile.TemporaryDirectory(prefix="mjolnir-") as scratch:
        from mjolnir.kernels.compile import compile_variant

        function = compile_variant(variant)
        object_path = Path(scratch) / "kernel.o"
        function.export_to_c(str(object_path), function_name=variant.name)
        build = Build(variant, function, object_path.read_bytes())
    compiled_sm, wanted_sm = cubin_sm(build.cubin), arch_sm(variant.arch)
    if compiled_sm != wanted_sm:
        raise BuildError(f"{variant.name}: compiled for sm_{compiled_sm}, expected sm_{wanted_sm}")
    return build


def build_library(variant: Variant, path: Path) -> str:
    """Compile ``variant`` and link it to ``path`` (ending in .so), its entry point named ``variant.name``.

    Returns STATIC or DYNAMIC; raises as compile_kernel and link_library do.
    """
    return compile_kernel(variant).write_library(Path(path))


def load_library(path: Path, name: str, link: str) -> Kernel:
    """The function ``name`` of a library made by link_library. It stays loaded for the life of the process.

    Raises:
        BuildError: linked against the DSL's runtime, which is not installed.
        Exception: whatever the loader raises where the file or the symbol cannot be had.
    """
    import tvm_ffi

    if link == DYNAMIC:
        runtime = next((folder / "libcute_dsl_runtime.so" for folder in _dsl_lib_folders()), None)
        if runtime is None:
            raise BuildError(f"{path} needs the CuTe DSL's runtime library, and the CuTe DSL is not installed")
        # By its soname, a library that is already loaded satisfies the dependency: no search path is needed.
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    return tvm_ffi.load_module(str(path))[name]


def link_library(object_code: bytes, path: Path) -> str:
    """Link an exported object to a shared library at ``path``: statically if the pieces are here, else dynamically.

    Returns STATIC or DYNAMIC.

    Raises:
        BuildError: no C compiler, no runtime library to link with, or the linker failed; the message says which.
    """
    import tvm_ffi

    compiler = find_c_compiler()
    if compiler is None:
        raise BuildError("no C compiler (cc, gcc or clang on PATH, or $CC) to link kernels with")
    tvm_ffi_library = tvm_ffi.libinfo.find_libtvm_ffi()
    with tempfile.TemporaryDirectory(prefix="mjolnir-") as scratch:
        kernel, shim, exports = (Path(scratch) / name for name in ("kernel.o", "shim.c", "exports.map"))
        kernel.write_bytes(object_code)
        shim.write_text(_ERROR_SHIM)
        exports.write_text(_EXPORTS)
        common = [*compiler, "-shared", "-fPIC", "-O2", "-s", f"-Wl,--version-script={exports}", "-Wl,--no-undefined"]
        attempts = []
        static = find_static_runtimes()
        if static is not None:
            inputs = [kernel, shim, *static, tvm_ffi_library, "-Wl,--gc-sections", "-lpthread", "-ldl", "-lrt"]
            attempts.append((STATIC, inputs))
        for folder in _dsl_lib_folders():
            attempts.append((DYNAMIC, [kernel, folder / "libcute_dsl_runtime.so", tvm_ffi_library]))
        errors = []
        for link, inputs in attempts:
            command = [*common, "-o", str(path), *map(str, inputs)]
            try:
                result = subprocess.run(command, capture_output=True, text=True, timeout=120)
            except (OSError, subprocess.TimeoutExpired) as error:
                errors.append(f"{link}: {error}")
                continue
            if result.returncode == 0:
                return link
            errors.append(f"{link}: {compiler[0]} exited {result.returncode}: {result.stderr.strip()[-800:]}")
    raise BuildError("cannot link a kernel library: " + ("; ".join(errors) or "no CuTe DSL runtime library found"))


def find_c_compiler() -> list[str] | None:
    """The command of the C compiler: $CC, else cc, gcc or clang; None where there is none."""
    for command in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        try:
            words = shlex.split(command)
        except ValueError:  # a quote that is not closed
            continue
        if words and shutil.which(words[0]):
            return words
    return None


def find_static_runtimes() -> tuple[Path, Path] | None:
    """(the DSL's static host runtime, a libcudart_static.a of the same CUDA major version); None where either lacks."""
    for folder in _dsl_lib_folders():
        archive = folder / "libcuda_dialect_runtime_static.a"
        flavour = re.fullmatch(r"cu(\d+)", folder.parent.name)
        if archive.is_file() and flavour is not None:
            for cudart in _static_cudarts():
                if _cuda_major(cudart) == int(flavour.group(1)):
                    return archive, cudart
    return None


def dsl_missing_reason() -> str | None:
    """Why nothing can be compiled here, in a sentence that says what to do; None where the CuTe DSL is installed."""
    if dsl_toolchain() is None:
        return "the CuTe DSL is not installed (pip install 'mjolnir-attention[cuda]')"
    return None


def _dsl_lib_folders() -> Iterator[Path]:
    """Folders of the DSL's host runtime, the CUDA 13 one first: it is the flavour the DSL extra installs."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    for root in (spec.submodule_search_locations or []) if spec is not None else []:
        for flavour in ("cu13", "cu12"):
            folder = Path(root) / flavour / "lib"
            if (folder / "libcute_dsl_runtime.so").is_file():
                yield folder


def _static_cudarts() -> Iterator[Path]:
    """Every libcudart_static.a of a toolkit or an nvidia wheel."""
    roots = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    roots += ["/usr/local/cuda", *map(str, sorted(Path("/usr/local").glob("cuda-*"), reverse=True))]
    spec = importlib.util.find_spec("nvidia")
    for wheels in (spec.submodule_search_locations or []) if spec is not None else []:
        roots += [f"{wheels}/{name}" for name in ("cu13", "cu12", "cuda_runtime")]
    for root in roots:
        for folder in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
            archive = Path(root) / folder / "libcudart_static.a"
            if archive.is_file():
                yield archive


def _cuda_major(cudart: Path) -> int | None:
    """The CUDA major version of a libcudart_static.a, from the header that lies beside its folder."""
    try:
        header = (cudart.parent.parent / "include" / "cuda_runtime_api.h").read_text(errors="replace")
    except OSError:
        return None
    match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", header)
    return int(match.group(1)) // 1000 if match is not None else None
