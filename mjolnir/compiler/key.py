"""What a library on disk must agree with before it is used: variant, package source, DSL, entry format."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mjolnir.variant import Variant

SCHEMA = 1
"""Version of the entry format; an entry of another one is not used."""

PACKAGE = Path(__file__).resolve().parents[1]

_DSL_PACKAGES = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
)

# CUTE_DSL_* variables that name places or what to print or keep. Any other may change the code that comes out.
_HARMLESS_DSL_SETTINGS = ("ARCH", "CACHE", "DISABLE_FILE_CACHING", "DUMP", "KEEP", "LIBS", "LOG", "NO_CACHE", "PRINT")


def entry_digest(variant: Variant, source: str, toolchain: Mapping[str, str]) -> str:
    """The key of an entry: SHA-256 (hex) over everything that decides which code it holds. The arch is in the variant.

    Args:
        variant: the kernel.
        source: source_digest of the package it was compiled from.
        toolchain: dsl_toolchain() of the machine that compiled it.
    """
    identity = {
        "schema": SCHEMA,
        "variant": variant_fields(variant),
        "source": source,
        "toolchain": dict(toolchain),
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def variant_fields(variant: Variant) -> dict[str, Any]:
    """The variant as plain JSON values."""
    return dataclasses.asdict(variant)


def source_digest(package: Path = PACKAGE) -> str:
    """SHA-256 (hex) over the path and content of every .py file of the package: any change recompiles."""
    digest = hashlib.sha256()
    for path in sorted(path for path in package.rglob("*.py") if path.is_file()):  # an editor's lock is a dangling link
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


OWN_SOURCE = source_digest()
"""Of this package, as it was when this module was imported: a process runs the code that it imported."""


def source_changed() -> bool:
    """Whether the package's files have changed since. Modules imported later would be of another source than
    ``OWN_SOURCE`` says, and so would what they compile."""
    return source_digest() != OWN_SOURCE


def dsl_toolchain() -> dict[str, str] | None:
    """Versions of the installed CuTe DSL packages and the settings that change their output; None without the DSL."""
    versions = {}
    for name in _DSL_PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if not versions:
        return None
    settings = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("CUTE_DSL_") and not name.removeprefix("CUTE_DSL_").startswith(_HARMLESS_DSL_SETTINGS)
    }
    return versions | settings
