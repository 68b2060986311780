"""The study: settings measured over the evaluation text with scales from the calibration text, as JSON."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mjolnir.accuracy.evaluate import Quality, evaluate, reference_states
from mjolnir.accuracy.setting import BF16, STUDY, Setting
from mjolnir.accuracy.stepwise import Agreement, check_stepwise
from mjolnir.calibration.calibrate import observe_demo_model
from mjolnir.calibration.scales import KvScales
from mjolnir.calibration.scales_file import ScalesFile, check_headroom
from mjolnir.checks import check_positive_int
from mjolnir.demo.generate import load_demo
from mjolnir.demo.text import EVALUATION, text_digest, text_tokens
from mjolnir.evidence import header

MODEL = "SmolLM2-135M-Instruct (GGUF, Q4_1 weights dequantised)"

STEPWISE_SETTINGS = (Setting("fp8", "fp8"), Setting("e2m3", "e2m3", "channel"), Setting("nvfp4", "nvfp4"))
STEPWISE_TOKENS = 16
"""What is checked token by token: a step takes the time of a thousand batched tokens."""

METHOD = (
    "Teacher-forced: every token of a text attends to the quantised K and V of all tokens up to itself, prompt "
    "included, through the exact codecs and one batched causal attention in fp32; K, V, Q and O are bf16 around it. "
    "Texts are consecutive stretches of the pydoc topics of the evaluation part, one context each; scales are static,"
    " headroom times the largest magnitudes over the calibration part, which shares no topic with it, in contexts of "
    "the same length. perplexity of the next token; nll_change: its log against the bf16 cache's on the same tokens, "
    "with the mean's standard error; kl: KL(bf16 cache || setting), nats, mean over tokens, 99th percentile and mean "
    "by quarter of the context; same_top: share of tokens with the bf16 cache's likeliest successor; o_error: per "
    "layer, relative error of O in the 2-norm over the same Q (first text). stepwise: the same logits token by token "
    "through write_kv, pages and DecodeRunner."
)


@dataclasses.dataclass(frozen=True)
class Options:
    """What ``mjolnir accuracy`` is asked for.

    Raises:
        TypeError, ValueError: a number of another type, or out of its range.

    Attributes:
        settings: of the cache; bf16 is measured in any case.
        tokens: evaluated, a multiple of ``context``.
        context: tokens per text.
        calibration_tokens: observed for the scales, where no file is given.
        headroom: of the scales.
        scales: a scales file instead of calibration.
    """

    settings: tuple[Setting, ...] = STUDY
    tokens: int = 8192
    context: int = 2048
    calibration_tokens: int = 16384
    headroom: float = 1.1
    scales: Path | None = None

    def __post_init__(self) -> None:
        check_positive_int("context", self.context, minimum=8)
        check_positive_int("tokens", self.tokens, minimum=self.context)
        check_positive_int("calibration_tokens", self.calibration_tokens)
        check_headroom(self.headroom)


@dataclasses.dataclass(frozen=True)
class Result:
    """One setting, measured."""

    setting: Setting
    bytes_per_token: int
    quality: Quality

    def as_json(self) -> dict[str, Any]:
        row = {"name": self.setting.name, **dataclasses.asdict(self.setting), "bytes_per_token": self.bytes_per_token}
        return row | {name: _rounded(value) for name, value in dataclasses.asdict(self.quality).items()}


@dataclasses.dataclass(frozen=True)
class Study:
    """A run."""

    header: dict[str, Any]
    options: dict[str, Any]
    text: dict[str, Any]
    stepwise: list[Agreement]
    results: list[Result]
    seconds: float

    def to_json(self) -> str:
        top = {
            **self.header,
            "model": MODEL,
            "method": METHOD,
            "options": self.options,
            "text": self.text,
            "stepwise": [dataclasses.asdict(agreement) for agreement in self.stepwise],
            "seconds": round(self.seconds),
        }
        lines = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in top.items()]
        rows = ",\n".join(f"  {json.dumps(result.as_json(), ensure_ascii=False)}" for result in self.results)
        return "{\n" + ",\n".join(lines) + ',\n"rows": [\n' + rows + "\n]\n}\n"


def run_study(
    options: Options, device: torch.device, progress: Callable[[str], None], on_result: Callable[[Result], None]
) -> Study:
    """Calibrate, measure every setting, check STEPWISE_SETTINGS token by token.

    Raises:
        ModuleNotFoundError: weights or libraries of the demo are not installed.
        OSError: the scales file cannot be read.
        ValueError: more tokens than the text has, or a scales file that does not fit.
    """
    start = time.monotonic()
    model, tokenizer = load_demo(device)
    config = model.config
    ids = text_tokens(tokenizer, EVALUATION)
    count = options.tokens // options.context
    if count * options.context + 1 > len(ids):
        raise ValueError(f"tokens must be below {len(ids)}, what the evaluation text has, got {options.tokens}")
    # Spread over the text; each text has one token more, the last one's successor.
    starts = [i * ((len(ids) - options.context - 1) // max(1, count - 1)) for i in range(count)]
    texts = [torch.tensor(ids[at : at + options.context + 1], device=device) for at in starts]
    if options.scales is None:
        progress(f"calibrating over {options.calibration_tokens} tokens")
        file = ScalesFile.of(
            observe_demo_model(options.calibration_tokens, device, context=options.context), headroom=options.headroom
        )
    else:
        file = KvScales.load(
            options.scales, num_layers=config.num_layers, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
        ).file  # fmt: skip
    scales = {
        setting: KvScales(
            file, config.num_heads, setting.k_format, setting.v_format, setting.granularity, options.headroom, device
        )
        for setting in dict.fromkeys((BF16, *options.settings))
    }
    progress(f"bf16 cache over {count} texts of {options.context} tokens")
    references = reference_states(model, scales[BF16], texts, BF16)
    results = []
    for setting in scales:
        quality = evaluate(model, setting, scales[setting], texts, references)
        size = setting.bytes_per_token(config.num_layers, config.num_kv_heads, config.head_size)
        results.append(Result(setting, size, quality))
        on_result(results[-1])
    progress("token by token")
    checked = [setting for setting in options.settings if setting in STEPWISE_SETTINGS]
    stepwise = [check_stepwise(model, setting, scales[setting], texts[0][:STEPWISE_TOKENS]) for setting in checked]
    return Study(
        header=header(device),
        options={
            "tokens": count * options.context,
            "context": options.context,
            "calibration_tokens": file.tokens,
            "headroom": options.headroom,
        },
        text={"what": "pydoc topics", "sha256": text_digest(EVALUATION), "tokens": len(ids)},
        stepwise=stepwise,
        results=results,
        seconds=time.monotonic() - start,
    )


def _rounded(value: Any) -> Any:
    """Six significant digits."""
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}")
