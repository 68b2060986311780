"""The GPU code (cubin) inside a host object file or library: find it, and tell what it was compiled for."""

from __future__ import annotations

import re
import struct

_ELF = b"\x7fELF"
_EM_CUDA = 190
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # ELF64: ident, type, machine, version, entry, phoff, shoff, flags, sizes


def extract_cubins(binary: bytes) -> list[bytes]:
    """Every cubin embedded in ``binary`` (an object, a shared library, or a cubin itself), in file order."""
    cubins = []
    for match in re.finditer(re.escape(_ELF), binary):
        start = match.start()
        if start + _HEADER.size > len(binary):
            break
        fields = _HEADER.unpack_from(binary, start)
        machine, phoff, shoff = fields[2], fields[5], fields[6]
        phentsize, phnum, shentsize, shnum = fields[9:13]
        # The two header tables are the last things in a cubin, so the file ends where the later of them ends.
        end = start + max(phoff + phentsize * phnum, shoff + shentsize * shnum)
        if machine == _EM_CUDA and end <= len(binary):
            cubins.append(binary[start:end])
    return cubins


def cubin_sm(cubin: bytes) -> int:
    """The SM version a cubin was compiled for, such as 90 for sm_90a."""
    ident, flags = cubin[:16], _HEADER.unpack_from(cubin)[7]
    abi_version = ident[8]
    # ABI version 8 moved the number up by one byte.
    return (flags >> 8) & 0xFFFF if abi_version >= 8 else flags & 0xFF


def arch_sm(arch: str) -> int:
    """The number in an arch name: 90 for "sm_90a".

    Raises:
        ValueError: not of the form sm_<number>[a|f].
    """
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if match is None:
        raise ValueError(f"arch = {arch!r}: expected sm_<number>, sm_<number>a or sm_<number>f, such as sm_90a")
    return int(match.group(1))
