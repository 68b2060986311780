"""What ``mjolnir accuracy`` prints."""

from __future__ import annotations

from rich.table import Table

from mjolnir.accuracy.study import Result, Study


def describe(result: Result) -> str:
    """One line, as soon as it is known."""
    q = result.quality
    return f"{result.setting.name}: perplexity {q.perplexity:.3f}, KL {q.kl:.2e}, same top {q.same_top:.2%}"


def render(study: Study) -> Table:
    """The settings, one a row."""
    table = Table(title=f"against the bf16 cache, {study.options['tokens']} tokens in contexts of "
                        f"{study.options['context']}", title_justify="left")  # fmt: skip
    for column in ("K and V", "bytes/token", "perplexity", "Δ NLL", "KL", "KL, p99", "same top", "error of O"):
        table.add_column(column, justify="left" if column == "K and V" else "right")
    for result in study.results:
        q = result.quality
        table.add_row(
            result.setting.name,
            f"{result.bytes_per_token:,}",
            f"{q.perplexity:.3f}",
            f"{q.nll_change:+.4f} ± {q.nll_change_se:.4f}",
            f"{q.kl:.2e}",
            f"{q.kl_p99:.2e}",
            f"{q.same_top:.2%}",
            f"{sum(q.o_error) / len(q.o_error):.2e}",
        )
    return table
