# SPDX-License-Identifier: Apache-2.0
"""The sparse FFN in a plan: a step by hand, budgets, and what is better."""

import dataclasses

import pytest

from tests.fixtures.model_configs import LLAMA_3_8B
from vllm_tiered.errors import ConfigError
from vllm_tiered.planner.machine import load_profile
from vllm_tiered.planner.memory_split import baseline
from vllm_tiered.planner.model_shape import model_shape
from vllm_tiered.planner.plan import Case
from vllm_tiered.planner.serving import Workload
from vllm_tiered.planner.sparse_ffn import (
    best_without,
    ffn_bytes,
    fit_sparse_ffn,
    room_for_ffn,
    sparse_ffn_step,
)
from vllm_tiered.planner.step_time import Batch, compute_times
from vllm_tiered.units import GIB, MIB

MACHINE = dataclasses.replace(
    load_profile("rtx4090-pcie4"), far_layer_overhead_us=0, storage_read_gb_per_s=None
)
LLAMA = model_shape(LLAMA_3_8B)
ONE = Batch(requests=1, new_tokens=1, context_tokens=100)
LINK, NEAR = MACHINE.read_gb_per_s * 1e9, MACHINE.near_gb_per_s * 1e9


@dataclasses.dataclass(frozen=True)
class Memory:
    """A memory plan with the bytes of each layer."""

    near_bytes: int = 2 * GIB
    far_bytes: int = 14 * GIB
    num_far_layers: int = 32
    streamed_bytes: int = 336 * MIB
    cached: int = 40 * MIB
    scored: int = 80 * MIB
    fits: int = 4

    def sparse_bytes(self, layer: int, tokens: int) -> tuple[int, int] | None:
        return (tokens * self.cached, self.scored) if tokens <= self.fits else None


def case(near_gib=8, **changes):
    given = Case(
        shape=LLAMA,
        machine=MACHINE,
        load=Workload(prompt_tokens=512, output_tokens=128),
        near_bytes=int(near_gib * GIB),
        far_bytes=64 * GIB,
        target="latency",
    )
    return dataclasses.replace(given, **changes)


def without_ffn(batch):
    """Return the seconds of everything but the FFN, and of a dense FFN with near weights."""
    times = compute_times(LLAMA, MACHINE, batch, baseline("all near", LLAMA))
    return times.rest + sum(times.compute[::2]), times.compute[1]


def test_a_token_waits_for_missing_neurons_and_then_multiplies():
    step = sparse_ffn_step(LLAMA, MACHINE, ONE, Memory(), 0.25)
    others, _ = without_ffn(ONE)
    load = 0.25 * 40 * MIB / LINK
    assert step.link_seconds == step.stall_seconds == pytest.approx(32 * load)
    assert step.seconds == pytest.approx(others + 32 * (load + 120 * MIB / NEAR))


def test_neurons_of_layers_beyond_far_memory_come_from_the_disk():
    disk = dataclasses.replace(MACHINE, storage_read_gb_per_s=2.0)
    step = sparse_ffn_step(LLAMA, disk, ONE, Memory(num_far_layers=20), 0.25)
    loaded = 0.25 * 40 * MIB
    assert step.link_seconds == pytest.approx(20 * loaded / LINK + 12 * loaded / 2e9)


def test_a_prompt_streams_the_ffn_while_it_computes():
    prompt = Batch(requests=1, new_tokens=512, context_tokens=0)
    step = sparse_ffn_step(LLAMA, MACHINE, prompt, Memory(), 0.25)
    others, dense = without_ffn(prompt)
    stream = 336 * MIB / LINK
    assert step.seconds == pytest.approx(others + 32 * max(stream, dense))
    assert step.stall_seconds == pytest.approx(32 * max(0.0, stream - dense))


def test_a_step_that_wants_too_much_is_dense():
    five = dataclasses.replace(ONE, requests=5)
    step = sparse_ffn_step(LLAMA, MACHINE, five, Memory(), 0.25)
    assert step.link_seconds == pytest.approx(32 * 336 * MIB / LINK)
    # And one that would load as much as it streams.
    slow = sparse_ffn_step(LLAMA, MACHINE, ONE, Memory(cached=400 * MIB), 1.0)
    assert slow.link_seconds == pytest.approx(32 * 336 * MIB / LINK)


def test_near_memory_is_divided_between_ffn_weights_and_kv():
    asked = case()
    fit = fit_sparse_ffn(asked, Memory(), 0.25)
    assert fit.dense_bytes == ffn_bytes(LLAMA) == 32 * 3 * 4096 * 14336 * 2
    others = LLAMA.other_bytes + LLAMA.layer_bytes - fit.dense_bytes
    assert fit.near_bytes + others + fit.kv_bytes == asked.near_bytes
    assert fit.served.requests == asked.load.max_requests_in(LLAMA, fit.kv_bytes)
    assert room_for_ffn(asked) == asked.near_bytes - others - asked.load.kv_bytes(LLAMA)
    assert fit.alone.decode_seconds == pytest.approx(
        sparse_ffn_step(LLAMA, MACHINE, asked.load.decode(1), Memory(), 0.25).seconds
    )


def test_an_unknown_disk_is_said():
    with pytest.raises(ConfigError, match="31 of 32 layers, and it is not known how fast"):
        fit_sparse_ffn(case(), Memory(num_far_layers=31), 0.25)


def test_the_best_without_the_store_is_named():
    """A variant in 4 bit is near as a whole, and has fewer bytes to read where all is near too."""
    for near_gib in (8, 24):
        asked = case(near_gib)
        made = asked.plan()
        found = best_without(asked, made)
        assert found is not None and "4-bit" in found[0] and made.best is not None
        assert found[1].decode_seconds < made.best.decode_seconds
