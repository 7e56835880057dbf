# SPDX-License-Identifier: Apache-2.0
"""`neuron_ffn` over a layer's neurons; in decode it should be bound by memory bandwidth.

B tokens, n neurons, M matrices of a neuron, H hidden. All neurons are active, as most of those that
a selection chose are. With few tokens the kernel would skip rows of `down` that add nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.suites.gpu.kernels import Case

_SHAPES: Mapping[str, tuple[int, int, bool]] = {
    "Llama-13B": (5120, 13824, True),
    "OPT-13B": (5120, 20480, False),
}
"""Hidden size, number of neurons of a layer, and whether it is gated."""

_CODECS = ("bfloat16", "int8", "int4")
_TOKENS = (1, 4, 16, 64)
_TARGET_SHARE = 0.7
_MOST_TOKENS_WITH_TARGET = 16
"""At 64 tokens tensor cores are about to be the limit, not memory."""

_GROUP = 64
"""Number of weights per scale of 4-bit codes."""

_MISSING = 16
"""In cases with far memory, one neuron in this many comes from there."""

_TOLERANCE = 2.0**-15
"""Share of the sum of magnitudes, less than one neuron of 20480 adds.

Batches round activations to 2^-16.
"""


def cases(torch: Any) -> Iterator[Case]:
    """Yield each shape, codec and number of tokens, and neurons loaded during the matmul."""
    for shape in _SHAPES:
        for codec in _CODECS:
            bundles = _bundles(torch, shape, codec)
            for num_tokens in _TOKENS:
                yield _matmul(torch, shape, bundles, num_tokens)
            yield _fill(torch, shape, bundles)


def _bundles(torch: Any, shape: str, codec: str) -> Any:
    """Return bundles scaled as in a real layer: x of size 1 gives sums of size 1."""
    from vllm_tiered.kernels.neuron_ffn.bundles import Bundles

    hidden, num_neurons, gated = _SHAPES[shape]
    matrices = 3 if gated else 2
    scales = up_bias = None
    size = 1 / math.sqrt(hidden)
    if codec == "bfloat16":
        weights = torch.randn((num_neurons, matrices * hidden), device="cuda") * size
        rows = weights.to(torch.bfloat16).view(torch.uint8)
    else:
        num_bytes = matrices * hidden // (2 if codec == "int4" else 1)
        rows = torch.randint(0, 256, (num_neurons, num_bytes), dtype=torch.uint8, device="cuda")
        groups = hidden // _GROUP if codec == "int4" else 1
        step = size / (4.6 if codec == "int4" else 74)  # the standard deviation of a uniform code
        scales = (1 + torch.rand((num_neurons, matrices, groups), device="cuda")) * step
        scales = scales.to(torch.float16)
    if not gated:
        up_bias = torch.full((num_neurons,), 8.0, device="cuda")
    return Bundles(
        slots=rows, scales=scales, up_bias=up_bias, hidden=hidden, gated=gated, codec=codec
    )


def _num_bytes(bundles: Any, num_tokens: int) -> int:
    """Return the bytes of neurons and x, read once, and of the float32 sums."""
    tables = [table for table in (bundles.scales, bundles.up_bias) if table is not None]
    weights = bundles.slots.nbytes + sum(table.nbytes for table in tables)
    return int(weights + num_tokens * bundles.hidden * (2 + 4))


_ALL_ACTIVE = (-math.inf, False)
"""Of ReLUs: no gate is too small, so that all down columns are read."""


def _matmul(torch: Any, shape: str, bundles: Any, num_tokens: int) -> Case:
    from vllm_tiered.kernels.neuron_ffn import api

    num_neurons = len(bundles.slots)
    x_BH = torch.randn((num_tokens, bundles.hidden), device="cuda").to(torch.bfloat16)
    device_name = torch.cuda.get_device_name()

    def run() -> Any:
        return api.compute_ffn(x_BH, bundles, num_neurons, _ALL_ACTIVE, device_name=device_name)

    has_target = num_tokens <= _MOST_TOKENS_WITH_TARGET
    return Case(
        name=f"{shape} {bundles.codec}, {num_neurons} neurons, {num_tokens} tokens",
        num_bytes=_num_bytes(bundles, num_tokens),
        run=run,
        torch_runs=_in_torch(torch, bundles, x_BH),
        is_right=lambda: _is_right(torch, run(), x_BH, bundles),
        target_share=_TARGET_SHARE if has_target else None,
    )


def _in_torch(torch: Any, bundles: Any, x_BH: Any) -> dict[str, Callable[[], object]]:
    """Return dense layers over the same neurons, gathered into 16-bit matrices."""
    from vllm_tiered.kernels.neuron_ffn import reference

    rows = torch.arange(len(bundles.slots), device="cuda")
    linear = torch.nn.functional.linear
    bias = None if bundles.up_bias is None else bundles.up_bias.to(torch.bfloat16)

    def matrices() -> list[Any]:
        w_nMH = reference.dequantize(bundles, rows, torch.bfloat16)
        return [w_nMH[:, i].contiguous() for i in range(bundles.num_matrices)]

    def multiplied(gate_up_down: list[Any]) -> Any:
        up_Bn = linear(x_BH, gate_up_down[-2], bias)
        a_Bn = linear(x_BH, gate_up_down[0]) * up_Bn if bundles.gated else up_Bn
        return a_Bn @ gate_up_down[-1]

    made = matrices()
    runs: dict[str, Callable[[], object]] = {"dense in 16 bit": lambda: multiplied(made)}
    if bundles.codec != "bfloat16":
        runs["made 16-bit, dense"] = lambda: multiplied(matrices())
    return runs


def _is_right(torch: Any, found: Any, x_BH: Any, bundles: Any) -> bool:
    """Return whether the result is within a sum's rounding; a missing neuron exceeds it."""
    from vllm_tiered.kernels.neuron_ffn import reference

    rows = torch.arange(len(bundles.slots), device="cuda")
    a_Bn = reference.compute_activations(x_BH, bundles, rows, _ALL_ACTIVE)
    down_nH = reference.dequantize(bundles, rows, torch.float32)[:, -1]
    terms_BH = a_Bn.abs() @ down_nH.abs()
    return bool(((found - a_Bn @ down_nH).abs() <= _TOLERANCE * terms_BH).all())


