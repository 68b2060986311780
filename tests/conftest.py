"""Shared by all tests: GPU tests are skipped, with the reason, where there is no CUDA device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# A first call may load or compile something: time limits per example would only make runs flaky.
settings.register_profile("mjolnir", deadline=None)
settings.load_profile("mjolnir")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Thousands of small products: on a busy machine threads that wait for each other take 100 times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch.cuda.is_available() is False")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
