# SPDX-License-Identifier: Apache-2.0
"""Values of an OPT with synthetic sparsity, tensor by tensor (see `model.py` in this folder).

Letters: H hidden, N neurons of a layer, r rank of the latent, P positions, L layers.

The unit is a token embedding's coordinate. E = H - 2r is the number of other coordinates:

    stream at layer l    2r coordinates of ±amplitude * u_j,  E coordinates of variance 1 + growth_l
    latent's energy      LATENT_ENERGY * E  =  2r * amplitude^2
    sigma_l              what the layer norm divides by: sqrt((LATENT_ENERGY + 1 + growth_l) E / H)
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from benchmarks.inputs.synthetic_sparsity.model import Sparsity
from benchmarks.peers.model import Bits, to_bfloat16
from benchmarks.peers.shapes import POSITION_OFFSET, OptShape

Floats = npt.NDArray[np.float32]

LATENT_ENERGY = 3.0
"""Energy of the latent over that of the other coordinates, at the first layer."""

GROWTH = 0.5
"""Growth of the other coordinates' energy from the first layer to the last."""

LOGITS_STD = 3.0
"""Standard deviation that makes the next token's distribution neither flat nor certain."""

_QUERY_KEY_GAIN = 1.2  # over 1/sqrt(H), so that attention looks at some tokens more than at others
_ATTENTION_AVERAGED = 0.5  # about this share of its energy is left after averaging
_BIAS_STD = 0.02
_BLOCK_LENGTH = 8_388_593  # a prime, as in peers.model, so that rows never repeat
_PIECE_NUMBERS = 1 << 22


