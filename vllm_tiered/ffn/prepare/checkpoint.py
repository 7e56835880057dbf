# SPDX-License-Identifier: Apache-2.0
"""Reader of a Hugging Face checkpoint's FFN, one layer at a time.

[gate │] up     rows of gate_proj and up_proj; of gate_up_proj, which has both (Phi-3: gate
                first); or of fc1 (OPT)
down            columns of down_proj or fc2

N neurons, M matrices ([gate,] up, down), H features of the hidden state.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_tiered.errors import ConfigError, UnsupportedError
from vllm_tiered.ffn.activation import RELU, SPARSE, name_of
from vllm_tiered.ffn.layout import FfnShape
from vllm_tiered.ffn.prepare.tensor_files import TensorFiles
from vllm_tiered.storage.checkpoint_fingerprint import fingerprint_of_folder
from vllm_tiered.untrusted import read_checkpoint_json

DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Names of tensors and config keys in a family of models.

    Attributes:
        prefixes: prefixes of a layer's tensors, saved with or without a language model head.
        rows: matrices whose rows are neurons, in the order of a bundle. A tensor that holds several
            matrices has them one after the other.
        down: the matrix whose columns are neurons.
        gated: whether the rows are gate and up.
        neurons, activation: the config's keys.
        default_activation: used if the config has none; None if the config must have it.
    """

    prefixes: tuple[str, ...]
    rows: tuple[str, ...]
    down: str
    gated: bool
    neurons: str = "intermediate_size"
    activation: str = "hidden_act"
    default_activation: str | None = None


_LLAMA = Family(
    prefixes=("model.layers.", "layers."),
    rows=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    gated=True,
)

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "phi3": Family(
        prefixes=_LLAMA.prefixes, rows=("mlp.gate_up_proj",), down="mlp.down_proj", gated=True
    ),
    "opt": Family(
        prefixes=("model.decoder.layers.", "decoder.layers."),
        rows=("fc1",),
        down="fc2",
        gated=False,
        neurons="ffn_dim",
        activation="activation_function",
        default_activation="relu",
    ),
}


@dataclass(frozen=True, slots=True)
class FfnWeights:
    """FFN weights of one layer.

    Attributes:
        rows_NMH: rows of gate and up (or fc1) and columns of down (or fc2).
        up_bias_N, down_bias_H: None if the model has none.
        activation: a name of ``ffn.activation``.
    """

    rows_NMH: torch.Tensor
    up_bias_N: torch.Tensor | None
    down_bias_H: torch.Tensor | None
    activation: str

    @property
    def is_gated(self) -> bool:
        """Whether the FFN has a gate beside up and down."""
        return self.rows_NMH.shape[1] == 3

    @property
    def down_norms_N(self) -> torch.Tensor:
        """Euclidean norms of the down columns, float32."""
        norms: torch.Tensor = self.rows_NMH[:, -1].float().norm(dim=1)
        return norms


