# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that run real engines."""

from collections.abc import Callable

import pytest

from vllm_tiered.adapter import kv_config


@pytest.fixture
def force_far_layers(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set the number of far layers, also where no expansion leads to it (small models)."""

    def force(far_layers: int) -> None:
        monkeypatch.setattr(kv_config, "resolve_far_layers", lambda kv, num_layers: far_layers)

    return force
