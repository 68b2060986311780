"""A folder of peers unpacked, and the environment that they need. Peers are installed nowhere: sys.path gets their
folders, and all that they build or unpack stays in the user's cache folder."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import platformdirs

logger = logging.getLogger(__name__)

FLASHINFER, FLASHINFER_MODULES, FA3 = "flashinfer_slim.tar.xz", "flashinfer_aot*.tar.xz", "fa3_C.abi3.so.xz"
SOURCES = "src"
ARCH = "9.0a"
"""What FlashInfer builds for; the peers' binaries are Hopper's too."""


@dataclasses.dataclass(frozen=True)
class Site:
    """Where peers lie once they are unpacked.

    Attributes:
        root: the folder.
        packages: FlashInfer, with its prebuilt modules.
        sources: the Triton kernels of vLLM and SGLang.
        wheels: packages that the others import; what the environment has goes first.
        fa3: FlashAttention 3, a library of PyTorch operators.
    """

    root: Path

    @property
    def packages(self) -> Path:
        return self.root / "packages"

    @property
    def sources(self) -> Path:
        return self.root / SOURCES

    @property
    def wheels(self) -> Path:
        return self.root / "wheels"

    @property
    def fa3(self) -> Path:
        return self.root / "fa3" / "_C.abi3.so"


def unpack(folder: Path, cache: Path | None = None) -> Site:
    """Unpack a folder of peers unless that has been done.

    Args:
        folder: flashinfer_slim.tar.xz, fa3_C.abi3.so.xz, src/ with the packages vllm and sglang; also archives
            flashinfer_aot*.tar.xz and wheels, if they are there.
        cache: where to; None: the user's cache folder.

    Raises:
        FileNotFoundError: one of the first three is missing.
    """
    for name in (FLASHINFER, FA3, SOURCES):
        if not (folder / name).exists():
            raise FileNotFoundError(f"peers must be a folder with {name} in it, got {folder}")
    cache = cache or Path(platformdirs.user_cache_dir("mjolnir", appauthor=False)) / "peers"
    site = Site(cache / _digest(folder))
    if site.root.exists():
        return site
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = Site(Path(tempfile.mkdtemp(dir=cache)))
    _extract(folder / FLASHINFER, partial.packages)
    for modules in folder.glob(FLASHINFER_MODULES):
        _extract(modules, partial.packages / "flashinfer" / "data")
    partial.wheels.mkdir()
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial.wheels)
    partial.fa3.parent.mkdir()
    with lzma.open(folder / FA3) as packed, open(partial.fa3, "wb") as library:
        shutil.copyfileobj(packed, library)
    # Modes are not copied: the source may be read-only, and its bytecode is to be cached beside it.
    shutil.copytree(folder / SOURCES, partial.sources, copy_function=shutil.copyfile)
    for path in [partial.sources, *partial.sources.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    partial.root.rename(site.root)
    return site


def activate(site: Site) -> None:
    """Make the peers importable by this process and buildable by its children; what is set already stays."""
    sys.path[:0] = [str(site.sources), str(site.packages)]
    sys.path.append(str(site.wheels))
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(site.root / "flashinfer"))
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", ARCH)
    os.environ.setdefault("FLASHINFER_DISABLE_VERSION_CHECK", "1")  # its companion packages are not there
    toolkit = cuda_toolkit()
    if toolkit is None:
        logger.warning("no CUDA toolkit found: FlashInfer modules that were not shipped cannot be built")
        return
    os.environ["CUDA_HOME"] = str(toolkit)
    os.environ["PATH"] = f"{toolkit / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    stubs = _driver_stub(site.root / "lib")
    os.environ["LIBRARY_PATH"] = f"{stubs}{os.pathsep}{os.environ.get('LIBRARY_PATH', '')}"


def cuda_toolkit() -> Path | None:
    """The toolkit itself: nvcc on the PATH may be a wrapper that lies elsewhere."""
    candidates = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    if nvcc := shutil.which("nvcc"):
        candidates.append(Path(nvcc).resolve().parents[1])
    return next(
        (at for at in candidates if (at / "bin/nvcc").exists() and (at / "include/cuda_runtime.h").exists()), None
    )


def _driver_stub(folder: Path) -> Path:
    """A folder with libcuda.so, the name that linking asks for; a driver alone brings libcuda.so.1."""
    folder.mkdir(exist_ok=True)
    link = folder / "libcuda.so"
    if not link.exists():
        link.unlink(missing_ok=True)
        driver = _driver_library()
        if driver is None:
            logger.warning("libcuda.so.1 not found: FlashInfer modules that link it cannot be built")
        else:
            link.symlink_to(driver)
    return folder


def _driver_library() -> Path | None:
    places = [Path("/usr/local/nvidia/lib64/libcuda.so.1"), Path("/usr/local/nvidia/lib/libcuda.so.1")]
    try:
        listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        listed = ""
    places[:0] = [Path(line.split("=>")[1].strip()) for line in listed.splitlines() if "libcuda.so.1" in line]
    return next((place for place in places if place.exists()), None)


def _extract(archive: Path, target: Path) -> None:
    with tarfile.open(archive) as tar:
        tar.extractall(target, filter="data")


def _digest(folder: Path) -> str:
    """Of names, sizes and times: an archive that changed is unpacked anew."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    facts = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
