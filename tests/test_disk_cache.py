"""The folder of compiled kernels: whatever lies in it, callers get the right function and at most one warning."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import logging
import multiprocessing
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock
import pytest
from fake_kernels import (
    OTHER,
    SOURCE,
    TOOLCHAIN,
    VARIANT,
    CountingBuilder,
    FakeBuild,
    die_with_lock,
    get_in_process,
    open_disk,
)

from mjolnir import env
from mjolnir.compiler import disk as disk_module
from mjolnir.compiler import entry, key
from mjolnir.compiler.build import BuildError, KernelUnavailable
from mjolnir.compiler.cache import CacheStats, KernelCache
from mjolnir.compiler.disk import DiskCache
from mjolnir.variant import Variant

DISK_VALUE = f"disk:{VARIANT.name}"
JIT_VALUE = f"jit:{VARIANT.name}"
NOBODY = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "kernels"
    if os.geteuid() == 0:  # as pytest made it, and can remove it
        os.chown(tmp_path, 0, 0)
    tmp_path.chmod(0o700)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, logger="mjolnir.compiler")
    return lambda: [record.getMessage() for record in caplog.records]


def fresh(folder: Path, builder: Callable | None = None, **disk: object) -> KernelCache:
    """A cache as a new process would make it."""
    return KernelCache(builder=builder or CountingBuilder(), disk=open_disk(folder, **disk))  # type: ignore[arg-type]


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.so"))


def filled(folder: Path, variant: Variant = VARIANT) -> Path:
    """The path of a sound entry."""
    fresh(folder).get(variant)
    (path,) = folder.glob(f"{variant.name}-*.so")
    return path


# Hits and misses


def test_compiled_once_then_loaded_by_the_next_process(folder, warnings):
    first = fresh(folder)
    assert not first.is_compiled(VARIANT)
    assert first.get(VARIANT)() == DISK_VALUE  # the library, not the JIT function: as the next process will
    assert first.get(VARIANT) is first.get(VARIANT)
    assert first.is_compiled(VARIANT) and not first.is_compiled(OTHER)
    assert first.stats == CacheStats(memory_hits=2, compiles=1)
    second = fresh(folder)
    assert second.get(VARIANT)() == DISK_VALUE
    assert second.get(OTHER)() == f"disk:{OTHER.name}"
    assert second.stats == CacheStats(disk_hits=1, compiles=1)
    assert second.stats.misses == 1
    assert len(entries(folder)) == 2
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not list(folder.glob(".writing-*")) and warnings() == []


def test_folder_is_private_whatever_the_umask(folder):
    old = os.umask(0)
    try:
        fresh(folder).get(VARIANT)
    finally:
        os.umask(old)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o022 == 0 for path in entries(folder))


def test_off_compiles_in_each_process_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        cache = KernelCache(None, builder=CountingBuilder())
        assert cache.get(VARIANT)() == JIT_VALUE
        assert cache.stats == CacheStats(compiles=1)
    assert cache.describe().state == "off" and cache.describe().folder is None
    assert list(tmp_path.iterdir()) == []


# Keys


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Variant)])
def test_every_field_of_the_variant_is_in_the_key(field):
    value = getattr(VARIANT, field)
    changed = {bool: lambda: not value, int: lambda: value + 1, str: lambda: value + "x"}[type(value)]()
    other = dataclasses.replace(VARIANT, **{field: changed})
    assert key.entry_digest(other, SOURCE, TOOLCHAIN) != key.entry_digest(VARIANT, SOURCE, TOOLCHAIN)


def test_source_toolchain_and_format_are_in_the_key(monkeypatch):
    digest = key.entry_digest(VARIANT, SOURCE, TOOLCHAIN)
    assert digest == key.entry_digest(dataclasses.replace(VARIANT), str(SOURCE), dict(TOOLCHAIN))
    assert digest != key.entry_digest(VARIANT, "t" * 64, TOOLCHAIN)
    assert digest != key.entry_digest(VARIANT, SOURCE, {"nvidia-cutlass-dsl": "4.8.2"})
    assert digest != key.entry_digest(VARIANT, SOURCE, TOOLCHAIN | {"CUTE_DSL_LINEINFO": "1"})
    monkeypatch.setattr(key, "SCHEMA", key.SCHEMA + 1)
    assert digest != key.entry_digest(VARIANT, SOURCE, TOOLCHAIN)


def test_source_digest_sees_content_and_names_of_python_files_only(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "kernels" / "b.py").write_text("y = 2\n")
    digests = [key.source_digest(tmp_path)]
    (tmp_path / "a.cpython-311.pyc").write_bytes(b"cached")
    assert key.source_digest(tmp_path) == digests[0]
    (tmp_path / "kernels" / "b.py").write_text("y = 3\n")
    digests.append(key.source_digest(tmp_path))
    (tmp_path / "kernels" / "b.py").rename(tmp_path / "kernels" / "c.py")
    digests.append(key.source_digest(tmp_path))
    (tmp_path / "a.py").write_text("x = 1\ny = 3\n")  # the same lines, otherwise cut into files
    (tmp_path / "kernels" / "c.py").write_text("")
    digests.append(key.source_digest(tmp_path))
    assert len(set(digests)) == len(digests)


def test_dsl_settings_that_change_code_are_part_of_the_toolchain(monkeypatch):
    monkeypatch.setattr(key.importlib.metadata, "version", lambda name: "4.8.1")
    for name in [name for name in os.environ if name.startswith("CUTE_DSL_")]:
        monkeypatch.delenv(name)
    plain = key.dsl_toolchain()
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    monkeypatch.setenv("CUTE_DSL_KEEP_PTX", "1")
    assert key.dsl_toolchain() == plain
    monkeypatch.setenv("CUTE_DSL_ENABLE_ASSERTIONS", "1")
    assert key.dsl_toolchain() == plain | {"CUTE_DSL_ENABLE_ASSERTIONS": "1"}


def test_the_digest_is_of_the_source_that_the_process_imported(tmp_path):
    shutil.copytree(key.PACKAGE, tmp_path / "mjolnir", ignore=shutil.ignore_patterns("__pycache__"))
    script = """
