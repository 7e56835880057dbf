# SPDX-License-Identifier: Apache-2.0
"""vLLM offloader that places the decoder layers' weights (HeLM, section V).

vLLM passes each decoder layer to its offloader when it builds the layer. The offloader moves the
layer's parameters to the host, so that a model larger than near memory can be built. When all
layers are built, the placement assigns every parameter to a tier, and vLLM's loader writes to the
tiers.

    wrap_modules   tiers             far parameters are views of far memory
    (loading)                        the loader writes weights to their tiers; those in 4 bit are
                                     compressed into theirs one by one, as soon as each is loaded;
                                     those of quantized layers get tiers when all are processed
    start          buffers           far parameters are views of their weight buffers from now on
    post_init      hooks             on the modules that read them, whatever wraps these by now
    forward        acquire, release  each module with offloaded parameters waits for them, and
                                     releases its buffer when it is done

In compiled models, the two calls go through vLLM's custom ops for offloaders.
"""

import itertools
import logging
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.model_executor.offloader.base import BaseOffloader

from vllm_tiered.adapter.device import make_device
from vllm_tiered.adapter.telemetry import link_peak, manifest, totals
from vllm_tiered.adapter.weights.choosing import PlacementChooser
from vllm_tiered.adapter.weights.graphs import check_not_captured, remember_placement
from vllm_tiered.adapter.weights.hooks import FarParameter, register_hooks
from vllm_tiered.adapter.weights.int4_layers import (
    CompressedLinear,
    compress_in_place,
    compressible_weights,
)
from vllm_tiered.adapter.weights.layer_weights import (
    IsElsewhere,
    cpu_linear,
    disable_weight_processing,
    move_to_host,
    move_to_near,
    placed_tensors,
    readers,
    skip_loading,
    tensors_of_readers,
)
from vllm_tiered.adapter.weights.loading_files import LoadingFiles
from vllm_tiered.adapter.weights.quantized import (
    ToHost,
    fits_host_memory,
    is_quantized,
    process_on,
    to_host,
)
from vllm_tiered.adapter.weights.read_check import check_reads
from vllm_tiered.adapter.weights.tiers import find_offloaded
from vllm_tiered.config import WeightsConfig
from vllm_tiered.devices.available_memory import read_host_memory
from vllm_tiered.devices.base import Direction
from vllm_tiered.errors import UnsupportedError
from vllm_tiered.weights.buffers import WeightBufferPool
from vllm_tiered.weights.offloaded_weights import (
    OffloadedWeights,
)
from vllm_tiered.weights.placement import Placement
from vllm_tiered.weights.store import WeightStore

logger = logging.getLogger("vllm.tiered")


