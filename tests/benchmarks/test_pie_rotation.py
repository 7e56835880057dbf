# SPDX-License-Identifier: Apache-2.0
"""Pie's protocol of swapping layers: figure 4 of the paper, and what holds for any swaps."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from benchmarks.simulator.policies.rotation import Rotation


class Log:
    """A rotation of layers that compute for one second each, and the swaps that it begins.

    Layers and seconds count from 1, as in the paper.
    """

    def __init__(self, num_layers, num_near, *, swap_in_s, swap_out_s, **kwargs):
        self.rotation = Rotation(
            num_layers,
            num_near,
            swap_in_s=lambda layer: self._note("in", layer, swap_in_s),
            swap_out_s=lambda layer: self._note("out", layer, swap_out_s),
            **kwargs,
        )
        self.num_layers = num_layers
        self.swaps = []
        self.now = 0.0
        self.stall = 0.0
        self.starts = []

    def _note(self, kind, layer, seconds):
        self.swaps.append((kind, layer + 1, self.present))
        return seconds

    def run(self, tokens):
        for step in range(tokens * self.num_layers):
            layer = step % self.num_layers
            self.present = step + 1
            begins = self.rotation.compute(layer, self.now)
            assert self.rotation.near[layer]
            in_flight = [
                each for each in (self.rotation.swap_in, self.rotation.swap_out) if each is not None
            ]
            assert (
                sum(self.rotation.near) + sum(self.rotation.far) + len(in_flight) == self.num_layers
            )
            self.stall += begins - self.now
            self.starts.append(begins)
            self.now = begins + 1
        return self


def figure_4(tokens, **kwargs):
    """Nine layers, transfers of two computes, two layers in CPU memory."""
    return Log(9, 7, swap_in_s=2.0, swap_out_s=2.0, **kwargs).run(tokens)


def test_figure_4_begins_the_swaps_that_the_paper_describes():
    """No swap-out at layer 1; 1 leaves at 2; nothing at 3; at 4, 3 leaves and 8 comes."""
    swaps = figure_4(1).swaps
    assert swaps[:3] == [("out", 1, 2), ("in", 8, 4), ("out", 3, 4)]
    assert swaps[3:] == [("in", 9, 6), ("out", 5, 6), ("in", 1, 8), ("out", 7, 8)]


def test_figure_4_hides_the_expansion_of_1_28():
    assert figure_4(50).stall == 0
    assert pytest.approx(1.28, abs=0.01) == 9 / 7


def test_a_layer_of_figure_4_spends_eight_computes_away():
    """Two to leave, four behind the two layers before it, two to return."""
    left = {}
    away = []
    for kind, layer, at in figure_4(20).swaps:
        if kind == "out":
            left[layer] = at
        elif layer in left:
            away.append(at + 2 - left.pop(layer))
    assert len(away) > 70
    assert set(away) == {8}


def test_figure_4_swaps_half_of_the_layers_in_a_token():
    """The link is never idle: 4.5 layers in each direction, where four would do.

    `interleave` with two buffers has the same seven spaces with four far layers.
    """
    swaps = [kind for kind, _, _ in figure_4(101).swaps]
    before = [kind for kind, _, _ in figure_4(1).swaps]
    for kind in ("in", "out"):
        assert (swaps.count(kind) - before.count(kind)) / 100 == pytest.approx(4.5)


def test_one_more_far_layer_than_figure_4_stalls():
    assert Log(9, 6, swap_in_s=2.0, swap_out_s=2.0).run(50).stall > 0


@pytest.mark.parametrize("fills_space", [False, True])
@pytest.mark.parametrize("num_near", [9, 12, 30])
def test_fast_swaps_still_move_every_layer_in_a_token(num_near, fills_space):
    log = Log(40, num_near, swap_in_s=0.1, swap_out_s=0.1, fills_space=fills_space)
    log.run(1)
    before = len(log.swaps)
    log.run(10)
    assert (len(log.swaps) - before) / 10 == pytest.approx(2 * 40, rel=0.01)
    assert log.stall == 0


def test_checks_at_each_layer_round_a_swap_up_to_whole_layers():
    """A swap of 1.1 computes takes two, unless compute waits: not 36 layers of 40 in a token."""

    def moved(**kwargs):
        log = Log(40, 20, swap_in_s=1.1, swap_out_s=1.1, **kwargs).run(20)
        return sum(kind == "in" for kind, _, _ in log.swaps) / (log.now / 40)

    assert 20 < moved() < 23
    assert moved(is_eager=True) == pytest.approx(40 / 1.1, rel=0.01)


def test_short_swap_outs_empty_near_memory_unless_told_not_to():
    def stall(**kwargs):
        return Log(40, 30, swap_in_s=2.0, swap_out_s=0.1, **kwargs).run(30).stall

    assert stall(fills_space=True) == 0 < stall()


@given(
    num_layers=st.integers(2, 12),
    share=st.floats(0, 1),  # of the layers near
    swap_in_s=st.floats(0.01, 5),
    swap_out_s=st.floats(0.01, 5),
    fills_space=st.booleans(),
    is_eager=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_every_layer_is_near_when_it_computes(
    num_layers, share, swap_in_s, swap_out_s, fills_space, is_eager
):
    num_near = 1 + round(share * (num_layers - 1))
    log = Log(
        num_layers,
        num_near,
        swap_in_s=swap_in_s,
        swap_out_s=swap_out_s,
        fills_space=fills_space,
        is_eager=is_eager,
    )
    rotation = log.run(6).rotation
    taken = sum(rotation.near) + (rotation.swap_in is not None) + (rotation.swap_out is not None)
    assert taken <= num_near
    if num_near == num_layers:
        assert not log.swaps and not log.stall
    # A layer that is not always near is read at least that often (Belady's bound on a cycle).
    reads = sum(kind == "in" for kind, _, _ in log.swaps)
    if num_layers > 2:
        bound = num_layers * (num_layers - num_near) / (num_layers - 1)
        assert reads >= 5 * bound - num_layers


def test_no_space_at_all_is_refused():
    with pytest.raises(ValueError, match="0 of 9 layers near"):
        Rotation(9, 0, swap_in_s=lambda layer: 1.0, swap_out_s=lambda layer: 1.0)
