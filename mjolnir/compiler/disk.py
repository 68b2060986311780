"""The folder of compiled kernels, shared by processes: look up, lock, write, set aside.

Loading an entry runs its code, so a folder, parent or entry that others can write to is refused. A failure here never
stops a caller that can compile: `usable`, `load`, `lock` and `store` warn, once for each kind of trouble, and say so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import filelock

from mjolnir.compiler import entry, key
from mjolnir.compiler.build import BuildError, Kernel, load_library
from mjolnir.compiler.entry import CorruptEntry, ForeignEntry, UntrustedPath
from mjolnir.variant import Variant

logger = logging.getLogger("mjolnir.compiler")

LOCK_TIMEOUT_S = 300.0
"""How long to wait for another process that compiles the same kernel, before compiling it here too."""

Loader = Callable[[Path, str, str], Kernel]  # (file, function name, link) -> function
LibraryWriter = Callable[[Path], str]  # writes a library to the path, returns its link


@dataclasses.dataclass
class DiskStats:
    """Events since the folder was opened."""

    rejected: int = 0  # entries not used: corrupt, foreign, or writable by others
    failures: int = 0  # everything else that made a lookup, lock or write fail


class DiskCache:
    """One folder of entries (see entry.py).

    A machine with the CuTe DSL uses the entry of exactly its DSL. One without uses the newest entry of the same variant
    and package source, whatever DSL compiled it: that is how a folder filled elsewhere serves a machine that only runs.

    Args:
        folder: created with mode 0700 when something is first written or locked.
        source: key.OWN_SOURCE; another in tests.
        toolchain: key.dsl_toolchain(), None where the DSL is not installed.
        loader: opens a library; replaced in tests.
    """

    def __init__(
        self,
        folder: Path,
        *,
        source: str,
        toolchain: Mapping[str, str] | None,
        loader: Loader = load_library,
    ) -> None:
        self.folder = Path(os.path.realpath(folder))  # Path.resolve() raises where links go in a circle
        self.source = source
        self.toolchain = toolchain
        self.stats = DiskStats()
        self._loader = loader
        self._warned: set[str] = set()

    @classmethod
    def open(cls, folder: Path) -> DiskCache:
        """The folder as this package and this machine's DSL see it. Nothing is created or read yet."""
        return cls(folder, source=key.OWN_SOURCE, toolchain=key.dsl_toolchain())

    def usable(self) -> bool:
        """Whether code from the folder may be loaded; to be asked before each use, since permissions change."""
        reason = self.refusal()
        if reason is not None:
            self._fail("folder", f"not using the kernel cache {self.folder}: {reason}")
        return reason is None

    def load(self, variant: Variant, repair: bool = False) -> Kernel | None:
        """The function of a sound entry; None where there is none.

        With ``repair``, to be used while holding the lock, entries that cannot be used are reported and corrupt ones
        renamed out of the way. Without it they are passed over in silence, since another process may be at it.
        """
        for path in self._candidates(variant):
            try:
                footer = entry.read(path, variant)
                if footer.source == self.source:
                    return self._loader(path, variant.name, footer.link)
            except FileNotFoundError:
                continue
            except CorruptEntry as error:
                if self.toolchain is None and isinstance(error, ForeignEntry):
                    continue  # found by its variant's name alone: it may well serve another version of this package
                if repair:
                    self.stats.rejected += 1
                    self._set_aside(path, error)
            except UntrustedPath as error:
                if repair:
                    self.stats.rejected += 1
                    self._warn(str(path), f"ignoring the compiled kernel {path}: {error}")
            except Exception as error:  # the loader's: whatever stops a library from being opened must not stop us
                if repair:
                    self._fail(str(path), f"cannot load the compiled kernel {path}: {error}")
        return None

    @contextlib.contextmanager
    def lock(self, variant: Variant) -> Iterator[None]:
        """One process at a time works on an entry. Without a lock to be had, it warns and goes on."""
        with contextlib.ExitStack() as held:
            try:
                self._create_folder()
                path = self.folder / f"{variant.name}.lock"
                held.enter_context(filelock.FileLock(path, timeout=LOCK_TIMEOUT_S, mode=0o600))
            except filelock.Timeout:
                self._fail("lock", f"another process held {path} for {LOCK_TIMEOUT_S:.0f} s; not waiting any longer")
            except Exception as error:
                self._fail("write", f"cannot write to the kernel cache {self.folder}: {error}")
            yield

    def store(self, variant: Variant, write_library: LibraryWriter) -> bool:
        """Write an entry; False, after a warning, where that fails. See ``put``."""
        try:
            self.put(variant, write_library)
        except BuildError as error:
            self._fail("link", f"compiled kernels serve this process only: {error}")
        except Exception as error:
            self._fail("write", f"cannot write to the kernel cache {self.folder}: {error}")
        else:
            return True
        return False

    def put(self, variant: Variant, write_library: LibraryWriter) -> Path:
        """Write an entry and return its path. Readers see the old file, none, or the whole new one.

        Raises:
            BuildError: it cannot be linked, or there is no DSL whose versions could be its key.
            OSError: it cannot be written.
        """
        if self.toolchain is None:
            raise BuildError("the CuTe DSL is not installed, so its versions are unknown")
        with tempfile.TemporaryDirectory(prefix="mjolnir-") as scratch:
            library = Path(scratch) / f"{variant.name}.so"
            link = write_library(library)
            content = entry.pack(library.read_bytes(), variant, self.source, self.toolchain, link)
        path = self._path(variant, self.toolchain)
        self._create_folder()
        write_atomically(path, content)
        return path

    def refusal(self) -> str | None:
        """Why the folder must not be used; None where it may be, or does not exist yet."""
        try:
            for parent in self.folder.parents:
                if parent.exists():
                    reason = entry.writable_by_others(parent.stat(), is_parent=True)
                    if reason is not None:  # they could put another folder in its place
                        return f"its parent {parent}: {reason}"
            info = self.folder.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"it cannot be reached: {error.strerror}"
        if not stat.S_ISDIR(info.st_mode):
            return "it is not a folder"
        return entry.writable_by_others(info)

    def near_misses(self, variant: Variant) -> int:
        """How many sound entries of the variant are from another version of this package."""
        count = 0
        for path in self.folder.glob(f"{variant.name}-*.so"):
            try:
                count += entry.read(path, variant).source != self.source
            except ForeignEntry:
                count += 1
            except Exception:  # counts for nothing, whatever is the matter with it
                continue
        return count

    def _path(self, variant: Variant, toolchain: Mapping[str, str]) -> Path:
        return self.folder / entry.file_name(variant.name, key.entry_digest(variant, self.source, toolchain))

    def _candidates(self, variant: Variant) -> list[Path]:
        """Files that may hold the variant, the one to prefer first."""
        if self.toolchain is not None:
            return [self._path(variant, self.toolchain)]
        ages = []
        for path in self.folder.glob(f"{variant.name}-*.so"):
            with contextlib.suppress(OSError):
                ages.append((path.lstat().st_mtime_ns, path))
        return [path for _, path in sorted(ages, reverse=True)]

    def _create_folder(self) -> None:
        for parent in reversed(self.folder.parents):
            parent.mkdir(mode=0o755, exist_ok=True)  # whatever the umask: one that others can write to is refused
        self.folder.mkdir(mode=0o700, exist_ok=True)

    def _set_aside(self, path: Path, error: CorruptEntry) -> None:
        aside = path.with_name(f"{path.name}.corrupt-{time.time_ns()}")
        try:
            os.replace(path, aside)
        except OSError as problem:
            self._fail(str(path), f"the compiled kernel {path} is unusable ({error}) and cannot be renamed: {problem}")
        else:
            self._warn(str(aside), f"the compiled kernel {path} is unusable ({error}); kept as {aside.name}")

    def _fail(self, kind: str, message: str) -> None:
        self.stats.failures += 1
        self._warn(kind, message)

    def _warn(self, kind: str, message: str) -> None:
        """Log ``message`` unless one of its kind was."""
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(message)


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside ``path`` and rename onto it. The mode is 0644: the folder keeps others out, and can be opened up."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(content)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