class TieredOffloader(BaseOffloader):
    """vLLM offloader that places the decoder layers' parameters and prefetches offloaded ones.

    Args:
        config: the placement and its budgets.
        model: returns the identity of the model's weights, for the file of stored weights.
        is_elsewhere: whether another part keeps a module's parameters, which it then leaves alone.
        elsewhere_bytes: returns the far memory that other parts are going to take.
        rank, num_ranks: tensor-parallel rank and number of ranks; the first rank logs.
        ranks_here: ranks that share the host's memory.

    Attributes:
        placement: placement of the layers; None until they are built.
        buffer_pool: the weight buffers; None until all weights are loaded.
        is_used: whether it has the layers of a model.
        is_loaded: whether the engine's model is loaded. What is built later is a draft model.
        is_checked: whether it was checked where far weights are read.
    """

    def __init__(
        self,
        config: WeightsConfig,
        *,
        model: Callable[[], Mapping[str, str]],
        is_elsewhere: IsElsewhere = lambda module: False,
        elsewhere_bytes: Callable[[], int] = lambda: 0,
        rank: int = 0,
        num_ranks: int = 1,
        ranks_here: int = 1,
    ) -> None:
        self._config = config
        self._rank, self._ranks_here = rank, ranks_here
        self._is_elsewhere = is_elsewhere
        self._device = make_device()
        self._chooser = PlacementChooser(
            config,
            self._device,
            model=model,
            placed=self._placed,
            elsewhere_bytes=elsewhere_bytes,
            rank=rank,
            num_ranks=num_ranks,
            ranks_here=ranks_here,
        )
        self._weights: OffloadedWeights | None = None
        self._far: list[FarParameter] = []
        self._compressed: list[CompressedLinear] = []
        self._near_device = torch.device("cpu")
        self._waiting: list[nn.Module] = []
        self._waits_in_files = False
        self.placement: Placement | None = None
        self.buffer_pool: WeightBufferPool | None = None
        self._is_on_gpu = False
        self._has_hooks = False
        self.is_used = self.is_loaded = self.is_checked = False
        self._use_before: dict[str, float] = {}
        self._use_at_start: dict[str, float] = {}

    def wrap_modules(
        self, modules_generator: Generator[nn.Module, None, None], prefix: str = ""
    ) -> list[nn.Module]:
        """Place each parameter of each layer, and return the layers.

        The layers of a draft model, which is built when the model is loaded, stay as they are.

        Raises:
            UnsupportedError: the model has a second stack of layers.
            BudgetError: the placement does not fit its budgets.
        """
        if self.is_loaded:
            return list(modules_generator)
        if self.is_used:
            raise UnsupportedError(
                "the model has more than one stack of layers (an encoder and a decoder), and "
                "weights are prefetched in one order: set weights.placement=off"
            )
        # A class that refuses an activation does so in its first layer, and is then built anew.
        modules = iter(modules_generator)
        first = list(itertools.islice(modules, 1))
        self.is_used = True
        try:
            return self._wrap(itertools.chain(first, modules))
        except BaseException:
            self.close()
            raise

    def _wrap(self, modules: Iterable[nn.Module]) -> list[nn.Module]:
        layers: list[nn.Module] = []
        near_device = torch.device("cpu")
        usable_bytes = read_host_memory().usable_bytes // self._ranks_here
        for layer in modules:
            near_device = next((p.device for _, p in self._placed(layer)), near_device)
            move_to_host(tensors_of_readers(layer))
            layers.append(layer)
        self._near_device = near_device
        linears = [module for layer in layers for _, module in readers(layer)]
        quantized = list(filter(is_quantized, linears))
        if quantized:
            tensors = [one for layer in layers for _, one in tensors_of_readers(layer)]
            num_bytes = sum(one.nbytes for one in tensors)
            folder = self._config.storage_path
            home: ToHost = to_host
            if not fits_host_memory(num_bytes, usable_bytes, may_store=folder is not None):
                assert folder is not None
                home = LoadingFiles(Path(folder)).copy
                self._waits_in_files = True
                for tensor in tensors:
                    tensor.data = home(tensor.data)
            for module in linears:
                disable_weight_processing(module)
            process_on(near_device, quantized, home)
            self._waiting = layers
        else:
            # On a GPU the layers have host memory by now; the CPU's is first written when loaded.
            left_bytes = read_host_memory().usable_bytes // self._ranks_here
            is_written = near_device.type != "cpu"
            self._place(layers, max(0, usable_bytes - left_bytes) if is_written else 0)
        return layers

    def _place(self, layers: Sequence[nn.Module], freed_bytes: int) -> None:
        """Choose the placement of layers, and give each of their tensors its tier.

        Args:
            layers: the decoder layers.
            freed_bytes: host memory that the layers have, which their placement will free or take.
        """
        near_device = self._near_device
        is_compressed = self._config.compress == "int4"
        compressed = compressible_weights(layers) if is_compressed else [set() for _ in layers]
        self.placement = placement = self._chooser.choose(
            layers,
            compressed,
            near_device,
            is_loaded=bool(self._waiting),
            freed_bytes=freed_bytes,
        )
        store = self._chooser.store if placement.storage_bytes else None
        if store is not None:
            expected = self._chooser.expected_step
            store.record_placement(placement, None if expected is None else asdict(expected))
        self._assign_tiers(layers, compressed, placement, near_device, store)
        remember_placement(placement)

    def _waiting_bytes(self) -> int:
        """Return the host memory of quantized layers that wait until they are placed."""
        if self._waits_in_files:
            return 0
        tensors = (one for layer in self._waiting for _, one in tensors_of_readers(layer))
        return sum(tensor.nbytes for tensor in tensors if tensor.device.type == "cpu")

    def _placed(self, layer: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        return placed_tensors(layer, self._is_elsewhere)

    def _assign_tiers(
        self,
        layers: Sequence[nn.Module],
        compressed: Sequence[Collection[str]],
        placement: Placement,
        near_device: torch.device,
        store: WeightStore | None,
    ) -> None:
        offloaded = find_offloaded(layers, compressed, placement)
        self._far = offloaded.parameters
        for far_parameter in self._far:
            disable_weight_processing(far_parameter.owner)
        self._compressed = [
            CompressedLinear(layer.get_submodule(name.removesuffix(".weight")))
            for layer, names in zip(layers, compressed, strict=True)
            for name in names
        ]
        _check_distinct([linear.weight for linear in self._compressed])
        self._weights = OffloadedWeights(
            self._device,
            offloaded.sublayers,
            near_device,
            store,
            placement.prefetch_depth,
            is_loaded=bool(self._waiting),
        )
        far_ids = {id(one.parameter) for one in self._far}
        in_near = partial(compress_in_place, near_device=near_device)
        for linear in self._compressed:
            is_far = id(linear.weight) in far_ids
            linear.compress_when_filled(self._weights.compress if is_far else in_near)
        if store is not None and store.is_filled:
            for group in offloaded.sublayers:
                for one in group.stored:
                    skip_loading(one.parameter)
        for layer, far, in_4_bit in zip(layers, offloaded.names, compressed, strict=True):
            # Near ones in 4 bit, too, stay away until they are compressed.
            near = (named for named in self._placed(layer) if named[0] not in far | {*in_4_bit})
            move_to_near(near, near_device, from_files=self._waits_in_files)
        self._is_on_gpu = near_device.type == "cuda"

    @property
    def stores(self) -> bool:
        """Whether some weights are stored in a file, or may be once they are placed."""
        has_file = self._config.storage_path is not None
        return has_file and (self.placement is None or bool(self.placement.stored))

    def close(self) -> None:
        """Free far memory and weight buffers, after which the model cannot run. Idempotent."""
        store = self._chooser.store
        if store is not None:
            store.cancel()
        self._device.close()
        if store is not None:
            store.close()
        self._weights = self.buffer_pool = self._chooser.store = None
        manifest.publish_weights(None)
        totals.withdraw("weights", self.total_use)

    def start(self) -> None:
        """Start streaming through the weight buffers, once all weights are loaded. Idempotent.

        Raises:
            UnsupportedError: an offloaded or compressed parameter was replaced during loading.
        """
        if self._waiting:
            self._place(self._waiting, self._waiting_bytes())
            self._waiting = []
        if self.is_loaded or self._weights is None:
            return
        self.is_loaded = True
        for one in self._far:
            if getattr(one.owner, one.leaf, None) is not one.parameter:
                raise UnsupportedError(
                    f"{one.path}.{one.leaf} was replaced by another tensor while the model was "
                    "loaded (packed, or quantized), so it cannot be offloaded: set "
                    "weights.placement=off"
                )
            if hasattr(one.owner, "cpu_linear"):
                setattr(one.owner, "cpu_linear", cpu_linear)  # noqa: B010 (types of its own)
        for linear in self._compressed:
            linear.multiply_compressed()
        if self._far:
            link_peak.measure(self._near_device)
        self.buffer_pool = self._weights.start_streaming()
        # Only now is everything where it was placed, and the file of stored weights published.
        assert self.placement is not None, "placed before"
        self._announce(self.placement)
        self._use_at_start = self._use()  # what was counted before the model ran
        self._use_before = self._use_at_start
        totals.publish("weights", self.total_use)

    def post_init(self) -> None:
        """Start, if that is still to be done, and let modules wait for their weights. Idempotent.

        Raises:
            UnsupportedError: see :meth:`start`.
        """
        self.start()
        if not self._has_hooks:
            self._has_hooks = True
            register_hooks(self._far, self)

    def check_reads(self, runner: Any) -> None:
        """Check that modules alone read their far weights, which takes a dummy step.

        Raises:
            UnsupportedError: something else reads one.
        """
        self.is_checked = True
        if self._far:
            opaque = [linear.module for linear in self._compressed]
            check_reads(runner, self._far, self, opaque)
        self._use_at_start = self._use_before = self._use()

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

    def _announce(self, placement: Placement) -> None:
        stated = manifest.WeightsManifest.of(
            placement, self._config.compress, self._chooser.expected_step
        )
        manifest.publish_weights(stated)
        if self._rank == 0:
            logger.info("%s", stated.describe())


def _check_distinct(parameters: Sequence[nn.Parameter]) -> None:
    if len({id(parameter) for parameter in parameters}) < len(parameters):
        raise UnsupportedError(
            "layers share parameters, and a sublayer is offloaded with its own: set "
            "weights.placement=off"
        )
