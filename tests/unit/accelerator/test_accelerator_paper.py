# SPDX-License-Identifier: Apache-2.0
"""PRESERVE's figures 2 and 5 to 9 and table 1, from the model."""

import json
from dataclasses import replace

import numpy as np
import pytest

from vllm_tiered.accelerator import npu
from vllm_tiered.accelerator.chip import table_2
from vllm_tiered.accelerator.decoders import DECODERS
from vllm_tiered.accelerator.density import PAPERS_PER_OURS, Space, explore
from vllm_tiered.accelerator.figures import bandwidths, clusters
from vllm_tiered.accelerator.results import Asked, design_space
from vllm_tiered.accelerator.step import Load, decode_step, speedup
from vllm_tiered.errors import BudgetError


@pytest.fixture(scope="module")
def answer():
    return design_space(Asked())


def test_figure_6_best_l2_sizes(answer):
    assert abs(answer["with_prefetch"]["best_l2_mib"] - 104) <= 8
    assert answer["without_prefetch"]["best_l2_mib"] == 8


def test_figure_6_gain_which_no_fitted_number_is_in(answer):
    high, low = (
        answer[side]["output_tokens_per_s_per_mm2"]
        for side in ("with_prefetch", "without_prefetch")
    )
    assert high / low == pytest.approx(1.25, rel=0.02)
    assert low * PAPERS_PER_OURS == answer["without_prefetch"]["throughput_density"]


def test_figure_5_savings(answer):
    saved = 1 - np.array([curve[-1] for curve in answer["figure_5"]["latency_by_model"].values()])
    assert saved.min() == pytest.approx(0.20, abs=0.02)
    assert saved.max() == pytest.approx(0.36, abs=0.02)
    assert saved.mean() == pytest.approx(0.25, abs=0.025)
    assert set(answer["figure_5"]["last_gain_l2_mib"].values()) == {136, 144}


def test_figure_7_best_cluster_is_where_the_latencies_meet(answer):
    best = max(answer["figure_7"], key=lambda point: point["speedup"])
    assert best["num_devices"] == 32
    assert best["ffn_prefetch_us"] == pytest.approx(best["all_reduce_us"], rel=0.05)
    longer = {
        point["num_devices"]: point["ffn_prefetch_us"] > 1.5 * point["all_reduce_us"]
        for point in answer["figure_7"]
    }
    assert longer == {8: True, 16: True, 32: False, 64: False, 128: False}


def test_figure_8_mean_speedups(answer):
    by_rate = {point["gbit_per_s"]: point["mean"] for point in answer["figure_8"]}
    assert by_rate[200] == pytest.approx(1.18, abs=0.01)
    assert by_rate[1000] == pytest.approx(1.27, abs=0.01)
    assert list(by_rate.values()) == sorted(by_rate.values())


def test_figure_9_rises_with_both_and_by_up_to_a_tenth(answer):
    speedups = np.array([curve["speedups"] for curve in answer["figure_9"]])
    assert (np.diff(speedups, axis=0) > 0).all() and (np.diff(speedups, axis=1) > 0).all()
    assert 1.05 < speedups[-1, -1] / speedups[0, -1] < 1.10


def test_figure_2_sixteen_devices_fit_an_l2_that_there_is(answer):
    figure = answer["figure_2"]
    largest = {
        number: max(
            max(point["attention_mib"], point["mlp_mib"])
            for point in figure["points"]
            if point["num_devices"] == number
        )
        for number in (8, 16)
    }
    assert largest[16] <= max(figure["l2_mib"].values()) < largest[8]


def test_table_1_with_nothing_fitted():
    rows = npu.table_1(npu.ASCEND_910B)
    assert len(rows) == 18
    assert npu.mean_error(rows) < 0.15


