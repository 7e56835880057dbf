# SPDX-License-Identifier: Apache-2.0
"""Dense/sparse cost model, fed with the steps of a simulated machine with known rates."""

import numpy as np
import pytest

from vllm_tiered.ffn.cost_model import DenseSparseCostModel

READ, MULTIPLY, PER_TOKEN, OVERHEAD = 1 / 1.4e9, 1 / 16e9, 1 / 200e9, 4e-4
LAYERS = 30


def sparse_seconds(missing: int, multiplied: int, tokens: int) -> float:
    return OVERHEAD + missing * READ + multiplied * (MULTIPLY + tokens * PER_TOKEN)


def dense_seconds(tokens: int) -> float:
    return 0.14 + tokens * 2e-4


def trained(seed: int, noise: float) -> DenseSparseCostModel:
    """Return a cost model that has seen noisy prompts and small batches, as in an engine."""
    rng = np.random.default_rng(seed)
    cost_model = DenseSparseCostModel()

    def noisy(seconds: float) -> float:
        held_up = 10.0 if rng.random() < 0.03 else 1.0
        return seconds * held_up * float(1 + noise * rng.random())

    for _ in range(200):
        tokens, missing = int(rng.integers(1, 9)), int(rng.integers(0, 30_000_000))
        multiplied = missing + int(rng.integers(0, 20_000_000))
        seconds = noisy(sparse_seconds(missing, multiplied, tokens))
        cost_model.add_sparse(0, seconds, missing, multiplied, tokens, is_warm=False)
        prompt = int(rng.integers(4, 300))
        cost_model.add_dense(noisy(dense_seconds(prompt)), prompt)
    return cost_model


@pytest.mark.parametrize("seed", range(4))
def test_it_is_within_five_percent_of_the_faster_way(seed: int) -> None:
    """The bound also holds for batches far larger than those of the training."""
    cost_model = trained(seed, noise=0.04)
    # Warm steps miss all neurons, so the model uses the missing bytes that each step states.
    for tokens in (1, 2, 4, 8, 16, 32, 64) * 5:
        seconds = sparse_seconds(10_000_000, 10_000_000, tokens)
        cost_model.add_sparse(0, seconds, 10_000_000, 10_000_000, tokens, is_warm=True)
    rng = np.random.default_rng(seed + 100)
    num_dense = 0
    for _ in range(300):
        tokens = int(rng.integers(1, 65))
        multiplied = int(rng.integers(1_000_000, 268_000_000))
        missing = int(multiplied * rng.random())
        is_dense = cost_model.prefers_dense(0, missing, multiplied, tokens)
        num_dense += is_dense
        both = (sparse_seconds(missing, multiplied, tokens), dense_seconds(tokens))
        assert both[is_dense] <= 1.05 * min(both)
    assert 0 < num_dense < 300


def test_no_step_becomes_dense_before_both_ways_are_known() -> None:
    cost_model = DenseSparseCostModel()
    for _ in range(100):
        cost_model.add_sparse(0, 10.0, 1000, 1000, 64, is_warm=True)
    assert not cost_model.prefers_dense(0, 10**9, 10**9, 64)
    for tokens in range(20):
        cost_model.add_dense(0.1, tokens)
    assert cost_model.prefers_dense(0, 10**9, 10**9, 64)
    assert not cost_model.prefers_dense(1, 10**9, 10**9, 64), (
        "another layer, of which nothing is known"
    )
    assert not cost_model.prefers_dense(0, 10**9, 10**9, 1), "another size of batch"


class Engine:
    """Simulated layers of a model, each with a cache that dense steps do not change.

    A sparse step after a sparse one misses the layer's share of the wanted neurons. A sparse step
    after a dense one misses all of them.
    """

    WANTED = 2_000_000

    def __init__(self, warm_share: float, overhead: float, dense: float) -> None:
        self.cost_model = DenseSparseCostModel()
        self.warm_shares = [warm_share] * LAYERS
        self.overhead, self.dense = overhead, dense
        self.num_looks = 0  # steps that were scored
        self.cool()
        for _ in range(LAYERS):  # the prompt
            self.cost_model.add_dense(dense + 64 * 1e-5, 64)

    def sparse_seconds(self, missing: float, tokens: int = 1) -> float:
        return self.overhead + missing * READ + self.WANTED * (MULTIPLY + tokens * PER_TOKEN)

    def cool(self) -> None:
        self._is_warm = [False] * LAYERS

    def step(self, tokens: int = 1) -> tuple[float, list[int]]:
        """Return the seconds, and the layers that were computed densely."""
        total, dense = 0.0, []
        for layer in range(LAYERS):
            is_warm = self._is_warm[layer]
            missing = int((self.warm_shares[layer] if is_warm else 1.0) * self.WANTED)
            is_dense = self.cost_model.is_surely_dense(layer, tokens)
            if not is_dense:
                self.num_looks += 1
                is_dense = self.cost_model.prefers_dense(layer, missing, self.WANTED, tokens)
            if is_dense:
                total += self.dense
                dense.append(layer)
                self.cost_model.add_dense(self.dense, tokens)
                self._is_warm[layer] = False
            else:
                seconds = self.sparse_seconds(missing, tokens)
                total += seconds
                self.cost_model.add_sparse(
                    layer, seconds, missing, self.WANTED, tokens, is_warm=is_warm
                )
                self._is_warm[layer] = True
        return total, dense


