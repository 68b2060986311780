"""From a scales file to the tensors that a writer and a runner take."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mjolnir.calibration.scales_file import ScalesFile, check_headroom
from mjolnir.checks import check_choice, check_positive_int
from mjolnir.formats import KvFormat, get_format

GRANULARITIES = ("tensor", "head", "channel")


class LayerScales(NamedTuple):
    """Scales of one layer, on one device, all fp32.

    A channel's scale is k_write[h, c]: what ``write_kv`` divides by. Of it the runner takes k_scale[h] out of the
    scores and q_mul[head, c] = k_write[h, c] / k_scale[h], at most 1, into the query; likewise V, with o_mul on O.

    Attributes:
        k_write, v_write: (1,), (h_k,) or (h_k, d): ``k_scale`` and ``v_scale`` of ``write_kv``.
        k_scale, v_scale: (1,) or (h_k,): of ``DecodeRunner.run``.
        q_mul, o_mul: (h_q, d), or None where scales are not per channel.
    """

    k_write: Tensor
    v_write: Tensor
    k_scale: Tensor
    v_scale: Tensor
    q_mul: Tensor | None = None
    o_mul: Tensor | None = None

    @classmethod
    def alike(cls, k_scale: Tensor, v_scale: Tensor) -> LayerScales:
        """Of (1,) or (h_k,): a writer and a runner take the same."""
        return cls(k_scale, v_scale, k_scale, v_scale)


def full_scale(fmt: KvFormat) -> float:
    """The largest magnitude that the format holds under a descale of 1: with block scales, that times the largest of
    them, 448."""
    return fmt.max_value * (448.0 if fmt.block else 1.0)


@dataclasses.dataclass(frozen=True)
class KvScales:
    """The scales of a model's layers in its KV formats.

    Args:
        file: checked amax by layer.
        num_heads: query heads, a multiple of the file's num_kv_heads.
        k_format, v_format: names in ``mjolnir.formats``.
        granularity: "tensor", "head" or "channel", of both K and V; 16-bit formats keep a scale of 1.
        headroom: instead of the file's.
        device: of the tensors.

    Raises:
        TypeError: num_heads is not an integer, or headroom not a number.
        ValueError: an argument out of its range, or granularity "channel" of a file with amax per head.
    """

    file: ScalesFile
    num_heads: int
    k_format: str = "fp8"
    v_format: str | None = None
    granularity: str = "head"
    headroom: float | None = None
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        check_positive_int("num_heads", self.num_heads)
        check_choice("granularity", self.granularity, GRANULARITIES)
        if self.num_heads % self.file.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of the file's num_kv_heads = {self.file.num_kv_heads}, got "
                f"{self.num_heads}"
            )
        if self.headroom is not None:
            check_headroom(self.headroom)
        for name, fmt in self._formats().items():
            for index, layer in self.file.layers.items() if self.granularity == "channel" and fmt.bits < 16 else ():
                if not isinstance(getattr(layer, name)[0], list):
                    raise ValueError(f"{name} of layer {index} is per head: scales per channel need amax per channel")

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        k_format: str = "fp8",
        v_format: str | None = None,
        granularity: str = "head",
        headroom: float | None = None,
        device: torch.device | str = "cpu",
    ) -> KvScales:
        """The scales of a model of that shape.

        Raises:
            OSError: the file cannot be read.
            TypeError: num_layers or num_heads is not an integer, or headroom not a number.
            ValueError: it is no scales file, is of a model of another shape, or lacks a layer; the message says which.
                Or another argument is out of its range.
        """
        check_positive_int("num_layers", num_layers)
        file = ScalesFile.load(path)
        for name, expected in (("num_kv_heads", num_kv_heads), ("head_size", head_size)):
            if getattr(file, name) != expected:
                raise ValueError(f"{path}: {name} is {getattr(file, name)}, the model has {expected}")
        try:
            file.require_layers(range(num_layers))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        return cls(file, num_heads, k_format, v_format, granularity, headroom, device)

    def layer(self, index: int) -> LayerScales:
        """The scales of one layer.

        Raises:
            ValueError: the file does not have it, or a scale does not fit fp32.
        """
        self.file.require_layers([index])
        amax = self.file.layers[index]
        (k_write, k_scale, q_mul), (v_write, v_scale, o_mul) = (
            self._side(f"{name} of layer {index}", getattr(amax, name), fmt) for name, fmt in self._formats().items()
        )
        return LayerScales(k_write, v_write, k_scale, v_scale, q_mul, o_mul)

    def _formats(self) -> dict[str, KvFormat]:
        """By field of LayerAmax."""
        k_format = get_format(self.k_format, "k_format")
        v_format = k_format if self.v_format is None else get_format(self.v_format, "v_format")
        return {"k_amax": k_format, "v_amax": v_format}

    def _side(
        self, name: str, amax: list[list[float]] | list[float], fmt: KvFormat
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(write scale, descale, factor on Q or O) of K or V."""
        if fmt.bits == 16:
            one = torch.ones(1, device=self.device)
            return one, one, None
        largest = torch.tensor(amax, dtype=torch.float32, device=self.device)
        headroom = self.file.headroom if self.headroom is None else self.headroom
        scale = largest * (headroom / full_scale(fmt))
        if not scale.isfinite().all():
            raise ValueError(f"{name} is up to {largest.max():g}: with a headroom of {headroom:g} no scale fits fp32")
        if self.granularity == "tensor":
            return scale.max().reshape(1), scale.max().reshape(1), None
        per_head = scale if scale.dim() == 1 else scale.amax(-1)
        if self.granularity == "head":
            return per_head, per_head, None
        factor = scale / torch.where(per_head == 0, 1, per_head)[:, None]
        return scale, per_head, factor.repeat_interleave(self.num_heads // len(scale), 0).contiguous()