def test_table_1_fitted_on_one_model_predicts_the_others():
    rows = npu.table_1(npu.ASCEND_910B_FITTED)
    left = npu.mean_error(rows, without=npu.FITTED_ON)
    assert left < 0.08 < npu.constant_error(rows)
    seconds = [abs(row.without_s / row.paper_without_s - 1) for row in rows]
    assert np.mean(seconds) < 0.15


def test_the_fit_is_one():
    """Changing any fitted overhead by a tenth raises the squared error on Llama3-8B."""

    def squares(chip):
        rows = [row for row in npu.table_1(chip) if row.model == npu.FITTED_ON]
        return sum(
            np.log(ours / paper) ** 2
            for row in rows
            for ours, paper in (
                (row.without_s, row.paper_without_s),
                (row.with_s, row.paper_with_s),
            )
        )

    chip = npu.ASCEND_910B_FITTED
    least = squares(chip)
    for name in ("layer_s", "core_bytes_per_s", "strided_s_per_token", "strided_l2_share"):
        for factor in (0.9, 1.1):
            value = getattr(chip.overheads, name) * factor
            changed = replace(chip, overheads=replace(chip.overheads, **{name: value}))
            assert squares(changed) > least, (name, factor)


def test_other_readings_are_reported(answer):
    by_name = {each["reading"]: each for each in answer["readings"]}
    assert by_name["as read here"]["best_l2_mib"] == answer["with_prefetch"]["best_l2_mib"]
    assert by_name["context lengths 2k, 4k, 8k and 16k only"]["best_l2_mib"] == 80
    assert by_name["all tokens over all time"]["best_l2_mib"] == 144
    assert by_name["with prompts, end to end"]["gain"] < 1.2


def test_figure_7_is_the_same_if_each_operation_waits_for_its_own():
    load = Load(batch=16, context_tokens=8192)
    speedups = {
        number: speedup(table_2(104), DECODERS["Llama3-405B"], number, load, wait="operation")
        for number in (8, 16, 32, 64)
    }
    assert max(speedups, key=lambda number: speedups[number]) == 32


def test_every_claim_says_how_it_came_about(answer):
    kinds = {claim["kind"] for claim in answer["claims"]}
    assert kinds == {"predicted", "reading", "fitted", "given"}
    assert max(abs(claim["error"]) for claim in answer["claims"]) < 0.1
    json.dumps(answer)


def test_a_sweep_equals_single_steps():
    """The sweep reuses times of sizes that prefetch the same: against each on its own."""
    decoder = DECODERS["Mixtral-8x22B"]
    space = Space(decoders=(decoder,), batches=(8, 24), contexts=(4096, 16384))
    density = explore(space)
    for column, load in enumerate(space.loads):
        for index, size in enumerate(space.l2_mib):
            step = decode_step(table_2(size), decoder, 32, load, prefetch=True)
            expected = load.output_tokens * step.seconds
            assert density.with_s[index, 0, column] == expected


def test_loads_that_do_not_fit_are_left_out_and_models_refused():
    decoder = DECODERS["Llama3-405B"]
    space = Space(decoders=(decoder,), batches=(8, 256), contexts=(16384,), num_devices=8)
    density = explore(space)
    assert np.isnan(density.tokens).tolist() == [[False, True]]
    assert np.isfinite(density.with_prefetch).all() and np.isfinite(density.latencies).all()
    with pytest.raises(BudgetError, match=r"110 GB on each of 4 devices.*--num-devices"):
        explore(replace(space, num_devices=4))


def test_other_spaces_have_no_claims():
    answer = design_space(Asked(space=Space(decoders=(DECODERS["Llama3-8B"],)), cluster_sizes=(2,)))
    assert "claims" not in answer and "table_1" not in answer
    assert [point["num_devices"] for point in answer["figure_7"]] == [2]
    assert clusters(DECODERS["Llama3-405B"], (1, 2)) == []
    assert bandwidths([DECODERS["Llama3-8B"]], (400,))[0].mean > 1
