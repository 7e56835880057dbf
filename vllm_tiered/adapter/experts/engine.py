# SPDX-License-Identifier: Apache-2.0
"""Experts of an engine: slots in the place of each layer's experts, attached to `RoutedExperts`.

a layer is built       its tensors get memory: of all experts, or of the slots alone if the file of
                       stored experts has them already
weights are loaded     vLLM's loader writes to that memory
a layer is processed   what vLLM made of its weights moves to its tier; slots take its place
a step                 `quant_method.apply` runs on the slots, with slot numbers for experts

Nothing is model-specific: a bundle is whatever has a leading dimension of experts after vLLM has
processed the weights.
"""

import importlib.util
import logging
import shutil
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from vllm_tiered.adapter.compat import vllm_version
from vllm_tiered.adapter.device import make_device
from vllm_tiered.adapter.experts import copies, graphs
from vllm_tiered.adapter.experts.adopted import Adopted
from vllm_tiered.adapter.experts.embeddings import Embeddings
from vllm_tiered.adapter.experts.lookahead import Lookahead
from vllm_tiered.adapter.experts.slots import Slots
from vllm_tiered.adapter.experts.tensors import (
    bundle_of,
    check_layer,
    check_mostly_paged,
    check_nothing_else,
    expert_tensors,
    keep_one_expert,
    kernel_name,
    load_nothing,
    move_to_draft,
    processed_tensors,
)
from vllm_tiered.adapter.telemetry import manifest, preload, totals
from vllm_tiered.config import ExpertsConfig
from vllm_tiered.devices.available_memory import FAR_SHARE, read_host_memory
from vllm_tiered.errors import BudgetError, ConfigError, UnsupportedError
from vllm_tiered.experts.layout import ExpertBundle, num_slots
from vllm_tiered.experts.store import KNOB, ExpertFile
from vllm_tiered.units import GIB, format_bytes

logger = logging.getLogger("vllm.tiered")

_LEAST_SHARE = 0.8
"""Share of an expert's bytes in the checkpoint that its kernel needs at least. It may leave out
zero points and the order of groups, which are a few percent."""

_library: torch.library.Library | None = None


