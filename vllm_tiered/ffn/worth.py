# SPDX-License-Identifier: Apache-2.0
"""Whether a neuron store is of use to a model, from the bytes that it and the dense FFN need.

By default, the neuron cache gets twice what a token wants, or at least 1.25 times. So with staging
and tables it takes more than the dense FFN only if a token wants about half of the dense FFN's
bytes or more. Then there is no memory to win, and sparse steps are slower: with a 4-bit base and
the mix 25/25/50, Qwen2.5-Coder-0.5B decoded 9.3 tokens/s instead of 42, all in memory (2 EPYC
cores, 2026-11-24).
"""

from pathlib import Path

from vllm_tiered.config import FfnConfig
from vllm_tiered.errors import BudgetError, ConfigError, IntegrityError
from vllm_tiered.ffn.layout import FfnShape, Precision, bundle_bytes
from vllm_tiered.ffn.open import load_predictors, make_plan
from vllm_tiered.ffn.store.reader import NeuronStore
from vllm_tiered.units import format_bytes


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
        store = NeuronStore.open(Path(config.store))
        try:
            predictors = load_predictors(store)
            plan = make_plan(config, store, predictors, num_ranks=1, has_index=has_index)
        finally:
            store.close()
    except (BudgetError, ConfigError, IntegrityError):
        return None
    dense = dense_bytes(plan.shape)
    if plan.near_bytes <= dense:
        return None
    return (
        f"the neurons of {config.store} need {format_bytes(plan.near_bytes)} near, and the dense "
        f"FFN {format_bytes(dense)}, which is faster then; a quantised checkpoint needs less. "
        "ffn.near_gib or ffn.mix use the store nevertheless"
    )


def dense_bytes(shape: FfnShape) -> int:
    """Return the bytes of all layers' FFN matrices in full precision."""
    return shape.num_layers * shape.neurons * bundle_bytes(shape, Precision.FULL)
