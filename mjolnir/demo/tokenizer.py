"""SmolLM2's tokenizer, rebuilt from GGUF metadata, and its chat format (ChatML)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""What the model's own chat template puts first when the conversation has no system message."""

CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


class ChatTokenizer:
    """Byte-level BPE over the vocabulary and merges that a GGUF file carries.

    Args:
        metadata: GGUF metadata by key, as ``read_gguf`` returns it.

    Raises:
        ValueError: the file's tokenizer is not SmolLM's.
        ModuleNotFoundError: the ``tokenizers`` library is not installed.
    """

    def __init__(self, metadata: dict[str, Any]) -> None:
        kind = (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])
        if kind != ("gpt2", "smollm"):
            raise ValueError(f"metadata: tokenizer (model, pre) is {kind}, expected ('gpt2', 'smollm')")
        try:
            from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("the demo needs tokenizers: pip install 'mjolnir-attention[demo]'") from error

        tokens = metadata["tokenizer.ggml.tokens"]
        types = metadata["tokenizer.ggml.token_type"]
        merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
        self._tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
        # "smollm" in GGUF: every digit by itself, then GPT-2's regular expression.
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self._tokenizer.decoder = decoders.ByteLevel()
        control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
        self._tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
        self.end_of_turn: int = metadata["tokenizer.ggml.eos_token_id"]

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, tokens: list[int]) -> str:
        """Text of ``tokens``, without control tokens."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def encode_chat(self, prompt: str) -> list[int]:
        """Tokens of a conversation whose next turn is the assistant's answer to ``prompt``."""
        turns = f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n"
        return self.encode(turns + "<|im_start|>assistant\n")

    def stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """Pieces of text as tokens come; a character split over several tokens comes whole."""
        from tokenizers.decoders import DecodeStream

        decoder = DecodeStream(skip_special_tokens=True)
        for token in tokens:
            piece = decoder.step(self._tokenizer, token)
            if piece:
                yield piece
