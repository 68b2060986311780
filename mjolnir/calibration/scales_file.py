"""The scales file: largest magnitudes of K and V by layer, from which the scales of any KV format follow.

    {"kind": "mjolnir-kv-scales", "version": 1, "model": "...", "source": "...", "tokens": 16384,
     "num_kv_heads": 3, "head_size": 64, "headroom": 1.1,
     "layers": {"0": {"k_amax": [[...], ...], "v_amax": [[...], ...]}, ...}}

``k_amax`` and ``v_amax`` are (num_kv_heads, head_size) lists, per channel, or (num_kv_heads,), per head.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mjolnir.calibration.observe import AmaxObserver

KIND, VERSION = "mjolnir-kv-scales", 1

Magnitude = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Amax = list[list[Magnitude]] | list[Magnitude]


class LayerAmax(BaseModel):
    """Largest magnitudes of one layer."""

    model_config = ConfigDict(extra="forbid")

    k_amax: Amax
    v_amax: Amax


class ScalesFile(BaseModel):
    """A scales file, checked.

    Attributes:
        model, source: what was observed, in words.
        tokens: observed per layer.
        headroom: room that scales leave above amax, a factor; loading may choose another.
        layers: by index of the layer in the model.
    """

    model_config = ConfigDict(extra="forbid")

    kind: Literal["mjolnir-kv-scales"] = "mjolnir-kv-scales"
    version: Literal[1] = 1
    model: str = ""
    source: str = ""
    tokens: Annotated[int, Field(ge=0)] = 0
    num_kv_heads: Annotated[int, Field(ge=1)]
    head_size: Annotated[int, Field(ge=1)]
    headroom: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    layers: dict[Annotated[int, Field(ge=0)], LayerAmax]

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

    def save(self, path: Path) -> None:
        """Write the file, one layer a line."""
        top = self.model_dump(exclude={"layers"})
        head = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in top.items()]
        layers = [
            f"  {json.dumps(str(index))}: {json.dumps(layer.model_dump())}" for index, layer in self.layers.items()
        ]
        text = "{\n" + ",\n".join(head) + ',\n"layers": {\n' + ",\n".join(layers) + "\n}\n}\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> ScalesFile:
        """Read and check a file.

        Raises:
            OSError: it cannot be read.
            ValueError: it is no scales file of this version, or a field is missing, unknown or of another shape; the
                message names the file and the field.
        """
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"), strict=False)
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, fault['loc'])) or 'the file'}: {fault['msg'].removeprefix('Value error, ')}"
                for fault in error.errors()[:4]
            )
            raise ValueError(f"{path} is not a scales file: {faults}") from error

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
            ValueError: it saw nothing.
        """
        if not observer.tokens:
            raise ValueError("observer has seen no tokens")
        layers = {}
        for index in sorted(observer.tokens):
            amax = observer.amax(index)
            k_amax, v_amax = amax if per_channel else (x.amax(-1) for x in amax)
            layers[index] = LayerAmax(k_amax=k_amax.tolist(), v_amax=v_amax.tolist())
        heads, head_size = observer.amax(min(layers))[0].shape
        return cls(
            model=model,
            source=source,
            tokens=min(observer.tokens.values()),
            num_kv_heads=heads,
            head_size=head_size,
            headroom=headroom,
            layers=layers,
        )


def _shape(amax: Amax) -> tuple[int, ...] | None:
    """None for rows of unequal length."""
    if not amax or not isinstance(amax[0], list):
        return (len(amax),)
    lengths = {len(row) if isinstance(row, list) else -1 for row in amax}
    return (len(amax), lengths.pop()) if len(lengths) == 1 else None
