# SPDX-License-Identifier: Apache-2.0
"""Tests that variants equal the launches of the launchers: types, constants, warps and stages.

Launches are recorded, not run. Shapes are those of models, and memory is never touched. A launch
without a variant fails, and so does a variant without a launch.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from vllm_tiered.kernels.dequant_linear import api as dequant_linear
from vllm_tiered.kernels.dequant_linear.reference import GROUP
from vllm_tiered.kernels.expert_slots import api as expert_slots
from vllm_tiered.kernels.expert_slots.index import empty_index as empty_slots
from vllm_tiered.kernels.expert_slots.index import empty_plan
from vllm_tiered.kernels.kv_pages import api as kv_pages
from vllm_tiered.kernels.kv_pages.narrow import convert_pages
from vllm_tiered.kernels.l2_prefetch import api as l2_prefetch
from vllm_tiered.kernels.neuron_cache import api as neuron_cache
from vllm_tiered.kernels.neuron_cache.index import empty_index
from vllm_tiered.kernels.neuron_ffn import api as neuron_ffn
from vllm_tiered.kernels.neuron_ffn.bundles import Bundles, Missing
from vllm_tiered.kernels.resources import VARIANTS
from vllm_tiered.kernels.select_neurons import api as select_neurons
from vllm_tiered.kernels.variants import Variant

HIDDEN = 4096
TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}
TRITONS_OWN = {"num_warps": 4, "num_stages": 3}


class Launch(NamedTuple):
    """Recorded launch of a kernel: arguments by name, and launch options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]


