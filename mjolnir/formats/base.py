"""What a KV-cache format is: how a row of values lies in memory, and the way in and out."""

from __future__ import annotations

import abc
import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class KvFormat(abc.ABC):
    """A storage format of K or V. The value of a stored element is decode(code) × descale; a format with block scales
    also multiplies by the element's block scale.

    A row, the ``head_size`` elements of one token and KV head, is ``row_bytes`` of packed codes: a cache view's last
    dimension is ``row_width`` elements of ``storage_dtype``.
    """

    name: str
    bits: int
    """Bits per element, without block scales."""
    storage_dtype: torch.dtype
    """What ``encode`` returns."""
    accepted_dtypes: tuple[torch.dtype, ...]
    """Dtypes a cache of this format may have; the first is ``storage_dtype``."""
    max_value: float
    """Largest finite magnitude of a code."""
    pack: int = 1
    """Elements that lie in whole bytes together: rows have a multiple of them."""
    block: int = 0
    """Neighbouring elements of a row that share a block scale; 0: there are none."""

    def row_bytes(self, head_size: int) -> int:
        """Bytes of the codes of one token's row of one head: ``head_size`` elements."""
        return head_size * self.bits // 8

    def row_width(self, head_size: int) -> int:
        """Elements of ``storage_dtype`` of such a row: the last dimension of a cache view."""
        return self.row_bytes(head_size) // self.storage_dtype.itemsize

    def scale_width(self, head_size: int) -> int:
        """Block scales, of one byte each, of such a row; 0 where the format has none."""
        return head_size // self.block if self.block else 0

    def head_size_of(self, row_width: int) -> int:
        """The inverse of ``row_width``."""
        return row_width * self.storage_dtype.itemsize * 8 // self.bits

    def block_scales(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor | None:
        """The block scales that rows x are to be encoded with; None where the format has none.

        Args:
            x: (…, head_size), any float dtype.
            scale: fp32, broadcastable to x.

        Returns:
            float8_e4m3fn (…, head_size / block).
        """
        return None

    def encode(self, x: torch.Tensor, scale: torch.Tensor, block_scale: torch.Tensor | None = None) -> torch.Tensor:
        """The codes of x / scale (/ block_scale), computed in fp32 and rounded to nearest, ties to even.

        Formats below 16 bits saturate, ±Inf too. NaN stays NaN where the format has one; where it has none NaN becomes
        the largest value, as in PTX's ``cvt.satfinite``.

        Where ``scale`` is 0 (a channel that was all zero) x is divided by 1 instead: what is stored decodes to 0
        whatever it is, but 0 / 0 would have stored a NaN that poisons 0 × NaN. So it is where a block scale is 0.

        Args:
            x: any float dtype, (…, head_size); head_size a multiple of ``pack``.
            scale: fp32, broadcastable to x.
            block_scale: what ``block_scales`` gave for x and scale.

        Returns:
            ``storage_dtype`` (…, row_width(head_size)).

        Raises:
            TypeError: x is not a float tensor.
            ValueError: scale does not broadcast to the shape of x, the last dimension cannot be packed, or block_scale
                is missing or not wanted.
        """
        self._check_block_scale(block_scale)
        divided = self._divide(x, scale)
        if block_scale is not None:
            divided = _quotient(divided, self._per_element(block_scale, divided.shape[-1]))
        return self._pack(divided)

    def decode(self, codes: torch.Tensor, block_scale: torch.Tensor | None = None) -> torch.Tensor:
        """The exact value of each code in fp32, times its block scale (exact too), without the descale.

        Args:
            codes: (…, row_width), in one of ``accepted_dtypes``.
            block_scale: (…, head_size / block) e4m3 as float8_e4m3fn or uint8, for a format that has them.

        Raises:
            TypeError: codes of another dtype.
            ValueError: block_scale is missing or not wanted.
        """
        if codes.dtype not in self.accepted_dtypes:
            accepted = " or ".join(map(str, self.accepted_dtypes))
            raise TypeError(f"codes of a {self.name} cache must have dtype {accepted}, got {codes.dtype}")
        self._check_block_scale(block_scale)
        values = self._unpack(codes)
        if block_scale is not None:
            values = values * self._per_element(block_scale, values.shape[-1])
        return values

    @abc.abstractmethod
    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        """fp32 rows to packed codes: round, saturate, pack."""

    @abc.abstractmethod
    def _unpack(self, codes: torch.Tensor) -> torch.Tensor:
        """Packed codes to fp32 rows."""

    def _divide(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            raise TypeError(f"x must be a float tensor, got {x.dtype}")
        if x.dim() and x.shape[-1] % self.pack:
            raise ValueError(f"rows of a {self.name} cache have a multiple of {self.pack} elements, got {x.shape[-1]}")
        try:
            divisor = scale.float().expand(x.shape)
        except RuntimeError:
            raise ValueError(f"scale of shape {tuple(scale.shape)} must broadcast to x: {tuple(x.shape)}") from None
        return _quotient(x.float(), divisor)

    def _per_element(self, block_scale: torch.Tensor, head_size: int) -> torch.Tensor:
        """e4m3 block scales in fp32, repeated over their elements."""
        if block_scale.shape[-1] * self.block != head_size:
            raise ValueError(
                f"block_scale must have {self.scale_width(head_size)} scales per row of {head_size} elements, got "
                f"{block_scale.shape[-1]}"
            )
        return block_scale.view(torch.float8_e4m3fn).float().repeat_interleave(self.block, dim=-1)

    def _check_block_scale(self, block_scale: torch.Tensor | None) -> None:
        if (block_scale is not None) != bool(self.block):
            wanted = "needs" if self.block else "has no"
            raise ValueError(f"a {self.name} cache {wanted} block scales, got block_scale={type(block_scale).__name__}")


def over(x: torch.Tensor, number: float) -> torch.Tensor:
    """x / number rounded to nearest, on every device. By a Python number PyTorch's CUDA kernel does not divide: it
    multiplies by the reciprocal (ATen/native/cuda/BinaryDivTrueKernel.cu), an ulp off for half of all amax / 448."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def _quotient(x: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    return x / torch.where(divisor == 0, 1.0, divisor)
