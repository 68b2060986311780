"""Answering a prompt token by token over the paged cache, and measuring what the cache's format costs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mjolnir.calibration.scales import KvScales
from mjolnir.checks import check_choice, check_positive_int
from mjolnir.demo.kv import KV_LAYOUT, PagedKVCache
from mjolnir.demo.model import Llama, LlamaConfig, causal_attention
from mjolnir.demo.tokenizer import ChatTokenizer
from mjolnir.demo.weights import find_model, read_gguf
from mjolnir.formats import get_format
from mjolnir.runner import PAGE_SIZES, DecodeRunner


class CachedDecoder:
    """The model over one sequence: the prompt through PyTorch, every later token through ``DecodeRunner``.

    Args:
        max_tokens: prompt and answer together.
        kv_format, v_format, q_mode: as ``DecodeRunner`` takes them.
        scales: calibrated descales; None: fixed by the prompt.
        kv_dtype: K and V are rounded to it before the cache quantises them; None: as the model makes them.
    """

    def __init__(
        self,
        model: Llama,
        *,
        kv_format: str,
        page_size: int,
        max_tokens: int,
        v_format: str | None = None,
        q_mode: str = "bf16",
        scales: KvScales | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        c = model.config
        self.model, self.kv_dtype = model, kv_dtype
        self.runner = DecodeRunner(
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_size=c.head_size,
            page_size=page_size,
            out_dtype=torch.bfloat16,
            max_num_seqs=1,
            q_mode=q_mode,
            kv_format=kv_format,
            v_format=v_format,
            kv_layout=KV_LAYOUT,
            device=model.device,
        )
        self.cache = PagedKVCache(
            num_layers=c.num_layers,
            num_kv_heads=c.num_kv_heads,
            head_size=c.head_size,
            page_size=page_size,
            max_tokens=max_tokens,
            kv_format=kv_format,
            v_format=v_format,
            scales=scales,
            device=model.device,
        )
        self.runner.precompile()  # so that no step waits for it

    def prefill(self, prompt: list[int]) -> Tensor:
        """Fill the cache with the prompt, attending to its exact K and V. Logits (vocabulary,) of what comes next."""

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self._write(layer, key, value)
            return causal_attention(query, key, value, self.model.config.softmax_scale)

        self.cache.extend(len(prompt))
        return self.model.forward(torch.tensor(prompt, device=self.model.device), 0, attend)[-1]

    def step(self, token: int) -> Tensor:
        """Append a token. Logits (vocabulary,) of what comes next. One plan serves all layers."""
        cache, runner = self.cache, self.runner
        position = cache.length
        cache.extend(1)
        plan = runner.plan([cache.length], 1, 1, cache.block_table, cache.seq_lens)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self._write(layer, key, value)
            query = query.bfloat16()
            out = torch.empty_like(query)
            cache.attend(runner, plan, layer, query, out, self.model.config.softmax_scale)
            return out.to(self.model.dtype)

        return self.model.forward(torch.tensor([token], device=self.model.device), position, attend)[0]

    def _write(self, layer: int, key: Tensor, value: Tensor) -> None:
        if self.kv_dtype is not None:
            key, value = key.to(self.kv_dtype), value.to(self.kv_dtype)
        self.cache.write(layer, key, value)


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far logits are from reference logits, over all steps of an answer."""

    max_abs: float
    mean_abs: float
    kl: float  # mean over steps of KL(reference ‖ logits), nats
    same_top: float  # share of steps whose most likely token is the same

    @classmethod
    def between(cls, logits: Tensor, reference: Tensor) -> Difference:
        """Of two (steps, vocabulary) tensors."""
        gap = (logits - reference).abs()
        p, q = reference.double().log_softmax(-1), logits.double().log_softmax(-1)
        return cls(
            max_abs=gap.max().item(),
            mean_abs=gap.mean().item(),
            kl=(p.exp() * (p - q)).sum(-1).mean().item(),
            same_top=(logits.argmax(-1) == reference.argmax(-1)).float().mean().item(),
        )


@dataclasses.dataclass(frozen=True)
class DemoResult:
    """One answer and what it cost. Differences are over the tokens that were decoded through the cache."""

    kv_format: str
    page_size: int
    device: str
    backend: str
    prompt_tokens: int
    answer: str
    answer_tokens: int
    load_s: float
    prefill_s: float
    tokens_per_s: float  # of the steps after prefill; 0 if the answer had none
    cache_bytes_per_token: int
    bf16_cache_bytes_per_token: int
    against_bf16_cache: Difference | None  # None: nothing was decoded
    against_full_attention: Difference | None


