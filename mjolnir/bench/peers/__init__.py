"""What the harness can time. Another project's kernel joins by a class with these methods; nothing else changes.

setup.py          a folder of peers unpacked, and the environment that they need
modules.py        FlashInfer modules that were not shipped, built in the background
fa2.py            FlashInfer's FA2 decode wrapper
xqa.py            FlashInfer's XQA
fa3.py            FlashAttention 3
vllm_triton.py    vLLM's Triton kernel
sglang_triton.py  SGLang's Triton kernel

Peers are only imported when ``load`` is called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from mjolnir.bench.case import Case
from mjolnir.bench.shapes import Shape
from mjolnir.checks import check_choice

NAMES = ("fa2", "xqa", "fa3", "vllm-triton", "sglang-triton")


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

    def refuses(self, shape: Shape) -> str | None:
        """Why the peer cannot compute the shape; None where it can."""

    def prepare(self, case: Case) -> Prepared:
        """Everything that is done before the first call. Whatever it raises is the reason why there is no time."""


def load(folder: Path, shapes: Sequence[Shape], names: Sequence[str] = NAMES) -> list[Peer]:
    """The peers of a folder, unpacked; builds of what they lack for the shapes begin in the background.

    Args:
        folder: what ``setup.unpack`` takes.
        shapes: those to come, in their order.
        names: of NAMES.

    Raises:
        ValueError: an unknown name.
        FileNotFoundError: a file that must be in the folder is not there.
    """
    from mjolnir.bench.peers import setup
    from mjolnir.bench.peers.fa2 import FlashInferFa2
    from mjolnir.bench.peers.fa3 import FlashAttention3
    from mjolnir.bench.peers.modules import Modules
    from mjolnir.bench.peers.sglang_triton import SglangTriton
    from mjolnir.bench.peers.vllm_triton import VllmTriton
    from mjolnir.bench.peers.xqa import Xqa

    for name in names:
        check_choice("peer", name, NAMES)
    site = setup.unpack(folder)
    setup.activate(site)
    modules = Modules()
    built = FlashInferFa2(modules), Xqa(modules)
    every: list[Peer] = [*built, FlashAttention3(site.fa3), VllmTriton(), SglangTriton()]
    wanted = [peer for peer in every if peer.name in names]
    modules.start(shapes, [peer for peer in built if peer in wanted])
    return wanted