from pathlib import Path
import mjolnir.compiler.build as build
from mjolnir.compiler import KernelCache, key
before = key.source_digest()
assert not key.source_changed()
(key.PACKAGE / "kernels" / "new.py").write_text("x = 1")
assert KernelCache(None).describe().source == before != key.source_digest()
try:
    build.Build(None, None, b"").write_library(Path("kernel.so"))
except build.BuildError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)},
                         capture_output=True, text=True)  # fmt: skip
    assert run.stdout == "the source of mjolnir has changed since this process imported it\n", run.stderr


def test_the_lock_of_an_editor_is_no_source(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    digest = key.source_digest(tmp_path)
    (tmp_path / ".#a.py").symlink_to("someone@host:1")
    assert key.source_digest(tmp_path) == digest


@pytest.mark.parametrize("changed", [{"source": "t" * 64}, {"toolchain": {"nvidia-cutlass-dsl": "4.9"}}])
def test_another_version_compiles_beside_the_first(folder, changed, warnings):
    path = filled(folder)
    other = fresh(folder, **changed)
    assert other.get(VARIANT)() == DISK_VALUE and other.stats == CacheStats(compiles=1)
    assert len(entries(folder)) == 2 and path in entries(folder)
    assert fresh(folder).get(VARIANT)() == DISK_VALUE and warnings() == []


# Corrupt and foreign entries


def truncate(path: Path, keep: Callable[[int], int]) -> None:
    os.truncate(path, keep(path.stat().st_size))


def flip(path: Path, where: Callable[[int], int]) -> None:
    content = bytearray(path.read_bytes())
    content[where(len(content))] ^= 0x10
    path.write_bytes(content)


def replace_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        path.unlink()
        make(path)

    return spoil


def of_another_variant(path: Path) -> None:
    shutil.copy(filled(path.parent, OTHER), path)


def of_another_source(path: Path) -> None:
    path.write_bytes(entry.pack(b"\x7fELFold", VARIANT, "old source", TOOLCHAIN, "static"))


def of_another_format(path: Path, **changes: object) -> None:
    """Whole, but written by a version with another SCHEMA, or with other fields."""
    content = entry.pack(b"\x7fELF", VARIANT, SOURCE, TOOLCHAIN, "static")
    length_at = len(content) - len(entry.MAGIC) - hashlib.sha256().digest_size - 8
    footer = json.loads(content[4:length_at]) | (changes or {"schema": key.SCHEMA + 1})
    text = json.dumps(footer).encode()
    hashed = b"\x7fELF" + text + len(text).to_bytes(8, "little")
    path.write_bytes(hashed + hashlib.sha256(hashed).digest() + entry.MAGIC)


SPOILERS: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: truncate(path, lambda size: 0),
    "cut in half": lambda path: truncate(path, lambda size: size // 2),
    "last byte lost": lambda path: truncate(path, lambda size: size - 1),
    "grown": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "bit of the library": lambda path: flip(path, lambda size: 5),
    "bit of the footer": lambda path: flip(path, lambda size: size - 100),
    "bit of the hash": lambda path: flip(path, lambda size: size - 20),
    "text": lambda path: path.write_text("not a library\n"),
    "library without a footer": lambda path: path.write_bytes(b"\x7fELF" + VARIANT.name.encode()),
    "folder": replace_by(lambda path: path.mkdir()),
    "link to a sound file": replace_by(lambda path: path.symlink_to(filled(path.parent.parent / "elsewhere"))),
    "dangling link": replace_by(lambda path: path.symlink_to("nowhere")),
    "pipe": replace_by(os.mkfifo),
    "another variant's": of_another_variant,
    "another source's": of_another_source,
    "another format's": of_another_format,
    "of no mapping": lambda path: of_another_format(path, toolchain=5),
    "with a field too many": lambda path: of_another_format(path, colour="blue"),
}


@pytest.mark.parametrize("kind", SPOILERS)
def test_spoiled_entry_is_set_aside_and_rebuilt(folder, kind, warnings):
    path = filled(folder)
    sound = path.read_bytes()
    SPOILERS[kind](path)
    cache = fresh(folder)
    assert cache.get(VARIANT)() == DISK_VALUE
    assert cache.stats == CacheStats(compiles=1, rejected=1)
    (message,) = warnings()
    assert str(path) in message and "unusable" in message
    assert path.is_file() and not path.is_symlink() and path.read_bytes() == sound
    assert len(list(folder.glob(f"{path.name}.corrupt-*"))) == 1
    again = fresh(folder)
    assert again.get(VARIANT)() == DISK_VALUE and again.stats == CacheStats(disk_hits=1)
    assert cache.describe().set_aside == 1


def test_no_cut_and_no_flipped_bit_passes(folder):
    content = filled(folder).read_bytes()
    assert entry.unpack(content).source == SOURCE
    for size in range(len(content)):
        with pytest.raises(entry.CorruptEntry):
            entry.unpack(content[:size])
    for position in range(len(content)):
        for bit in (1, 128):
            with pytest.raises(entry.CorruptEntry):
                entry.unpack(content[:position] + bytes([content[position] ^ bit]) + content[position + 1 :])


def test_library_that_does_not_load_costs_a_warning_and_a_compile(folder, warnings):
    path = filled(folder)

    def loader(path: Path, name: str, link: str) -> Callable:
        raise OSError("version `GLIBC_2.99' not found")

    disk = DiskCache(folder, source=SOURCE, toolchain=TOOLCHAIN, loader=loader)
    cache = KernelCache(builder=CountingBuilder(), disk=disk)
    assert cache.get(VARIANT)() == JIT_VALUE
    assert cache.stats.compiles == 1 and cache.stats.rejected == 0
    (message,) = warnings()
    assert "GLIBC_2.99" in message
    assert entries(folder) == [path]


# Folders that others can write to


def chmod(path: Path, mode: int) -> None:
    path.chmod(mode)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "world-writable": (lambda folder: folder.chmod(0o777), "0777"),
    "world-writable, sticky": (lambda folder: folder.chmod(0o1777), "1777"),
    "group-writable": (lambda folder: folder.chmod(0o770), "0770"),
    "in a world-writable parent": (lambda folder: folder.parent.chmod(0o777), "0777"),
    "in a group-writable parent": (lambda folder: folder.parent.chmod(0o770), "0770"),
    "in a parent of another user": (lambda folder: os.chown(folder.parent, NOBODY, NOBODY), f"uid {NOBODY}"),
    "in another user's sticky parent": (
        lambda folder: (os.chown(folder.parent, NOBODY, NOBODY), folder.parent.chmod(0o1777)),
        f"uid {NOBODY}",
    ),
    "of another user": (lambda folder: os.chown(folder, NOBODY, NOBODY), f"uid {NOBODY}"),
}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=as_root) if "user" in kind else kind for kind in REFUSED])
def test_folder_that_others_can_write_to_is_refused(folder, kind, warnings):
    path = filled(folder)
    before = path.read_bytes(), path.stat().st_mtime_ns
    REFUSED[kind][0](folder)
    cache = fresh(folder)
    assert cache.get(VARIANT)() == JIT_VALUE and cache.get(OTHER)() == f"jit:{OTHER.name}"
    assert cache.stats == CacheStats(compiles=2, cache_failures=2)
    (message,) = warnings()
    assert str(folder) in message and REFUSED[kind][1] in message
    assert entries(folder) == [path] and (path.read_bytes(), path.stat().st_mtime_ns) == before
    report = cache.describe()
    assert report.state == "refused" and report.reason is not None and REFUSED[kind][1] in report.reason
    assert ("its parent" in report.reason) == ("parent" in kind)


