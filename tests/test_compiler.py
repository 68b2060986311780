"""From a kernel to a library that loads: linking, GPU code inside, many archs from one process, a folder filled."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_kernels import OTHER, VARIANT, c_builder, c_object

from mjolnir.compiler import build, key
from mjolnir.compiler.batch import compile_to_folder
from mjolnir.compiler.build import BuildError, KernelUnavailable
from mjolnir.compiler.cache import CacheStats, KernelCache
from mjolnir.compiler.cubin import arch_sm, cubin_sm, extract_cubins
from mjolnir.compiler.disk import DiskCache
from mjolnir.compiler.inspect import (
    FunctionReport,
    KernelReport,
    ToolMissing,
    _instructions_by_function,
    find_cuobjdump,
    inspect_cubin,
)

TESTS = Path(__file__).parent
# dlopen and friends were in libdl before glibc 2.34, and the loader itself is one of libc's files.
LIBC = {"libc.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libm.so.6", "ld-linux-x86-64.so.2"}

needs_cc = pytest.mark.skipif(build.find_c_compiler() is None, reason="no C compiler on this machine")
needs_dsl = pytest.mark.skipif(key.dsl_toolchain() is None, reason="the CuTe DSL is not installed")
needs_static = pytest.mark.skipif(build.find_static_runtimes() is None, reason="no libcudart_static.a, or no DSL")
needs_cuobjdump = pytest.mark.skipif(find_cuobjdump() is None, reason="no cuobjdump (CUDA toolkit or Triton)")
needs_readelf = pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf (binutils)")


def elf(machine: int, abi: int, flags: int, body: bytes = b"") -> bytes:
    """A file with an ELF64 header and one section header (64 bytes), ``body`` between them."""
    ident = b"\x7fELF\x02\x01\x01\x41" + bytes([abi]) + bytes(7)
    sizes = (64, 56, 0, 64, 1, 0)
    return ident + struct.pack("<HHIQQQI6H", 2, machine, 1, 0, 0, 64 + len(body), flags, *sizes) + body + bytes(64)


# Cubins


def test_cubins_are_found_whole_between_other_things():
    one, two = elf(190, 8, 0x6005A04, b"first"), elf(190, 7, 0x5A055A, b"the second")
    host = elf(62, 0, 0, b"x86 code")
    binary = host + b"\x7fELF, only the letters" + one + b"between" + two + b"\x7fEL"
    assert extract_cubins(binary) == [one, two]
    assert extract_cubins(one) == [one]
    assert extract_cubins(binary[: binary.index(two) + len(two) - 1]) == [one]  # the second one is cut
    assert extract_cubins(b"") == [] and extract_cubins(host) == []


@pytest.mark.parametrize(
    ("abi", "flags", "sm"), [(8, 0x6005A04, 90), (8, 0x6006402, 100), (8, 0x6007802, 120), (7, 0x5A055A, 90)]
)
def test_sm_of_a_cubin(abi, flags, sm):
    assert cubin_sm(elf(190, abi, flags)) == sm


def test_sm_of_an_arch():
    assert [arch_sm(arch) for arch in ("sm_90a", "sm_100f", "sm_120a", "sm_89")] == [90, 100, 120, 89]
    for wrong in ("90", "sm_", "sm_90b", "sm_90a ", "compute_90"):
        with pytest.raises(ValueError, match=re.escape(repr(wrong))):
            arch_sm(wrong)


# Linking


def needed_libraries(path: Path) -> set[str]:
    listing = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    assert "RPATH" not in listing and "RUNPATH" not in listing
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", listing))


def exported_symbols(path: Path) -> set[str]:
    listing = subprocess.run(["readelf", "-W", "--dyn-syms", path], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listing.splitlines() if re.match(r"\s*\d+:", line)]
    return {row[7].split("@")[0] for row in rows if len(row) > 7 and row[6] != "UND"}


@needs_static
@needs_cc
@needs_readelf
def test_static_library_needs_only_libc_and_tvm_ffi_and_exports_only_its_entry(tmp_path):
    path = tmp_path / "k.so"
    assert build.link_library(c_object("probe_static", 42), path) == build.STATIC
    assert needed_libraries(path) - LIBC == {"libtvm_ffi.so"}
    assert exported_symbols(path) == {"__tvm_ffi_probe_static"}
    function = build.load_library(path, "probe_static", build.STATIC)
    assert function() == 42
    with pytest.raises(RuntimeError, match=r"CUDA error 700 \(cudaErrorIllegalAddress\): .*illegal memory access"):
        function(700)
    with pytest.raises(AttributeError):
        build.load_library(path, "another_name", build.STATIC)


@needs_dsl
@needs_cc
def test_without_static_pieces_it_links_to_the_dsl(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_static_cudarts", lambda: iter(()))
    path = tmp_path / "k.so"
    assert build.link_library(c_object("probe_dynamic", 43), path) == build.DYNAMIC
    assert b"libcute_dsl_runtime.so" in path.read_bytes()
    assert build.load_library(path, "probe_dynamic", build.DYNAMIC)() == 43
    monkeypatch.setattr(build, "_dsl_lib_folders", lambda: iter(()))
    with pytest.raises(BuildError, match="needs the CuTe DSL's runtime library"):
        build.load_library(path, "probe_dynamic", build.DYNAMIC)


def test_static_runtime_of_another_cuda_is_not_taken(tmp_path, monkeypatch):
    dsl, toolkit = tmp_path / "cu13" / "lib", tmp_path / "cuda" / "lib64"
    for folder in (dsl, toolkit, tmp_path / "cuda" / "include"):
        folder.mkdir(parents=True)
    for file in (dsl / "libcuda_dialect_runtime_static.a", toolkit / "libcudart_static.a"):
        file.write_bytes(b"")
    monkeypatch.setattr(build, "_dsl_lib_folders", lambda: iter([dsl]))
    monkeypatch.setattr(build, "_static_cudarts", lambda: iter([toolkit / "libcudart_static.a"]))
    assert build.find_static_runtimes() is None  # of no known version
    header = tmp_path / "cuda" / "include" / "cuda_runtime_api.h"
    header.write_text("#define CUDART_VERSION  12090\n")
    assert build.find_static_runtimes() is None
    header.write_text("/* */\n#define CUDART_VERSION  13000\n")
    expected = (dsl / "libcuda_dialect_runtime_static.a", toolkit / "libcudart_static.a")
    assert build.find_static_runtimes() == expected


def test_no_c_compiler_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(BuildError, match="no C compiler"):
        build.link_library(b"", tmp_path / "k.so")


@needs_cc
def test_a_c_compiler_that_is_no_command_is_passed_over(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    found = build.find_c_compiler()
    for command in ("gcc '-O2", "no-such-compiler -O2", " "):
        monkeypatch.setenv("CC", command)
        assert build.find_c_compiler() == found


@needs_cc
def test_linker_errors_are_quoted(tmp_path):
    with pytest.raises(BuildError, match="cannot link a kernel library"):
        build.link_library(b"no object", tmp_path / "k.so")
    assert not (tmp_path / "k.so").exists()


def test_no_dsl_is_said(monkeypatch):
    monkeypatch.setattr(build, "dsl_toolchain", lambda: None)
    with pytest.raises(KernelUnavailable, match=r"pip install 'mjolnir-attention\[cuda\]'"):
        build.compile_kernel(VARIANT)


# A folder filled in parallel


@needs_dsl
@needs_cc
def test_compile_to_folder(tmp_path):
    folder = tmp_path / "kernels"
    failing = dataclasses.replace(VARIANT, rows=64)
    seen = []

    def progress(result, done, total):
        seen.append((result.variant.rows, done, total))

    wanted = [VARIANT, failing, OTHER, VARIANT]
    results = compile_to_folder(wanted, folder, "sm_120a", jobs=2, progress=progress, builder=c_builder)
    assert [result.variant for result in results] == [
        dataclasses.replace(variant, arch="sm_120a") for variant in (VARIANT, failing, OTHER)
    ]
    assert [result.ok for result in results] == [True, False, True]
    assert results[1].error == "RuntimeError: too many rows for this compiler"
    assert sorted(row for row, _, _ in seen) == [8, 16, 64]
    assert [(done, total) for _, done, total in seen] == [(1, 3), (2, 3), (3, 3)]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {result.path for result in results if result.ok} == set(folder.glob("*.so"))

    # Another machine: the folder was copied, and there is no DSL.
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    disk = DiskCache(copy, source=key.OWN_SOURCE, toolchain=None)
    cache = KernelCache(builder=c_builder, disk=disk)
    assert cache.get(results[0].variant)() == 8 and cache.get(results[2].variant)() == 16
    assert cache.stats == CacheStats(disk_hits=2)

    again = compile_to_folder([VARIANT], folder, "sm_120a", jobs=1, builder=c_builder)
    assert [(result.cached, result.path, result.error) for result in again] == [(True, None, None)]


def test_compile_to_folder_refuses_what_would_be_refused(tmp_path):
    tmp_path.chmod(0o775)
    with pytest.raises(PermissionError, match="0775"):
        compile_to_folder([VARIANT], tmp_path, builder=c_builder)
    with pytest.raises(ValueError, match="jobs = 0"):
        compile_to_folder([VARIANT], tmp_path / "kernels", jobs=0)
    tmp_path.chmod(0o700)
    assert compile_to_folder([], tmp_path / "kernels") == []


def test_compile_to_folder_says_once_that_there_is_no_dsl(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "dsl_toolchain", lambda: None)
    tried = []
    with pytest.raises(ModuleNotFoundError, match="the CuTe DSL is not installed"):
        compile_to_folder([VARIANT, OTHER], tmp_path / "kernels", progress=lambda *step: tried.append(step))
    assert tried == [] and not (tmp_path / "kernels").exists()


# The DSL itself: compiled once, in a process of its own


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], bytes]:
    """Reads a file that standin_kernels.py wrote."""
    folder = tmp_path_factory.mktemp("compiled")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUTE_DSL_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), environment.get("PYTHONPATH", "")])
    script = subprocess.run(
        [sys.executable, TESTS / "standin_kernels.py", folder], env=environment, capture_output=True, text=True
    )
    assert script.returncode == 0, script.stderr
    return lambda name: (folder / name).read_bytes()


@needs_dsl
def test_one_process_compiles_for_several_archs(compiled):
    for index, sm in enumerate((90, 100, 110, 120, 90)):
        (cubin,) = extract_cubins(compiled(f"one_{index}.o"))
        assert cubin_sm(cubin) == sm


@needs_dsl
def test_threads_do_not_mix_archs_up(compiled):
    for index, sm in enumerate((90, 100, 110, 120, 90)):
        for repeat in range(3):
            (cubin,) = extract_cubins(compiled(f"thread_{index}_{repeat}.o"))
            assert cubin_sm(cubin) == sm


@needs_dsl
def test_kernel_of_the_wrong_arch_is_refused(compiled):
    assert json.loads(compiled("wrong_arch.json")) == f"{VARIANT.name}: compiled for sm_120, expected sm_90"


@needs_dsl
@needs_static
@needs_cc
@needs_readelf
def test_compiled_kernel_loads_and_checks_its_arguments(compiled, tmp_path):
    path = tmp_path / "k.so"
    assert build.link_library(compiled("one_0.o"), path) == build.STATIC
    assert needed_libraries(path) - LIBC == {"libtvm_ffi.so"}
    assert exported_symbols(path) == {f"__tvm_ffi_{VARIANT.name}"}
    assert extract_cubins(path.read_bytes()) == extract_cubins(compiled("one_0.o"))
    function = build.load_library(path, VARIANT.name, build.STATIC)
    with pytest.raises(TypeError, match="Expects 3 parameters"):
        function(0)
    with pytest.raises(TypeError, match="argument #1"):
        function(0, "one", 0)


@needs_dsl
@needs_cuobjdump
def test_report_of_a_kernel_in_registers(compiled):
    (cubin,) = extract_cubins(compiled("one_0.o"))
    report = inspect_cubin(cubin, "add")
    (function,) = report.functions
    assert (report.name, report.sm, report.static_smem_bytes) == ("add", 90, 0)
    assert 0 < report.registers <= 32 and not report.spills
    assert (function.stack_bytes, function.local_bytes) == (0, 0)
    assert report.count("FADD") == 1 and report.count("LDG") == 1 and report.count("STG.E") == 1
    assert report.count("LDL") == report.count("HMMA") == 0


@needs_dsl
@needs_cuobjdump
def test_report_sees_local_memory(compiled):
    (cubin,) = extract_cubins(compiled("spills.o"))
    report = inspect_cubin(cubin, "indexed")
    assert report.spills and report.functions[0].stack_bytes >= 256  # 64 floats
    assert report.count("LDL") > 0 and report.count("STL") > 0


SASS = """
\t\tFunction : first
\t.headerflags\t@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;            /* 0x00000a00ff017b82 */
                                                                     /* 0x000fe20000000800 */
        /*0010*/              @!P0 LDS.128 R4, [R2] ;                /* 0x0000000000267919 */
        /*0020*/              @UP1 UMOV UR4, 0x400 ;                 /* 0x0000000000267919 */
        /*10030*/                  LDSM.16.M88.4 R4, [R2] ;          /* 0x0000000000267919 */
