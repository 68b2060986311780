"""What is observed: the demo's model over English text, or a dump of K and V."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from mjolnir.calibration.observe import FLOATS, AmaxObserver
from mjolnir.checks import check_positive_int

_ENTRY = re.compile(r"([kv])\.([0-9]{1,9})")

CONTEXT = 2048
"""Tokens that the demo's model reads at a time. Scales hold for contexts of about that length only: a channel of K that
positions rotate slowly reaches its largest values late."""


def observe_dump(path: Path | str) -> AmaxObserver:
    """Observe a dump: a .npz, or a .pt that holds a dict of tensors, with "k.<layer>" and "v.<layer>" of shape (tokens,
    num_kv_heads, head_size) each.

    Raises:
        OSError: it cannot be opened.
        ValueError: another kind of file, a damaged one, a name that is not such, a layer that is named twice ("k.0" and
            "k.00"), K without V, shapes that do not fit, or values that are not finite. The message names the file.
    """
    path, observer = Path(path), AmaxObserver()
    arrays: dict[tuple[str, int], Tensor] = {}
    for entry, array in _entries(path):
        if entry in arrays:
            raise ValueError(f"{path} has {entry[0]} of layer {entry[1]} twice")
        arrays[entry] = array
    if not arrays:
        raise ValueError(f"{path} holds no arrays")
    for layer in sorted({layer for _, layer in arrays}):
        pair = [arrays.get((side, layer)) for side in "kv"]
        for side, x in zip("kv", pair, strict=True):
            if x is None:
                raise ValueError(f"{path} has no {side}.{layer}")
        try:
            observer.observe(layer, *pair)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"{path}, layer {layer}: {error}") from None
    return observer


def observe_demo_model(
    tokens: int, device: torch.device, progress: Callable[[int], None] = lambda _: None, context: int = CONTEXT
) -> AmaxObserver:
    """Observe SmolLM2-135M-Instruct over the calibration part of the demo's text, ``context`` tokens at a time;
    ``progress`` gets the tokens done.

    Raises:
        ModuleNotFoundError: weights or libraries of the demo are not installed.
        ValueError: fewer than one token, or more than the text has.
    """
    from mjolnir.demo.generate import load_demo
    from mjolnir.demo.model import causal_attention
    from mjolnir.demo.text import CALIBRATION, text_tokens

    check_positive_int("tokens", tokens)
    check_positive_int("context", context)
    model, tokenizer = load_demo(device)
    ids = text_tokens(tokenizer, CALIBRATION)
    if tokens > len(ids):
        raise ValueError(f"tokens must be at most {len(ids)}, what the calibration text has, got {tokens}")
    observer = AmaxObserver()

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        observer.observe(layer, key, value)
        return causal_attention(query, key, value, model.config.softmax_scale)

    for first in range(0, tokens, context):
        end = min(first + context, tokens)
        model.hidden(torch.tensor(ids[first:end], device=device), 0, attend)
        progress(end)
    return observer


def _read_npz(file: BinaryIO) -> dict[str, Tensor]:
    with np.load(file, allow_pickle=False) as archive:
        return {name: torch.from_numpy(np.asarray(archive[name])) for name in archive.files}


def _read_pt(file: BinaryIO) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)


_READERS: dict[str, Callable[[BinaryIO], Any]] = {".npz": _read_npz, ".pt": _read_pt}


def _entries(path: Path) -> Iterator[tuple[tuple[str, int], Tensor]]:
    if path.suffix not in _READERS:
        raise ValueError(f"a dump is a .npz or a .pt file, got {path}")
    with path.open("rb") as file:
        try:
            arrays = _READERS[path.suffix](file)
        except Exception as error:  # of a dozen kinds: zipfile's, pickle's, NumPy's, PyTorch's
            raise ValueError(f"{path} cannot be read as a {path.suffix} file: {error}") from error
    if not isinstance(arrays, dict):
        raise ValueError(f"{path} must hold a dict of tensors, got {type(arrays).__name__}")
    for name, array in arrays.items():
        match = _ENTRY.fullmatch(str(name))
        if match is None:
            raise ValueError(f"{path}: arrays are called k.<layer> and v.<layer>, got {name!r}")
        if not isinstance(array, Tensor) or array.dtype not in FLOATS or array.dim() != 3:
            kind = f"{array.dtype} {tuple(array.shape)}" if isinstance(array, Tensor) else type(array).__name__
            raise ValueError(f"{path}: {name} must be floats of shape (tokens, num_kv_heads, head_size), got {kind}")
        yield (match[1], int(match[2])), array
