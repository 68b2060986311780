"""Perplexity, KL divergence, top-1 agreement and errors of O of one setting against the bf16 cache."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mjolnir.accuracy.attend import cached_attention
from mjolnir.accuracy.setting import Setting
from mjolnir.calibration.scales import KvScales
from mjolnir.demo.model import Llama

SLICE = 128
"""Tokens whose logits are compared at a time: the vocabulary makes them 25 MB in fp32."""

QUARTERS = 4
"""Parts of the context that KL is also given for."""


@dataclasses.dataclass
class Sums:
    """Running sums over texts of one length."""

    tokens: int = 0
    nll: float = 0.0
    reference_nll: float = 0.0
    nll_gaps: list[Tensor] = dataclasses.field(default_factory=list)  # per token, setting − bf16
    kls: list[Tensor] = dataclasses.field(default_factory=list)  # per text, per token
    same_top: int = 0

    def add(self, hidden: Tensor, reference: Tensor, targets: Tensor, model: Llama) -> None:
        """Compare the logits of one text: hidden states (tokens, hidden size) of the setting and of the bf16 cache, and
        the token that follows each."""
        kls = []
        for ours, theirs, target in zip(hidden.split(SLICE), reference.split(SLICE), targets.split(SLICE), strict=True):
            q, p = (model.logits(x).log_softmax(-1) for x in (ours, theirs))
            kls.append((p.exp() * (p - q)).sum(-1).double())
            self.same_top += int((p.argmax(-1) == q.argmax(-1)).sum())
            nll, reference_nll = (-x.gather(1, target[:, None])[:, 0].double() for x in (q, p))
            self.nll += nll.sum().item()
            self.reference_nll += reference_nll.sum().item()
            self.nll_gaps.append(nll - reference_nll)
        self.kls.append(torch.cat(kls))
        self.tokens += len(targets)


@dataclasses.dataclass(frozen=True)
class Quality:
    """What a setting costs. Logs are natural.

    Attributes:
        perplexity: exp of the mean negative log-likelihood of the next token.
        nll_change, nll_change_se: mean over tokens of its difference to the bf16 cache's, and that mean's standard
            error.
        kl, kl_p99: KL(bf16 ‖ setting) of the next token's distribution, mean and 99th percentile over tokens.
        kl_by_quarter: the mean over the quarters of the context: early tokens attend to few others.
        same_top: share of tokens whose likeliest successor is the bf16 cache's.
        o_error: per layer, ‖O − O over exact K, V and Q‖₂ / ‖that‖₂, the rounding of O to bf16 included.
    """

    perplexity: float
    nll_change: float
    nll_change_se: float
    kl: float
    kl_p99: float
    kl_by_quarter: list[float]
    same_top: float
    o_error: list[float]


class OutputErrors:
    """Relative errors of O per layer, from sums of squares."""

    def __init__(self, num_layers: int) -> None:
        self._squares = torch.zeros(num_layers, 2, dtype=torch.float64)

    def add(self, layer: int, out: Tensor, exact: Tensor) -> None:
        self._squares[layer, 0] += (out - exact).double().square().sum().cpu()
        self._squares[layer, 1] += exact.double().square().sum().cpu()

    def relative(self) -> list[float]:
        return (self._squares[:, 0] / self._squares[:, 1]).sqrt().tolist()


def evaluate(
    model: Llama, setting: Setting, scales: KvScales, texts: Sequence[Tensor], references: Sequence[Tensor]
) -> Quality:
    """Measure a setting over texts (tokens,) of one length; ``references`` are their hidden states over a bf16 cache.

    Errors of O are those of the first text: they cost a second attention.
    """
    sums, errors = Sums(), OutputErrors(model.config.num_layers)
    for i, (text, reference) in enumerate(zip(texts, references, strict=True)):
        attend = cached_attention(setting, scales, model.config.softmax_scale, errors.add if i == 0 else None)
        hidden = model.hidden(text[:-1], 0, attend)
        sums.add(hidden, reference, text[1:], model)
    kls, gaps = torch.stack(sums.kls), torch.cat(sums.nll_gaps)
    return Quality(
        perplexity=math.exp(sums.nll / sums.tokens),
        nll_change=gaps.mean().item(),
        nll_change_se=gaps.std().item() / math.sqrt(sums.tokens),
        kl=kls.mean().item(),
        kl_p99=kls.flatten().quantile(0.99).item(),
        kl_by_quarter=[part.mean().item() for part in kls.tensor_split(QUARTERS, dim=1)],
        same_top=sums.same_top / sums.tokens,
        o_error=errors.relative(),
    )


def reference_states(model: Llama, scales: KvScales, texts: Sequence[Tensor], setting: Setting) -> list[Tensor]:
    """Hidden states (tokens − 1, hidden size) of each text under a setting: that of the bf16 cache."""
    attend = cached_attention(setting, scales, model.config.softmax_scale)
    return [model.hidden(text[:-1], 0, attend) for text in texts]