class ExpertsEngine:
    """Experts of one rank of an engine.

    Args:
        config: the ``experts`` section, with near memory.
        context: vLLM's modules that ops find by name (``static_forward_context``).
        model: returns the identity of the model's weights, for the file of stored experts.
        rank, num_ranks: tensor-parallel rank and number of ranks.
        ranks_here: ranks that share the host's memory.
    """

    def __init__(
        self,
        config: ExpertsConfig,
        *,
        context: dict[str, Any],
        model: Callable[[], Mapping[str, str]],
        rank: int,
        num_ranks: int,
        ranks_here: int = 1,
    ) -> None:
        self._config, self._context = config, context
        self._model = model
        self._rank, self._num_ranks, self._ranks_here = rank, num_ranks, ranks_here
        self._device = make_device()
        self._layers: list[Adopted] = []
        self._slots = Slots(config=config, device=self._device)
        self._embeddings: Embeddings | None = None
        if config.storage_path is not None and not self._device.has_device_memory:
            folder = Path(config.storage_path)
            self._embeddings = Embeddings(folder, self._is_any_stored, self._bytes_to_reserve)
        self._far_bytes = 0
        self._far_budget: float | None = None
        self._usable_bytes: int | None = None
        self._stored_bytes = 0
        self._is_checked = self._is_complete = False
        self._before: dict[str, float] = {}
        self._stated: manifest.ExpertsManifest | None = None
        self._preload: preload.Source | None = None
        register_op()

    @property
    def _file(self) -> ExpertFile | None:
        return self._slots.file

    @property
    def _has_fallback(self) -> bool:
        return self._config.fallback != "none"

    def is_of(self, context: dict[str, Any]) -> bool:
        """Return whether these experts belong to the engine with ``context``."""
        return self._context is context

    @property
    def far_bytes(self) -> int:
        """Far memory of the layers that were built so far."""
        return self._far_bytes

    def keeps(self, module: torch.nn.Module) -> bool:
        """Return whether a module's experts are kept here."""
        return any(one.layer is module for one in self._layers)

    # A layer's life ---------------------------------------------------------------------

    def adopt(self, layer: Any) -> None:
        """Give a new layer's tensors their memory, and attach to it.

        Raises:
            UnsupportedError: the layer's experts cannot pass through slots; the message says why.
            ConfigError: the file of stored experts cannot be made or used.
            BudgetError: the file's disk, or the host, does not have the memory of the experts.
        """
        check_layer(layer)
        if self._has_fallback:
            copies.check(layer)
        if self._usable_bytes is None:  # once, before any expert is in host memory
            self._usable_bytes = read_host_memory().usable_bytes // self._ranks_here
        self._move_to_host(layer)
        if self._config.storage_path is not None and self._file is None:
            self._slots.file = self._open_file(self._config.storage_path, layer)
        tensors = expert_tensors(layer)
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        adopted = Adopted(layer, stored=self._is_stored(layer, num_bytes))
        if self._has_fallback:
            adopted.copy_shapes = copies.shapes_of(layer)
        self._layers.append(adopted)
        if not adopted.stored:
            self._far_bytes += num_bytes
            self._check_host(self._usable_bytes)
        else:
            self._prepare_loading(adopted, bundle_of(tensors))
        self._check_before_loading(layer, bundle_of(tensors))
        name = f"tiered.experts.{layer.layer_name}"
        method = layer.quant_method
        method.process_weights_after_loading = partial(self._process, adopted)
        method.apply = partial(_apply, name)
        self._context[name] = adopted

    def adopt_runner(self, runner: Any) -> None:
        """Prepare what computes a layer, routing and shared experts included, for CUDA graphs."""
        if self._device.has_device_memory:
            graphs.write_to_fixed_memory(runner)

    def adopt_embedding(self, layer: Any) -> None:
        """Let a new embedding take little memory if experts are in a file."""
        if self._embeddings is not None:
            self._embeddings.adopt(layer)

    def finish(self, model: torch.nn.Module) -> None:
        """Publish the file of stored experts and say what was taken over, after loading.

        Args:
            model: the loaded model, whose routers name candidates.

        Raises:
            UnsupportedError: the model has no experts.
            BudgetError: the disk is full.
        """
        if not self._layers:
            raise UnsupportedError(
                "experts.near_gib is set, and the model has no mixture of experts: leave it out"
            )
        if self._file is not None and not self._file.is_filled and self._file.layers:
            self._file.publish()
        for adopted in self._layers:
            if adopted.is_waiting:
                self._slots.attach(adopted)
            self._move_rest(adopted.layer)
        self._preload = self._look_ahead(model)
        self._is_complete = True
        stated = self._stated = self._manifest()
        manifest.publish_experts(stated)
        preload.publish("experts", self._preload)
        totals.publish("experts", self.total_use)
        totals.publish(totals.EXPERT_HITS, self.hits_by_layer)
        totals.publish(totals.EXPERT_MISSES, self.misses_by_layer)
        if self._rank == 0:
            logger.info("%s", stated.describe())

    def _move_to_host(self, layer: Any) -> None:
        """Let a layer's tensors be loaded to host memory: a GPU holds one layer's at a time.

        vLLM moves them to the GPU to process them, and back.
        """
        for name, tensor in expert_tensors(layer).items():
            if tensor.device.type != "cpu":
                self._slots.near = tensor.device
                layer.get_parameter(name).data = tensor.cpu()  # padding may stay as vLLM made it

    def _move_rest(self, layer: Any) -> None:
        """Move what vLLM has left in host memory to the GPU, all experts if each has a slot."""
        for parameter in layer.parameters(recurse=False):
            if parameter.device.type != self._slots.near.type:
                parameter.data = parameter.data.to(self._slots.near)

    def _look_ahead(self, model: torch.nn.Module) -> preload.Source:
        """Let each layer load what the next one's router would choose for its hidden states.

        Returns:
            What decides in each step whether they do; or why they never do.

        Raises:
            UnsupportedError: this is asked for, and the model's routers cannot be called alone.
        """
        asked = self._config.prefetch == "on"
        if self._device.has_device_memory and asked:
            raise UnsupportedError("experts.prefetch does not work on a GPU yet: leave it out")
        if self._config.prefetch == "off":
            return 'experts.prefetch is "off"'
        if self._device.has_device_memory:
            return "it does not work on a GPU yet"
        # With a fallback, what arrived in time would decide what is computed in 4 bit.
        if self._has_fallback and not asked:
            return "experts.fallback is set"
        in_slots = [one for one in self._layers if one.experts is not None]
        pairs = [(one.layer, one.experts) for one in in_slots if one.experts is not None]
        lookahead = Lookahead(model, pairs, is_always_on=asked, logs=self._rank == 0)
        if lookahead.num_layers:
            in_slots[0].begin_step = lookahead.begin_step
            return lookahead.trial
        if len(in_slots) < 2:
            return "no two layers have experts in slots"
        if asked:
            raise UnsupportedError(
                f"{in_slots[1].layer.layer_name}: its router cannot be called alone: leave "
                "experts.prefetch out"
            )
        return "the model's routers cannot be called alone"

    def close(self) -> None:
        """Free memory and close files. Idempotent."""
        preload.withdraw("experts", self._preload)
        totals.withdraw("experts", self.total_use)
        totals.withdraw(totals.EXPERT_HITS, self.hits_by_layer)
        totals.withdraw(totals.EXPERT_MISSES, self.misses_by_layer)
        for adopted in self._layers:
            adopted.close_drafts()
        self._layers, self._context = [], {}
        if self._embeddings is not None:
            self._embeddings.close()
        self._slots.close()
        if self._file is not None:
            self._file.cancel()
        self._device.close()
        if self._file is not None:
            self._file.close()
            self._slots.file = None
        if self._stated is not None:
            manifest.withdraw_experts(self._stated)

    def take_use(self) -> dict[str, float]:
        """Return the increase of each figure since the last call; empty before :meth:`finish`."""
        use = self._use(waits=False)
        before, self._before = self._before, use
        return {name: value - before.get(name, 0.0) for name, value in use.items()}

    def hits_by_layer(self) -> dict[str, float]:
        """Return the hits of each layer with slots since the start, by the layer's name.

        On a GPU those of the steps whose counts have arrived.
        """
        self._slots.count_on_device(waits=False)
        return {one.experts.name: one.experts.stats.hits for one in self._layers if one.experts}

    def misses_by_layer(self) -> dict[str, float]:
        """Return the misses beside the hits that were returned last, by the layer's name."""
        return {one.experts.name: one.experts.stats.misses for one in self._layers if one.experts}

    def total_use(self) -> dict[str, float]:
        """Return each figure since the start; empty before :meth:`finish`."""
        return self._use(waits=True)

    def _use(self, *, waits: bool) -> dict[str, float]:
        if not self._is_complete:
            return {}
        self._slots.count_on_device(waits=waits)
        layers = [(one.stored, one.experts.stats) for one in self._layers if one.experts]
        loaded = {True: 0, False: 0}
        for stored, stats in layers:
            loaded[stored] += stats.loaded_bytes + stats.ahead_bytes
        return {
            "experts_far_bytes": float(loaded[False]),
            "experts_storage_bytes": float(loaded[True]),
            "experts_wait_seconds": sum(stats.wait_seconds for _, stats in layers),
            "experts_hits": float(sum(stats.hits for _, stats in layers)),
            "experts_misses": float(sum(stats.misses for _, stats in layers)),
            "experts_layer_steps": float(sum(stats.steps for _, stats in layers)),
            "experts_waves": float(sum(stats.waves for _, stats in layers)),
            "experts_pairs": float(sum(stats.pairs for _, stats in layers)),
            "experts_fallback_pairs": float(sum(stats.fallback_pairs for _, stats in layers)),
            "experts_ahead": float(sum(stats.ahead for _, stats in layers)),
            "experts_ahead_used": float(sum(stats.ahead_used for _, stats in layers)),
        }

    # ------------------------------------------------------------------------------------

    def _open_file(self, path: str, layer: Any) -> ExpertFile:
        method = layer.quant_method
        settings = {
            "dtype": str(layer.params_dtype),
            "method": type(method).__name__,
            "kernel": kernel_name(method),
            "zentorch": importlib.util.find_spec("zentorch") is not None,
            "vllm": vllm_version(),
            "far_gib": self._config.far_gib,
            "fallback": self._config.fallback,
        }
        file = ExpertFile(
            Path(path),
            rank=self._rank,
            num_ranks=self._num_ranks,
            model=self._model(),
            settings=settings,
        )
        usable = read_host_memory().usable_bytes // self._ranks_here
        if file.is_filled and self._config.far_gib == "auto" and file.far_bytes > usable:
            file.discard(
                f"leaves {format_bytes(file.far_bytes)} to far memory, which has "
                f"{format_bytes(usable)} now"
            )
        return file

    def _is_stored(self, layer: Any, num_bytes: int) -> bool:
        if self._file is None:
            return False
        if self._file.is_filled:
            return layer.layer_name in self._file.layers
        if self._far_budget is None:  # once, as what the layers take now is not allocated yet
            usable = read_host_memory().usable_bytes // self._ranks_here
            far_gib = self._config.far_gib
            self._far_budget = FAR_SHARE * usable if far_gib == "auto" else float(far_gib) * GIB
        return self._far_bytes + num_bytes > self._far_budget

    def _check_host(self, usable_bytes: int) -> None:
        """Check that the host has the memory, which is first written while the model is loaded."""
        if self._far_bytes > usable_bytes:
            raise BudgetError(
                f"experts: {len(self._layers)} layers take {format_bytes(self._far_bytes)} of far "
                f"memory, and only {format_bytes(usable_bytes)} can be allocated per rank "
                f"({read_host_memory().describe_limit()}): set experts.storage_path to a folder on "
                "an SSD, or lower experts.far_gib if it is set"
            )

    def _is_any_stored(self) -> bool:
        return any(one.stored for one in self._layers)

    def _bytes_to_reserve(self) -> int:
        """Return the disk space that the file of experts is still going to take."""
        is_reserved = self._file is None or self._file.is_filled or self._file.layers
        return 0 if is_reserved else self._stored_bytes

    def _prepare_loading(self, adopted: Adopted, bundle: ExpertBundle) -> None:
        """Let the loader skip a stored layer's tensors, or write large ones to files on the disk.

        New tensors take no memory until something writes to them.

        Raises:
            BudgetError: the disk has no space for two copies of the stored experts.
            ConfigError: no file can be made in the folder, or it is gone by now.
        """
        assert self._file is not None and self._config.storage_path is not None
        if self._file.is_filled:
            for tensor in bundle.tensors:
                parameter = adopted.layer.get_parameter(tensor.name)
                if parameter.ndim > 2:  # vLLM has to see that a checkpoint has biases
                    parameter.weight_loader = load_nothing
            return
        folder = Path(self._config.storage_path)
        for tensor in bundle.paged:
            parameter = adopted.layer.get_parameter(tensor.name)
            self._stored_bytes += parameter.nbytes
            adopted.drafts.append(move_to_draft(parameter, folder))
        free_bytes = _free_bytes(folder)
        if self._stored_bytes > free_bytes:
            old = self._file.path
            hint = f", or remove {old}, which would be replaced" if old.exists() else ""
            raise BudgetError(
                f"{format_bytes(self._stored_bytes)} of experts or more are to be stored in "
                f"{KNOB} {folder}, twice while they are made from the checkpoint, and "
                f"{format_bytes(free_bytes)} are free beside the first copy: make room{hint}"
            )

    def _check_before_loading(self, layer: Any, bundle: ExpertBundle) -> None:
        """Let the first weight of a mixture that is loaded check near memory.

        All layers are known then, and nothing has been read that would have to be read again.
        """
        for tensor in bundle.tensors:
            parameter = layer.get_parameter(tensor.name)
            loader = getattr(parameter, "weight_loader", None)
            if loader is not None:
                parameter.weight_loader = self._checked(layer, bundle, loader)

    def _checked(
        self, layer: Any, bundle: ExpertBundle, loader: Callable[..., Any]
    ) -> Callable[..., Any]:
        @wraps(loader)
        def load(*args: object, **kwargs: object) -> Any:
            if not self._is_checked:
                self._num_slots(layer, bundle, least_share=_LEAST_SHARE)
                self._is_checked = True
            return loader(*args, **kwargs)

        return load

    def _process(self, adopted: Adopted, layer: Any) -> None:
        """Let vLLM process a layer's weights, and move the result to its tier."""
        if adopted.stored and self._file is not None and self._file.is_filled:
            # vLLM makes of one expert what it would make of all: the shapes of slots.
            keep_one_expert(layer, bundle_of(expert_tensors(layer)))
        elif self._has_fallback:
            adopted.copies = copies.make(layer)
        adopted.process(layer)
        tensors = processed_tensors(layer)
        check_nothing_else(layer, tensors)
        bundle = bundle_of(tensors)
        if not self._slots.count:
            self._slots.num_layers = len(self._layers)
            self._slots.count = self._num_slots(layer, bundle)
        if adopted.stored and self._file is not None and not self._file.is_filled:
            if not self._file.layers:
                names = [one.layer.layer_name for one in self._layers if one.stored]
                check_mostly_paged(layer, bundle)
                whole = copies.with_copies(bundle, adopted.copies)
                self._file.begin(names, whole, layer.local_num_experts, self._far_bytes)
            self._file.fill(layer.layer_name, {**tensors, **adopted.copies})
            keep_one_expert(layer, bundle)
            del tensors
            adopted.close_drafts()
            adopted.is_waiting = True
        elif self._slots.count < layer.local_num_experts or adopted.stored:
            if self._device.has_device_memory:
                # vLLM moves the tensors back to the host after this: slots come later.
                if not adopted.stored:
                    adopted.move_to_far(self._device, tensors, bundle)
                keep_one_expert(layer, bundle)
                adopted.is_waiting = True
            else:
                self._slots.attach(adopted)
        else:  # a slot for each expert: nothing to do better than vLLM
            layer.quant_method.apply = adopted.apply
            adopted.copies = {}
            self._slots.near_bytes += bundle.num_bytes * layer.local_num_experts

    def _num_slots(self, layer: Any, bundle: ExpertBundle, *, least_share: float = 1.0) -> int:
        """Return the slots of each layer known so far. Raises BudgetError: see `num_slots`."""
        return num_slots(
            int(float(self._config.near_gib) * GIB),
            [bundle] * len(self._layers),
            num_experts=layer.local_num_experts,
            top_k=layer.top_k,
            resident_bytes=sum(
                shape.nbytes for one in self._layers for shape in one.copy_shapes.values()
            ),
            least_share=least_share,
        )

    def _manifest(self) -> manifest.ExpertsManifest:
        first = self._layers[0]
        return manifest.ExpertsManifest(
            num_layers=len(self._layers),
            num_experts=first.layer.local_num_experts,
            top_k=first.layer.top_k,
            slots=self._slots.count,
            policy=self._config.policy,
            near_bytes=self._slots.near_bytes,
            far_bytes=self._slots.far_bytes,
            storage_bytes=self._file.num_bytes if self._file is not None else 0,
            embedding_bytes=self._embeddings.file_bytes if self._embeddings is not None else 0,
        )


