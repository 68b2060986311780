"""What is observed: the demo's model over English text, or a dump of K and V."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mjolnir.calibration.observe import AmaxObserver
from mjolnir.checks import check_positive_int

_ENTRY = re.compile(r"([kv])\.(\d+)")

CONTEXT = 2048
"""Tokens that the demo's model reads at a time. Scales hold for contexts of about that length only: a channel of K that
positions rotate slowly reaches its largest values late."""


def observe_dump(path: Path) -> AmaxObserver:
    """Observe a dump: a .npz, or a .pt that holds a dict of tensors, with "k.<layer>" and "v.<layer>" of shape (tokens,
    num_kv_heads, head_size) each.

    Raises:
        OSError: it cannot be read.
        ValueError: another kind of file, a name that is not such, K without V, or shapes that do not fit.
    """
    observer = AmaxObserver()
    arrays = dict(_entries(path))
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


def _entries(path: Path) -> Iterator[tuple[tuple[str, int], Tensor]]:
    arrays: dict[str, Any]
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: torch.from_numpy(np.asarray(archive[name])) for name in archive.files}
    elif path.suffix == ".pt":
        arrays = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(arrays, dict):
            raise ValueError(f"{path} must hold a dict of tensors, got {type(arrays).__name__}")
    else:
        raise ValueError(f"a dump is a .npz or a .pt file, got {path}")
    for name, array in arrays.items():
        match = _ENTRY.fullmatch(str(name))
        if match is None:
            raise ValueError(f"{path}: arrays are called k.<layer> and v.<layer>, got {name!r}")
        if not isinstance(array, Tensor) or not array.is_floating_point() or array.dim() != 3:
            kind = f"{array.dtype} {tuple(array.shape)}" if isinstance(array, Tensor) else type(array).__name__
            raise ValueError(f"{path}: {name} must be floats of shape (tokens, num_kv_heads, head_size), got {kind}")
        yield (match[1], int(match[2])), array
