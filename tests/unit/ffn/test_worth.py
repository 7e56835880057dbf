# SPDX-License-Identifier: Apache-2.0
"""A store that needs more near memory than the dense FFN is left alone, unless the user insists."""

from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.ffn_models import random_ffn
from tests.fixtures.ffn_runtimes import Scripted
from vllm_tiered.config import FfnConfig
from vllm_tiered.ffn import memory_plan, worth
from vllm_tiered.ffn.open import make_plan
from vllm_tiered.ffn.selection import ALL
from vllm_tiered.ffn.store.reader import NeuronStore
from vllm_tiered.ffn.worth import better_format, costs, mix_costs, why_dense
from vllm_tiered.units import format_bytes


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("store") / "ffn"
    random_ffn(folder, gated=True, num_layers=4, hidden=96, neurons=512)
    return str(folder)


@pytest.fixture(autouse=True)
def predictors(monkeypatch: pytest.MonkeyPatch) -> list[Scripted]:
    """The store has none, and `prepare` would have had to measure them."""
    found = [Scripted(512) for _ in range(4)]
    monkeypatch.setattr(worth, "load_predictors", lambda _: found)
    return found


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Staging is small beside a real model's FFN."""
    monkeypatch.setattr(memory_plan, "_CHUNK_BYTES", 10 * 1024)


def test_neurons_of_which_none_is_known_to_be_inactive_need_more_than_the_dense_ffn(
    store: str, predictors: list[Scripted]
) -> None:
    said = why_dense(FfnConfig(store=store))
    dense = 4 * 512 * 3 * 96 * 4
    assert (
        said is not None and f"the dense FFN needs {format_bytes(dense)}," in said and store in said
    )
    with NeuronStore.open(store) as opened:
        plan = make_plan(FfnConfig(store=store), opened, list(predictors), num_ranks=1)
    assert plan.near_bytes > dense and f"neurons need {format_bytes(plan.near_bytes)} in" in said
    assert "perplexity" not in said


@pytest.mark.parametrize(
    "asked",
    [{"mix": (0.25, 0.25, 0.5)}, {"exact": True}, {"near_gib": 1.0}],
    ids=["mix", "exact", "near_gib"],
)
def test_what_the_user_asked_for_is_done(store: str, asked: dict[str, Any]) -> None:
    assert why_dense(FfnConfig(store=store, **asked)) is None


def test_other_formats_are_beside_it_with_their_quality(store: str, monkeypatch) -> None:
    """Codes of 3 rows of 96 weights; a scale of 2 bytes for each row in 8 bit, and for 32 in 4."""
    # The same mix of all neurons, and of those that are predicted to be active.
    known = {
        "plain": {ALL.shares: 7.5, (0, 1, 0): 7.6, (0.25, 0.25, 0.5): 1.0},
        "candidates": {ALL.shares: 1.0, (0, 1, 0): 1.0, (0.25, 0.25, 0.5): 7.55},
    }
    monkeypatch.setattr(worth, "perplexities", lambda _, of: known[of])
    dense, in_8_bit, in_4_bit, ours = costs(FfnConfig(store=store))
    neurons = 4 * 512
    assert (dense.near_bytes, dense.perplexity) == (neurons * 3 * 96 * 4, 7.5)
    assert (in_8_bit.near_bytes, in_8_bit.perplexity) == (neurons * 3 * (96 + 2), 7.6)
    assert (in_4_bit.near_bytes, in_4_bit.perplexity) == (neurons * 3 * (48 + 3 * 2), None)
    assert ours.perplexity == 7.55
    said = str(why_dense(FfnConfig(store=store)))
    assert "perplexity 7.55 in" in said
    assert f"in 8 bit {format_bytes(in_8_bit.near_bytes)}, perplexity 7.6 and" in said


@pytest.mark.parametrize(
    ("in_8_bit", "of_store", "near_bytes", "is_better"),
    [
        (7.55, 7.55, 10_000_000, True),
        (7.56, 7.55, 10_000_000, False),  # it is further from the model
        (7.0, 7.55, 1000, False),  # it takes more
        (None, 7.55, 10_000_000, False),
        (7.0, None, 10_000_000, False),
    ],
)
def test_a_format_that_takes_less_and_loses_nothing_is_named(
    store: str,
    monkeypatch: pytest.MonkeyPatch,
    in_8_bit: float | None,
    of_store: float | None,
    near_bytes: int,
    is_better: bool,
) -> None:
    class Plan:
        pass

    Plan.near_bytes, Plan.mix = near_bytes, None  # type: ignore[attr-defined]
    known = {ALL.shares: of_store, (0, 1, 0): in_8_bit}
    monkeypatch.setattr(worth, "perplexities", lambda _, of: known)
    monkeypatch.setattr(worth, "make_plan", lambda *_, **__: Plan)
    said = better_format(FfnConfig(store=store, near_gib=0.01))
    assert (said is not None) == is_better
    if said:
        size = format_bytes(4 * 512 * 3 * (96 + 2))
        assert f"in 8 bit {size}, perplexity 7.55; the neurons need" in said


def test_each_mix_that_was_tried_has_its_near_memory(store: str, monkeypatch) -> None:
    known = {(0.5, 0.5, 0.0): 7.5, (0.25, 0.25, 0.5): 7.6, (0.0, 0.0, 1.0): 8.5}
    monkeypatch.setattr(worth, "perplexities", lambda _, of: known if of == "candidates" else {})
    found = mix_costs(FfnConfig(store=store))
    assert [(one.name, one.perplexity) for one in found] == [
        ("50/50/0", 7.5),
        ("25/25/50", 7.6),
        ("0/0/100", 8.5),
    ]
    assert found[0].near_bytes > found[1].near_bytes > found[2].near_bytes > 0


@pytest.mark.parametrize("more", [0, 1])
def test_it_is_the_plans_bytes_that_decide(store: str, monkeypatch, more: int) -> None:
    class Plan:
        near_bytes = 4 * 512 * 3 * 96 * 4 + more

        mix = None

    monkeypatch.setattr(worth, "make_plan", lambda *_, **__: Plan)
    assert (why_dense(FfnConfig(store=store)) is not None) == bool(more)


def test_a_store_that_cannot_be_opened_says_so_when_it_is_opened(tmp_path: Path) -> None:
    assert why_dense(FfnConfig(store=str(tmp_path / "none"))) is None