def _fill(torch: Any, shape: str, bundles: Any) -> Case:
    """Return a one-token case whose first run loads some neurons' slots from far memory."""
    from vllm_tiered.kernels.neuron_ffn import api
    from vllm_tiered.kernels.neuron_ffn.bundles import Missing

    num_neurons = len(bundles.slots)
    num_missing = num_neurons // _MISSING
    order = torch.randperm(num_neurons, device="cuda")
    slot_ids, present_slot_ids = order[:num_missing], order[num_missing:]
    slab_ids = torch.arange(num_missing, device="cuda")
    slab = bundles.slots[slot_ids].cpu().pin_memory()
    bundles.slots[slot_ids] = 0
    missing = Missing(
        slab=slab,
        slab_ids=slab_ids,
        slot_ids=slot_ids,
        neuron_ids=slot_ids,
        scales=None if bundles.scales is None else bundles.scales.clone(),
        up_bias=None if bundles.up_bias is None else bundles.up_bias.clone(),
    )
    counts = torch.tensor([num_missing, len(present_slot_ids)], dtype=torch.int32, device="cuda")
    x_BH = torch.randn((1, bundles.hidden), device="cuda").to(torch.bfloat16)
    device_name = torch.cuda.get_device_name()

    def run() -> Any:
        return api.load_and_compute(
            x_BH,
            bundles,
            missing,
            present_slot_ids,
            counts,
            _ALL_ACTIVE,
            device_name=device_name,
        )

    far_mib = num_missing * bundles.slots.shape[1] / 2**20
    return Case(
        name=f"{shape} {bundles.codec}, 1 token, {far_mib:.1f} MiB of it from far memory",
        num_bytes=_num_bytes(bundles, 1) + num_missing * bundles.slots.shape[1],
        run=run,
        is_right=lambda: (
            bool(torch.equal(bundles.slots[slot_ids].cpu(), slab))
            and _is_right(torch, run(), x_BH, bundles)
        ),
    )