@pytest.fixture
def launches(monkeypatch) -> list[Launch]:
    """Record all launches in the returned list instead of running them."""
    recorded: list[Launch] = []

    def at_grid(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            options = {name: named.pop(name, own) for name, own in TRITONS_OWN.items()}
            given = dict(zip(kernel.arg_names, arguments, strict=False))
            recorded.append(Launch(kernel, given | named, options))

        return launch

    for kind in {type(variant.kernel) for variant in VARIANTS}:
        monkeypatch.setattr(kind, "__getitem__", at_grid)
    return recorded


def type_of(value: Any) -> str:
    """Return the type that Triton derives for an argument."""
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def is_aligned(value: Any) -> bool:
    return (value.data_ptr() if isinstance(value, torch.Tensor) else value) % 16 == 0


def differences(launch: Launch, variant: Variant) -> list[str]:
    """Return the differences between a launch and a variant.

    Triton also specialises on numbers that are 1 or multiples of 16. A variant without these
    specialisations also covers such launches.
    """
    found = []
    for name in variant.kernel.arg_names:
        value = launch.arguments[name]
        if name not in variant.signature:
            wanted = variant.constants[name]
            if isinstance(value, torch.Tensor) or value != wanted:
                kind = type_of(value) if isinstance(value, torch.Tensor) else value
                found.append(f"{name}: {kind}, not {wanted}")
        elif value is None:
            found.append(f"{name}: None, not {variant.signature[name]}")
        elif type_of(value) != variant.signature[name]:
            found.append(f"{name}: {type_of(value)}, not {variant.signature[name]}")
        elif name in variant.aligned and not is_aligned(value):
            found.append(f"{name}: 16 does not divide it")
    wanted_options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    if launch.options != wanted_options:
        found.append(f"{launch.options}, not {wanted_options}")
    return found


def bundles_of(codec: str, *, gated: bool) -> Bundles:
    matrices = 3 if gated else 2
    code_bits = {"bfloat16": 16, "int8": 8, "int4": 4}[codec]
    groups = {"int8": HIDDEN // 64, "int4": HIDDEN // 64}.get(codec)
    return Bundles(
        slots=torch.empty((512, matrices * HIDDEN * code_bits // 8), dtype=torch.uint8),
        scales=groups and torch.empty((512, matrices, groups), dtype=torch.float16),
        up_bias=None if gated else torch.empty(512),
        hidden=HIDDEN,
        gated=gated,
        codec=codec,
    )


def missing_of(bundles: Bundles) -> Missing:
    ids = torch.empty(16, dtype=torch.int64)
    return Missing(
        slab=bundles.slots,
        slab_ids=ids,
        slot_ids=ids,
        neuron_ids=ids,
        scales=bundles.scales,
        up_bias=bundles.up_bias,
    )


RELU, BOTH = (0.0, False), (0.0, True)


def predictor_rows(*, gated: bool, has_bias: bool) -> Bundles:
    """Return the 4-bit rows of a predictor, without down."""
    bundles = bundles_of("int4", gated=gated)
    rows = bundles.slots[:, : (bundles.num_matrices - 1) * bundles.matrix_bytes].contiguous()
    bias = torch.empty(512) if has_bias else None
    return replace(bundles, slots=rows, up_bias=bias, has_down=False)


def ffn_calls() -> Iterator[Callable[[], object]]:
    """Yield all FFN calls of a bfloat16 model in decode.

    They are for one token, for the most tokens of the few-tokens kernel, and for a batch.
    """
    for codec in ("bfloat16", "int8", "int4"):
        for gated in (True, False):
            bundles = bundles_of(codec, gated=gated)
            for num_tokens in (1, 2 if codec == "int4" else 4, 64):
                x_BH = torch.empty((num_tokens, HIDDEN), dtype=torch.bfloat16)
                yield partial(neuron_ffn.compute_ffn, x_BH, bundles, 512, RELU)
    ids, counts = torch.empty(64, dtype=torch.int64), torch.empty(2, dtype=torch.int32)
    for codec in ("bfloat16", "int8", "int4"):
        for gated in (True, False):
            bundles = bundles_of(codec, gated=gated)
            missing = missing_of(bundles)
            for num_tokens in (1, 2 if codec == "int4" else 4):
                x_BH = torch.empty((num_tokens, HIDDEN), dtype=torch.bfloat16)
                given = x_BH, bundles, missing, ids, counts, RELU
                yield partial(neuron_ffn.load_and_compute, *given)
    x_BH = torch.empty((1, HIDDEN), dtype=torch.bfloat16)
    for gated, has_bias, relu in ((False, False, RELU), (False, True, RELU), (True, False, BOTH)):
        rows = predictor_rows(gated=gated, has_bias=has_bias)
        yield partial(neuron_ffn.compute_activations, x_BH, rows, 512, relu)
    bundles, a_Bn = bundles_of("int4", gated=True), torch.empty(1, 512)
    yield partial(neuron_ffn.compute_activations, x_BH, bundles, 512, RELU)
    yield partial(neuron_ffn.add_down_projection, torch.empty(1, HIDDEN), a_Bn, bundles, 512)


def linear_calls() -> Iterator[Callable[[], object]]:
    packed = torch.empty(HIDDEN * HIDDEN // GROUP * (GROUP // 2 + 4), dtype=torch.uint8)
    for num_tokens, bias_N in (
        (1, None),
        (4, torch.empty(HIDDEN, dtype=torch.bfloat16)),
        (16, None),
        (64, torch.empty(HIDDEN, dtype=torch.bfloat16)),
    ):
        x_BK = torch.empty((num_tokens, HIDDEN), dtype=torch.bfloat16)
        yield partial(dequant_linear.linear, x_BK, packed, HIDDEN, bias_N)


def select_calls() -> Iterator[Callable[[], object]]:
    scores_BN = torch.empty((4, 13824))
    edges = select_neurons.edges_of((0.1, 0.2, 0.3), scores_BN.device)
    for threshold in (None, 0.5):
        yield partial(select_neurons.select, scores_BN, edges, threshold)
    yield partial(select_neurons.select, scores_BN, edges, limits=(512, 1024, 2048))


def index_calls() -> Iterator[Callable[[], object]]:
    reached_N = torch.empty(13824, dtype=torch.uint8)
    for window in (1, 4):
        index = empty_index(13824, (512, 1024, 2048), window, reached_N.device)
        yield partial(neuron_cache.plan, index, reached_N)


def expert_calls() -> Iterator[Callable[[], object]]:
    near = torch.device("cpu")
    for num_experts, decay in ((64, 0.99), (128, None), (512, 0.99)):
        table = empty_slots(num_experts, num_experts // 2, decay, near)
        ids = torch.empty((2, 8), dtype=torch.int32)
        yield partial(expert_slots.resolve, table, ids)
    plan = empty_plan(table, ids)
    for row in ((1024, 2048), (7,)):  # whole words, and bytes
        dtype = torch.bfloat16 if len(row) > 1 else torch.uint8
        rows, slots = torch.empty((4, *row), dtype=dtype), torch.empty((2, *row), dtype=dtype)
        yield partial(expert_slots.fill, plan, rows, slots)


def page_calls() -> Iterator[Callable[[], object]]:
    pages, ids = torch.empty((64, 8192), dtype=torch.int32), torch.empty(8, dtype=torch.int64)
    yield partial(kv_pages.copy_pages, pages, ids, pages, ids)
    narrow = torch.empty((64, 4224), dtype=torch.int32)
    for code in ("int8", "fp8"):
        for src, dst in ((pages, narrow), (narrow, pages)):
            page_format = {"element": "bfloat16", "code": code, "num_elements": 16384, "group": 64}
            yield partial(
                convert_pages,
                src,
                ids,
                dst,
                ids,
                **page_format,
                inverse_limit=1 / 127,
                largest_scale=1 << 15,
            )
    table_LB, blocks_RC = torch.empty((40, 64), dtype=torch.int32), pages[:8, :128]
    tables_LRC = torch.empty((40, 8, 128), dtype=torch.int32)
    slots_LT = torch.empty((40, 64), dtype=torch.int64)
    yield partial(
        kv_pages.translate, table_LB, blocks_RC, tables_LRC, ids, slots_LT, block_tokens=16
    )


def prefetch_calls() -> Iterator[Callable[[], object]]:
    switch = torch.empty(1, dtype=torch.int32)
    weight, cache = torch.empty(1 << 20), torch.empty((64, 8192), dtype=torch.int32)
    table = torch.empty((256, 16), dtype=torch.int32)
    lengths = torch.empty(256, dtype=torch.int32)
    for architecture in (80, 90):
        yield partial(l2_prefetch.prefetch, weight, switch, architecture=architecture)
        yield partial(
            l2_prefetch.prefetch_kv,
            cache,
            table,
            lengths,
            switch,
            block_tokens=16,
            max_bytes=1 << 24,
            architecture=architecture,
        )


CALLS = {
    "neuron_ffn": ffn_calls,
    "neuron_cache": index_calls,
    "dequant_linear": linear_calls,
    "select_neurons": select_calls,
    "expert_slots": expert_calls,
    "kv_pages": page_calls,
    "l2_prefetch": prefetch_calls,
}


@pytest.mark.parametrize("name", CALLS)
def test_the_table_has_what_is_launched_and_nothing_else(name, launches):
    for call in CALLS[name]():
        call()
    variants = [variant for variant in VARIANTS if variant.name.startswith(f"{name}.")]
    launched = set()
    for launch in launches:
        by_variant = {
            variant.name: differences(launch, variant)
            for variant in variants
            if variant.kernel is launch.kernel
        }
        equal = [variant for variant, found in by_variant.items() if not found]
        assert equal, (
            f"{launch.kernel.__name__} is launched as no variant is: nearest are "
            f"{sorted(by_variant.items(), key=lambda item: len(item[1]))[:2]}"
        )
        launched.update(equal)
    assert launched == {variant.name for variant in variants}