\t\tFunction : second
        /*0000*/               @P3 STL [R1+0x4], R5 ;                /* 0x0000000000267919 */
        /*0010*/                   EXIT ;                            /* 0x0000000000267919 */
"""


def test_instructions_of_a_listing():
    assert _instructions_by_function(SASS) == {
        "first": {"LDC": 1, "LDS.128": 1, "UMOV": 1, "LDSM.16.M88.4": 1},
        "second": {"STL": 1, "EXIT": 1},
    }


def test_report_over_functions():
    first, second = _instructions_by_function(SASS).values()
    one = FunctionReport("first", 40, 0, 0, 1024, first)
    two = FunctionReport("second", 168, 0, 0, 0, second)
    assert one.count("LDS") == 1 and one.count("LDS.128") == 1 and one.count("LD") == 0
    assert not one.spills and two.spills
    report = KernelReport("both", 90, (one, two))
    assert (report.registers, report.static_smem_bytes, report.spills, report.count("EXIT")) == (168, 1024, True, 1)
    assert not KernelReport("one", 90, (one,)).spills
    assert dataclasses.replace(one, stack_bytes=8).spills and dataclasses.replace(one, local_bytes=8).spills


def test_no_cuobjdump_is_said(monkeypatch):
    monkeypatch.setattr("mjolnir.compiler.inspect.find_cuobjdump", lambda: None)
    with pytest.raises(ToolMissing, match="CUDA toolkit"):
        inspect_cubin(b"", "any")


# The real kernel


@needs_dsl
@needs_static
@needs_cc
def test_decode_kernel_compiles_here_and_loads_without_the_dsl(tmp_path, monkeypatch):
    monkeypatch.delenv("CUTE_DSL_ARCH", raising=False)  # the variant decides, not the machine
    (result,) = compile_to_folder([VARIANT], tmp_path / "kernels", jobs=1)
    assert result.error is None
    script = """
import sys
sys.modules["cutlass"] = None  # importing it fails
from pathlib import Path
from mjolnir.compiler import KernelCache, key
key.dsl_toolchain.__globals__["_DSL_PACKAGES"] = ()
from fake_kernels import VARIANT
cache = KernelCache(Path(sys.argv[1]))
try:
    cache.get(VARIANT)()
except TypeError as error:
    print(cache.stats.disk_hits, cache.stats.misses, "Expects" in str(error))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    run = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "kernels"], env=environment, capture_output=True, text=True
    )
    assert run.stdout.split() == ["1", "0", "True"], run.stderr
