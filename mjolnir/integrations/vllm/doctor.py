"""What vLLM would use here, and why not more: the section that ``mjolnir doctor --vllm`` adds."""

from __future__ import annotations

import collections
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

import torch

from mjolnir import env
from mjolnir.backends import CUTE
from mjolnir.calibration.scales_file import ScalesFile
from mjolnir.checks import check_positive_int
from mjolnir.integrations.vllm import compat, plugin
from mjolnir.integrations.vllm.eligibility import OWN_NAMES, LayerFacts, why_not

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NUMBER = (int, float)


def describe(
    backend: str,
    backend_reason: str,
    *,
    model: Path | None = None,
    kv_cache_dtype: str = "auto",
    tensor_parallel: int = 1,
) -> dict[str, Any]:
    """Plain JSON values. Does not import vLLM.

    Args:
        backend, backend_reason: what ``choose_backend`` says of the device.
        model: a folder with a Hugging Face ``config.json``; its layers are listed with what they would run on.
        kv_cache_dtype, tensor_parallel: as ``vllm serve`` takes them.

    Raises:
        ValueError: config.json is no JSON object, lacks a field or has an odd one, or its heads do not fit
            tensor_parallel.
        OSError: it cannot be read.
    """
    without = "the server will stop" if kv_cache_dtype in OWN_NAMES else "everything runs on the fallback"
    report: dict[str, Any] = {
        "vllm": _version(),
        "plugin": _plugin(),
        "fallback": compat.fallback_name(),
        "choose it": "--attention-backend CUSTOM" + f" (from vLLM 0.33 also {plugin.OWN_NAME})",
        "kernels": "yes" if backend == CUTE else f"no, {without}: {backend_reason}",
    }
    if model is not None:
        for line, count in _layers(model, kv_cache_dtype, tensor_parallel, backend == CUTE).items():
            report.setdefault("layers", {})[line] = count
        if kv_cache_dtype in OWN_NAMES:
            report["scales"] = _scales(kv_cache_dtype)
    return report


def _scales(kv_cache_dtype: str) -> str:
    """Of a cache that Mjolnir writes."""
    path = env.VLLM_SCALES.read()
    if path is None:
        needed = kv_cache_dtype == plugin.E2M3_NAME
        return f"none, and e2m3 needs them: set {env.VLLM_SCALES.name}" if needed else "vLLM's, one a layer"
    try:
        file = ScalesFile.load(path)
    except (OSError, ValueError) as error:
        return f"the server will stop: {error}"
    return f"{path}: {len(file.layers)} layers, {file.num_kv_heads} KV heads of {file.head_size}"


def _version() -> str:
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    known = any(version.startswith(release + ".") for release in compat.TESTED)
    return version if known else f"{version}: not one of those that Mjolnir is tested with, {', '.join(compat.TESTED)}"


def _plugin() -> str:
    allowed = os.environ.get("VLLM_PLUGINS")
    found = {entry.value for entry in importlib.metadata.entry_points(group="vllm.general_plugins", name="mjolnir")}
    if not found:
        return "vLLM will not find it: mjolnir-attention is not installed in this environment"
    if allowed is not None and "mjolnir" not in allowed.split(","):
        return f"vLLM will not load it: VLLM_PLUGINS={allowed}"
    return f"found, {', '.join(sorted(found))}"


def _layers(folder: Path, kv_cache_dtype: str, tensor_parallel: int, has_kernels: bool) -> collections.Counter[str]:
    """How many layers would run on what, in words."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    config = (config.get("text_config") or config) if isinstance(config, dict) else config
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold an object, and so must its text_config, got {type(config).__name__}")
    counts: collections.Counter[str] = collections.Counter()
    for facts in layers_of(config, kv_cache_dtype, tensor_parallel):
        reason = why_not(facts) if isinstance(facts, LayerFacts) else facts
        if reason is None and not has_kernels:
            reason = "no kernels for this device"
        if reason is None and isinstance(facts, LayerFacts):
            counts[f"decode on Mjolnir: {facts.shape()}"] += 1
        elif kv_cache_dtype in OWN_NAMES and isinstance(facts, LayerFacts):  # no other backend reads such a cache
            counts[f"the server will stop: {reason}"] += 1
        else:
            counts[f"on {compat.fallback_name()}: {reason}"] += 1
    return counts


def layers_of(config: dict[str, Any], kv_cache_dtype: str, tensor_parallel: int) -> list[LayerFacts | str]:
    """The attention layers of a Hugging Face configuration of text, on one rank: facts, or a reason in words.

    It reads what configurations have in common; a model's code may still do something else, which the server's log
    says when it starts.

    Raises:
        ValueError: a field that is missing or odd, or numbers of heads that do not fit tensor_parallel.
    """
    check_positive_int("tensor_parallel", tensor_parallel)
    count = _field(config, "num_hidden_layers")
    if config.get("kv_lora_rank"):
        return ["MLA: choose another backend, vLLM does not start with this one"] * count
    heads = _field(config, "num_attention_heads")
    kv_heads = _field(config, "num_key_value_heads", heads)
    head_size = _field(config, "head_dim", 0) or _field(config, "hidden_size") // heads
    if heads % tensor_parallel or (kv_heads % tensor_parallel and tensor_parallel % kv_heads):
        raise ValueError(f"tensor_parallel must fit {heads} heads on {kv_heads} KV heads, got {tensor_parallel}")
    kinds = _field(config, "layer_types", [], list) or ["full_attention"] * count
    window = _field(config, "sliding_window", 0, NUMBER) if config.get("use_sliding_window", True) else 0
    every_layer = not config.get("layer_types")
    dtype = DTYPES.get(str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"), torch.float32)
    facts: list[LayerFacts | str] = []
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention", "attention"):
            facts.append(f"layers of {kind}")
            continue
        facts.append(
            LayerFacts(
                num_heads=heads // tensor_parallel,
                num_kv_heads=max(1, kv_heads // tensor_parallel),
                head_size=head_size,
                dtype=dtype,
                kv_cache_dtype=kv_cache_dtype,
                sliding_window=(window or None) if every_layer or kind == "sliding_attention" else None,
                logits_soft_cap=_field(config, "attn_logit_softcapping", 0, NUMBER),
                has_sinks=config.get("model_type") == "gpt_oss",
            )
        )
    return facts


def _field(config: dict[str, Any], name: str, default: Any = None, kind: Any = int) -> Any:
    """A field of a configuration, at least 1 if it is an int; ``default`` where it is missing or null."""
    value = config.get(name)
    if value is None and default is None:
        raise ValueError(f"config.json has no {name}")
    if value is None:
        return default
    if not isinstance(value, kind) or isinstance(value, bool) or (kind is int and value < 1):
        expected = {int: "an integer of at least 1", list: "a list"}.get(kind, "a number")
        raise ValueError(f"config.json: {name} must be {expected} or null, got {value!r}")
    return value
