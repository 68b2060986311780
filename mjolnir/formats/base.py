"""What a KV-cache format is: how a value lies in memory, and the way in and out."""

from __future__ import annotations

import abc
import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class KvFormat(abc.ABC):
    """A storage format of K and V. The value of a stored element is decode(code) × descale."""

    name: str
    bits: int
    """Bits per element."""
    storage_dtype: torch.dtype
    """What ``encode`` returns."""
    accepted_dtypes: tuple[torch.dtype, ...]
    """Dtypes a cache of this format may have; the first is ``storage_dtype``."""
    max_value: float
    """Largest finite magnitude of a code."""

    def row_bytes(self, head_size: int) -> int:
        """Bytes of one token's row of one head: ``head_size`` elements."""
        return head_size * self.bits // 8

    def encode(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The codes of x / scale, computed in fp32 and rounded to nearest, ties to even; NaN stays NaN.

        Where ``scale`` is 0 (a channel that was all zero) x is divided by 1 instead: what is stored decodes to 0
        whatever it is, but 0 / 0 would have stored a NaN that poisons 0 × NaN.

        Args:
            x: any float dtype, any shape.
            scale: fp32, broadcastable to x.

        Returns:
            ``storage_dtype``, the shape of x.

        Raises:
            TypeError: x is not a float tensor.
            ValueError: scale does not broadcast to the shape of x.
        """
        if not x.is_floating_point():
            raise TypeError(f"x must be a float tensor, got {x.dtype}")
        try:
            divisor = scale.float().expand(x.shape)
        except RuntimeError:
            raise ValueError(f"scale of shape {tuple(scale.shape)} must broadcast to x: {tuple(x.shape)}") from None
        return self._round(x.float() / torch.where(divisor == 0, 1.0, divisor))

    @abc.abstractmethod
    def _round(self, x: torch.Tensor) -> torch.Tensor:
        """fp32 values to codes."""

    @abc.abstractmethod
    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """The exact value of each code in fp32, without the descale; ``codes`` in one of ``accepted_dtypes``.

        Raises:
            TypeError: codes of another dtype.
        """

    def _check_codes(self, codes: torch.Tensor) -> None:
        if codes.dtype not in self.accepted_dtypes:
            accepted = " or ".join(map(str, self.accepted_dtypes))
            raise TypeError(f"codes of a {self.name} cache must have dtype {accepted}, got {codes.dtype}")