@pytest.mark.parametrize("mode", [0o1777, 0o1770, 0o755])
def test_sticky_parent_is_fine(folder, mode):
    folder.parent.chmod(mode)  # like /tmp: others cannot rename what is ours
    cache = fresh(folder)
    assert cache.get(VARIANT)() == DISK_VALUE and cache.stats.cache_failures == 0


def test_parents_that_it_makes_are_not_refused_later(folder):
    old = os.umask(0o002)
    try:
        fresh(folder / "a" / "b").get(VARIANT)
    finally:
        os.umask(old)
    assert fresh(folder / "a" / "b").get(VARIANT)() == DISK_VALUE
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "a" / "b")] == [0o755, 0o700]


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.chmod(0o666),
        lambda path: path.chmod(0o664),
        pytest.param(lambda path: os.chown(path, NOBODY, NOBODY), marks=as_root),
    ],
)
def test_entry_that_others_can_write_to_is_not_loaded(folder, change, warnings):
    path = filled(folder)
    change(path)
    loaded = []
    disk = DiskCache(folder, source=SOURCE, toolchain=TOOLCHAIN, loader=lambda *call: loaded.append(call))
    assert disk.load(VARIANT, repair=True) is None and loaded == []
    cache = fresh(folder)
    assert cache.get(VARIANT)() == DISK_VALUE  # ours now: written over it
    assert cache.stats == CacheStats(compiles=1, rejected=1)
    assert path.stat().st_uid == os.geteuid() and stat.S_IMODE(path.stat().st_mode) == 0o644
    assert all(str(path) in message for message in warnings()) and len(warnings()) == 2  # one for each of the caches


