# SPDX-License-Identifier: Apache-2.0
"""vLLM offloader that places the decoder layers' weights (HeLM, section V).

vLLM passes each decoder layer to its offloader when it builds the layer. The offloader moves the
layer's parameters to the host, so that a model larger than near memory can be built. When all
layers are built, the placement assigns every parameter to a tier, and vLLM's loader writes to the
tiers.

    wrap_modules   tiers             far parameters are views of far memory
    (loading)                        the loader writes weights to their tiers
    post_init      buffers           far parameters are views of their weight buffers from now on
                                     (those in 4 bit are compressed into their tiers first)
    forward        acquire, release  each module with offloaded parameters waits for them, and
                                     releases its buffer when it is done

In compiled models, the two calls go through vLLM's custom ops for offloaders.
"""

import json
import logging
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn
from vllm.model_executor.offloader.base import BaseOffloader
from xxhash import xxh3_64_hexdigest

from vllm_tiered.adapter.device import make_device
from vllm_tiered.adapter.telemetry import link_peak, manifest, totals
from vllm_tiered.adapter.weights.graphs import check_not_captured, remember_placement
from vllm_tiered.adapter.weights.hooks import register_hooks
from vllm_tiered.adapter.weights.int4_layers import CompressedLinear, compressible_weights
from vllm_tiered.adapter.weights.kv_sharing import (
    all_ranks_have,
    give_rest_to_kv,
    plan_inputs,
    plan_with_kv,
)
from vllm_tiered.adapter.weights.layer_weights import (
    cpu_linear,
    movable_parameters,
    move_to_host,
    move_to_near,
    parameter_bytes,
    skip_loading,
)
from vllm_tiered.adapter.weights.measurements import measure_sublayers
from vllm_tiered.config import WeightsConfig
from vllm_tiered.devices.available_memory import FAR_SHARE, read_host_memory
from vllm_tiered.devices.base import Direction
from vllm_tiered.errors import UnsupportedError
from vllm_tiered.planner.latency_placement import place_for_latency
from vllm_tiered.planner.pipeline_time import ExpectedStep, pipeline_step_time, transfer_seconds
from vllm_tiered.units import GIB
from vllm_tiered.weights.buffers import WeightBufferPool
from vllm_tiered.weights.int4.packing import packing_for
from vllm_tiered.weights.layout import (
    BUFFER_ALIGNMENT,
    PARAMETER_ALIGNMENT,
    Parameter,
    Sublayer,
    sublayers_of,
)
from vllm_tiered.weights.offloaded_weights import (
    OffloadedParameter,
    OffloadedSublayer,
    OffloadedWeights,
)
from vllm_tiered.weights.placement import Placement, place, spill_to_storage
from vllm_tiered.weights.store import WeightStore

logger = logging.getLogger("vllm.tiered")