def load_demo(device: torch.device) -> tuple[Llama, ChatTokenizer]:
    """The demo's model, in bf16 on a GPU and fp32 elsewhere, and its tokenizer."""
    metadata, weights = read_gguf(find_model())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Llama(LlamaConfig.from_metadata(metadata), weights, device, dtype), ChatTokenizer(metadata)


def greedy(decoder: CachedDecoder, prompt: list[int], max_tokens: int, end: int, logits: list[Tensor]) -> Iterator[int]:
    """The likeliest tokens one by one, up to ``max_tokens`` or ``end``, which is not among them.

    ``logits`` receives those that each token was chosen from, prefill's first.
    """
    logits.append(decoder.prefill(prompt))
    for _ in range(max_tokens):
        token = int(logits[-1].argmax())
        if token == end:
            return
        yield token
        if len(logits) == max_tokens:
            return
        logits.append(decoder.step(token))


def decode_logits(decoder: CachedDecoder, prompt: list[int], answer: list[int]) -> Tensor:
    """Teacher-forced: logits (len(answer), vocabulary) after each token of a given answer."""
    decoder.prefill(prompt)
    return torch.stack([decoder.step(token) for token in answer])


def full_logits(model: Llama, prompt: list[int], answer: list[int]) -> Tensor:
    """The same logits without a cache: one forward pass of full attention over all tokens."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return causal_attention(query, key, value, model.config.softmax_scale)

    return model.forward(torch.tensor(prompt + answer, device=model.device), 0, attend)[len(prompt) :]


def run_demo(
    prompt: str,
    *,
    kv_format: str,
    page_size: int,
    device: torch.device,
    max_tokens: int,
    emit: Callable[[str], None],
) -> DemoResult:
    """Answer ``prompt``, giving each piece of text to ``emit`` as it comes, then compare the logits.

    Raises:
        ModuleNotFoundError: weights or libraries of the demo are not installed.
        ValueError: an unknown kv_format or page_size, or prompt and answer exceed the model's context.
    """
    get_format(kv_format)  # an argument that cannot work is refused before the weights are read
    check_choice("page_size", page_size, PAGE_SIZES)
    check_positive_int("max_tokens", max_tokens)
    started = time.perf_counter()
    model, tokenizer = load_demo(device)
    prompt_ids = tokenizer.encode_chat(prompt)
    total = len(prompt_ids) + max_tokens
    if total > model.config.max_tokens:
        raise ValueError(f"prompt and max_tokens make {total} tokens: the model has {model.config.max_tokens}")

    def decoder(kv_format: str) -> CachedDecoder:
        return CachedDecoder(model, kv_format=kv_format, page_size=page_size, max_tokens=total)

    answering = decoder(kv_format)
    loaded = time.perf_counter()
    times: list[float] = []
    answer: list[int] = []
    logits: list[Tensor] = []

    def tokens() -> Iterator[int]:
        for token in greedy(answering, prompt_ids, max_tokens, tokenizer.end_of_turn, logits):
            times.append(time.perf_counter())  # the token is on the host: the step's work is done
            answer.append(token)
            yield token

    for piece in tokenizer.stream(tokens()):
        emit(piece)
    finished = time.perf_counter()
    emit("\n")

    decoded = answer[: len(logits) - 1]  # tokens that went through the cache
    against_bf16 = against_full = None
    if decoded:
        ours = torch.stack(logits[1:])
        against_bf16 = Difference.between(ours, decode_logits(decoder("bf16"), prompt_ids, decoded))
        against_full = Difference.between(ours, full_logits(model, prompt_ids, decoded))
    first = times[0] if times else finished
    c = model.config
    return DemoResult(
        kv_format=kv_format,
        page_size=page_size,
        device=device.type,
        backend=answering.runner.backend,
        prompt_tokens=len(prompt_ids),
        answer=tokenizer.decode(answer),
        answer_tokens=len(answer),
        load_s=loaded - started,
        prefill_s=first - loaded,
        tokens_per_s=len(decoded) / (finished - first) if decoded else 0.0,
        cache_bytes_per_token=answering.cache.bytes_per_token,
        bf16_cache_bytes_per_token=2 * 2 * c.num_layers * c.num_kv_heads * c.head_size,  # K and V, 2 bytes each
        against_bf16_cache=against_bf16,
        against_full_attention=against_full,
    )
