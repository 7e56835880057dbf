# SPDX-License-Identifier: Apache-2.0
"""Launches of the FFN kernels for a few tokens."""

from collections.abc import Mapping
from typing import Any

import torch

from vllm_tiered.kernels.neuron_ffn.bundles import Bundles, Missing, Relu
from vllm_tiered.kernels.neuron_ffn.codecs import reduce_kernel
from vllm_tiered.kernels.neuron_ffn.few_tokens_kernel import few_tokens_kernel

_NUMBERS = 64
"""Most numbers of x in a thread's registers; sums of the down projection take as many."""


def most_tokens(bundles: Bundles, parameters: Mapping[str, int]) -> int:
    """Return the most tokens of one launch, which registers limit."""
    threads = 32 * _num_warps(bundles, parameters)
    segments = power_of_two(bundles.width // bundles.segment)
    hidden = segments * bundles.segment * (bundles.hidden // bundles.width)
    tokens: int = max(1, min(parameters["few_tokens"], _NUMBERS * threads // hidden))
    return tokens


def _num_warps(bundles: Bundles, parameters: Mapping[str, int]) -> int:
    """Return the warps of a program: one thread for each 16 bytes of a matrix, up to a limit."""
    segments = power_of_two(bundles.width // bundles.segment)
    matrix_bytes = segments * bundles.segment * bundles.code_dtype.itemsize
    num_warps: int = max(1, min(parameters["num_warps"], matrix_bytes // 512))
    return num_warps


class Launch:
    """Launch of the few-tokens kernel over at most ``num_neurons`` neurons.

    Args:
        parameters: launch parameters from ``tuned``.
        missing: neurons to load; None if all are cached.

    Attributes:
        constants: constants that the kernel is compiled with.
    """

    def __init__(
        self,
        bundles: Bundles,
        num_neurons: int,
        num_tokens: int,
        relu: Relu,
        parameters: Mapping[str, int],
        missing: Missing | None = None,
    ) -> None:
        both = [bundles.slots] if missing is None else [bundles.slots, missing.slab]
        has_words = all(bundles.has_words(memory) for memory in both)
        code_bytes = bundles.code_dtype.itemsize
        self._places = 4 // code_bytes if has_words else 1
        self._halves = bundles.hidden // bundles.width
        self._words_of_matrix = bundles.width // self._places
        self._dtype = torch.int32 if has_words else bundles.code_dtype
        segments = power_of_two(bundles.width // bundles.segment)
        matrix_bytes = segments * bundles.segment * code_bytes
        num_warps = _num_warps(bundles, parameters)
        tokens = power_of_two(num_tokens)
        tile_neurons = parameters["tile_bytes"] // (bundles.num_matrices * matrix_bytes)
        tile_neurons = min(tile_neurons, parameters["tile_neurons"] // tokens)
        if bundles.num_groups:
            # Keep scales fewer than threads. Otherwise Triton gives them another layout, and moves
            # every operand that they are combined with through shared memory.
            tile_neurons = min(tile_neurons, (32 * num_warps - 1) // (self._halves * segments))
        tile_neurons = 1 << max(1, tile_neurons).bit_length() - 1
        tile_bytes = tile_neurons * bundles.num_matrices * matrix_bytes
        # The lists of ids take registers too: with 8 stages, two tokens in 4 bit spill on sm_100.
        most_stages = 8 if missing is None else 7
        num_stages = max(2, min(1 + parameters["prefetch_bytes"] // tile_bytes, most_stages))
        self._reduce_block = parameters["reduce_block"]
        self._bundles = bundles
        self._missing = missing
        self._num_neurons = num_neurons
        self._num_tokens = num_tokens
        self._threshold = relu[0]
        self._num_programs = min(parameters["num_programs"], -(-num_neurons // tile_neurons))
        self.constants = dict(
            HIDDEN=bundles.hidden,
            NUM_GROUPS=bundles.num_groups,
            GATED=bundles.gated,
            CODEC=bundles.codec,
            HAS_BIAS=bundles.up_bias is not None and not bundles.gated,
            BOTH=relu[1],
            FILLS=missing is not None,
            TOKENS=tokens,
            NEURONS=tile_neurons,
            STAGES=num_stages,
            ALIGNED=all(
                n % 16 == 0 for r in both for n in (r.data_ptr(), r.stride(0), bundles.matrix_bytes)
            ),
            HALVES=self._halves,
            PLACES=self._places,
            SEGMENT=bundles.segment // self._places,
            SEGMENTS=segments,
            num_warps=num_warps,
            num_stages=1,
        )

    def multiply(
        self,
        x_BH: torch.Tensor | None,
        a_Bn: torch.Tensor | None,
        out_BH: torch.Tensor,
        *,
        adds: bool,
        **others: Any,
    ) -> None:
        """Compute the FFN of x or the down projection of ``a_Bn``; write it or add it."""
        shape = (self._num_programs, self._num_tokens, self._bundles.hidden)
        parts = out_BH.new_empty(shape, dtype=torch.float32)
        self.run(x_BH, a_Bn, parts, **others)
        block = self._reduce_block
        reduce_partial_sums(
            parts, out_BH, block, adds=adds, halves=self._halves, places=self._places
        )

    def run(
        self,
        x_BH: torch.Tensor | None,
        a_Bn: torch.Tensor | None,
        parts: torch.Tensor | None,
        *,
        are_slots_filled: int = 0,
        present_slot_ids: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
    ) -> None:
        """Launch the kernel without the reduction; without ``parts`` it writes ``a_Bn``."""
        bundles, missing = self._bundles, self._missing
        words = bundles.view(bundles.slots, self._dtype)
        far = None if missing is None else bundles.view(missing.slab, self._dtype)
        few_tokens_kernel[(self._num_programs,)](
            None if x_BH is None else self._arranged(x_BH),
            words,
            bundles.scales,
            bundles.up_bias,
            a_Bn,
            parts,
            far,
            None if missing is None else missing.slab_ids,
            None if missing is None else missing.slot_ids,
            None if missing is None else missing.neuron_ids,
            present_slot_ids,
            counts,
            None if missing is None else missing.scales,
            None if missing is None else missing.up_bias,
            self._num_neurons,
            self._num_tokens,
            are_slots_filled,
            words.stride(0),
            0 if far is None else far.stride(0),
            0 if a_Bn is None else a_Bn.stride(0),
            self._threshold,
            ACTIVATES=x_BH is not None,
            MULTIPLIES=parts is not None,
            **self.constants,
        )

    def _arranged(self, x_BH: torch.Tensor) -> torch.Tensor:
        """Return x as float32 [B, halves, places, words], in the order of the codes in words."""
        x_BHWP = x_BH.view(len(x_BH), self._halves, self._words_of_matrix, self._places)
        return x_BHWP.transpose(2, 3).float().contiguous()


def reduce_partial_sums(
    parts: torch.Tensor, out_BH: torch.Tensor, block: int, *, adds: bool, halves: int, places: int
) -> None:
    """Write the sum of the partial sums, float32 [P, B, H], to ``out_BH``, or add it."""
    hidden = out_BH.shape[1]
    reduce_kernel[(-(-out_BH.numel() // block),)](
        parts,
        out_BH,
        len(parts),
        len(out_BH),
        out_BH.stride(0),
        HALVES=halves,
        PLACES=places,
        WORDS=hidden // halves // places,
        ADDS=adds,
        PARTS=64,
        BLOCK=block,
    )


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()
