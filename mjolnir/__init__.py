"""Mjolnir: decode attention over paged, low-precision KV caches.

The public names below load on first use, so that ``import mjolnir`` and the command line start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mjolnir.expand import expand_pages
    from mjolnir.layouts import KVLayout, detect_kv_layout, split_kv_cache, split_nvfp4_cache
    from mjolnir.runner import DecodeRunner, StepPlan
    from mjolnir.write import write_kv

__version__ = "0.1.0"

__all__ = [
    "DecodeRunner",
    "KVLayout",
    "StepPlan",
    "__version__",
    "detect_kv_layout",
    "expand_pages",
    "split_kv_cache",
    "split_nvfp4_cache",
    "write_kv",
]

_HOME = {
    "DecodeRunner": "mjolnir.runner",
    "KVLayout": "mjolnir.layouts",
    "StepPlan": "mjolnir.runner",
    "detect_kv_layout": "mjolnir.layouts",
    "expand_pages": "mjolnir.expand",
    "split_kv_cache": "mjolnir.layouts",
    "split_nvfp4_cache": "mjolnir.layouts",
    "write_kv": "mjolnir.write",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
