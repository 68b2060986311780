"""Real English that every Python ships with: the topics of ``help()``, which are chapters of the language reference."""

from __future__ import annotations

import hashlib
from typing import Any

CALIBRATION, EVALUATION = "calibration", "evaluation"
"""Two parts without a topic in common: every third topic in alphabetical order, and the others."""


def english_text(part: str) -> str:
    """The topics of one part, joined.

    Raises:
        ValueError: an unknown part.
    """
    from pydoc_data.topics import topics

    if part not in (CALIBRATION, EVALUATION):
        raise ValueError(f"part must be {CALIBRATION!r} or {EVALUATION!r}, got {part!r}")
    names = [name for i, name in enumerate(sorted(topics)) if (i % 3 == 0) == (part == CALIBRATION)]
    return "\n\n".join(topics[name].strip() for name in names)


def text_tokens(tokenizer: Any, part: str) -> list[int]:
    """The part as tokens of a ``ChatTokenizer``."""
    return tokenizer.encode(english_text(part))


def text_digest(part: str) -> str:
    """SHA-256 of the part: it differs between versions of Python."""
    return hashlib.sha256(english_text(part).encode()).hexdigest()
