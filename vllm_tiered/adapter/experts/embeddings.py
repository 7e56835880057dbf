# SPDX-License-Identifier: Apache-2.0
"""Embeddings of an engine whose experts are in a file: on a CPU they need little memory either.

vLLM's CPU backend packs the matrix of each embedding for a GEMM, and keeps the matrix as well. A
step reads one of the four whole:

    input embedding      matrix     a row a token                         to a file
                         packed     only if it is the output's, too       made when first used
    output embedding     matrix     not at all, in most models            to a file
                         packed     all of it                             in memory

The file is read through the page cache, so that memory which is free keeps the rows that are used.
It has no name, is written at each start, and its rows have no checksums, as their memory had none.
Every result stays as it was, bit by bit: the same kernel reads the same packed matrix. A model that
computes its output with the module of its input packs it in its first step, not in its start.
"""

import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)
from vllm.platforms import current_platform

from vllm_tiered.adapter.experts.tensors import move_to_draft
from vllm_tiered.errors import BudgetError, ConfigError
from vllm_tiered.storage.immutable_file import Draft
from vllm_tiered.units import MIB, format_bytes

logger = logging.getLogger("vllm.tiered")

_CHUNK_BYTES = 64 * MIB
"""Bytes that are written to the file at a time, and are in memory twice."""


class Embeddings:
    """Embeddings of an engine.

    Args:
        folder: where the files are.
        is_wanted: returns whether the engine's experts are in a file; called after it is known.
        reserved_bytes: returns the disk space that the experts' file is still going to take.

    Attributes:
        file_bytes: bytes of the matrices in files.
    """

    def __init__(
        self, folder: Path, is_wanted: Callable[[], bool], reserved_bytes: Callable[[], int]
    ) -> None:
        self._folder, self._is_wanted, self._reserved_bytes = folder, is_wanted, reserved_bytes
        self._drafts: list[Draft] = []
        self.file_bytes = 0

    def adopt(self, layer: Any) -> None:
        """Attach to a new embedding, if vLLM packs it, and then reads no more of it than rows."""
        method = layer.quant_method
        model = get_current_vllm_config().model_config
        # In another dtype than the model's, the output is computed from the matrix itself.
        is_read = model.head_dtype != model.dtype
        is_read |= current_platform.is_zen_cpu() and not envs.VLLM_ZENTORCH_WEIGHT_PREPACK
        if type(method) is UnquantizedEmbeddingMethod and layer.weight.is_cpu and not is_read:
            pack = method.process_weights_after_loading
            method.process_weights_after_loading = partial(self._process, pack)

    def close(self) -> None:
        """Close the files, whose space is free when the model is gone. Idempotent."""
        for draft in self._drafts:
            draft.close()
        self._drafts = []

    def _process(self, pack: Callable[[Any], None], layer: Any) -> None:
        """Stand in for `process_weights_after_loading`."""
        if not self._is_wanted():
            pack(layer)
            return
        self._move_to_file(layer.weight)
        if isinstance(layer, ParallelLMHead):
            self._pack(pack, layer)
        else:
            layer.cpu_linear = partial(self._pack_at_first_use, pack, layer)

    def _pack_at_first_use(
        self,
        pack: Callable[[Any], None],
        layer: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        self._pack(pack, layer)  # it sets `cpu_linear`
        result: torch.Tensor = layer.cpu_linear(x, layer.weight, bias)
        return result

    def _pack(self, pack: Callable[[Any], None], layer: Any) -> None:
        """Let vLLM pack a matrix; one that it then reads as a whole goes back to memory."""
        weight = layer.weight
        draft = self._draft_of(weight)
        if draft is None:
            pack(layer)
            return
        draft.expect_reads(scattered=False)
        pack(layer)
        if _is_packed(layer):
            draft.write_back(0, weight.nbytes)
            draft.expect_reads(scattered=True)
        else:
            weight.data = weight.data.clone()
            self._drop(draft, weight.nbytes)

    def _move_to_file(self, weight: torch.nn.Parameter) -> None:
        """Move a matrix to a file, unless it is in one, or the disk does not have the space."""
        if self._draft_of(weight) is not None:
            return  # the output's matrix is the input's
        loaded, draft = weight.data, None
        try:
            free_bytes = shutil.disk_usage(self._folder).free - self._reserved_bytes()
            if free_bytes < weight.nbytes:
                raise BudgetError(f"{format_bytes(max(0, free_bytes))} are free for it")
            draft = move_to_draft(weight, self._folder)
            self._drafts.append(draft)
            self.file_bytes += weight.nbytes
            to, of = (data.view(-1).view(torch.uint8) for data in (weight.data, loaded))
            for begin in range(0, len(to), _CHUNK_BYTES):
                end = min(begin + _CHUNK_BYTES, len(to))
                to[begin:end] = of[begin:end]
                draft.write_back(begin, end)
            draft.expect_reads(scattered=True)
        except (BudgetError, ConfigError, OSError) as error:
            weight.data = loaded
            if draft is not None:
                self._drop(draft, weight.nbytes)
            logger.warning(
                "tiered experts: an embedding of %s stays in memory: %s",
                format_bytes(weight.nbytes),
                error,
            )

    def _draft_of(self, weight: torch.Tensor) -> Draft | None:
        address = weight.data_ptr()
        return next((one for one in self._drafts if one.memory.data_ptr() == address), None)

    def _drop(self, draft: Draft, num_bytes: int) -> None:
        self._drafts.remove(draft)
        self.file_bytes -= num_bytes
        draft.close()


def _is_packed(layer: Any) -> bool:
    """Return whether the output is computed from a packed copy: then the matrix may be any."""
    x = layer.weight.new_zeros((1, layer.weight.shape[1]))
    return bool(layer.cpu_linear(x, x, None).shape[-1] == len(layer.weight) > 1)