class TieredOffloader(BaseOffloader):
    """vLLM offloader that places the decoder layers' parameters and prefetches offloaded ones.

    Args:
        config: the placement and its budgets.
        model: returns the identity of the model's weights, for the file of stored weights.
        rank, num_ranks: tensor-parallel rank and number of ranks; the first rank logs.

    Attributes:
        placement: placement of the layers; None until they are built.
        buffer_pool: the weight buffers; None until all weights are loaded.
        is_used: whether it has the layers of a model.
    """

    def __init__(
        self,
        config: WeightsConfig,
        *,
        model: Callable[[], Mapping[str, str]],
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self._config = config
        self._rank, self._num_ranks = rank, num_ranks
        self._model = model
        self._store: WeightStore | None = None
        self._device = make_device()
        self._weights: OffloadedWeights | None = None
        self._far: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._compressed: list[CompressedLinear] = []
        self._near_device = torch.device("cpu")
        self.placement: Placement | None = None
        self.buffer_pool: WeightBufferPool | None = None
        self._is_on_gpu = False
        self.is_used = False
        self._expected_step: ExpectedStep | None = None
        self._use_before: dict[str, float] = {}
        self._use_at_start: dict[str, float] = {}

    def wrap_modules(
        self, modules_generator: Generator[nn.Module, None, None], prefix: str = ""
    ) -> list[nn.Module]:
        """Place each parameter of each layer, and return the layers.

        Raises:
            UnsupportedError: the model has a second stack of layers, or parameters that are shared
                or not contiguous.
            BudgetError: the placement does not fit its budgets.
        """
        if self.is_used:
            raise UnsupportedError(
                "the model has more than one stack of layers (a draft model, an encoder), and "
                "weights are prefetched in one order: set weights.placement=off"
            )
        self.is_used = True
        try:
            return self._wrap(modules_generator)
        except BaseException:
            self.close()
            raise

    def _wrap(self, modules: Iterable[nn.Module]) -> list[nn.Module]:
        layers: list[nn.Module] = []
        near_device = torch.device("cpu")
        for layer in modules:
            near_device = next((p.device for p in layer.parameters()), near_device)
            move_to_host(layer)
            layers.append(layer)
        is_compressed = self._config.compress == "int4"
        compressed = compressible_weights(layers) if is_compressed else [set() for _ in layers]
        self.placement = placement = self._place(layers, compressed, near_device)
        store = self._store if placement.storage_bytes else None
        if store is not None:
            expected = self._expected_step
            store.record_placement(placement, None if expected is None else asdict(expected))
        self._assign_tiers(layers, compressed, placement, near_device, store)
        remember_placement(placement)
        self._announce(placement)
        return layers

    def _assign_tiers(
        self,
        layers: Sequence[nn.Module],
        compressed: Sequence[Collection[str]],
        placement: Placement,
        near_device: torch.device,
        store: WeightStore | None,
    ) -> None:
        moved = [
            (sublayer.layer, far, stored)
            for sublayer, (far, stored) in zip(
                placement.sublayers, placement.offloaded, strict=True
            )
            if far or stored
        ]

        def offloaded(index: int, chosen: Iterable[Parameter]) -> list[OffloadedParameter]:
            return [
                OffloadedParameter(
                    layers[index].get_parameter(p.name), p.num_bytes, p.name in compressed[index]
                )
                for p in chosen
            ]

        groups = [
            OffloadedSublayer(offloaded(index, far), offloaded(index, stored))
            for index, far, stored in moved
        ]
        self._far = [
            (layers[index], p.name, one.parameter)
            for (index, far, stored), group in zip(moved, groups, strict=True)
            for p, one in zip((*far, *stored), (*group.far, *group.stored), strict=True)
        ]
        self._compressed = [
            CompressedLinear(layer.get_submodule(name.removesuffix(".weight")))
            for layer, names in zip(layers, compressed, strict=True)
            for name in names
        ]
        _check_distinct([parameter for *_, parameter in self._far])
        _check_distinct([linear.weight for linear in self._compressed])
        self._weights = OffloadedWeights(
            self._device, groups, near_device, store, placement.prefetch_depth
        )
        if store is not None and store.is_filled:
            for group in groups:
                for one in group.stored:
                    skip_loading(one.parameter)
        stay_away = list(map(set, compressed))  # near ones too, until compression
        for position, (index, far, stored) in enumerate(moved):
            names = [p.name for p in (*far, *stored)]
            stay_away[index].update(names)
            register_hooks(layers[index], names, position, self)
        for layer, away in zip(layers, stay_away, strict=True):
            move_to_near(layer, away, near_device)
        self._near_device = near_device
        self._is_on_gpu = near_device.type == "cuda"

    @property
    def stores(self) -> bool:
        """Whether some weights are stored in a file."""
        return (
            self._store is not None and self.placement is not None and bool(self.placement.stored)
        )

    def close(self) -> None:
        """Free far memory and weight buffers, after which the model cannot run. Idempotent."""
        if self._store is not None:
            self._store.cancel()
        self._device.close()
        if self._store is not None:
            self._store.close()
        self._weights = self.buffer_pool = self._store = None
        manifest.publish_weights(None)
        totals.withdraw("weights", self.total_use)

    def post_init(self) -> None:
        """Start streaming through the weight buffers, once all weights are loaded. Idempotent.

        Raises:
            UnsupportedError: an offloaded or compressed parameter was replaced during loading.
        """
        if self.buffer_pool is not None or self._weights is None:
            return
        for layer, name, parameter in self._far:
            if dict(layer.named_parameters()).get(name) is not parameter:
                raise UnsupportedError(
                    f"{name} was replaced by another tensor while the model was loaded (packed, or "
                    "quantized), so it cannot be offloaded: set weights.placement=off"
                )
        for layer, name, _ in self._far:
            module = layer.get_submodule(name.rpartition(".")[0])
            if hasattr(module, "cpu_linear"):
                setattr(module, "cpu_linear", cpu_linear)  # noqa: B010 (a module's types are its own)
        far = {id(parameter) for *_, parameter in self._far}
        for linear in self._compressed:
            linear.multiply_compressed()
            if id(linear.weight) not in far:
                linear.compress(self._near_device)
        if self._far:
            link_peak.measure(self._near_device)
        self.buffer_pool = self._weights.start_streaming()
        self._use_at_start = self._use()  # what was counted before the model ran
        self._use_before = self._use_at_start
        totals.publish("weights", self.total_use)

    def take_use(self) -> dict[str, float]:
        """Return the link's bytes and seconds, and the stall of compute, since the last call."""
        use = self._use()
        before, self._use_before = self._use_before, use
        return {name: value - before.get(name, 0.0) for name, value in use.items()}

    def total_use(self) -> dict[str, float]:
        """Return what :meth:`take_use` gave in all, and what it would give now."""
        before = self._use_at_start
        return {name: value - before.get(name, 0.0) for name, value in self._use().items()}

    def _use(self) -> dict[str, float]:
        if self.buffer_pool is None:
            return {}
        link = self._device.use(Direction.READ)
        return {
            "weights_read_bytes": float(link.num_bytes),
            "weights_read_seconds": link.busy_seconds,
            "weights_stall_seconds": self.buffer_pool.stall_seconds,
            "weights_steps": float(self.buffer_pool.num_steps),
        }

    # The forward pass calls these two: through the hooks, or through vLLM's custom ops if compiled.

    def _wait_for_layer(self, layer_idx: int) -> None:
        assert self.buffer_pool is not None, "the model runs before its weights are loaded"
        if self._is_on_gpu:
            check_not_captured()
        self.buffer_pool.acquire(layer_idx)

    def _start_prefetch(self, layer_idx: int) -> None:
        assert self.buffer_pool is not None
        if self._is_on_gpu:
            check_not_captured()
        self.buffer_pool.release(layer_idx)

    def _place(
        self,
        layers: Sequence[nn.Module],
        compressed: Sequence[Collection[str]],
        near_device: torch.device,
    ) -> Placement:
        sublayers = [
            sublayer
            for index, (layer, names) in enumerate(zip(layers, compressed, strict=True))
            for sublayer in sublayers_of(
                index, parameter_bytes(layer, names), movable_parameters(layer)
            )
        ]
        config = self._config
        near_bytes, far_bytes = _in_bytes(config.near_gib), _in_bytes(config.far_gib)
        placement = None
        if config.storage_path is not None:
            at_most = far_bytes
            if far_bytes is None:
                # Usable memory differs a little from start to start. A file is used as long as its
                # far part fits usable memory, even if it exceeds FAR_SHARE of it.
                at_most = read_host_memory().usable_bytes // self._num_ranks
                far_bytes = int(FAR_SHARE * at_most)
            self._store = self._open_store(config.storage_path, layers, near_device)
            placement = self._recorded(self._store, sublayers, at_most)
            if placement is not None:
                far_bytes = at_most
                if self._store.expectation is not None:
                    self._expected_step = ExpectedStep(**self._store.expectation)
        if placement is None:
            placement = self._choose(
                layers, sublayers, compressed, near_device, near_bytes, far_bytes
            )
            if self._store is not None and far_bytes is not None:
                placement = spill_to_storage(placement, far_bytes)
        placement.check_budget(near_bytes, far_bytes)
        if config.shares_with_kv:
            give_rest_to_kv(config, placement)
        return placement

    def _recorded(
        self, store: WeightStore, sublayers: Sequence[Sublayer], far_bytes: int | None
    ) -> Placement | None:
        """Return the file's placement; with a shared plan, all ranks use their files or none."""
        recorded = store.placement(sublayers, far_bytes)
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
    ) -> Placement:
        config = self._config
        if config.shares_with_kv:
            placement, self._expected_step = plan_with_kv(
                config,
                self._device,
                layers,
                sublayers,
                near_device,
                compressed=compressed,
                far_bytes=far_bytes,
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
        )
        placement = place_for_latency(
            sublayers, measured.times, measured.link, near_bytes, far_bytes, measured.storage
        )
        step = pipeline_step_time(
            transfer_seconds(placement, measured.link, measured.storage),
            measured.times,
            prefetch_depth=placement.prefetch_depth,
        )
        self._expected_step = ExpectedStep(
            requests=1, seconds=step.seconds, stall_share=step.stall_seconds / step.seconds
        )
        return placement

    def _open_store(
        self, folder: str, layers: Sequence[nn.Module], near_device: torch.device
    ) -> WeightStore:
        """Open the file of stored weights with the settings that determine its contents."""
        config = self._config
        shapes = [
            [(name, str(p.dtype), list(p.shape)) for name, p in layer.named_parameters()]
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
            **(plan_inputs() if config.shares_with_kv else {}),
        }
        return WeightStore(
            Path(folder),
            rank=self._rank,
            num_ranks=self._num_ranks,
            model=self._model(),
            settings=settings,
        )

    def _announce(self, placement: Placement) -> None:
        stated = manifest.WeightsManifest.of(placement, self._config.compress, self._expected_step)
        manifest.publish_weights(stated)
        if self._rank == 0:
            logger.info("%s", stated.describe())


def _check_distinct(parameters: Sequence[nn.Parameter]) -> None:
    if len({id(parameter) for parameter in parameters}) < len(parameters):
        raise UnsupportedError(
            "layers share parameters, and a sublayer is offloaded with its own: set "
            "weights.placement=off"
        )


def _in_bytes(gib: float | str) -> int | None:
    return None if isinstance(gib, str) else int(gib * GIB)
