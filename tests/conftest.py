"""Shared by all tests: GPU tests are skipped, with the reason, where there is no CUDA device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

# A first call may load or compile something: time limits per example would only make runs flaky.
settings.register_profile("mjolnir", deadline=None)
settings.load_profile("mjolnir")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch.cuda.is_available() is False")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
