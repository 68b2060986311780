"""What the harness can time. Another project's kernel joins by a class with these two methods; nothing else changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch

from mjolnir.bench.case import Case
from mjolnir.bench.shapes import Shape


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A peer, ready for one case.

    Attributes:
        call: attention over the cache of a slot, on the current stream, capturable in a CUDA graph. It returns O,
            bf16, (tokens, heads_q, head_dim) or of as many elements in that order.
        plan: what the peer does on the host once per step; None: nothing.
    """

    call: Callable[[int], torch.Tensor]
    plan: Callable[[], object] | None = None


class Peer(Protocol):
    @property
    def name(self) -> str:
        """The key in a row's ``peers``."""

    def supports(self, shape: Shape) -> bool:
        """Whether the peer can compute the shape at all."""

    def prepare(self, case: Case) -> Prepared:
        """Everything that is done before the first call."""
