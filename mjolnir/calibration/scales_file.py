"""The scales file: largest magnitudes of K and V by layer, from which the scales of any KV format follow.

    {"kind": "mjolnir-kv-scales", "version": 1, "model": "...", "source": "...", "tokens": 16384,
     "num_kv_heads": 3, "head_size": 64, "headroom": 1.1,
     "layers": {"0": {"k_amax": [[...], ...], "v_amax": [[...], ...]}, ...}}

``k_amax`` and ``v_amax`` are (num_kv_heads, head_size) lists, per channel, or (num_kv_heads,), per head. Numbers fit
fp32. Only model, source, tokens and headroom may be missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from mjolnir.calibration.observe import AmaxObserver

LARGEST = torch.finfo(torch.float32).max

Magnitude = Annotated[float, Field(ge=0, le=LARGEST)]
Amax = list[list[Magnitude]] | list[Magnitude]


def check_headroom(headroom: Any) -> float:
    """A factor that scales leave above amax.

    Raises:
        TypeError: not a number.
        ValueError: not positive, or beyond fp32.
    """
    if isinstance(headroom, bool) or not isinstance(headroom, (int, float, np.floating)):
        raise TypeError(f"headroom must be a number, got {headroom!r} ({type(headroom).__name__})")
    if not 0 < headroom <= LARGEST:
        raise ValueError(f"headroom must be a positive factor that fits fp32, got {headroom}")
    return float(headroom)


def _index(key: Any) -> Any:
    """A layer's key in JSON, where "00" is not "0"."""
    return int(key) if isinstance(key, str) and re.fullmatch("0|[1-9][0-9]{0,8}", key) else key


LayerIndex = Annotated[int, BeforeValidator(_index), Field(ge=0)]


class LayerAmax(BaseModel):
    """Largest magnitudes of one layer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    k_amax: Amax
    v_amax: Amax


class ScalesFile(BaseModel):
    """A scales file, checked.

    Raises:
        ValueError: a field is missing, unknown, of another type or shape, or out of its range (pydantic's error).

    Attributes:
        model, source: what was observed, in words.
        tokens: observed per layer.
        headroom: room that scales leave above amax, a factor; loading may choose another.
        layers: by index of the layer in the model.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    kind: Literal["mjolnir-kv-scales"]
    version: Literal[1]
    model: str = ""
    source: str = ""
    tokens: Annotated[int, Field(ge=0)] = 0
    num_kv_heads: Annotated[int, Field(ge=1)]
    head_size: Annotated[int, Field(ge=1)]
    headroom: Annotated[float, Field(gt=0, le=LARGEST)] = 1.0
    layers: dict[LayerIndex, LayerAmax]

    @model_validator(mode="after")
    def _check_shapes(self) -> ScalesFile:
        if not self.layers:
            raise ValueError("layers must not be empty")
        shapes = ((self.num_kv_heads,), (self.num_kv_heads, self.head_size))
        for index, layer in self.layers.items():
            for name, amax in (("k_amax", layer.k_amax), ("v_amax", layer.v_amax)):
                if (shape := _shape(amax)) not in shapes:
                    raise ValueError(
                        f"layer {index}: {name} must have shape {shapes[0]} or {shapes[1]}, got "
                        f"{'rows of unequal length' if shape is None else shape}"
                    )
        return self

    def require_layers(self, layers: Sequence[int]) -> None:
        """Raises ValueError, naming them, if any of the layers is missing."""
        missing = sorted(set(layers) - set(self.layers))
        if missing:
            have = f"{min(self.layers)} … {max(self.layers)}"
            raise ValueError(f"the scales file has no layer {', '.join(map(str, missing))}; it has {have}")

    def save(self, path: Path | str) -> None:
        """Write the file, one layer a line. Raises OSError where that cannot be."""
        path = Path(path)
        top = self.model_dump(exclude={"layers"})
        head = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in top.items()]
        layers = [
            f"  {json.dumps(str(index))}: {json.dumps(layer.model_dump())}" for index, layer in self.layers.items()
        ]
        text = "{\n" + ",\n".join(head) + ',\n"layers": {\n' + ",\n".join(layers) + "\n}\n}\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> ScalesFile:
        """Read and check a file.

        Raises:
            OSError: it cannot be read.
            ValueError: it is no JSON, has a key twice, is no scales file of this version, or a field is missing,
                unknown, of another type or shape, or out of its range; the message names the file and the field.
        """
        content = Path(path).read_bytes()
        try:
            return cls.model_validate(json.loads(content, object_pairs_hook=_without_duplicates))
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, fault['loc'])) or 'the file'}: {fault['msg'].removeprefix('Value error, ')}"
                for fault in error.errors()[:4]
            )
            raise ValueError(f"{path} is not a scales file: {faults}") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a scales file: {error}") from error

    @classmethod
    def of(
        cls,
        observer: AmaxObserver,
        *,
        per_channel: bool = True,
        headroom: float = 1.0,
        model: str = "",
        source: str = "",
    ) -> ScalesFile:
        """What an observer saw.

        Raises:
            TypeError: ``headroom`` is not a number.
            ValueError: it saw nothing, layers of several shapes, or ``headroom`` is out of its range.
        """
        headroom = check_headroom(headroom)
        if not observer.tokens:
            raise ValueError("observer has seen no tokens")
        layers = {}
        for index in sorted(observer.tokens):
            amax = observer.amax(index)
            k_amax, v_amax = amax if per_channel else (x.amax(-1) for x in amax)
            layers[index] = LayerAmax(k_amax=k_amax.tolist(), v_amax=v_amax.tolist())
        heads, head_size = observer.amax(min(layers))[0].shape
        return cls(
            kind="mjolnir-kv-scales",
            version=1,
            model=model,
            source=source,
            tokens=min(observer.tokens.values()),
            num_kv_heads=heads,
            head_size=head_size,
            headroom=headroom,
            layers=layers,
        )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; json itself would keep the last of two values."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{key!r} is there twice")
        result[key] = value
    return result


def _shape(amax: Amax) -> tuple[int, ...] | None:
    """None for rows of unequal length."""
    if not amax or not isinstance(amax[0], list):
        return (len(amax),)
    lengths = {len(row) if isinstance(row, list) else -1 for row in amax}
    return (len(amax), lengths.pop()) if len(lengths) == 1 else None