class Checkpoint:
    """FFN layers of a checkpoint.

    Args:
        folder: a folder with config.json and safetensors.
        dtype: dtype of the weights returned; None for the checkpoint's.

    Attributes:
        name: name of the folder.
        fingerprint: hash of the configuration and weights.
        shape, activation, dtype: properties of the FFN layers.

    Raises:
        ConfigError: the folder has no checkpoint, or a damaged one.
        UnsupportedError: the model's FFN is of no known kind.
    """

    def __init__(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        self.folder = Path(folder)
        self.name = self.folder.resolve().name
        config = _read_config(self.folder)
        self._family = family = _family(config, self.folder)
        self._files = TensorFiles(self.folder)
        prefixes = [p for p in family.prefixes if f"{p}0.{family.down}.weight" in self._files]
        if not prefixes:
            raise UnsupportedError(
                f"{self.folder} has no {family.prefixes[0]}0.{family.down}.weight, as "
                f"{config['model_type']} models have: an FFN of this kind (no mixture of experts, "
                "no quantised checkpoint) is what prepare takes"
            )
        self._prefix = prefixes[0]
        self.dtype = dtype or self._files.dtype(f"{self._prefix}0.{family.down}.weight")
        if self.dtype not in DTYPES.values():
            raise UnsupportedError(f"weights are {self.dtype}: give --dtype {' or '.join(DTYPES)}")
        self.shape = _shape(config, family, self.dtype)
        self.activation = _activation(config, family)
        self._check_tensors()
        self.fingerprint = fingerprint_of_folder(self.folder)

    def layer(self, layer: int) -> FfnWeights:
        """Read one layer.

        Memory use peaks at the layer's size plus the size of its largest matrix.

        Raises:
            ConfigError: the files cannot be read.
        """
        shape, family = self.shape, self._family
        size = (shape.neurons, shape.num_matrices, shape.hidden)
        weights_NMH = torch.empty(size, dtype=self.dtype)
        matrix = 0
        for name in family.rows:
            rows_XH = self._files.read(self._name(layer, name, "weight"))
            for rows_NH in rows_XH.split(shape.neurons):  # type: ignore[no-untyped-call]
                weights_NMH[:, matrix] = rows_NH
                matrix += 1
            del rows_XH, rows_NH
        weights_NMH[:, -1] = self._files.read(self._name(layer, family.down, "weight")).t()
        return FfnWeights(
            weights_NMH,
            self._bias(layer, family.rows[-1]),
            self._bias(layer, family.down),
            self.activation,
        )

    def _bias(self, layer: int, matrix: str) -> torch.Tensor | None:
        name = self._name(layer, matrix, "bias")
        return self._files.read(name).to(self.dtype) if name in self._files else None

    def _name(self, layer: int, matrix: str, kind: str) -> str:
        return f"{self._prefix}{layer}.{matrix}.{kind}"

    def _check_tensors(self) -> None:
        """Check names, shapes and dtypes of all tensors before hours of work begin."""
        shape, family = self.shape, self._family
        rows = shape.neurons * ((2 if shape.gated else 1) // len(family.rows))
        expected = {name: (rows, shape.hidden) for name in family.rows}
        expected[family.down] = (shape.hidden, shape.neurons)
        for layer in range(shape.num_layers):
            for matrix, size in expected.items():
                name = self._name(layer, matrix, "weight")
                if name not in self._files:
                    raise ConfigError(f"{self.folder} lacks {name}: copy the checkpoint again")
                if self._files.shape(name) != size:
                    raise ConfigError(
                        f"{self.folder}: {name} is {list(self._files.shape(name))}, and config.json"
                        f" says {list(size)}: they are not of one model"
                    )
                self._files.dtype(name)
            if shape.gated and self._name(layer, family.rows[0], "bias") in self._files:
                raise UnsupportedError(
                    f"{self.folder}: {self._name(layer, family.rows[0], 'bias')}: gated FFNs with "
                    "biases are not supported yet"
                )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = read_checkpoint_json(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"{folder} has no config.json: give a local folder with a Hugging Face checkpoint"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no model's configuration")
    return config


def _family(config: Mapping[str, Any], folder: Path) -> Family:
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise UnsupportedError(
            f"{folder}: model_type {kind!r} is not known to prepare, which takes "
            f"{', '.join(sorted(FAMILIES))}"
        )
    if "quantization_config" in config:
        raise UnsupportedError(
            f"{folder} is quantised: prepare takes checkpoints in 16 or 32 bit, which it quantises "
            "itself"
        )
    return FAMILIES[kind]


def _shape(config: Mapping[str, Any], family: Family, dtype: torch.dtype) -> FfnShape:
    return FfnShape(
        num_layers=_number(config, "num_hidden_layers"),
        hidden=_number(config, "hidden_size"),
        neurons=_number(config, family.neurons),
        gated=family.gated,
        dtype_bytes=dtype.itemsize,
    )


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {key} is {value!r}, not a number from 1 on")
    return value


def _activation(config: Mapping[str, Any], family: Family) -> str:
    found = config.get(family.activation, family.default_activation)
    if found not in (SPARSE if family.gated else [RELU]):
        raise UnsupportedError(
            f"config.json: {family.activation} is {found!r}. A neuron store is for "
            f"{', '.join(SPARSE)}, with which most neurons of a token are inactive; with others "
            "all of them count, and a quantised checkpoint is smaller, faster and closer to the "
            "model"
        )
    return name_of(str(found), config.get("hidden_act_param"))
