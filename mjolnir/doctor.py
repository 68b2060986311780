"""What this machine offers Mjolnir: versions, device, backend and why, kernel cache, environment knobs."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
from typing import Any

import torch
from rich.table import Table

import mjolnir
from mjolnir import env
from mjolnir.backends import choose_backend, device_arch
from mjolnir.compiler import kernel_cache

PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "numpy")


def collect() -> dict[str, dict[str, Any]]:
    """Everything as plain JSON values, by section. Changes nothing: no kernel is loaded, no folder is made."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend, reason = choose_backend(device)
    return {
        "versions": {"mjolnir": mjolnir.__version__, "python": platform.python_version()} | _package_versions(),
        "device": _describe_device(device),
        "backend": {"name": backend, "reason": reason, "writers": _describe_writers(device)},
        "kernel cache": _describe_cache(),
        "environment": {knob.name: knob.read() for knob in env.KNOBS},
    }


def render(report: dict[str, dict[str, Any]]) -> Table:
    """The report as a table; what is not there is shown as –."""
    meanings = {knob.name: knob.meaning for knob in env.KNOBS}
    table = Table(show_header=False, title="mjolnir doctor", title_justify="left")
    for _ in range(2):
        table.add_column()
    table.add_column(overflow="fold")  # nothing is cut off: paths and digests are for copying
    for section, entries in report.items():
        for i, (name, value) in enumerate(entries.items()):
            text = _as_text(value)
            if name in meanings:
                text = f"{text}\n{meanings[name]}"
            table.add_row(section if i == 0 else "", name, text)
        table.add_section()
    return table


def _as_text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, dict):
        return "\n".join(f"{key} {entry}" for key, entry in value.items())
    return str(value)


def _package_versions() -> dict[str, str | None]:
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _describe_device(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        built_for = torch.version.cuda
        return {
            "name": f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)",
            "why": "no CUDA device is visible" if built_for else "this torch is a CPU build",
            "driver": _driver_version(),
        }
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "arch": device_arch(device),
        "sm_count": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver": _driver_version(),
        "torch_cuda": torch.version.cuda,
    }


def _describe_writers(device: torch.device) -> str:
    """What write_kv, expand_pages and fp8 queries run on."""
    if device.type != "cuda":
        return f"PyTorch: device is {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "PyTorch: Triton is not installed"
    return "Triton kernels"


def _driver_version() -> str | None:
    """As nvidia-smi says; None without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {error}"


def _describe_cache() -> dict[str, Any]:
    report = dataclasses.asdict(kernel_cache().describe())
    return report | {"folder": None if report["folder"] is None else str(report["folder"])}
