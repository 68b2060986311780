"""What every committed result says about where it comes from."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path
from typing import Any

import torch

from mjolnir import doctor, env
from mjolnir.compiler.key import OWN_SOURCE

CHECKOUT = Path(__file__).resolve().parents[1]


def header(device: torch.device | str | None = None) -> dict[str, Any]:
    """Where and from what a result was made, as plain JSON values.

    Args:
        device: what was measured; None: the CUDA device if there is one.

    Returns:
        commit: hash of the checkout's HEAD; without git, what MJOLNIR_COMMIT says, else None.
        dirty: whether tracked files differ from it; None where git cannot say.
        source: SHA-256 over the package's source, the one that compiled kernels carry.
        device, driver: names, None where there is no driver.
        versions: of Python, Mjolnir and the packages it runs on.
        date: UTC, ISO 8601, to the second.
    """
    report = doctor.collect()
    name = report["device"]["name"]
    if device is not None and torch.device(device).type == "cpu" and not name.startswith("cpu"):
        name = "cpu"
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": _git("rev-parse", "HEAD") or env.COMMIT.read(),
        "dirty": None if changes is None else bool(changes),
        "source": OWN_SOURCE,
        "device": name,
        "driver": report["device"]["driver"],
        "versions": report["versions"],
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _git(*arguments: str) -> str | None:
    """What git prints about the checkout that the package lies in; None without git, or installed elsewhere."""
    if not (CHECKOUT / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(CHECKOUT), *arguments], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