@as_root
def test_a_user_trusts_what_root_wrote_but_not_the_reverse(folder, monkeypatch):
    path = filled(folder)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert entry.writable_by_others(path.stat()) is None
    os.chown(path, 1000, 1000)
    assert entry.writable_by_others(path.stat()) is None
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "uid 1000" in (entry.writable_by_others(path.stat()) or "")


# Folders that cannot be used


def full_disk(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk(folder, monkeypatch, warnings):
    class FullFile(io.FileIO):
        def write(self, content: bytes) -> int:  # type: ignore[override]
            super().write(content[: len(content) // 2])
            full_disk()
            raise AssertionError

    monkeypatch.setattr(disk_module.os, "fdopen", FullFile)
    cache = fresh(folder)
    assert cache.get(VARIANT)() == JIT_VALUE and cache.get(OTHER)() == f"jit:{OTHER.name}"
    assert cache.stats == CacheStats(compiles=2, cache_failures=2)
    (message,) = warnings()
    assert str(folder) in message and "No space left" in message
    assert entries(folder) == [] and not list(folder.glob(".writing-*"))


def test_write_that_stops_halfway_leaves_the_old_entry(tmp_path, monkeypatch):
    path = tmp_path / "entry.so"
    path.write_bytes(b"old")
    monkeypatch.setattr(disk_module.os, "replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        disk_module.write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("where", ["a file", "under a file", "in a circle of links", "where no folder can be made"])
def test_no_folder(tmp_path, where, warnings):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("link")
    folder = {
        "a file": tmp_path / "file", "under a file": tmp_path / "file" / "kernels",
        "in a circle of links": tmp_path / "link" / "kernels",
    }.get(where)  # fmt: skip
    folder = folder or Path("/proc/mjolnir")
    cache = fresh(folder)
    assert cache.get(VARIANT)() == JIT_VALUE and cache.get(OTHER)() == f"jit:{OTHER.name}"
    assert cache.stats.compiles == 2 and cache.stats.cache_failures >= 2
    (message,) = warnings()
    assert str(folder) in message
    assert cache.describe().state == ("absent" if where.startswith("where") else "refused")


@pytest.mark.parametrize(
    "error",
    [
        filelock.Timeout("kernel.lock"),
        NotImplementedError("no flock here"),
        PermissionError("not yours"),
        RuntimeError("odd"),
    ],
)
def test_no_lock(folder, monkeypatch, error, warnings):
    class BadLock(contextlib.AbstractContextManager):
        def __init__(self, *args: object, **kwargs: object) -> None:
            pass

        def __enter__(self) -> None:
            raise error

        def __exit__(self, *args: object) -> None:
            pytest.fail("released a lock that was not held")

    monkeypatch.setattr(disk_module.filelock, "FileLock", BadLock)
    cache = fresh(folder)
    assert cache.get(VARIANT)() == DISK_VALUE
    assert cache.stats == CacheStats(compiles=1, cache_failures=1) and len(warnings()) == 1


def test_lock_name_taken_by_a_folder(folder, warnings):
    folder.mkdir(mode=0o700)
    (folder / f"{VARIANT.name}.lock").mkdir()
    cache = fresh(folder)
    assert cache.get(VARIANT)() == DISK_VALUE
    assert cache.stats == CacheStats(compiles=1, cache_failures=1) and len(warnings()) == 1


def test_no_linker_is_said_once(folder, warnings):
    class Unlinked(FakeBuild):
        def write_library(self, path: Path) -> str:
            raise BuildError("no C compiler")

    cache = fresh(folder, Unlinked)
    assert cache.get(VARIANT)() == JIT_VALUE and cache.get(OTHER)() == f"jit:{OTHER.name}"
    assert cache.stats == CacheStats(compiles=2, cache_failures=2)
    (message,) = warnings()
    assert "no C compiler" in message and "this process only" in message


def test_whatever_goes_wrong_in_a_write_costs_a_warning(folder, warnings):
    class Odd(FakeBuild):
        def write_library(self, path: Path) -> str:
            raise ValueError("no closing quotation")

    cache = fresh(folder, Odd)
    assert cache.get(VARIANT)() == JIT_VALUE and cache.stats == CacheStats(compiles=1, cache_failures=1)
    (message,) = warnings()
    assert "no closing quotation" in message


# Without the DSL


def no_dsl(variant: Variant) -> FakeBuild:
    raise KernelUnavailable("the CuTe DSL is not installed")


def test_machine_without_the_dsl_loads_what_another_compiled(folder, warnings):
    path = filled(folder)
    cache = fresh(folder, no_dsl, toolchain=None)
    assert cache.get(VARIANT)() == DISK_VALUE and cache.stats == CacheStats(disk_hits=1)
    with pytest.raises(KernelUnavailable, match=f"{OTHER.name}: not in the kernel cache .*CuTe DSL is not installed"):
        cache.get(OTHER)
    assert cache.stats == CacheStats(disk_hits=1, compile_failures=1)
    assert entries(folder) == [path] and warnings() == []


def test_without_the_dsl_the_newest_sound_entry_of_this_source_is_taken(folder):
    versions = ["4.8.1", "4.8.2", "4.8.3"]
    paths = {}
    for age, version in enumerate(versions):
        disk = open_disk(folder, toolchain={"nvidia-cutlass-dsl": version})
        paths[version] = disk.put(VARIANT, FakeBuild(VARIANT).write_library)
        os.utime(paths[version], (1000 + age, 1000 + age))
    assert len(set(paths.values())) == 3
    seen = []

    def loader(path: Path, name: str, link: str) -> Callable:
        seen.append(path)
        return lambda: None

    disk = DiskCache(folder, source=SOURCE, toolchain=None, loader=loader)
    assert disk.load(VARIANT) is not None and seen.pop() == paths["4.8.3"]
    os.truncate(paths["4.8.3"], 10)
    assert disk.load(VARIANT) is not None and seen.pop() == paths["4.8.2"]
    assert disk.load(VARIANT, repair=True) is not None and seen.pop() == paths["4.8.2"]
    assert not paths["4.8.3"].exists() and disk.stats.rejected == 1


def test_without_the_dsl_another_source_is_never_loaded_nor_touched(folder, warnings):
    path = filled(folder)
    of_another_format(path.with_name(f"{VARIANT.name}-{'0' * 32}.so"))
    of_another_format(path.with_name(f"{VARIANT.name}-{'1' * 32}.so"), toolchain=5)
    cache = fresh(folder, no_dsl, toolchain=None, source="t" * 64)
    with pytest.raises(KernelUnavailable, match="3 built from another version of this package"):
        cache.get(VARIANT)
    assert len(entries(folder)) == 3 and cache.stats.rejected == 0 and warnings() == []


def test_unavailable_says_when_the_folder_is_refused_or_off(folder, warnings):
    filled(folder)
    folder.chmod(0o777)
    with pytest.raises(KernelUnavailable, match="refused .*0777"):
        fresh(folder, no_dsl, toolchain=None).get(VARIANT)
    with pytest.raises(KernelUnavailable, match="MJOLNIR_KERNEL_CACHE=0"):
        KernelCache(None, builder=no_dsl).get(VARIANT)


# Threads and processes


def run_threads(count: int, work: Callable[[], object]) -> list[object]:
    barrier = threading.Barrier(count)
    results: list[object] = []

    def body() -> None:
        barrier.wait()
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=body) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == count
    return results


def test_threads_wait_for_one_compile(folder):
    builder = CountingBuilder(seconds=0.2)
    cache = fresh(folder, builder)
    kernels = run_threads(8, lambda: cache.get(VARIANT))
    assert builder.built == [VARIANT] and len(set(map(id, kernels))) == 1
    assert kernels[0]() == DISK_VALUE  # type: ignore[operator]
    assert cache.stats.compiles == 1 and cache.stats.memory_hits <= 7


def test_two_variants_are_made_at_the_same_time(folder):
    both = threading.Barrier(2, timeout=10)

    def builder(variant: Variant) -> FakeBuild:
        both.wait()  # passes only if the other one is in here too
        return FakeBuild(variant)

    cache = fresh(folder, builder)
    names = iter([VARIANT, OTHER])
    values = run_threads(2, lambda: cache.get(next(names))())
    assert sorted(values) == sorted([DISK_VALUE, f"disk:{OTHER.name}"])  # type: ignore[type-var]


def test_failed_compile_reaches_every_waiter_and_is_not_remembered(folder):
    calls = []

    def builder(variant: Variant) -> FakeBuild:
        calls.append(variant)
        threading.Event().wait(0.2)
        if len(calls) == 1:
            raise RuntimeError("ptxas died")
        return FakeBuild(variant)

    cache = fresh(folder, builder)
    results = run_threads(4, lambda: cache.get(VARIANT))
    assert len(calls) == 1 and all("ptxas died" in str(error) for error in results)
    assert not cache.is_compiled(VARIANT) and entries(folder) == []
    assert cache.get(VARIANT)() == DISK_VALUE
    assert cache.stats == CacheStats(compiles=1, compile_failures=1)


def test_an_interrupt_stays_in_its_thread(folder):
    inside, go = threading.Event(), threading.Event()

    def builder(variant: Variant) -> FakeBuild:
        inside.set()
        go.wait(10)
        raise KeyboardInterrupt

    cache = fresh(folder, builder)
    waiter: list[object] = []

    def wait_for_it() -> None:
        inside.wait(10)
        threading.Timer(0.2, go.set).start()
        waiter.extend(run_threads(1, lambda: cache.get(VARIANT)))

    thread = threading.Thread(target=wait_for_it)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        cache.get(VARIANT)
    thread.join(30)
    assert isinstance(waiter[0], RuntimeError) and "was interrupted in another thread" in str(waiter[0])


def test_processes_compile_one_key_once(folder, tmp_path):
    context = multiprocessing.get_context("spawn")
    count, log, answers, barrier = 3, tmp_path / "log", context.Queue(), context.Barrier(3)
    workers = [context.Process(target=get_in_process, args=(folder, log, barrier, answers)) for _ in range(count)]
    for worker in workers:
        worker.start()
    results = [answers.get(timeout=30) for _ in workers]
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    assert sorted(results) == sorted([(DISK_VALUE, 1, 0)] + [(DISK_VALUE, 0, 1)] * (count - 1))
    assert len(log.read_text().splitlines()) == 1 and len(entries(folder)) == 1


def test_lock_of_a_process_that_died_is_free(folder):
    worker = multiprocessing.get_context("spawn").Process(target=die_with_lock, args=(folder,))
    worker.start()
    worker.join(30)
    assert worker.exitcode == 1 and (folder / f"{VARIANT.name}.lock").exists()
    cache = fresh(folder)
    assert cache.get(VARIANT)() == DISK_VALUE and cache.stats.cache_failures == 0


# Report and environment


def test_describe(folder):
    cache = fresh(folder)
    report = cache.describe()
    assert (report.folder, report.state, report.entries, report.size_bytes) == (folder, "absent", 0, 0)
    assert not folder.exists()
    cache.get(VARIANT)
    cache.get(OTHER)
    report = cache.describe()
    assert (report.state, report.entries, report.set_aside) == ("ready", 2, 0)
    assert report.size_bytes == sum(path.stat().st_size for path in entries(folder))
    assert report.source == key.source_digest() and report.toolchain == key.dsl_toolchain()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0", None),
        (" 0 ", None),
        ("off", None),
        ("OFF", None),
        ("./off", Path.cwd() / "off"),
        ("/x/kernels", Path("/x/kernels")),
        ("~/kernels", Path("/home/me/kernels")),
        ("kernels", Path.cwd() / "kernels"),
        ("", Path("/home/me/.cache/mjolnir/kernels")),
        (None, Path("/home/me/.cache/mjolnir/kernels")),
    ],
)
def test_kernel_cache_variable(monkeypatch, value, expected):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if value is None:
        monkeypatch.delenv("MJOLNIR_KERNEL_CACHE", raising=False)
    else:
        monkeypatch.setenv("MJOLNIR_KERNEL_CACHE", value)
    assert env.kernel_cache_folder() == expected


def test_every_knob_has_the_prefix_and_a_meaning():
    assert env.KERNEL_CACHE in env.KNOBS
    assert all(knob.name.startswith("MJOLNIR_") and knob.meaning for knob in env.KNOBS)
