# SPDX-License-Identifier: Apache-2.0
"""Choice of a placement for the layers of a model that is being built.

The placement comes from the file of stored weights if that is filled, from a plan of measured times
with "latency", "throughput" and "auto", and from the names of the parameters otherwise.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from xxhash import xxh3_64_hexdigest

from vllm_tiered.adapter.compat import vllm_version
from vllm_tiered.adapter.weights.far_nodes import measure_far_tiers, place_with_tiers
from vllm_tiered.adapter.weights.kv_sharing import (
    all_ranks_have,
    give_rest_to_kv,
    plan_inputs,
    plan_with_kv,
)
from vllm_tiered.adapter.weights.layer_weights import (
    movable_parameters,
    parameter_bytes,
    readers,
    shared_parameters,
)
from vllm_tiered.adapter.weights.measurements import measure_sublayers
from vllm_tiered.adapter.weights.module_times import module_seconds
from vllm_tiered.adapter.weights.quantized import is_quantized, kernel_name
from vllm_tiered.config import WeightsConfig
from vllm_tiered.devices.available_memory import FAR_SHARE, read_host_memory
from vllm_tiered.devices.base import Device
from vllm_tiered.errors import BudgetError
from vllm_tiered.planner.far_tiers import FarTiers
from vllm_tiered.planner.pipeline_time import ExpectedStep, pipeline_step_time, transfer_seconds
from vllm_tiered.units import GIB, format_bytes
from vllm_tiered.weights.int4.packing import packing_for
from vllm_tiered.weights.layout import (
    BUFFER_ALIGNMENT,
    PARAMETER_ALIGNMENT,
    Sublayer,
    sublayers_of,
)
from vllm_tiered.weights.placement import Placement, place, spill_to_storage
from vllm_tiered.weights.store import WeightStore


class PlacementChooser:
    """Chooses the placement of one rank.

    Args:
        config: the placement and its budgets.
        device: the device whose links are measured.
        model: returns the identity of the model's weights, for the file of stored weights.
        placed: returns the parameters of a layer that are to be placed, with their names.
        elsewhere_bytes: returns the far memory that other parts are going to take.
        rank, num_ranks: tensor-parallel rank and number of ranks.
        ranks_here: ranks that share the host's memory.

    Attributes:
        store: the file of stored weights; None if there is no `storage_path`.
        expected_step: the step that the placement was planned for; None if it was not planned.
    """

    def __init__(
        self,
        config: WeightsConfig,
        device: Device,
        *,
        model: Callable[[], Mapping[str, str]],
        placed: Callable[[nn.Module], Iterator[tuple[str, torch.Tensor]]],
        elsewhere_bytes: Callable[[], int],
        rank: int,
        num_ranks: int,
        ranks_here: int,
    ) -> None:
        self._config, self._device = config, device
        self._model, self._placed, self._elsewhere_bytes = model, placed, elsewhere_bytes
        self._rank, self._num_ranks, self._ranks_here = rank, num_ranks, ranks_here
        self.store: WeightStore | None = None
        self.expected_step: ExpectedStep | None = None

    def choose(
        self,
        layers: Sequence[nn.Module],
        compressed: Sequence[Collection[str]],
        near_device: torch.device,
        *,
        is_loaded: bool = False,
        freed_bytes: int = 0,
    ) -> Placement:
        """Return the placement of the layers.

        Args:
            layers: the decoder layers.
            compressed: for each layer, the matrices that will be in 4 bit.
            near_device: torch device that computes.
            is_loaded: whether the layers are loaded and processed, so that they can be timed.
            freed_bytes: host memory that the layers have until they are placed.

        Raises:
            BudgetError: the placement does not fit its budgets.
        """
        sublayers = self._sublayers(layers, compressed)
        config = self._config
        near_bytes, far_bytes = _in_bytes(config.near_gib), _in_bytes(config.far_gib)
        usable_bytes = self._usable_bytes(freed_bytes)
        # Also where nothing is planned, as far weights are to lie on the fastest nodes.
        far_tiers = measure_far_tiers(self._device, sublayers, near_device, self._ranks_here)
        placement = None
        if config.storage_path is not None:
            at_most = far_bytes
            if far_bytes is None:
                # Usable memory differs a little from start to start. A file is used as long as its
                # far part fits usable memory, even if it exceeds FAR_SHARE of it.
                at_most = usable_bytes
                far_bytes = int(FAR_SHARE * at_most)
                if near_device.type == "cpu" and near_bytes is not None:
                    at_most = max(0, at_most - near_bytes)
                    far_bytes = min(far_bytes, at_most)
            self.store = self._open_store(config.storage_path, layers, near_device)
            placement = self._recorded(self.store, sublayers, at_most, near_device, usable_bytes)
            if placement is not None:
                far_bytes = at_most
                if self.store.expectation is not None:
                    self.expected_step = ExpectedStep(**self.store.expectation)
        if placement is None:
            placement = self._choose(
                layers,
                sublayers,
                compressed,
                near_device,
                near_bytes,
                far_bytes,
                far_tiers,
                is_loaded=is_loaded,
            )
            if self.store is not None and far_bytes is not None:
                if config.far_gib == "auto" and near_device.type == "cpu":
                    left_bytes = usable_bytes - placement.near_bytes
                    far_bytes = max(0, min(far_bytes, left_bytes))
                placement = spill_to_storage(placement, far_bytes)
        placement.check_budget(near_bytes, far_bytes)
        _check_host(placement, near_device, usable_bytes)
        if config.shares_with_kv:
            give_rest_to_kv(config, placement)
        return placement

    def _usable_bytes(self, freed_bytes: int) -> int:
        """Return the host memory that this rank's layers may take."""
        usable = read_host_memory().usable_bytes // self._ranks_here + freed_bytes
        return max(0, usable - self._elsewhere_bytes())

    def _kernels(self, layers: Sequence[nn.Module]) -> dict[str, Any]:
        """Return what decides the bytes of quantized layers beside the checkpoint, JSON-safe."""
        names = {
            kernel_name(module)
            for layer in layers
            for _, module in readers(layer)
            if is_quantized(module)
        }
        return {"kernels": sorted(names), "vllm": vllm_version()} if names else {}

    def _sublayers(
        self, layers: Sequence[nn.Module], compressed: Sequence[Collection[str]]
    ) -> list[Sublayer]:
        """Return the layers' sublayers; parameters that layers share stay near, counted once."""
        shared = shared_parameters(layers)
        counted: set[int] = set()
        sublayers: list[Sublayer] = []
        for index, (layer, names) in enumerate(zip(layers, compressed, strict=True)):
            placed = [(name, p) for name, p in self._placed(layer) if id(p) not in counted]
            counted.update(id(p) for _, p in placed if id(p) in shared)
            movable = movable_parameters(layer)
            movable -= {name for name, p in placed if id(p) in shared}
            sublayers += sublayers_of(index, parameter_bytes(placed, names), movable)
        return sublayers

    def _recorded(
        self,
        store: WeightStore,
        sublayers: Sequence[Sublayer],
        far_bytes: int | None,
        near_device: torch.device,
        usable_bytes: int,
    ) -> Placement | None:
        """Return the file's placement; with a shared plan, all ranks use their files or none."""
        recorded = store.placement(sublayers, far_bytes)
        needed = 0 if recorded is None else _host_bytes(recorded, near_device)
        if needed > usable_bytes:
            store.discard(
                f"leaves {format_bytes(needed)} to host memory, which has "
                f"{format_bytes(usable_bytes)} now"
            )
            recorded = None
        if not self._config.shares_with_kv or all_ranks_have(recorded is not None):
            return recorded
        if recorded is not None:
            store.discard("is of one rank, and another rank's cannot be used")
        return None

    def _choose(
        self,
        layers: Sequence[nn.Module],
        sublayers: Sequence[Sublayer],
        compressed: Sequence[Collection[str]],
        near_device: torch.device,
        near_bytes: int | None,
        far_bytes: int | None,
        far_tiers: FarTiers,
        *,
        is_loaded: bool,
    ) -> Placement:
        config = self._config
        if config.shares_with_kv:
            placement, self.expected_step = plan_with_kv(
                config,
                self._device,
                layers,
                sublayers,
                near_device,
                compressed=compressed,
                far_bytes=far_bytes,
                far_tiers=far_tiers,
                is_first=self._rank == 0,
            )
            return placement
        if config.placement != "latency":
            return place(config.placement, sublayers, config.percents)
        assert near_bytes is not None, "checked by the configuration"
        folder = None if config.storage_path is None else Path(config.storage_path)
        measured = measure_sublayers(
            self._device,
            layers,
            sublayers,
            near_device,
            compressed=compressed,
            storage_folder=folder,
            known_seconds=module_seconds(layers, near_device, 1) if is_loaded else None,
        )
        placement, link = place_with_tiers(sublayers, measured, far_tiers, near_bytes, far_bytes)
        step = pipeline_step_time(
            transfer_seconds(placement, link, measured.storage),
            measured.times,
            prefetch_depth=placement.prefetch_depth,
        )
        self.expected_step = ExpectedStep(
            requests=1, seconds=step.seconds, stall_share=step.stall_seconds / step.seconds
        )
        return placement

    def _open_store(
        self, folder: str, layers: Sequence[nn.Module], near_device: torch.device
    ) -> WeightStore:
        """Open the file of stored weights with the settings that determine its contents."""
        config = self._config
        shapes = [
            [(name, str(p.dtype), list(p.shape)) for name, p in self._placed(layer)]
            for layer in layers
        ]
        is_compressed = config.compress == "int4"
        settings = {
            "placement": config.placement,
            "percents": None if config.percents is None else list(config.percents),
            "near_gib": config.near_gib,
            "far_gib": config.far_gib,
            "alignment": [BUFFER_ALIGNMENT, PARAMETER_ALIGNMENT],
            "compress": packing_for(near_device).layout() if is_compressed else config.compress,
            "shapes": xxh3_64_hexdigest(json.dumps(shapes).encode()),
            **(plan_inputs(config) if config.shares_with_kv else {}),
            **self._kernels(layers),
        }
        return WeightStore(
            Path(folder),
            rank=self._rank,
            num_ranks=self._num_ranks,
            model=self._model(),
            settings=settings,
        )


def _host_bytes(placement: Placement, near_device: torch.device) -> int:
    """Return the host memory of a placement, with near memory where that is the host's."""
    is_near_here = near_device.type == "cpu"
    return placement.far_bytes + (placement.near_bytes if is_near_here else 0)


def _check_host(placement: Placement, near_device: torch.device, usable_bytes: int) -> None:
    """Check that the host has the memory, which is first written while the model is loaded.

    Raises:
        BudgetError: it has not, so the kernel would kill the engine then.
    """
    needed = _host_bytes(placement, near_device)
    if needed > usable_bytes:
        raise BudgetError(
            f"weights.placement={placement.policy} needs {format_bytes(needed)} of host memory, "
            f"{format_bytes(placement.far_bytes)} of it far, and only {format_bytes(usable_bytes)} "
            f"can be allocated per rank ({read_host_memory().describe_limit()}): set "
            "weights.storage_path to a folder on an SSD, or lower weights.far_gib if it is set"
        )


def _in_bytes(gib: float | str) -> int | None:
    return None if isinstance(gib, str) else int(gib * GIB)
