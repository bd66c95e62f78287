"""What every test shares: hypothesis settings for busy machines, and the rule for tests that need a GPU."""

from __future__ import annotations

import pytest
from hypothesis import settings

# Wall-clock deadlines measure the machine's other tenants, not the code. The suite tries the same examples each time,
# so that a change is judged by what it changes; `make laws` draws others.
settings.register_profile("kvlane", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile("kvlane")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    reason = _why_no_gpu()
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_gpu() -> str | None:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return None if torch.cuda.is_available() else "no CUDA device"
