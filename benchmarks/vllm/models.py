"""Folders that vLLM loads models from: Qwen3-like ones with random weights, and SmolLM2-135M from its GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


def qwen_config(layers: int, hidden: int, heads: int, kv_heads: int, vocab: int, max_len: int) -> dict[str, Any]:
    """A Qwen3 configuration: head size 128, the MLP three times as wide as the model."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": hidden,
        "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 128, "vocab_size": vocab, "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "attention_bias": False,
        "attention_dropout": 0.0, "use_sliding_window": False, "sliding_window": None, "max_window_layers": layers,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip


def make_qwen(folder: Path, config: dict[str, Any], seed: int = 0) -> None:
    """Write the configuration and random weights.

    Matrices are normal with a standard deviation of in^-1/2, so that activations keep their size and attention has its
    usual share of them; embeddings with 0.1, so that the best token leads by about half a nat and greedy decoding
    depends on what the layers compute, not on noise alone.
    """
    from safetensors.torch import save_file

    write_config(folder, config)
    gen = torch.Generator().manual_seed(seed)
    hidden, mlp, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=gen) * columns**-0.5).bfloat16()

    tensors = {
        "model.embed_tokens.weight": (torch.randn(config["vocab_size"], hidden, generator=gen) * 0.1).bfloat16(),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_proj", heads * d, hidden),
            ("self_attn.k_proj", kv_heads * d, hidden),
            ("self_attn.v_proj", kv_heads * d, hidden),
            ("self_attn.o_proj", hidden, heads * d),
            ("mlp.gate_proj", mlp, hidden),
            ("mlp.up_proj", mlp, hidden),
            ("mlp.down_proj", hidden, mlp),
        ):
            tensors[f"{at}.{name}.weight"] = matrix(rows, columns)
        for name, size in (
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
            ("self_attn.q_norm", d),
            ("self_attn.k_norm", d),
        ):
            tensors[f"{at}.{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def make_smollm(folder: Path, gguf: Path) -> dict[str, Any]:
    """Write SmolLM2's weights, in bf16, and its configuration under the names of its original checkpoint. Returns the
    GGUF file's metadata."""
    from safetensors.torch import save_file

    from mjolnir.demo.model import LlamaConfig
    from mjolnir.demo.weights import read_gguf

    metadata, weights = read_gguf(gguf)
    c = LlamaConfig.from_metadata(metadata)
    hidden = c.num_heads * c.head_size
    write_config(folder, {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": weights["blk.0.ffn_gate.weight"].shape[0], "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads, "head_dim": c.head_size,
        "vocab_size": len(weights["token_embd.weight"]), "max_position_embeddings": c.max_tokens,
        "rms_norm_eps": float(c.norm_eps), "rope_theta": float(c.rope_base), "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "bos_token_id": 1, "eos_token_id": 2,
    })  # fmt: skip
    tensors = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"],
    }
    names = {
        "attn_norm": "input_layernorm", "attn_output": "self_attn.o_proj", "attn_v": "self_attn.v_proj",
        "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    for layer in range(c.num_layers):
        for ours, theirs in names.items():
            tensors[f"model.layers.{layer}.{theirs}.weight"] = weights[f"blk.{layer}.{ours}.weight"]
        for ours, theirs, heads in (("attn_q", "q_proj", c.num_heads), ("attn_k", "k_proj", c.num_kv_heads)):
            rows = weights[f"blk.{layer}.{ours}.weight"]
            tensors[f"model.layers.{layer}.self_attn.{theirs}.weight"] = halves_first(rows, heads)
    save_file({name: t.bfloat16().contiguous() for name, t in tensors.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    return metadata


def make_tokenizer(folder: Path, vocab: int) -> None:
    """Write a tokenizer of whole words w0, w1, …, for a server that takes text."""
    from tokenizers import Tokenizer
    from tokenizers import models as kinds
    from tokenizers.pre_tokenizers import Whitespace

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(vocab - 4))]
    tokenizer = Tokenizer(kinds.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}), encoding="utf-8"
    )


def halves_first(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a q or k projection from GGUF's order, where rotary pairs are neighbours, to the checkpoint's, where a
    head's element i is paired with element i + d / 2."""
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def write_config(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
