# SPDX-License-Identifier: Apache-2.0
"""Which side is faster, told from measured steps of a machine whose rates are known here."""

import numpy as np
import pytest

from vllm_tiered.ffn.switch_over import SwitchOver

READ, MULTIPLY, PER_TOKEN, OVERHEAD = 1 / 1.4e9, 1 / 16e9, 1 / 200e9, 4e-4
LAYERS = 30


def sparse_seconds(missing: int, multiplied: int, tokens: int) -> float:
    return OVERHEAD + missing * READ + multiplied * (MULTIPLY + tokens * PER_TOKEN)


def dense_seconds(tokens: int) -> float:
    return 0.14 + tokens * 2e-4


def trained(seed: int, noise: float) -> SwitchOver:
    """Prompts and small batches, as an engine sees them."""
    rng = np.random.default_rng(seed)
    switch = SwitchOver(LAYERS)

    def noisy(seconds: float) -> float:
        held_up = 10.0 if rng.random() < 0.03 else 1.0
        return seconds * held_up * float(1 + noise * rng.random())

    for _ in range(200):
        tokens, missing = int(rng.integers(1, 9)), int(rng.integers(0, 30_000_000))
        multiplied = missing + int(rng.integers(0, 20_000_000))
        seconds = noisy(sparse_seconds(missing, multiplied, tokens))
        switch.add_sparse(seconds, missing, multiplied, tokens, is_warm=False)
        # What is usual is that all is missing: steps are judged by what is missing of each.
        switch.add_sparse(
            noisy(sparse_seconds(missing, missing, 1)), missing, missing, 1, is_warm=True
        )
        prompt = int(rng.integers(4, 300))
        switch.add_dense(noisy(dense_seconds(prompt)), prompt)
    return switch


@pytest.mark.parametrize("seed", range(4))
def test_the_better_side_within_five_percent(seed: int) -> None:
    """Far beyond the batches it was trained on."""
    switch = trained(seed, noise=0.04)
    rng = np.random.default_rng(seed + 100)
    num_dense = 0
    for _ in range(300):
        tokens = int(rng.integers(1, 65))
        multiplied = int(rng.integers(1_000_000, 268_000_000))
        missing = int(multiplied * rng.random())
        is_dense = switch.prefers_dense(missing, multiplied, tokens)
        num_dense += is_dense
        both = (sparse_seconds(missing, multiplied, tokens), dense_seconds(tokens))
        assert both[is_dense] <= 1.05 * min(both)
    assert 0 < num_dense < 300 and switch.num_switched == num_dense


def test_nothing_is_switched_before_both_are_known() -> None:
    switch = SwitchOver(LAYERS)
    for _ in range(100):
        switch.add_sparse(10.0, 1000, 1000, 1, is_warm=True)
    assert not switch.prefers_dense(10**9, 10**9, 64)
    for tokens in range(20):
        switch.add_dense(0.1, tokens)
    assert switch.prefers_dense(10**9, 10**9, 64)


class Engine:
    """All layers of a model, each with a cache that dense steps leave as it is.

    A sparse step behind a sparse one misses `warm_share` of what it wants, any other one all of it.
    """

    WANTED = 2_000_000

    def __init__(self, warm_share: float, overhead: float, dense: float) -> None:
        self.switch = SwitchOver(LAYERS)
        self.warm_share, self.overhead, self.dense = warm_share, overhead, dense
        self._is_warm = [False] * LAYERS
        for _ in range(LAYERS):  # the prompt
            self.switch.add_dense(dense + 64 * 1e-5, 64)

    def sparse_seconds(self, missing: float) -> float:
        return self.overhead + missing * READ + self.WANTED * (MULTIPLY + PER_TOKEN)

    def cool(self) -> None:
        self._is_warm = [False] * LAYERS

    def token(self) -> tuple[float, int]:
        """Its seconds, and the layers that were computed densely."""
        total, num_dense = 0.0, 0
        for layer in range(LAYERS):
            share = self.warm_share if self._is_warm[layer] else 1.0
            missing = int(share * self.WANTED)
            if self.switch.prefers_dense(missing, self.WANTED, 1):
                total, num_dense = total + self.dense, num_dense + 1
                self.switch.add_dense(self.dense, 1)
                self._is_warm[layer] = False
            else:
                seconds = self.sparse_seconds(missing)
                total += seconds
                self.switch.add_sparse(
                    seconds, missing, self.WANTED, 1, is_warm=self._is_warm[layer]
                )
                self._is_warm[layer] = True
        return total, num_dense


def test_a_cold_cache_is_warmed_where_that_pays() -> None:
    """Dense is faster than a step that misses all, and slower than one that misses a tenth."""
    engine = Engine(warm_share=0.1, overhead=4e-4, dense=1.2e-3)
    assert engine.sparse_seconds(0.1 * engine.WANTED) < 0.6 * engine.dense
    assert engine.sparse_seconds(engine.WANTED) > 1.4 * engine.dense
    for _ in range(5):
        assert [engine.token()[1] for _ in range(100)] == [0] * 100
        engine.cool()  # another request, whose neurons are all missing


def test_dense_where_it_is_faster_but_for_trials_that_become_rare() -> None:
    engine = Engine(warm_share=0.5, overhead=1e-3, dense=1.2e-3)
    sparse = engine.sparse_seconds(0.5 * engine.WANTED)
    assert sparse > 1.5 * engine.dense
    tokens = [engine.token() for _ in range(1000)]
    settled = [seconds for seconds, _ in tokens[8:]]
    assert sum(settled) < 1.03 * len(settled) * LAYERS * engine.dense
    trials = [index for index, (_, num_dense) in enumerate(tokens) if num_dense == 0]
    gaps = np.diff(trials)
    assert [gap > 1 for gap in gaps].count(True) == 3, trials
    assert sorted(gaps)[-3:] == [gap for gap in gaps if gap > 1], "each wait is the longest yet"


def test_what_was_slow_at_the_start_is_tried_again() -> None:
    engine = Engine(warm_share=0.1, overhead=2e-3, dense=1.2e-3)
    before = [engine.token()[1] for _ in range(100)]
    assert before[-50:] == [LAYERS] * 50
    engine.overhead = 1e-4
    after = [engine.token()[1] for _ in range(600)]
    assert after[-100:] == [0] * 100
