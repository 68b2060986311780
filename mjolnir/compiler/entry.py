"""One kernel on disk: a shared library with a footer that says what it is and a hash over both.

    library | footer (JSON, UTF-8) | length of the footer (8 bytes, little-endian) | SHA-256 of all before it | MAGIC

Loaders ignore what follows an ELF image, so one file is both the library and its own description: it is replaced
atomically, and it can be copied to another folder alone. Opening a truncated library can kill the process (SIGBUS),
so nothing is loaded before its hash is right.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mjolnir.compiler import key
from mjolnir.variant import Variant

MAGIC = b"MJOLNIR\0"
_LENGTH = struct.Struct("<Q")
_HASH_BYTES = 32
_TAIL = _LENGTH.size + _HASH_BYTES + len(MAGIC)


class CorruptEntry(Exception):
    """The file is not a whole entry."""


class ForeignEntry(CorruptEntry):
    """A whole entry, but of another version of this package, or not the one its name promises."""


class UntrustedPath(Exception):
    """Someone else can write what would be loaded as code here."""


@dataclasses.dataclass(frozen=True)
class Footer:
    """What an entry says about itself."""

    digest: str  # key.entry_digest of the next three
    variant: dict[str, Any]
    source: str
    toolchain: dict[str, str]
    link: str  # build.STATIC or build.DYNAMIC
    schema: int = key.SCHEMA


def file_name(variant_name: str, digest: str) -> str:
    """The name of the entry's file. Half of the digest is plenty to tell entries apart; the footer has all of it."""
    return f"{variant_name}-{digest[:32]}.so"


def pack(library: bytes, variant: Variant, source: str, toolchain: Mapping[str, str], link: str) -> bytes:
    """The bytes of an entry."""
    footer = Footer(
        digest=key.entry_digest(variant, source, toolchain),
        variant=key.variant_fields(variant),
        source=source,
        toolchain=dict(toolchain),
        link=link,
    )
    text = json.dumps(dataclasses.asdict(footer), sort_keys=True).encode()
    hashed = library + text + _LENGTH.pack(len(text))
    return hashed + hashlib.sha256(hashed).digest() + MAGIC


def unpack(content: bytes) -> Footer:
    """The footer of a whole entry.

    Raises:
        CorruptEntry: its bytes are not what was written.
        ForeignEntry: they are, in another format.
    """
    if len(content) < _TAIL or not content.endswith(MAGIC):
        raise CorruptEntry(f"{len(content)} bytes without the closing mark of a kernel entry")
    hash_start = len(content) - _HASH_BYTES - len(MAGIC)
    if hashlib.sha256(memoryview(content)[:hash_start]).digest() != content[hash_start : hash_start + _HASH_BYTES]:
        raise CorruptEntry("its bytes do not match their hash")
    footer_end = hash_start - _LENGTH.size
    (length,) = _LENGTH.unpack(content[footer_end:hash_start])
    try:
        footer = Footer(**json.loads(content[footer_end - length : footer_end]))
        if not isinstance(footer.toolchain, dict):
            raise TypeError(f"toolchain must be a mapping, got {footer.toolchain!r}")
    except (ValueError, TypeError) as error:
        raise ForeignEntry(f"its footer cannot be read ({error})") from error
    if footer.schema != key.SCHEMA:
        raise ForeignEntry(f"entry format {footer.schema}, expected {key.SCHEMA}")
    return footer


def read(path: Path, variant: Variant) -> Footer:
    """Read and check the entry of ``variant`` at ``path``, without loading it.

    Raises:
        UntrustedPath: another user owns the file or can write to it.
        CorruptEntry: not a whole entry.
        ForeignEntry: one of another variant or key than its name says.
        OSError: it is not there, or cannot be read.
    """
    info = os.lstat(path)
    if not stat.S_ISREG(info.st_mode):  # a pipe would block, a link may lead anywhere
        raise CorruptEntry("not a regular file")
    reason = writable_by_others(info)
    if reason is not None:
        raise UntrustedPath(reason)
    footer = unpack(path.read_bytes())
    if footer.variant != key.variant_fields(variant):
        raise ForeignEntry("it holds another kernel than its name says")
    if footer.digest != key.entry_digest(variant, footer.source, footer.toolchain):
        raise ForeignEntry("its key does not match what it says it was built from")
    if path.name != file_name(variant.name, footer.digest):
        raise ForeignEntry("its key is not the one in its name: built from another source, by another DSL, or renamed")
    return footer


def writable_by_others(info: os.stat_result, *, is_parent: bool = False) -> str | None:
    """Why a file or folder with this status could have been written by someone else; None where it could not.

    root can write anywhere, so its files are as good as one's own. A parent, in which others must not replace what lies
    there, may be sticky, as /tmp is.
    """
    if info.st_uid not in (os.geteuid(), 0):
        return f"it belongs to another user (uid {info.st_uid})"
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not (is_parent and info.st_mode & stat.S_ISVTX):
        return f"other users can write to it (mode {stat.S_IMODE(info.st_mode):04o}; chmod go-w)"
    return None