def register_op() -> None:
    """Define the op ``tiered::routed_experts``. Idempotent."""
    global _library
    if _library is None:
        _library = torch.library.Library("tiered", "FRAGMENT")
        _library.define("routed_experts(Tensor x, Tensor weights, Tensor ids, str name) -> Tensor")
        _library.impl("routed_experts", _routed_experts, "CompositeExplicitAutograd")
        _library._register_fake("routed_experts", lambda x, weights, ids, name: torch.empty_like(x))


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise ConfigError(
            f"{KNOB} is {folder}: its free space cannot be read ({error.strerror}); give a "
            "writable folder on a local disk"
        ) from error


def _apply(
    name: str,
    layer: Any,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    shared_experts: Any,
    shared_experts_input: torch.Tensor | None,
) -> torch.Tensor:
    """Stand in for `quant_method.apply`. Shared experts have run before (`check_layer`)."""
    result: torch.Tensor = torch.ops.tiered.routed_experts(x, topk_weights, topk_ids, name)
    return result


def _routed_experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, name: str
) -> torch.Tensor:
    adopted = get_forward_context().no_compile_layers[name]
    assert adopted.experts is not None, "the model runs before its weights are loaded"
    if adopted.begin_step is not None:
        adopted.begin_step(len(x))
    return adopted.experts.compute(x, weights, ids, partial(_run, adopted))


def _run(
    adopted: Adopted, x: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    return adopted.apply(
        layer=adopted.layer,
        x=x,
        topk_weights=weights,
        topk_ids=slots,
        shared_experts=None,
        shared_experts_input=None,
    )
