# SPDX-License-Identifier: Apache-2.0
"""Launchers of the FFN: check shapes and types, then launch its kernels.

few tokens     permute x ─► few_tokens_kernel ─► reduce_kernel
batch          batch_activations_kernel ─► batch_down_kernel ─► reduce_kernel
"""

from collections.abc import Mapping

import torch

from vllm_tiered.kernels import tuned
from vllm_tiered.kernels.neuron_ffn import batch, few_tokens
from vllm_tiered.kernels.neuron_ffn.bundles import Bundles, Missing, Relu

_ANY: Relu = (0.0, False)
"""Where activations are given."""


def compute_activations(
    x_BH: torch.Tensor,
    bundles: Bundles,
    num_slots: int,
    relu: Relu,
    *,
    device_name: str | None = None,
) -> torch.Tensor:
    """Compute the activations of slots 0 .. num_slots - 1, float32 [B, n].

    Args:
        x_BH: any float type; each row contiguous.
        relu: what the gate (or fc1) has to exceed, and whether up has a ReLU too.
        device_name: the GPU whose launch parameters are used.
    """
    _check(x_BH, bundles, num_slots)
    a_Bn = x_BH.new_empty((len(x_BH), num_slots), dtype=torch.float32)
    if not a_Bn.numel():
        return a_Bn
    parameters = tuned.parameters("neuron_ffn", device_name)
    if _is_batch(bundles, len(x_BH), parameters):
        batch.compute_activations(x_BH, bundles, a_Bn, relu, parameters)
        return a_Bn
    for tokens in _few(len(x_BH), few_tokens.most_tokens(bundles, parameters)):
        launch = few_tokens.Launch(bundles, num_slots, len(a_Bn[tokens]), relu, parameters)
        launch.run(x_BH[tokens], a_Bn[tokens], None)
    return a_Bn


def add_down_projection(
    out_BH: torch.Tensor,
    a_Bn: torch.Tensor,
    bundles: Bundles,
    num_slots: int,
    *,
    device_name: str | None = None,
) -> None:
    """Add the down projection of slots 0 .. num_slots - 1 to ``out_BH``, float32 and contiguous.

    Slots whose activations are all 0 add nothing, even if they hold NaN; the few-tokens kernel does
    not read them.

    Args:
        a_Bn: float32 activations; each row contiguous.
    """
    assert out_BH.dtype == a_Bn.dtype == torch.float32, (out_BH.dtype, a_Bn.dtype)
    assert out_BH.is_contiguous() and out_BH.shape == (len(a_Bn), bundles.hidden)
    assert bundles.has_down
    assert a_Bn.shape[1] == num_slots <= len(bundles.slots) and a_Bn.stride(1) == 1
    if not a_Bn.numel():
        return
    parameters = tuned.parameters("neuron_ffn", device_name)
    if _is_batch(bundles, len(a_Bn), parameters):
        batch.add_down_projection(out_BH, a_Bn, bundles, parameters, adds=True)
        return
    for tokens in _few(len(a_Bn), few_tokens.most_tokens(bundles, parameters)):
        launch = few_tokens.Launch(bundles, num_slots, len(a_Bn[tokens]), _ANY, parameters)
        launch.multiply(None, a_Bn[tokens], out_BH[tokens], adds=True)


def compute_ffn(
    x_BH: torch.Tensor,
    bundles: Bundles,
    num_slots: int,
    relu: Relu,
    *,
    device_name: str | None = None,
) -> torch.Tensor:
    """Compute activations and down projection, float32 [B, H].

    The arguments are those of :func:`compute_activations`.
    """
    _check(x_BH, bundles, num_slots)
    assert bundles.has_down
    out_BH = x_BH.new_zeros((len(x_BH), bundles.hidden), dtype=torch.float32)
    if not len(x_BH) or not num_slots:
        return out_BH
    parameters = tuned.parameters("neuron_ffn", device_name)
    if _is_batch(bundles, len(x_BH), parameters):
        a_Bn = compute_activations(x_BH, bundles, num_slots, relu, device_name=device_name)
        batch.add_down_projection(out_BH, a_Bn, bundles, parameters, adds=False)
        return out_BH
    for tokens in _few(len(x_BH), few_tokens.most_tokens(bundles, parameters)):
        launch = few_tokens.Launch(bundles, num_slots, len(out_BH[tokens]), relu, parameters)
        launch.multiply(x_BH[tokens], None, out_BH[tokens], adds=False)
    return out_BH


def num_passes(bundles: Bundles, num_tokens: int, *, device_name: str | None = None) -> int:
    """Return how many times :func:`load_and_compute` reads missing neurons without a slot."""
    most: int = few_tokens.most_tokens(bundles, tuned.parameters("neuron_ffn", device_name))
    return -(-num_tokens // most)


def load_and_compute(
    x_BH: torch.Tensor,
    bundles: Bundles,
    missing: Missing,
    present_slot_ids: torch.Tensor,
    counts: torch.Tensor,
    relu: Relu,
    *,
    device_name: str | None = None,
) -> torch.Tensor:
    """Compute the FFN over missing and present neurons, and store the missing ones to their slots.

    The kernel is for a few tokens. Larger batches are computed a few tokens at a time; each pass
    reads the present slots and the missing neurons without a slot again.

    Args:
        x_BH: any float type; each row contiguous.
        missing: neurons to load. Except for -1, no slot may occur twice in its slots and the
            present ones.
        present_slot_ids: int64, slots of ``bundles``.
        counts: int32 [2], numbers of valid entries at the start of ``missing`` and of
            ``present_slot_ids``; read on the device.
        relu: what the gate (or fc1) has to exceed, and whether up has a ReLU too.

    Returns:
        float32 [B, H]. The order of the sums follows the two lists.
    """
    _check(x_BH, bundles, 0)
    assert counts.dtype == torch.int32 and counts.shape == (2,) and counts.is_contiguous()
    assert present_slot_ids.dtype == torch.int64 and present_slot_ids.is_contiguous()
    assert (missing.scales is None) == (bundles.scales is None)
    assert (missing.up_bias is None) == (bundles.up_bias is None)
    out_BH = x_BH.new_zeros((len(x_BH), bundles.hidden), dtype=torch.float32)
    parameters = tuned.parameters("neuron_ffn", device_name)
    most_neurons = max(1, len(missing.slot_ids) + len(present_slot_ids))
    for tokens in _few(len(x_BH), few_tokens.most_tokens(bundles, parameters)):
        launch = few_tokens.Launch(
            bundles, most_neurons, len(out_BH[tokens]), relu, parameters, missing
        )
        launch.multiply(
            x_BH[tokens],
            None,
            out_BH[tokens],
            adds=False,
            are_slots_filled=int(tokens.start > 0),
            present_slot_ids=present_slot_ids,
            counts=counts,
        )
    return out_BH


def _check(x_BH: torch.Tensor, bundles: Bundles, num_slots: int) -> None:
    assert x_BH.ndim == 2 and x_BH.shape[1] == bundles.hidden and x_BH.stride(1) == 1
    assert x_BH.is_floating_point() and num_slots <= len(bundles.slots)


def _is_batch(bundles: Bundles, num_tokens: int, parameters: Mapping[str, int]) -> bool:
    """Return whether to use tensor cores, which need at least 16 codes that share a scale."""
    most: int = few_tokens.most_tokens(bundles, parameters)
    return num_tokens > most and bundles.segment >= 16


def _few(num_tokens: int, most: int) -> list[slice]:
    return [slice(i, min(i + most, num_tokens)) for i in range(0, num_tokens, most)]
