# SPDX-License-Identifier: Apache-2.0
"""Plans from a configuration: what prompts stream."""

from pathlib import Path

import pytest

from tests.fixtures.ffn_models import random_ffn
from tests.fixtures.ffn_runtimes import Scripted
from vllm_tiered.config import FfnConfig
from vllm_tiered.errors import ConfigError
from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.open import make_plan
from vllm_tiered.ffn.predictor.base import Predictor
from vllm_tiered.ffn.store.reader import NeuronStore


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_ffn(tmp_path_factory.mktemp("store") / "ffn", gated=True).path


def streamed(store: Path, **options: object) -> Precision:
    config = FfnConfig(store=str(store), far_gib=0.0, **options)  # type: ignore[arg-type]
    with NeuronStore.open(store) as opened:
        predictors: list[Predictor] = [Scripted(96) for _ in range(3)]
        return make_plan(config, opened, predictors, num_ranks=1).streamed


@pytest.mark.parametrize(
    ("mix", "expected"),
    [
        ("auto", "int8"),
        ((0.25, 0.25, 0.5), "int8"),
        ((0.0, 0.0, 1.0), "int8"),
        ((0.5, 0.0, 0.5), "full"),
        ((1.0, 0.0, 0.0), "full"),
    ],
)
def test_prompts_stream_8_bit_unless_16_is_what_is_asked_for(
    store: Path, mix: object, expected: str
) -> None:
    assert streamed(store, mix=mix) is Precision(expected)
    assert streamed(store, mix=mix, prefill="int4") is Precision.INT4
    assert streamed(store, mix=mix, prefill="full") is Precision.FULL


def test_every_neuron_in_full_precision_streams_it(store: Path) -> None:
    assert streamed(store, exact=True) is Precision.FULL
    with pytest.raises(ConfigError, match="prefill is 'int8'"):
        FfnConfig(store=str(store), exact=True, prefill="int8").check()


def test_a_precision_that_the_store_lacks(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with NeuronStore.open(store) as opened:
        opened.precisions = (Precision.FULL, Precision.INT4)
        config = FfnConfig(store=str(store), far_gib=0.0, mix=(0.5, 0, 0.5), prefill="int8")
        with pytest.raises(ConfigError, match="no neurons in int8"):
            make_plan(config, opened, [Scripted(96) for _ in range(3)], num_ranks=1)
