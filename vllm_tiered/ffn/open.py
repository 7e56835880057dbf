# SPDX-License-Identifier: Apache-2.0
"""Open a neuron store: make the runtime of an FFN from its configuration."""

from typing import Any, Literal

import numpy as np
import torch

from vllm_tiered.config import FfnConfig
from vllm_tiered.devices.available_memory import FAR_SHARE, read_host_memory
from vllm_tiered.devices.base import Device
from vllm_tiered.errors import BudgetError, ConfigError, IntegrityError
from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.memory_plan import FfnPlan, plan_exact, plan_mixed
from vllm_tiered.ffn.predictor.base import Predictor
from vllm_tiered.ffn.predictor.files import load_predictor, predictor_name, read_header
from vllm_tiered.ffn.runtime import FfnRuntime
from vllm_tiered.ffn.selection import Mix
from vllm_tiered.ffn.store.format import ANEW, MIX_FILE, statistics_name
from vllm_tiered.ffn.store.reader import NeuronStore, kind_of, no_predictors
from vllm_tiered.units import GIB, format_bytes
from vllm_tiered.untrusted import parse_json

_INDEX_BYTES = 20
"""Bytes of a neuron in a cache index on a GPU: location, last use, and a slot in three buffers."""

DEFAULT_MIX = Mix(full=0.25, int8=0.25, int4=0.5)
"""M2Cache's mix, which takes half the bytes of 16 bit. Used if `prepare` did not search for one."""


def open_runtime(
    config: FfnConfig,
    store: NeuronStore,
    device: Device,
    *,
    num_ranks: int = 1,
    near_device: torch.device | None = None,
) -> FfnRuntime:
    """Plan near and far memory as configured, allocate them, and fill far memory.

    Args:
        config: the ``ffn`` section.
        store: the rank's neurons; closed with the runtime.
        device: copies between the tiers; closed with the runtime.
        num_ranks: ranks that share the host's memory.
        near_device: torch device of near memory; None for the host.

    Raises:
        BudgetError: a tier does not have the memory.
        ConfigError: the store lacks a precision or a predictor.
        IntegrityError: a bundle is damaged.
    """
    predictors = [] if config.exact else load_predictors(store)
    is_gpu = near_device is not None and near_device.type == "cuda"
    plan = make_plan(config, store, predictors, num_ranks=num_ranks, has_index=is_gpu)
    memory = read_host_memory()
    usable = memory.usable_bytes // num_ranks
    if plan.far_bytes > usable:
        raise BudgetError(
            f"ffn.far_gib={config.far_gib} has {format_bytes(plan.far_bytes)} of neurons in far "
            f"memory, and only {format_bytes(usable)} can be allocated per rank "
            f"({memory.describe_limit()}): lower ffn.far_gib, the rest is read from the store"
        )
    return FfnRuntime(
        store,
        plan,
        device,
        predictors,
        policy=config.cache,
        window=config.window,
        deterministic=config.deterministic,
        tries_preload=config.preload == "auto",
        near_device=near_device,
    )


def make_plan(
    config: FfnConfig,
    store: NeuronStore,
    predictors: list[Predictor],
    *,
    num_ranks: int,
    has_index: bool = False,
) -> FfnPlan:
    """Return the memory plan of a rank.

    Args:
        num_ranks: ranks that share the host's memory.
        has_index: near memory also holds cache indices.

    Raises:
        BudgetError: a tier does not have the memory.
        ConfigError: the store lacks a precision.
    """
    near_bytes = None if config.near_gib == "auto" else int(config.near_gib * GIB)
    if config.far_gib == "auto":
        far_bytes = int(FAR_SHARE * read_host_memory().usable_bytes / num_ranks)
    else:
        far_bytes = int(config.far_gib * GIB)
    predictor_bytes = sum(p.num_bytes for p in predictors)
    table_bytes = store.table_bytes + predictor_bytes
    if has_index:
        table_bytes += store.shape.num_layers * store.shape.neurons * _INDEX_BYTES
    if config.exact:
        _check_stored(store, [Precision.FULL])
        return plan_exact(
            store.shape, near_bytes=near_bytes, far_bytes=far_bytes, table_bytes=table_bytes
        )
    mix = searched_mix(store) if config.mix == "auto" else Mix.from_shares(config.mix)
    _check_stored(store, [p for p, share in zip(Precision, mix.shares, strict=True) if share])
    return plan_mixed(
        store.shape,
        mix,
        active_shares=active_shares(store),
        held_shares=held_shares(store, config),
        streamed=_streamed(config, store, mix),
        near_bytes=near_bytes,
        far_bytes=far_bytes,
        table_bytes=table_bytes,
        predictor_bytes=predictor_bytes,
        prefetches=config.preload != "off",
    )