ALL = list(range(LAYERS))


def test_a_cold_cache_is_warmed_where_that_pays() -> None:
    """A dense step is faster than a sparse one that misses all, and slower than a warm one."""
    engine = Engine(warm_share=0.1, overhead=4e-4, dense=1.2e-3)
    assert engine.sparse_seconds(0.1 * engine.WANTED) < 0.6 * engine.dense
    assert engine.sparse_seconds(engine.WANTED) > 1.4 * engine.dense
    for _ in range(5):
        assert [engine.step()[1] for _ in range(100)] == [[]] * 100
        engine.cool()  # another request: all of its neurons are missing


def test_dense_where_it_is_faster_but_for_trials_that_become_rare() -> None:
    engine = Engine(warm_share=0.5, overhead=1e-3, dense=1.2e-3)
    sparse = engine.sparse_seconds(0.5 * engine.WANTED)
    assert sparse > 1.5 * engine.dense
    steps = [engine.step() for _ in range(1000)]
    settled = [seconds for seconds, _ in steps[8:]]
    assert sum(settled) < 1.03 * len(settled) * LAYERS * engine.dense
    trials = [index for index, (_, dense) in enumerate(steps) if not dense]
    assert trials == [*range(4), *range(132, 136), *range(392, 396), *range(908, 912)]


def test_in_a_row_of_dense_steps_an_eighth_is_scored() -> None:
    engine = Engine(warm_share=0.5, overhead=1e-3, dense=1.2e-3)
    for _ in range(20):
        engine.step()
    assert engine.step()[1] == ALL
    before = engine.num_looks
    for _ in range(80):
        assert engine.step()[1] == ALL
    assert engine.num_looks - before == 10 * LAYERS
    assert not engine.cost_model.is_surely_dense(0, 8), "another size of batch"


def test_a_row_of_dense_steps_ends_with_the_next_scored_step() -> None:
    engine = Engine(warm_share=0.5, overhead=1e-3, dense=1.2e-3)
    assert [engine.step()[1] for _ in range(50)][-1] == ALL
    engine.dense = 0.1
    for tokens in (1, 64) * 64:
        engine.cost_model.add_dense(engine.dense, tokens)
    assert [engine.step()[1] for _ in range(8)][-1] == []


def test_a_side_that_was_slow_at_the_start_is_tried_again() -> None:
    engine = Engine(warm_share=0.1, overhead=2e-3, dense=1.2e-3)
    before = [engine.step()[1] for _ in range(100)]
    assert before[-50:] == [ALL] * 50
    engine.overhead = 1e-4
    after = [engine.step()[1] for _ in range(600)]
    assert after[-100:] == [[]] * 100


def test_each_layer_is_judged_by_its_own_misses() -> None:
    engine = Engine(warm_share=0.05, overhead=4e-4, dense=1.2e-3)
    miss_much = list(range(0, LAYERS, 3))
    for layer in miss_much:
        engine.warm_shares[layer] = 0.9
    steps = [engine.step()[1] for _ in range(100)]
    assert steps[-50:] == [miss_much] * 50


def test_a_layer_that_is_always_sparse_keeps_no_other_from_its_trial() -> None:
    engine = Engine(warm_share=0.9, overhead=4e-4, dense=1.2e-3)
    engine.warm_shares[0] = 0.05
    assert [engine.step()[1] for _ in range(100)][-50:] == [ALL[1:]] * 50
    engine.warm_shares = [0.05] * LAYERS
    assert [engine.step()[1] for _ in range(300)][-100:] == [[]] * 100


def test_small_batches_between_keep_no_large_one_from_its_trial() -> None:
    """Sparse steps are faster for small batches from the start, and for large ones later."""
    engine = Engine(warm_share=0.9, overhead=4e-4, dense=1.2e-3)

    def rounds(count: int) -> list[int]:
        """Return the number of dense layers in each round's last step with eight requests."""
        found = []
        for _ in range(count):
            engine.warm_shares = [0.05] * LAYERS
            for _ in range(10):
                engine.step(1)
            engine.warm_shares = [share_of_8] * LAYERS
            for _ in range(30):
                dense = engine.step(8)[1]
            found.append(len(dense))
        return found

    share_of_8 = 0.9
    assert rounds(4)[-1] == LAYERS
    share_of_8 = 0.05
    assert rounds(20)[-3:] == [0] * 3
