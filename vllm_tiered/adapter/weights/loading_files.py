# SPDX-License-Identifier: Apache-2.0
"""Files that hold quantized layers until they are placed, where host memory is too small for them.

Each tensor is a shared mapping of a file of its own, which has no name any more. The system writes
its pages to the disk where memory is short, and reads them when they are used. The disk's space is
free as soon as the tensor is.
"""

import os
import tempfile
from pathlib import Path

import torch

from vllm_tiered.adapter.weights.quantized import SMALLEST_BYTES, is_dense
from vllm_tiered.errors import BudgetError
from vllm_tiered.units import format_bytes


class LoadingFiles:
    """Maker of tensors in files.

    Args:
        folder: folder of the files; made if there is none.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor in a file, with the same strides.

        A tensor that is small, or has gaps in its memory, is copied to host memory instead.

        Raises:
            BudgetError: the disk is full.
        """
        if tensor.nbytes < SMALLEST_BYTES or not is_dense(tensor):
            return tensor.to("cpu")
        flat = self._map(tensor.nbytes).view(tensor.dtype)
        mapped = flat.as_strided(tensor.shape, tensor.stride())
        mapped.copy_(tensor)
        return mapped

    def _map(self, num_bytes: int) -> torch.Tensor:
        """Return the mapping of a new file, uint8 [num_bytes]."""
        descriptor, name = tempfile.mkstemp(prefix="loading-", dir=self._folder)
        try:
            # A full disk would otherwise end the process at a write to the mapping.
            os.posix_fallocate(descriptor, 0, num_bytes)
            return torch.from_file(name, shared=True, size=num_bytes, dtype=torch.uint8)
        except OSError as error:
            raise BudgetError(
                f"quantized layers are kept in {self._folder} until they are placed, which has no "
                f"room for another {format_bytes(num_bytes)} ({error.strerror}): give "
                "weights.storage_path more space"
            ) from error
        finally:
            os.close(descriptor)
            os.unlink(name)
