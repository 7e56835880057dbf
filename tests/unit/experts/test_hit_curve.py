# SPDX-License-Identifier: Apache-2.0
"""Hit curves, and the bytes that they leave to a link."""

import numpy as np
import pytest

from vllm_tiered.experts.hit_curve import (
    UNIFORM,
    HitCurve,
    loaded_bytes,
    measured,
    wanted_experts,
)


def test_a_curve_is_linear_between_its_points():
    curve = HitCurve(source="recorded", about="a trace", points=((0.25, 0.6), (0.5, 0.8)))
    shares = (0.0, 0.125, 0.25, 0.375, 0.5, 0.75, 1.0)
    found = [curve.hit_ratio(share) for share in shares]
    assert found == pytest.approx([0.0, 0.3, 0.6, 0.7, 0.8, 0.9, 1.0])
    assert UNIFORM.source == "assumed" and UNIFORM.hit_ratio(0.3) == pytest.approx(0.3)


def test_an_engines_counts_are_a_point():
    curve = measured(16, 64, hits=70, misses=30)
    assert curve.source == "measured" and "100 experts wanted with 16 of 64" in curve.about
    assert curve.hit_ratio(0.25) == pytest.approx(0.7)
    assert curve.hit_ratio(1.0) == curve.hit_ratio(2.0) == 1.0


@pytest.mark.parametrize(
    "points", [((0.5, 0.3), (0.4, 0.6)), ((0.5, 1.2),), ((0.2, 0.5), (0.3, 0.4))]
)
def test_a_curve_that_falls_is_refused(points):
    with pytest.raises(ValueError, match="must ascend"):
        HitCurve(source="recorded", about="", points=points)


@pytest.mark.parametrize("batch", [1, 3, 20])
def test_a_step_wants_what_uniform_draws_want(batch):
    rng = np.random.default_rng(0)
    drawn = [
        len(set(np.concatenate([rng.permutation(32)[:4] for _ in range(batch)])))
        for _ in range(2000)
    ]
    assert wanted_experts(32, 4, batch) == pytest.approx(np.mean(drawn), rel=0.02)


def test_bytes_are_those_of_the_missing_experts():
    shape = {"num_experts": 64, "top_k": 8, "num_layers": 16, "bundle_bytes": 1000}
    assert loaded_bytes(UNIFORM, slots=16, batch_size=1, **shape) == pytest.approx(
        8 * 0.75 * 16 * 1000
    )
    assert loaded_bytes(UNIFORM, slots=64, batch_size=8, **shape) == 0
