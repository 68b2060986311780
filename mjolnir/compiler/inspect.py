"""What the assembler made of a variant: registers, spills, shared memory, instructions. Needs no GPU."""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from mjolnir.compiler.build import compile_kernel
from mjolnir.compiler.cubin import cubin_sm
from mjolnir.variant import Variant

_RESOURCES = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_FUNCTION = re.compile(r"^\s*Function : (\S+)", re.MULTILINE)
# "        /*0a10*/              @!P0 LDG.E.128 R4, ..." -> LDG.E.128
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)


class ToolMissing(RuntimeError):
    """cuobjdump is not installed."""


@dataclasses.dataclass(frozen=True)
class FunctionReport:
    """One kernel function of a cubin.

    Attributes:
        name: mangled, as in the cubin.
        registers: per thread.
        stack_bytes, local_bytes: local memory per thread: stack frame, and what is statically addressed.
        static_smem_bytes: per CTA; dynamic shared memory is set at launch and is not in it.
        instructions: count of each full mnemonic in the code, such as "HMMA.16816.F32".
    """

    name: str
    registers: int
    stack_bytes: int
    local_bytes: int
    static_smem_bytes: int
    instructions: Mapping[str, int]

    def count(self, mnemonic: str) -> int:
        """How often ``mnemonic`` stands in the code, with any further modifiers: "LDS" counts LDS and LDS.128."""
        return sum(n for full, n in self.instructions.items() if f"{full}.".startswith(f"{mnemonic}."))

    @property
    def spills(self) -> bool:
        """Whether the function keeps anything in local memory, which on a GPU is off-chip."""
        return bool(self.stack_bytes or self.local_bytes or self.count("LDL") or self.count("STL"))


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """One compiled variant: each of its kernel functions, and the figures that decide occupancy and speed."""

    name: str
    sm: int
    functions: tuple[FunctionReport, ...]

    @property
    def registers(self) -> int:
        """Registers per thread of the function that needs most."""
        return max(function.registers for function in self.functions)

    @property
    def static_smem_bytes(self) -> int:
        """Static shared memory per CTA of the function that needs most."""
        return max(function.static_smem_bytes for function in self.functions)

    @property
    def spills(self) -> bool:
        """Whether any function does."""
        return any(function.spills for function in self.functions)

    def count(self, mnemonic: str) -> int:
        """FunctionReport.count, over all functions."""
        return sum(function.count(mnemonic) for function in self.functions)


def inspect_variant(variant: Variant) -> KernelReport:
    """Compile ``variant`` (seconds) and report on its GPU code.

    Raises:
        ToolMissing: no cuobjdump.
        KernelUnavailable, BuildError: as compile_kernel.
    """
    return inspect_cubin(compile_kernel(variant).cubin, variant.name)


def inspect_cubin(cubin: bytes, name: str) -> KernelReport:
    """Report on a cubin; ``name`` is for the report. Raises ToolMissing, or RuntimeError where the tool fails."""
    with tempfile.TemporaryDirectory(prefix="mjolnir-") as scratch:
        path = Path(scratch) / "kernel.cubin"
        path.write_bytes(cubin)
        resources = _cuobjdump("--dump-resource-usage", path)
        code = _instructions_by_function(_cuobjdump("-sass", path))
    functions = tuple(
        FunctionReport(function, int(registers), int(stack), int(local), int(smem), code[function])
        for function, registers, stack, smem, local in _RESOURCES.findall(resources)
    )
    if not functions:
        raise RuntimeError(f"{name}: cuobjdump lists no function in the cubin")
    return KernelReport(name, cubin_sm(cubin), functions)


def find_cuobjdump() -> Path | None:
    """cuobjdump of a CUDA toolkit, or the one that Triton's wheel carries; None where neither is."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders = [Path(home) / "bin" for home in (*homes, "/usr/local/cuda")]
    on_path = shutil.which("cuobjdump")
    if on_path is not None:
        folders.insert(0, Path(on_path).parent)
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin is not None:
        folders.append(Path(spec.origin).parent / "backends" / "nvidia" / "bin")
    return next((folder / "cuobjdump" for folder in folders if (folder / "cuobjdump").is_file()), None)


def _instructions_by_function(sass: str) -> dict[str, Mapping[str, int]]:
    """Mnemonic counts of each function in a listing of ``cuobjdump -sass``."""
    # split() with a group alternates: what precedes the first function, then name, body, name, body, ...
    parts = _FUNCTION.split(sass)[1:]
    return {
        name: dict(collections.Counter(_INSTRUCTION.findall(body)))
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


def _cuobjdump(option: str, path: Path) -> str:
    tool = find_cuobjdump()
    if tool is None:
        raise ToolMissing("cuobjdump not found: it comes with the CUDA toolkit and with Triton")
    # It runs nvdisasm, which lies beside it.
    environment = {**os.environ, "PATH": f"{tool.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    result = subprocess.run([str(tool), option, str(path)], capture_output=True, text=True, env=environment)
    if result.returncode != 0:
        raise RuntimeError(f"{tool} {option} exited {result.returncode}: {(result.stderr or result.stdout).strip()}")
    return result.stdout