def _streamed(config: FfnConfig, store: NeuronStore, mix: Mix) -> Precision:
    """Return the precision of the neurons that prompts stream."""
    if config.prefill != "auto":
        wanted = Precision(config.prefill)
        _check_stored(store, [wanted])
        return wanted
    # Far memory holds what decode steps read, and this: 16 bit without 8 beside it stays alone.
    is_full_alone = mix.full and not mix.int8
    if Precision.INT8 in store.precisions and not is_full_alone:
        return Precision.INT8
    return store.precisions[0]


def load_predictors(store: NeuronStore) -> list[Predictor]:
    """Return the store's predictors, one for each layer.

    Raises:
        ConfigError: the store has none.
        IntegrityError: one is damaged.
    """
    kind = kind_of(store.contents)
    if kind is None:
        raise ConfigError(no_predictors(store.path))
    return [
        load_predictor(
            store.file(predictor_name(kind, layer)),
            store.contents["model"]["fingerprint"],
            first_neuron=store.first_neuron,
            num_neurons=store.shape.neurons,
        )
        for layer in range(store.shape.num_layers)
    ]


def searched_mix(store: NeuronStore) -> Mix:
    """Return the mix that `prepare` found best, or ``DEFAULT_MIX``.

    Raises:
        IntegrityError: the file of the mix is damaged.
    """
    found = _read_json(store, MIX_FILE)
    try:
        return DEFAULT_MIX if found is None else Mix.from_shares(found["mix"])
    except (KeyError, TypeError, ConfigError) as error:
        raise IntegrityError(
            f"{store.path / MIX_FILE} has no mix that can be used ({error}): {ANEW}"
        ) from error


def perplexities(
    store: NeuronStore, of: Literal["candidates", "plain"]
) -> dict[tuple[float, ...], float]:
    """Return the perplexities that `prepare` measured on calibration text, by mix; none if none.

    Args:
        of: the search's mixes of the neurons that are predicted to be active, or all neurons in one
            precision.
    """
    tried = (_read_json(store, MIX_FILE) or {}).get(of, ())
    return {tuple(one["mix"]): float(one["perplexity"]) for one in tried if "perplexity" in one}


def active_shares(store: NeuronStore) -> list[float]:
    """Return by layer the share of its neurons that are predicted to be active for a token.

    `prepare` measured the shares on calibration text. They are 1 if it did not.
    """
    kind, layers = kind_of(store.contents), range(store.shape.num_layers)
    reports = [{} if kind is None else _report(store, kind, layer) for layer in layers]
    return [min(1.0, float(report.get("predicted_share", 1.0))) for report in reports]


def held_shares(store: NeuronStore, config: FfnConfig) -> list[float]:
    """Return by layer the share of its neurons that the cache policy keeps if it has the room.

    Those predicted to be active for the last token, or for any of a window's tokens: as many times
    more as `prepare` found active on calibration text.
    """
    shares = active_shares(store)
    if config.cache != "window":
        return shares
    return [
        min(1.0, share * _of_window(_read_json(store, statistics_name(layer)), config.window))
        for layer, share in enumerate(shares)
    ]


def _of_window(statistics: dict[str, Any] | None, tokens: int) -> float:
    """Return how many times a token's active neurons a window of tokens has, by interpolation."""
    if not statistics or not statistics.get("active_share"):
        return 1.0
    known = {1: statistics["active_share"]} | {int(k): v for k, v in statistics["window"].items()}
    held = np.interp(tokens, sorted(known), [known[k] for k in sorted(known)])
    return float(held) / float(statistics["active_share"])


def missing_share(store: NeuronStore) -> float | None:
    """Return the share of a token's neurons that the last token's are not (M2Cache, 5.3).

    It is the layers' mean on calibration text; None if `prepare` had no such text.
    """
    found = [_read_json(store, statistics_name(n)) for n in range(store.shape.num_layers)]
    overlaps = [float(one["overlap"]) for one in found if one and "overlap" in one]
    return 1 - sum(overlaps) / len(overlaps) if overlaps else None


def _report(store: NeuronStore, kind: str, layer: int) -> dict[str, Any]:
    """Return the report of a layer's predictor."""
    found: dict[str, Any] = read_header(store.file(predictor_name(kind, layer)))["report"]
    return found


def _read_json(store: NeuronStore, name: str) -> dict[str, Any] | None:
    """Return a JSON file that `prepare` may have put in the store; None if it did not."""
    if name not in store.contents["files"]:
        return None
    path = store.file(name)
    try:
        found = parse_json(path.read_bytes(), any_number=True)  # a loss may be NaN
        if not isinstance(found, dict):
            raise ValueError("no table")
    except ValueError as error:
        raise IntegrityError(f"{path} is damaged ({error}): {ANEW}") from error
    return found


def _check_stored(store: NeuronStore, wanted: list[Precision]) -> None:
    missing = [p.value for p in wanted if p not in store.precisions]
    if missing:
        raise ConfigError(
            f"{store.path} has no neurons in {', '.join(missing)}, which tiered.ffn asks for: "
            f"prepare it with --precisions {','.join(p.value for p in Precision)}, or set "
            "tiered.ffn.mix to what it has"
        )
