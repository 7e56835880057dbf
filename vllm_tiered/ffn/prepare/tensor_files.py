# SPDX-License-Identifier: Apache-2.0
"""Reader of a checkpoint's safetensors, one tensor at a time into new memory.

Files are not memory-mapped, because touched pages of a mapping count as the process's memory until
the system reclaims them.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from vllm_tiered.errors import ConfigError, UnsupportedError
from vllm_tiered.untrusted import open_regular_file, parse_json, read_checkpoint_json

MAX_HEADER_BYTES = 100_000_000
"""Most bytes of a file's header, as in the safetensors library."""

_INDEX = "model.safetensors.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _Place(NamedTuple):
    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int  # bytes, in the file
    num_bytes: int


class TensorFiles:
    """Index of all tensors in a folder's safetensors, by name.

    Raises:
        ConfigError: the folder has no safetensors, lacks one of several files, or a file is
            damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[str, _Place] = {}
        for path in _files(folder):
            self._places |= _read_header(path)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def names(self) -> list[str]:
        """Return the names of all tensors, in no particular order."""
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an existing tensor."""
        return self._places[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of an existing tensor.

        Raises:
            UnsupportedError: the tensor is quantised.
        """
        place = self._places[name]
        if place.dtype not in _DTYPES:
            raise UnsupportedError(
                f"{place.path}: {name} is {place.dtype}: prepare takes checkpoints in 16 or 32 "
                "bit, which it quantises itself"
            )
        return _DTYPES[place.dtype]

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor in its own dtype.

        Raises:
            ConfigError: the file cannot be read.
            UnsupportedError: as :meth:`dtype`.
        """
        dtype, place = self.dtype(name), self._places[name]
        memory = torch.empty(place.num_bytes, dtype=torch.uint8)
        view, moved = memory.numpy().data, 0
        try:
            fd = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                while moved < place.num_bytes:
                    count = os.preadv(fd, [view[moved:]], place.begin + moved)
                    if not count:
                        raise ConfigError(f"{place.path} is cut off: copy the checkpoint again")
                    moved += count
                os.posix_fadvise(fd, place.begin, place.num_bytes, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
        except OSError as error:
            raise ConfigError(f"{place.path} cannot be read ({error.strerror})") from error
        return memory.view(dtype).view(place.shape)


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.exists():
        try:
            names = sorted(set(map(os.fspath, read_checkpoint_json(index)["weight_map"].values())))
        except OSError as error:
            raise ConfigError(f"{index} cannot be read ({error.strerror})") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index} is damaged: copy the checkpoint again") from error
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise ConfigError(
                f"{folder} lacks {len(missing)} of its {len(names)} files of weights "
                f"({missing[0]}): copy the checkpoint again"
            )
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{folder} has no *.safetensors: give a folder with a Hugging Face checkpoint in that "
            "format (save_pretrained writes it)"
        )
    return files


def _read_header(path: Path) -> Mapping[str, _Place]:
    damaged = f"{path} is damaged or cut off: copy the checkpoint again"
    try:
        with open(open_regular_file(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = 8 + int.from_bytes(file.read(8), "little")
            if not 8 < data <= min(size, 8 + MAX_HEADER_BYTES):
                raise ConfigError(damaged)
            header = parse_json(file.read(data - 8), any_number=True, allow_repeats=True)
        places = {}
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                shape = tuple(entry["shape"])
                if not all(type(one) is int for one in (begin, end, *shape)):
                    raise ConfigError(damaged)
                places[name] = _Place(path, entry["dtype"], shape, data + begin, end - begin)
                if not 0 <= begin <= end <= size - data:
                    raise ConfigError(damaged)
        return places
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(damaged) from error