class SyntheticValues:
    """Function from name and shape to a tensor's values; it takes four blocks of 34 MB and a piece.

    Raises ValueError if the latent leaves no coordinates for anything else.
    """

    def __init__(self, sizes: OptShape, sparsity: Sparsity, seed: int) -> None:
        if sparsity.rank % 2 or 4 * sparsity.rank > sizes.hidden_size:
            raise ValueError(
                f"rank {sparsity.rank}: expected an even number of at most a quarter of the"
                f" {sizes.hidden_size} features of the hidden state"
            )
        self._sizes, self._sparsity, self._seed = sizes, sparsity, seed
        self._rest = sizes.hidden_size - 2 * sparsity.rank
        self._amplitude = math.sqrt(LATENT_ENERGY * self._rest / (2 * sparsity.rank))
        self._added = GROWTH / ((1 + _ATTENTION_AVERAGED) * sizes.num_layers)
        self._threshold = NormalDist().inv_cdf(1 - sparsity.active_share) * math.sqrt(
            1 + sparsity.noise**2
        )
        self._block = cache(self._make_block)

    def __call__(self, name: str, shape: tuple[int, ...]) -> Iterator[Bits]:
        """Yield the tensor's values in bfloat16, in pieces."""
        for values in self._values(name.removeprefix("model.decoder."), shape):
            yield to_bfloat16(np.ascontiguousarray(values, dtype=np.float32))

    def factors(self, layer_idx: int) -> tuple[Floats, Floats, Floats]:
        """Return the predictor: A [r, H], B [N, r] and the bias [N].

        ``B @ (A @ x) + bias`` is the latent's part of a neuron's input, for x after the layer norm.
        Above 0 the neuron is active, except for the noise.
        """
        rank, neurons = self._sparsity.rank, self._sizes.ffn_dim
        b_Nr = self._rng(f"B{layer_idx}").standard_normal((neurons, rank), dtype=np.float32)
        b_Nr *= np.float32(1 / math.sqrt(rank))
        a_rH = np.zeros((rank, self._sizes.hidden_size), dtype=np.float32)
        of_latent = self._sigma(layer_idx) / (2 * self._amplitude)
        a_rH[np.arange(rank), 2 * np.arange(rank)] = of_latent
        a_rH[np.arange(rank), 2 * np.arange(rank) + 1] = -of_latent
        return a_rH, b_Nr, np.full(neurons, -self._threshold, dtype=np.float32)

    def write_predictor(self, path: Path) -> None:
        """Write all layers' factors: ``layers.I.a``, ``.b`` and ``.bias``."""
        import torch
        from safetensors.torch import save_file

        tensors = {}
        for layer_idx in range(self._sizes.num_layers):
            for part, values in zip(("a", "b", "bias"), self.factors(layer_idx), strict=True):
                # The bias is added in float32.
                dtype = torch.float32 if part == "bias" else torch.bfloat16
                tensors[f"layers.{layer_idx}.{part}"] = torch.from_numpy(values).to(dtype)
        save_file(tensors, path, metadata={"predictor": "exact factors of fc1"})

    def latent(self) -> Floats:
        """Return u [P, r]: pairs of a cosine and a sine of mean square 1, each at its own speed.

        Speeds are quantiles of a half-normal distribution, so that the correlation of two positions
        falls as exp(-(speed * distance)^2 / 2) and does not soon rise again.
        """
        num_pairs = self._sparsity.rank // 2
        correlation = _correlation_of(self._sparsity)
        speed = math.sqrt(-2 * math.log(correlation))
        quantiles = [
            NormalDist().inv_cdf(0.5 + (i + 0.5) / (2 * num_pairs)) for i in range(num_pairs)
        ]
        # A few quantiles have less than unit mean square, as the distribution's tail is missing.
        quantiles_k = np.array(quantiles) / np.sqrt(np.mean(np.square(quantiles)))
        phases_k = self._rng("phases").uniform(0, 2 * np.pi, num_pairs)
        angles_Pk = np.arange(self._sizes.max_positions)[:, None] * speed * quantiles_k + phases_k
        u = np.stack([np.cos(angles_Pk), np.sin(angles_Pk)], axis=-1) * math.sqrt(2)
        return u.reshape(self._sizes.max_positions, -1).astype(np.float32)

    def _values(self, name: str, shape: tuple[int, ...]) -> Iterator[Floats]:
        match name.split("."):
            case ["embed_tokens", "weight"]:
                return self._without_latent(name, shape, lambda rows: rows)
            case ["embed_positions", "weight"]:
                return self._positions(shape)
            case ["final_layer_norm", "weight"]:
                return iter([self._last_norm()])
            case [*_, "fc1", "weight"]:
                return self._fc1(name, shape, _layer_idx(name))
            case [*_, "fc1", "bias"]:
                return iter([self.factors(_layer_idx(name))[2]])
            case [*_, "self_attn_layer_norm" | "final_layer_norm", part]:
                return iter([np.full(shape, part == "weight", dtype=np.float32)])
            case [*_, "bias"]:
                noise = self._rng(name).standard_normal(shape, dtype=np.float32)
                return iter([noise * np.float32(_BIAS_STD)])
            case _:
                scale = np.float32(self._std(name))
                return (piece * scale for piece in self._noise(name, shape))

    def _std(self, name: str) -> float:
        """Return the standard deviation of a matrix that only holds noise."""
        sizes = self._sizes
        if ".q_proj" in name or ".k_proj" in name:
            return _QUERY_KEY_GAIN / math.sqrt(sizes.hidden_size)
        if ".v_proj" in name:
            return 1 / math.sqrt(sizes.hidden_size)
        if ".out_proj" in name:
            return math.sqrt(self._added / sizes.hidden_size)
        assert ".fc2" in name, name
        normal = NormalDist()
        # E[relu(z - t)^2] of z ~ N(0, 1) is the energy of a neuron's activation.
        t = normal.inv_cdf(1 - self._sparsity.active_share)
        energy = (1 + t * t) * self._sparsity.active_share - t * normal.pdf(t)
        return math.sqrt(self._added / (sizes.ffn_dim * energy * (1 + self._sparsity.noise**2)))

    def _growth(self, layer_idx: int) -> float:
        """Return the growth of the other coordinates' energy up to this layer's FFN."""
        return self._added * (_ATTENTION_AVERAGED * (layer_idx + 1) + layer_idx)

    def _sigma(self, layer_idx: int) -> float:
        energy = (LATENT_ENERGY + 1 + self._growth(layer_idx)) * self._rest
        return math.sqrt(energy / self._sizes.hidden_size)

    def _fc1(self, name: str, shape: tuple[int, ...], layer_idx: int) -> Iterator[Floats]:
        a_rH, b_Nr, _ = self.factors(layer_idx)
        rest_std = math.sqrt((1 + self._growth(layer_idx)) * self._rest)
        scale = np.float32(self._sparsity.noise * self._sigma(layer_idx) / rest_std)
        start = 0
        num_latent = 2 * self._sparsity.rank
        for rows in self._without_latent(name, shape, lambda rows: rows * scale):
            here = b_Nr[start : start + len(rows)]
            rows[:, :num_latent] = here @ a_rH[:, :num_latent]
            start += len(rows)
            yield rows

    def _positions(self, shape: tuple[int, ...]) -> Iterator[Floats]:
        rows = np.zeros(shape, dtype=np.float32)
        u = self.latent() * np.float32(self._amplitude)
        rows[POSITION_OFFSET:, 0 : 2 * self._sparsity.rank : 2] = u
        rows[POSITION_OFFSET:, 1 : 2 * self._sparsity.rank : 2] = -u
        yield rows

    def _last_norm(self) -> Floats:
        signs = self._rng("signs").choice(
            np.array([-1, 1], dtype=np.float32), self._sizes.hidden_size
        )
        # The norm leaves the rest with this deviation, and a logit sums over its coordinates. Signs
        # are random, because with tied embeddings a token would otherwise follow itself for ever.
        std = math.sqrt(1 + GROWTH) / self._sigma(self._sizes.num_layers)
        gains = signs * np.float32(LOGITS_STD / (std * math.sqrt(self._rest)))
        gains[: 2 * self._sparsity.rank] = 0
        return gains

    def _without_latent(
        self, name: str, shape: tuple[int, ...], change: Callable[[Floats], Floats]
    ) -> Iterator[Floats]:
        """Yield changed noise in whole rows, with zeros in the latent's coordinates."""
        for rows in self._noise(name, shape):
            changed = change(rows).copy()
            changed[:, : 2 * self._sparsity.rank] = 0
            yield changed

    def _noise(self, name: str, shape: tuple[int, ...]) -> Iterator[Floats]:
        """Yield N(0, 1) in pieces of whole rows, cut from a block at the tensor's own offset."""
        # Each kind has its own block: an embedding and a neuron with equal numbers would be alike.
        block = self._block(next(kind for kind in ("embed", "fc1", "fc2", "attn") if kind in name))
        num_rows, length = shape
        start = int(self._rng(name).integers(block.size))
        at_once = max(1, _PIECE_NUMBERS // length)
        for first in range(0, num_rows, at_once):
            count = min(at_once, num_rows - first) * length
            end = start + count
            piece = (
                np.take(block, np.arange(start, end), mode="wrap")
                if end > block.size
                else (block[start:end])
            )
            start = end % block.size
            yield piece.reshape(-1, length)

    def _make_block(self, kind: str) -> Floats:
        return self._rng(f"block-{kind}").standard_normal(_BLOCK_LENGTH, dtype=np.float32)

    def _rng(self, what: str) -> np.random.Generator:
        """Return a generator of the seed and its use alone, so that tensors come in any order."""
        return np.random.default_rng([self._seed, zlib.crc32(what.encode())])


def _layer_idx(name: str) -> int:
    return int(name.split(".")[1])


def _correlation_of(sparsity: Sparsity) -> float:
    """Return the latent's correlation at adjacent positions that gives the overlap.

    Two inputs z of correlation c are both above t with a probability that is a sum over t's
    quantiles: P(z2 > t | z1) with z2 = c z1 + sqrt(1 - c^2) times a fresh normal number.
    """
    normal = NormalDist()
    t = normal.inv_cdf(1 - sparsity.active_share)
    above = [normal.inv_cdf(1 - sparsity.active_share * (i + 0.5) / 2000) for i in range(2000)]
    low, high = 0.0, 1.0 - 1e-9
    for _ in range(40):
        middle = (low + high) / 2
        spread = math.sqrt(1 - middle**2)
        both = sum(1 - normal.cdf((t - middle * z) / spread) for z in above) / len(above)
        low, high = (middle, high) if both < sparsity.overlap else (low, middle)
    # The noise is new for each token, so the latent must supply its part of the correlation too.
    return min(high * (1 + sparsity.noise**2), 1 - 1e-9)
