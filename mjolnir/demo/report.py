"""What ``mjolnir demo`` prints after the answer."""

from __future__ import annotations

from rich.table import Table

from mjolnir.demo.generate import DemoResult, Difference


def render(result: DemoResult) -> Table:
    """What the answer took, what its cache takes, and how far its logits are off."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("tokens", f"{result.prompt_tokens} prompt + {result.answer_tokens} answer")
    table.add_row("load, prefill", f"{result.load_s:.1f} s, {result.prefill_s:.2f} s")
    table.add_row("decode", f"{result.tokens_per_s:.1f} tokens/s on {result.device}, backend {result.backend}")
    ours, bf16 = result.cache_bytes_per_token, result.bf16_cache_bytes_per_token
    table.add_row("KV cache", f"{result.kv_format}, {result.page_size} tokens per page")
    table.add_row("bytes per token", f"{ours:,} ({ours / bf16:.0%} of bf16's {bf16:,})")
    table.add_row("logits vs bf16 cache", _describe(result.against_bf16_cache))
    table.add_row("logits vs no cache", _describe(result.against_full_attention))
    return table


def _describe(difference: Difference | None) -> str:
    if difference is None:
        return "– (no token was decoded through the cache)"
    return (
        f"max |Δ| {difference.max_abs:.3f}, mean {difference.mean_abs:.4f}, "
        f"KL {difference.kl:.2e}, same top {difference.same_top:.1%}"
    )
