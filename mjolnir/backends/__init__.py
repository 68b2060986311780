"""Where a runner's work is done: compiled kernels on NVIDIA GPUs, PyTorch elsewhere."""

from __future__ import annotations

from typing import Any

import torch

CUTE, REFERENCE = "cute", "reference"

KERNEL_ARCHS = {(9, 0): "sm_90a", (10, 0): "sm_100a", (11, 0): "sm_110a", (12, 0): "sm_120a"}
"""Compute capabilities the kernels compile for. They have run on (9, 0) only."""

PROVEN_ARCHS = ("sm_90a",)


def find_device(device: Any) -> torch.device:
    """The device as its tensors name it: a GPU has an index, the CPU has none.

    Raises:
        ValueError: neither the CPU nor a CUDA device that PyTorch sees.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ValueError(f'device must be a CUDA device or "cpu", got {device!r}')
    if found.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f'device={str(found)!r}, but PyTorch sees no CUDA device; device="cpu" runs the reference')
    if (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={str(found)!r}, but PyTorch sees {torch.cuda.device_count()} CUDA devices")
    return found if found.index is not None else torch.device("cuda", torch.cuda.current_device())


def device_arch(device: torch.device) -> str | None:
    """The kernels' name of a CUDA device's architecture, or None where they do not compile for it."""
    return KERNEL_ARCHS.get(torch.cuda.get_device_capability(device))


def choose_backend(device: torch.device) -> tuple[str, str]:
    """(backend name, why) for a device."""
    if device.type != "cuda":
        return REFERENCE, f"device is {device.type}: the kernels need an NVIDIA GPU"
    arch = device_arch(device)
    if arch is None:
        major, minor = torch.cuda.get_device_capability(device)
        known = ", ".join(KERNEL_ARCHS.values())
        return REFERENCE, f"compute capability {major}.{minor}: the kernels compile for {known}"
    if arch not in PROVEN_ARCHS:
        return CUTE, f"{arch}: the kernels compile for it but have been run on {', '.join(PROVEN_ARCHS)} only"
    return CUTE, f"{arch}: compiled kernels"
