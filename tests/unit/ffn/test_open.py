# SPDX-License-Identifier: Apache-2.0
"""Plans from a configuration: what prompts stream."""

from pathlib import Path

import pytest

from tests.fixtures.ffn_models import random_ffn
from tests.fixtures.ffn_runtimes import Scripted
from vllm_tiered.config import FfnConfig
from vllm_tiered.devices.available_memory import HostMemory
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.errors import BudgetError, ConfigError
from vllm_tiered.ffn import open as opening
from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.open import make_plan, open_runtime
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


def test_more_far_neurons_than_the_host_has(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written as the store is opened, where the kernel would end the engine."""
    memory = HostMemory(
        total_bytes=1 << 30, available_bytes=1 << 12, limit_bytes=None, limit_used_bytes=None
    )
    monkeypatch.setattr(opening, "read_host_memory", lambda: memory)
    config = FfnConfig(store=str(store), far_gib=1.0, exact=True)
    found = (
        r"only 2\.00 KiB can be allocated per rank \(what the host's 1\.00 GiB have left\): lower"
    )
    device = CpuDevice()
    with NeuronStore.open(store) as opened, pytest.raises(BudgetError, match=found):
        open_runtime(config, opened, device, num_ranks=2)
    device.close()
