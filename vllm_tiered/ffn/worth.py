# SPDX-License-Identifier: Apache-2.0
"""Whether a neuron store is of use to a model, from the bytes that it and the dense FFN need.

By default, the neuron cache gets twice what a token wants, or at least 1.25 times. So with staging,
tables and predictors it takes more than the dense FFN only if a token wants about half of the dense
FFN's bytes or more. Then there is no memory to win, and sparse steps are slower. That is so, too,
for a store whose model's activity was not measured: all neurons are taken to be active.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from vllm_tiered.config import FfnConfig
from vllm_tiered.errors import BudgetError, ConfigError, IntegrityError
from vllm_tiered.ffn.layout import Precision, bundle_bytes
from vllm_tiered.ffn.matmul.quantise import num_groups
from vllm_tiered.ffn.open import load_predictors, make_plan, perplexities
from vllm_tiered.ffn.selection import ALL, PLAIN
from vllm_tiered.ffn.store.reader import NeuronStore
from vllm_tiered.units import format_bytes

_NAMES = {
    Precision.FULL: "the dense FFN needs",
    Precision.INT8: "in 8 bit",
    Precision.INT4: "in 4 bit",
}
_SCALE_BYTES = 2

OURS = "the neurons need"


def why_dense(config: FfnConfig, *, has_index: bool = False) -> str | None:
    """Return why the dense FFN is better than the store, in words; None if it is not.

    None, too, if the user set ``mix``, ``exact`` or ``near_gib``, and if the store cannot be used:
    opening it then says why. The answer depends on the store and the settings alone.

    Args:
        config: the ``ffn`` section, with a store.
        has_index: near memory also holds cache indices, as on a GPU.
    """
    assert config.store is not None
    if config.mix != "auto" or config.exact or config.near_gib != "auto":
        return None
    try:
        dense, *others, ours = costs(config, has_index=has_index)
    except (BudgetError, ConfigError, IntegrityError):
        return None
    if ours.near_bytes <= dense.near_bytes:
        return None
    less = " and ".join(str(one) for one in others)
    return (
        f"{ours} in {config.store}, and {dense}, which is faster then. A quantised checkpoint "
        f"needs less ({less}). ffn.near_gib or ffn.mix use the store nevertheless"
    )


def better_format(config: FfnConfig, *, has_index: bool = False) -> str | None:
    """Return which format of all neurons beats a store that is used, in words; None if none does.

    A format does that takes no more near memory than the store, and whose perplexity `prepare`
    found to be no higher: it needs neither a predictor nor reads. None, too, if they were not
    measured.

    Args:
        config: the ``ffn`` section, with a store.
        has_index: as in :func:`why_dense`.
    """
    try:
        _, *others, ours = costs(config, has_index=has_index)
    except (BudgetError, ConfigError, IntegrityError):
        return None
    if ours.perplexity is None:
        return None
    better = [
        one
        for one in others
        if one.near_bytes <= ours.near_bytes
        and one.perplexity is not None
        and one.perplexity <= ours.perplexity
    ]
    if not better:
        return None
    best = min(better, key=lambda one: one.near_bytes)
    return f"a quantised checkpoint is better for this model ({best}; {ours})"


@dataclass(frozen=True, slots=True)
class FfnCost:
    """Near memory and quality of a way to compute the FFN.

    Attributes:
        name: the way, in words.
        near_bytes: near memory of all layers.
        perplexity: on the calibration text of `vllm-tiered prepare`; None if it was not measured.
    """

    name: str
    near_bytes: int
    perplexity: float | None

    def __str__(self) -> str:
        quality = "" if self.perplexity is None else f", perplexity {self.perplexity:.4g}"
        return f"{self.name} {format_bytes(self.near_bytes)}{quality}"


def costs(config: FfnConfig, *, has_index: bool = False) -> list[FfnCost]:
    """Return the costs of the dense FFN, of all neurons in 8 and in 4 bit, and of the store.

    Args:
        config: the ``ffn`` section, with a store.
        has_index: as in :func:`why_dense`.

    Raises:
        BudgetError, ConfigError, IntegrityError: as opening the store does.
    """
    assert config.store is not None
    with NeuronStore.open(Path(config.store)) as store:
        predictors = [] if config.exact else load_predictors(store)
        plan = make_plan(config, store, predictors, num_ranks=1, has_index=has_index)
        of_all, of_named = perplexities(store, "plain"), perplexities(store, "candidates")
        shape = store.shape
        found = [
            FfnCost(
                name,
                shape.num_layers * shape.neurons * _neuron_bytes(store, precision),
                of_all.get(mix.shares),
            )
            for (precision, name), mix in zip(_NAMES.items(), PLAIN, strict=True)
            if precision in (Precision.FULL, *store.precisions)
        ]
    mix = plan.mix
    quality = of_all.get(ALL.shares) if mix is None else of_named.get(mix.shares)
    return [*found, FfnCost(OURS, plan.near_bytes, quality)]


def mix_costs(config: FfnConfig) -> list[FfnCost]:
    """Return the costs of the mixes that `prepare` tried, in its order; none without a search.

    Args:
        config: the ``ffn`` section, with a store.

    Raises:
        BudgetError, ConfigError, IntegrityError: as opening the store does.
    """
    assert config.store is not None
    with NeuronStore.open(Path(config.store)) as store:
        predictors = load_predictors(store)
        return [
            FfnCost(
                "/".join(f"{100 * share:g}" for share in shares),
                make_plan(replace(config, mix=shares), store, predictors, num_ranks=1).near_bytes,
                perplexity,
            )
            for shares, perplexity in perplexities(store, "candidates").items()
        ]


def _neuron_bytes(store: NeuronStore, precision: Precision) -> int:
    """Return the bytes of a neuron's codes and scales."""
    shape, scales = store.shape, 0
    if precision is not Precision.FULL:
        groups = num_groups(shape.hidden, precision, store.group[precision])
        scales = shape.num_matrices * groups
    return bundle_bytes(shape, precision) + scales * _SCALE_BYTES
