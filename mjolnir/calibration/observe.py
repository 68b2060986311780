"""The largest magnitudes of K and V, per layer, KV head and channel."""

from __future__ import annotations

import torch
from torch import Tensor

from mjolnir.checks import check_positive_int, check_tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class AmaxObserver:
    """Running maxima over everything that is observed.

    Attributes:
        tokens: by layer, how many tokens were observed.
    """

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}
        self._amax: dict[int, tuple[Tensor, Tensor]] = {}

    def observe(self, layer: int, key: Tensor, value: Tensor) -> None:
        """K and V (tokens, h_k, d) of one layer as they would be cached: K with its positions rotated in.

        Raises:
            TypeError: ``layer`` is not an integer, or K or V not a tensor of floats of 16 bits or more.
            ValueError: a negative layer, another shape than the layer had before, or a value that is not finite.
        """
        check_positive_int("layer", layer, minimum=0)
        check_tensor("key", key, dtype=FLOATS, ndim=3)
        check_tensor("value", value, dtype=FLOATS, shape=key.shape)
        if not len(key):
            return
        amax = [x.detach().abs().amax(0).float().cpu() for x in (key, value)]
        for name, largest in zip(("key", "value"), amax, strict=True):
            if not largest.isfinite().all():
                raise ValueError(f"{name} of layer {layer} has values that are not finite")
        if layer in self._amax:
            before = self._amax[layer]
            if before[0].shape != amax[0].shape:
                raise ValueError(
                    f"key of layer {layer} must have shape (tokens, {', '.join(map(str, before[0].shape))}), got "
                    f"{tuple(key.shape)}"
                )
            amax = [torch.maximum(old, new) for old, new in zip(before, amax, strict=True)]
        self._amax[layer] = (amax[0], amax[1])
        self.tokens[layer] = self.tokens.get(layer, 0) + len(key)

    def amax(self, layer: int) -> tuple[Tensor, Tensor]:
        """(K, V), each fp32 (h_k, d).

        Raises:
            ValueError: nothing of that layer was observed.
        """
        if layer not in self._amax:
            raise ValueError(f"layer {layer} was never observed; observed: {sorted(self._amax) or 'none'}")
        return self._amax[layer]
