# SPDX-License-Identifier: Apache-2.0
"""Copies that run during rounds: their rate, and the figures from the rounds."""

import json
import math
import time
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.harness.background_copier import PAGE_BYTES, PAGES_PER_COPY, Copier
from benchmarks.harness.summary import COPIED_BYTES
from benchmarks.suites.kv import copy_cost
from tests.fakes.benchmark_engines import FakeEngines, answer_in
from tests.fixtures.rounds import make_round

COPY_BYTES = PAGES_PER_COPY * PAGE_BYTES


def test_a_copier_copies_at_most_at_its_rate_and_then_stops():
    start = time.perf_counter()
    with Copier(0.05) as copier:
        time.sleep(0.3)
    seconds = time.perf_counter() - start
    num_bytes = copier.num_bytes
    assert COPY_BYTES <= num_bytes <= 0.05e9 * seconds + COPY_BYTES
    time.sleep(0.1)
    assert copier.num_bytes == num_bytes


def test_a_copier_that_is_not_held_back_really_copies():
    copier = Copier(math.inf)
    assert copier._far.words is not None and copier._near.words is not None
    copier._far.words[:] = np.arange(copier._far.num_pages)[:, None]
    with copier:
        while copier.num_bytes < 8 * COPY_BYTES:
            time.sleep(0.01)
    pages = copier._near.words[:, 0]
    assert (copier._near.words == pages[:, None]).all()
    assert (np.diff(pages.reshape(2, -1), axis=1) == 1).all()  # two whole chunks of far memory


def rounds(label, *, seconds, copied_gb=None):
    result = make_round(label, seconds=seconds)
    return [result if copied_gb is None else with_copies(result, copied_gb)]


def with_copies(result, copied_gb):
    return replace(result, counters={**result.counters, COPIED_BYTES: copied_gb * 1e9})


def test_figures_from_the_rounds():
    measured = {
        "no copies": rounds("no copies", seconds=4.0),
        "copies, 1 GB/s": rounds("copies, 1 GB/s", seconds=4.4, copied_gb=4.0),
        "copies, 2 GB/s": rounds("copies, 2 GB/s", seconds=5.0, copied_gb=5.0),
        "copies, inf GB/s": rounds("copies, inf GB/s", seconds=8.0, copied_gb=40.0),
    }
    result = copy_cost.summarise(measured, [1.0, 2.0, math.inf])
    assert result["seconds_per_gb"] == pytest.approx(0.15)  # of 0.1 and 0.2
    assert result["fraction_of_speed"] == pytest.approx(0.5)
    assert result["gb_per_s_while_computing"] == pytest.approx(5.0)
    assert list(result["by_rate"]) == ["0", "1", "2", "inf"]
    assert result["by_rate"]["2"]["seconds_per_gb"] == pytest.approx(0.2)


def test_engines_differ_in_their_background_copies(monkeypatch, fake_model):
    def answer(spec, requests):
        result = answer_in(lambda spec: 2.0 + min(1.0, spec.copies_gb_per_s))(spec, requests)
        return with_copies(result, 1.0) if spec.copies_gb_per_s else result

    fakes = FakeEngines(answer)
    monkeypatch.setattr(copy_cost, "engines", fakes)
    monkeypatch.setattr(copy_cost, "demo_model_dir", lambda: fake_model)
    monkeypatch.setattr(copy_cost, "idle_gb_per_s", lambda: 9.0)
    settings = copy_cost.Settings(num_requests=6, rates=(0.5,), max_repeats=0, rounds=1)
    steps: list[str] = []
    result = copy_cost.run(settings, steps.append)
    assert len(steps) == copy_cost.num_steps(settings)
    assert set(copy_cost.RESULT_KEYS) <= result.keys()
    json.loads(json.dumps(result, allow_nan=False))
    specs = [engine.spec for engine in fakes.started]
    assert [spec.copies_gb_per_s for spec in specs] == [0.0, 0.5, math.inf]
    assert len({replace(spec, label="", copies_gb_per_s=0.0) for spec in specs}) == 1
    assert len(copy_cost.table(result).splitlines()) == 2 + 3
