"""Argument checks that name the argument, its value and what was expected.

Each returns what it checked, in the form the caller goes on with, so that a check reads as an assignment.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from mjolnir.plan import INT32_MAX

Checked = TypeVar("Checked")

MAX_LAYOUTS = 256
"""Layouts of tensors that are remembered; a model has a few."""


def remember(known: dict[Any, Checked], layout: Any, checked: Checked) -> Checked:
    """Keep what was found out about a layout, so that the next call with it need not; a full ``known`` forgets all."""
    if len(known) >= MAX_LAYOUTS:
        known.clear()
    known[layout] = checked
    return checked


def layout_key(tensors: Iterable[Any], any_rows: int = 0) -> tuple[object, ...]:
    """Everything that is checked of tensors, as a dict key: a few microseconds. Of the first ``any_rows`` tensors the
    size of their first dimension is left out."""
    try:
        return tuple([
            None if t is None
            else (t.dtype, t.shape[1:] if i < any_rows else t.shape, t.stride(), t.device, t.data_ptr() & 15)
            for i, t in enumerate(tensors)
        ])  # fmt: skip
    except (AttributeError, RuntimeError):  # no tensor, or a sparse one: an unknown key, and the check says which
        return (object(),)


def check_positive_int(name: str, value: Any, *, minimum: int = 1) -> int:
    """``value`` as an int that is at least ``minimum``; NumPy integers are fine, bools and floats are not.

    Raises:
        TypeError: not an integer.
        ValueError: below ``minimum``.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__})") from None
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    return number


def check_choice(name: str, value: Any, choices: Collection[Any]) -> Any:
    """The one of ``choices`` that ``value`` equals: 64 for 64.0.

    Raises:
        ValueError: it is not.
    """
    try:
        return {choice: choice for choice in choices}[value]
    except (KeyError, TypeError):  # lists and arrays have no hash
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}") from None


def check_tensor(
    name: str,
    tensor: Any,
    *,
    dtype: torch.dtype | Collection[torch.dtype] | None = None,
    ndim: int | Collection[int] | None = None,
    shape: Sequence[int | None] | None = None,
    device: torch.device | None = None,
    contiguous_rows: bool = False,
    written: bool = False,
) -> torch.Tensor:
    """``tensor``, dense, of one of the given dtypes and ranks, of ``shape`` (None: any size), on ``device``.

    ``contiguous_rows`` asks for stride 1 in the last dimension, ``written`` for no stride of 0: what is written must
    have a place for each element. A size of 1 may carry any stride.

    Raises:
        TypeError: not a tensor, sparse, or of another dtype.
        ValueError: another rank, shape or device, rows that are not contiguous, or elements in one place.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got one of layout {tensor.layout}")
    if dtype is not None:
        dtypes = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name} must have dtype {_either(dtypes)}, got {tensor.dtype}")
    if ndim is not None:
        ndims = (ndim,) if isinstance(ndim, int) else tuple(ndim)
        if tensor.dim() not in ndims:
            raise ValueError(f"{name} must have {_either(ndims)} dimensions, got shape {tuple(tensor.shape)}")
    if shape is not None:
        fits = tensor.dim() == len(shape)
        fits = fits and all(want in (None, have) for want, have in zip(shape, tensor.shape, strict=True))
        if not fits:
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise ValueError(f"{name} must have shape ({wanted}), got {tuple(tensor.shape)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
    if contiguous_rows and tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must have stride 1 in its last dimension, got strides {tensor.stride()}")
    if written and any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(
            f"{name} is written and must have no stride of 0, got strides {tensor.stride()} of shape "
            f"{tuple(tensor.shape)}"
        )
    return tensor


def scale_view(name: str, scale: Any, num_seqs: int, num_kv_heads: int) -> torch.Tensor:
    """A descale as a (num_seqs, num_kv_heads) view of the same memory: what is shared has stride 0.

    ``scale`` is fp32 and has 1 element, shape (num_kv_heads,), or shape (b, num_kv_heads) with b ≥ num_seqs, of
    which the first num_seqs rows count. Any strides.

    Raises:
        TypeError: not a tensor, or not fp32.
        ValueError: another shape.
    """
    check_tensor(name, scale, dtype=torch.float32)
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(num_seqs, num_kv_heads)
    if scale.shape == (num_kv_heads,):
        return scale.expand(num_seqs, num_kv_heads)
    if scale.dim() == 2 and scale.shape[0] >= num_seqs and scale.shape[1] == num_kv_heads:
        return scale[:num_seqs]
    per_seq = f"({num_seqs or 'num_seqs'} or more, {num_kv_heads})"
    raise ValueError(
        f"{name} must have 1 element, shape ({num_kv_heads},) or shape {per_seq}, got shape {tuple(scale.shape)}"
    )


def host_lengths(seq_lens_host: Any, num_seqs: int) -> npt.NDArray[np.int64]:
    """The first num_seqs lengths of a sequence, an array or a CPU tensor of ints.

    Raises:
        TypeError: not one-dimensional, or not ints.
        ValueError: not on the host, too few, negative, or past int32, which those on the device are.
    """
    if isinstance(seq_lens_host, torch.Tensor) and seq_lens_host.device.type != "cpu":
        raise ValueError(f"seq_lens_host must be on the host, got a tensor on {seq_lens_host.device}")
    try:
        lens = np.asarray(seq_lens_host)
    except (TypeError, ValueError):  # sparse; rows of different lengths
        raise TypeError(f"seq_lens_host must be a sequence of ints, got {seq_lens_host!r}") from None
    if lens.ndim != 1 or (lens.size and lens.dtype.kind not in "iu"):
        raise TypeError(f"seq_lens_host must be a sequence of ints, got {lens.ndim} dimensions of {lens.dtype}")
    if len(lens) < num_seqs:
        raise ValueError(f"seq_lens_host must have at least num_seqs = {num_seqs} rows, got {len(lens)}")
    given = lens[:num_seqs]
    lens = given.astype(np.int64)
    if num_seqs and lens.view(np.uint64).max() > INT32_MAX:  # the unsigned view of a negative one is
        wrong = next(length for length in given.tolist() if not 0 <= length <= INT32_MAX)
        raise ValueError(f"seq_lens_host must be from 0 to {INT32_MAX}, got {wrong}")
    return lens


def _either(options: Collection[Any]) -> str:
    return " or ".join(map(str, options))
