# SPDX-License-Identifier: Apache-2.0
"""Read a folder of safetensors without torch and without loading it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Bf16 = npt.NDArray[np.uint16]  # bfloat16 bits


_DTYPES = {"BF16": "<u2", "I32": "<i4", "I64": "<i8"}


class Checkpoint:
    """The tensors of a model folder as read-only memory maps of its files.

    Raises ValueError, with the tensor's name and type, if one is neither bfloat16 nor a whole
    number.
    """

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
        self._maps: dict[str, npt.NDArray[Any]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as file:
                header_bytes = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(header_bytes))
            data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + header_bytes)
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                if (dtype := _DTYPES.get(entry["dtype"])) is None:
                    raise ValueError(f"{path.name}: {name} is {entry['dtype']}, expected BF16")
                start, end = entry["data_offsets"]
                self._maps[name] = data[start:end].view(dtype).reshape(entry["shape"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._maps)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._maps[name]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._maps.values())


def to_float32(bits: Bf16) -> npt.NDArray[np.float32]:
    """Return bfloat16 bits as numbers."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
