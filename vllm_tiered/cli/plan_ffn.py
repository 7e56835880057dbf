# SPDX-License-Identifier: Apache-2.0
"""The sparse FFN in `vllm-tiered plan`: memory as the engine plans it, and what it is worth."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from vllm_tiered.config import FfnConfig
from vllm_tiered.errors import BudgetError, ConfigError, UnsupportedError
from vllm_tiered.planner.model_shape import ModelShape
from vllm_tiered.planner.plan import Plan
from vllm_tiered.planner.serving import ServingEstimate
from vllm_tiered.planner.sparse_ffn import (
    SparseFfnFit,
    best_without,
    ffn_bytes,
    fit_sparse_ffn,
    room_for_ffn,
)
from vllm_tiered.units import GIB

NO_CALIBRATION = 1.0
"""Share of the wanted neurons that is taken to be loaded if `prepare` measured none: all."""


class StorePlan(NamedTuple):
    """What is predicted of a neuron store.

    Attributes:
        fit: the prediction.
        is_calibrated: the share of loaded neurons was measured on calibration text.
        best_without: name and prediction of what is best without the store; None if nothing fits.
        why_dense: why the engine leaves the FFN to vLLM with default settings; None if it does not.
        better_format: which format of all neurons is better by what `prepare` measured, if any.
    """

    fit: SparseFfnFit
    is_calibrated: bool
    best_without: tuple[str, ServingEstimate] | None
    why_dense: str | None
    better_format: str | None


def plan_store(args: argparse.Namespace, plan: Plan) -> StorePlan | str:
    """Return what is predicted of the store, or why it does not fit near memory or the limits.

    Raises:
        ConfigError: the store is of another model, lacks something, or its disk is not known.
        IntegrityError: the store is damaged.
        UnsupportedError: the engine does not compute such a model's FFN from a store.
    """
    # Imported here because torch takes seconds, and a plan without a store does not need it.
    from vllm_tiered.ffn.open import load_predictors, make_plan, missing_share
    from vllm_tiered.ffn.store.reader import NeuronStore
    from vllm_tiered.ffn.worth import better_format, why_dense

    case, folder = plan.case, Path(args.ffn_store)
    _check_model(case.shape)
    ranks = args.tensor_parallel_size
    store = NeuronStore.open(folder)
    try:
        if ranks > 1:
            neurons = store.shape.neurons // ranks
            store.close()
            store = NeuronStore.open(folder, num_neurons=neurons)
        full = store.shape.num_layers * store.shape.neurons * store.shape.num_matrices
        full *= store.shape.hidden * store.shape.dtype_bytes
        if (full, store.shape.num_layers) != (ffn_bytes(case.shape), case.shape.num_layers):
            raise ConfigError(
                f"--ffn-store {folder} holds {store.shape.num_layers} layers with {full} bytes of "
                f"FFN for a rank, and the model has {case.shape.num_layers} with "
                f"{ffn_bytes(case.shape)}: prepare this model, with its --dtype"
            )
        predictors = load_predictors(store)
        room = room_for_ffn(case)
        config = FfnConfig(store=args.ffn_store, far_gib=case.far_bytes / GIB)
        try:
            ffn = make_plan(config, store, predictors, num_ranks=ranks)
            if ffn.near_bytes > room:  # more than the mix needs: the cap that is left
                capped = FfnConfig(
                    store=args.ffn_store, far_gib=config.far_gib, near_gib=max(1, room) / GIB
                )
                ffn = make_plan(capped, store, predictors, num_ranks=ranks)
        except BudgetError as error:
            return str(error)
        missing = missing_share(store)
    finally:
        store.close()
    fit = fit_sparse_ffn(case, ffn, NO_CALIBRATION if missing is None else missing)
    if excess := case.limits.excess(fit.alone):
        return excess
    aside, better = why_dense(defaults := FfnConfig(store=args.ffn_store)), better_format(defaults)
    return StorePlan(fit, missing is not None, best_without(case, plan), aside, better)


def _check_model(shape: ModelShape) -> None:
    if shape.experts or shape.quantization:
        kind = "a mixture of experts" if shape.experts else "a quantised checkpoint"
        raise UnsupportedError(f"--ffn-store does not go with {kind}: leave it out")
