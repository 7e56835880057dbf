# SPDX-License-Identifier: Apache-2.0
"""Which side is faster, told from measured steps of a machine whose rates are known here."""

import numpy as np
import pytest

from vllm_tiered.ffn.switch_over import SwitchOver

READ, MULTIPLY, PER_TOKEN, OVERHEAD = 1 / 1.4e9, 1 / 16e9, 1 / 200e9, 4e-4


def sparse_seconds(missing: int, multiplied: int, tokens: int) -> float:
    return OVERHEAD + missing * READ + multiplied * (MULTIPLY + tokens * PER_TOKEN)


def dense_seconds(tokens: int) -> float:
    return 0.14 + tokens * 2e-4


def trained(seed: int, noise: float) -> SwitchOver:
    """Prompts and small batches, as an engine sees them."""
    rng = np.random.default_rng(seed)
    switch = SwitchOver()

    def noisy(seconds: float) -> float:
        held_up = 10.0 if rng.random() < 0.03 else 1.0
        return seconds * held_up * float(1 + noise * rng.random())

    for _ in range(200):
        tokens, missing = int(rng.integers(1, 9)), int(rng.integers(0, 30_000_000))
        multiplied = missing + int(rng.integers(0, 20_000_000))
        seconds = noisy(sparse_seconds(missing, multiplied, tokens))
        switch.add_sparse(seconds, missing, multiplied, tokens)
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
    switch = SwitchOver()
    for _ in range(100):
        switch.add_sparse(10.0, 1000, 1000, 1)
    assert not switch.prefers_dense(10**9, 10**9, 64)
    for tokens in range(20):
        switch.add_dense(0.1, tokens)
    assert switch.prefers_dense(10**9, 10**9, 64)
