# SPDX-License-Identifier: Apache-2.0
"""A store that needs more near memory than the dense FFN is left alone, unless the user insists."""

from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.ffn_models import random_ffn
from vllm_tiered.config import FfnConfig
from vllm_tiered.ffn import memory_plan, worth
from vllm_tiered.ffn.layout import FfnShape
from vllm_tiered.ffn.open import make_plan
from vllm_tiered.ffn.store.reader import NeuronStore
from vllm_tiered.ffn.worth import why_dense
from vllm_tiered.units import format_bytes


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("store") / "ffn"
    random_ffn(folder, gated=True, num_layers=4, hidden=128, neurons=512)
    return str(folder)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Staging is small beside a real model's FFN."""
    monkeypatch.setattr(memory_plan, "_CHUNK_BYTES", 10 * 1024)


def test_a_base_and_half_the_bytes_are_more_than_all_of_them(store: str) -> None:
    """All neurons in 4 bit, and buffers for twice a token's 25/25/50."""
    said = why_dense(FfnConfig(store=store))
    dense = 4 * 512 * 3 * 128 * 4
    assert said is not None and f"the dense FFN {format_bytes(dense)}" in said and store in said
    with NeuronStore.open(store) as opened:
        plan = make_plan(FfnConfig(store=store), opened, [], num_ranks=1)
    assert plan.near_bytes > dense and f"need {format_bytes(plan.near_bytes)} near" in said


@pytest.mark.parametrize(
    "asked",
    [{"mix": (0.25, 0.25, 0.5)}, {"exact": True}, {"near_gib": 1.0}],
    ids=["mix", "exact", "near_gib"],
)
def test_what_the_user_asked_for_is_done(store: str, asked: dict[str, Any]) -> None:
    assert why_dense(FfnConfig(store=store, **asked)) is None


@pytest.mark.parametrize("more", [0, 1])
def test_it_is_the_plans_bytes_that_decide(store: str, monkeypatch, more: int) -> None:
    class Plan:
        near_bytes = 4 * 512 * 3 * 128 * 4 + more

        shape = FfnShape(num_layers=4, hidden=128, neurons=512, gated=True, dtype_bytes=4)

    monkeypatch.setattr(worth, "make_plan", lambda *_, **__: Plan)
    assert (why_dense(FfnConfig(store=store)) is not None) == bool(more)


def test_a_store_that_cannot_be_opened_says_so_when_it_is_opened(tmp_path: Path) -> None:
    assert why_dense(FfnConfig(store=str(tmp_path / "none"))) is None
