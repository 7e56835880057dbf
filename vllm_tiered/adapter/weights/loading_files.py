# SPDX-License-Identifier: Apache-2.0
"""Files that hold quantized layers until they are placed, where host memory is too small for them.

Each tensor is a shared mapping of a file of its own, which has no name any more. The system writes
its pages to the disk where memory is short, and reads them when they are used. The disk's space is
free as soon as the tensor is.
"""

import os
import tempfile
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path

import torch

from vllm_tiered.adapter.weights.quantized import SMALLEST_BYTES, is_dense
from vllm_tiered.errors import BudgetError, ConfigError
from vllm_tiered.units import format_bytes


class LoadingFiles:
    """Maker of tensors in files.

    Args:
        folder: folder of the files; made if there is none.

    Raises:
        ConfigError: the folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._refused(error) from error

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor in a file, with the same strides.

        A tensor that is small, or has gaps in its memory, is copied to host memory instead.

        Raises:
            BudgetError: the disk is full.
            ConfigError: no file can be made in the folder.
        """
        if tensor.nbytes < SMALLEST_BYTES or not is_dense(tensor):
            return tensor.to("cpu")
        flat = self._map(tensor.nbytes).view(tensor.dtype)
        mapped = flat.as_strided(tensor.shape, tensor.stride())
        mapped.copy_(tensor)
        return mapped

    def _map(self, num_bytes: int) -> torch.Tensor:
        """Return the mapping of a new file, uint8 [num_bytes]."""
        try:
            descriptor, name = tempfile.mkstemp(prefix="loading-", dir=self._folder)
        except OSError as error:
            raise self._refused(error, num_bytes) from error
        try:
            os.unlink(name)
            # A full disk would otherwise end the process at a write to the mapping.
            os.posix_fallocate(descriptor, 0, num_bytes)
            # Whoever may write the folder could have put another file in the place of the name.
            path = f"/proc/self/fd/{descriptor}"
            return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
        except OSError as error:
            raise self._refused(error, num_bytes) from error
        finally:
            os.close(descriptor)

    def _refused(self, error: OSError, num_bytes: int = 0) -> BudgetError | ConfigError:
        kept = f"quantized layers are kept in {self._folder} until they are placed"
        if error.errno in (ENOSPC, EDQUOT, EFBIG):
            return BudgetError(
                f"{kept}, which has no room for another {format_bytes(num_bytes)} "
                f"({error.strerror}): give weights.storage_path more space"
            )
        return ConfigError(
            f"{kept}, where no file can be made ({error.strerror}): give as weights.storage_path a "
            "writable folder on a local disk"
        )
