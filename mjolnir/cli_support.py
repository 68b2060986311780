"""What commands share: errors in one line, the device, files that they will write, options that need others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    import torch

DEVICES = ("auto", "cpu", "cuda")


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Errors whose messages are written for users are one line on stderr and exit code 2: values, files, missing
    modules, what is not implemented. Anything else is a traceback, but for a reader that has gone, as of ``| head``:
    typer ends on it quietly."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (ValueError, NotImplementedError, ModuleNotFoundError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


def pick_device(name: str) -> torch.device:
    """The device that ``--device`` means.

    Raises:
        ValueError: another name, or "cuda" where there is none.
    """
    import torch

    if name not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {name!r}")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("device is 'cuda', but torch.cuda.is_available() is False: see `mjolnir doctor`")
    if name == "auto":
        name = "cuda" if available else "cpu"
    return torch.device(name)


def check_output(option: str, path: Path | None) -> None:
    """Make the folder of a file that ``option`` names, and fail where the file could not be written: before the work
    rather than after it. None is no file.

    Raises:
        OSError: the folder cannot be made, or it or the file cannot be written to.
        ValueError: it is a folder.
    """
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise ValueError(f"{option} must name a file, got the folder {path}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"{option}: cannot write to {path}")


def refuse_without(option: str, others: dict[str, object]) -> None:
    """Raises ValueError for options that are given (not None) and mean nothing without ``option``, which is not."""
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{name} needs {option}")
