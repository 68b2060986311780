"""`mjolnir doctor --vllm`: what would be used, and why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mjolnir.backends import CUTE, REFERENCE
from mjolnir.cli import app
from mjolnir.integrations.vllm import doctor

LLAMA = {
    "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def layers(tmp_path: Path, config: dict[str, Any], backend: str = CUTE, **options: Any) -> dict[str, int]:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return doctor.describe(backend, "why not", model=tmp_path, **options)["layers"]


@pytest.mark.parametrize(
    "config, options, want",
    [
        (LLAMA, {"kv_cache_dtype": "fp8"}, {"decode on Mjolnir: fp8, 32/8 heads of 128": 2}),
        (LLAMA, {"tensor_parallel": 8}, {"decode on Mjolnir: bf16, 4/1 heads of 128": 2}),
        (LLAMA, {"tensor_parallel": 16}, {"decode on Mjolnir: bf16, 2/1 heads of 128": 2}),
        (LLAMA, {"kv_cache_dtype": "int8_per_token_head"}, {"on FLASH_ATTN: KV cache dtype int8_per_token_head": 2}),
        (LLAMA | {"sliding_window": 4096}, {}, {"on FLASH_ATTN: sliding window of 4096": 2}),
        (
            LLAMA | {"sliding_window": 4096, "use_sliding_window": False},
            {},
            {"decode on Mjolnir: bf16, 32/8 heads of 128": 2},
        ),
        (LLAMA | {"sliding_window": 9, "layer_types": None}, {}, {"on FLASH_ATTN: sliding window of 9": 2}),
        (LLAMA | {"sliding_window": 9, "layer_types": []}, {}, {"on FLASH_ATTN: sliding window of 9": 2}),
        (LLAMA | {"sliding_window": None}, {}, {"decode on Mjolnir: bf16, 32/8 heads of 128": 2}),
        (LLAMA | {"num_key_value_heads": None}, {}, {"decode on Mjolnir: bf16, 32/32 heads of 128": 2}),
        (LLAMA | {"num_key_value_heads": 12}, {}, {"on FLASH_ATTN: 32 query heads on 12 KV heads": 2}),
        (LLAMA | {"text_config": None}, {}, {"decode on Mjolnir: bf16, 32/8 heads of 128": 2}),
        (LLAMA | {"head_dim": 80}, {}, {"on FLASH_ATTN: head size 80": 2}),
        (LLAMA | {"torch_dtype": "float32"}, {}, {"on FLASH_ATTN: queries of float32": 2}),
        (LLAMA | {"attn_logit_softcapping": 50.0}, {}, {"on FLASH_ATTN: scores capped at 50": 2}),
        (LLAMA | {"model_type": "gpt_oss"}, {}, {"on FLASH_ATTN: attention sinks": 2}),
        (
            LLAMA | {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention", "linear_attention"]},
            {},
            {
                "on FLASH_ATTN: sliding window of 128": 1,
                "decode on Mjolnir: bf16, 32/8 heads of 128": 1,
                "on FLASH_ATTN: layers of linear_attention": 1,
            },
        ),
        (
            LLAMA | {"kv_lora_rank": 512},
            {},
            {"on FLASH_ATTN: MLA: choose another backend, vLLM does not start with this one": 2},
        ),
        ({"text_config": LLAMA, "vision_config": {}}, {}, {"decode on Mjolnir: bf16, 32/8 heads of 128": 2}),
    ],
)
def test_layers_of_a_model(
    tmp_path: Path, config: dict[str, Any], options: dict[str, Any], want: dict[str, int]
) -> None:
    assert layers(tmp_path, config, **options) == want


@pytest.mark.parametrize("kv_cache_dtype", ["nvfp4", "e2m3"])
def test_a_cache_that_only_mjolnir_reads_has_no_fallback(tmp_path: Path, kv_cache_dtype: str) -> None:
    mixed = LLAMA | {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention", "linear_attention"]}
    assert layers(tmp_path, mixed, kv_cache_dtype=kv_cache_dtype) == {
        "the server will stop: sliding window of 128": 1,
        f"decode on Mjolnir: {kv_cache_dtype}, 32/8 heads of 128": 1,
        "on FLASH_ATTN: layers of linear_attention": 1,
    }
    stops = {"the server will stop: no kernels for this device": 2}
    assert layers(tmp_path, LLAMA, REFERENCE, kv_cache_dtype=kv_cache_dtype) == stops
    kernels = doctor.describe(REFERENCE, "why not", kv_cache_dtype=kv_cache_dtype)["kernels"]
    assert kernels == "no, the server will stop: why not"


def test_without_kernels_everything_falls_back(tmp_path: Path) -> None:
    assert layers(tmp_path, LLAMA, REFERENCE) == {"on FLASH_ATTN: no kernels for this device": 2}
    assert doctor.describe(REFERENCE, "why not")["kernels"] == "no, everything runs on the fallback: why not"


def test_heads_that_ranks_cannot_share(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tensor_parallel must fit 32 heads on 8 KV heads, got 3"):
        layers(tmp_path, LLAMA, tensor_parallel=3)
    with pytest.raises(ValueError, match="no num_attention_heads"):
        layers(tmp_path, {"num_hidden_layers": 1})


@pytest.mark.parametrize(
    "content, message",
    [
        (b"{", "config.json is no JSON: "),
        (b"[" * 100_000, "config.json is no JSON: "),
        (b'"\xff"', "config.json is no JSON: .*utf-8"),
        (b"[]", "config.json must hold an object, and so must its text_config, got list"),
        (b'{"text_config": [1]}', "must hold an object.* got list"),
        ({"num_hidden_layers": None}, "config.json has no num_hidden_layers"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be an integer of at least 1 or null, got '2'"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer of at least 1 or null, got True"),
        ({"num_attention_heads": 32.0}, r"num_attention_heads must be an integer of at least 1 or null, got 32\.0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be an integer of at least 1 or null, got 0"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"head_dim": [128]}, r"head_dim must be an integer of at least 1 or null, got \[128\]"),
        ({"layer_types": "full"}, "layer_types must be a list or null, got 'full'"),
        ({"sliding_window": "long"}, "sliding_window must be a number or null, got 'long'"),
        ({"attn_logit_softcapping": "50"}, "attn_logit_softcapping must be a number or null, got '50'"),
    ],
)
def test_odd_configurations_are_refused_by_name(tmp_path: Path, content: Any, message: str) -> None:
    content = content if isinstance(content, bytes) else json.dumps(LLAMA | content).encode()
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        doctor.describe(CUTE, "", model=tmp_path)
    assert CliRunner().invoke(app, ["doctor", "--model", str(tmp_path)]).exit_code == 2


@pytest.mark.parametrize(
    "version, want",
    [
        (None, "not installed"),
        ("0.26.0", "0.26.0"),
        ("0.33.1+cu130", "0.33.1+cu130"),
        ("0.3.0", "0.3.0: not one of those that Mjolnir is tested with, 0.26, 0.33"),
    ],
)
def test_vllms_version(monkeypatch: pytest.MonkeyPatch, version: str | None, want: str) -> None:
    def lookup(name: str) -> str:
        if version is None:
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(doctor.importlib.metadata, "version", lookup)
    assert doctor.describe(CUTE, "")["vllm"] == want


def test_whether_vllm_finds_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    entries: list[Any] = []
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda group, name: entries)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert doctor.describe(CUTE, "")["plugin"].startswith("vLLM will not find it")
    entries.append(type("Entry", (), {"value": "mjolnir.integrations.vllm.plugin:register"}))
    assert doctor.describe(CUTE, "")["plugin"] == "found, mjolnir.integrations.vllm.plugin:register"
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert doctor.describe(CUTE, "")["plugin"] == "vLLM will not load it: VLLM_PLUGINS=other"


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    result = CliRunner().invoke(
        app, ["doctor", "--json", "--vllm", "--model", str(tmp_path), "--kv-cache-dtype", "fp8"]
    )
    assert result.exit_code == 0, result.output
    section = json.loads(result.output)["vLLM"]
    assert section["fallback"] == "FLASH_ATTN" and sum(section["layers"].values()) == 2
    plain = CliRunner().invoke(app, ["doctor", "--json"])
    assert "vLLM" not in json.loads(plain.output)
    missing = CliRunner().invoke(app, ["doctor", "--model", str(tmp_path / "none")])
    assert missing.exit_code == 2 and "config.json" in missing.output


def test_scales_of_caches_that_mjolnir_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))

    def scales(kv_cache_dtype: str) -> str | None:
        report = doctor.describe(CUTE, "", model=tmp_path, kv_cache_dtype=kv_cache_dtype)
        found: str | None = report.get("scales")
        return found

    monkeypatch.delenv("MJOLNIR_VLLM_SCALES", raising=False)
    assert scales("fp8") is None
    assert scales("nvfp4") == "vLLM's, one a layer"
    assert scales("e2m3") == "none, and e2m3 needs them: set MJOLNIR_VLLM_SCALES"
    path = tmp_path / "scales.json"
    monkeypatch.setenv("MJOLNIR_VLLM_SCALES", str(path))
    assert str(scales("e2m3")).startswith("the server will stop: ") and "scales.json" in str(scales("e2m3"))
    sides = {"k_amax": [1.0] * 8, "v_amax": [1.0] * 8}
    file = {"kind": "mjolnir-kv-scales", "version": 1, "num_kv_heads": 8, "head_size": 128, "layers": {"0": sides}}
    path.write_text(json.dumps(file))
    assert scales("e2m3") == f"{path}: 1 layers, 8 KV heads of 128"
