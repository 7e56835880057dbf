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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from vllm_tiered.adapter.compat import vllm_version
from vllm_tiered.adapter.device import make_device
from vllm_tiered.adapter.experts import copies
from vllm_tiered.adapter.experts.lookahead import Lookahead
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
    takes_float32,
)
from vllm_tiered.adapter.telemetry import manifest, totals
from vllm_tiered.config import ExpertsConfig
from vllm_tiered.devices.available_memory import FAR_SHARE, read_host_memory
from vllm_tiered.devices.pages import PageBuffer
from vllm_tiered.errors import BudgetError, ConfigError, UnsupportedError
from vllm_tiered.experts.layer import ExpertLayer, HostRows, PagedRows
from vllm_tiered.experts.layout import ExpertBundle, num_slots
from vllm_tiered.experts.policy import POLICIES
from vllm_tiered.experts.slot_table import SlotTable
from vllm_tiered.experts.store import KNOB, ExpertFile
from vllm_tiered.storage.direct_file import aligned_pages
from vllm_tiered.storage.immutable_file import Draft
from vllm_tiered.units import GIB, format_bytes

logger = logging.getLogger("vllm.tiered")

_library: torch.library.Library | None = None


class _Adopted:
    """A layer whose experts pass through slots.

    Attributes:
        layer: vLLM's `RoutedExperts`.
        stored: its experts are in the file, or will be.
        drafts: files that hold the checkpoint's tensors until the layer is processed.
        apply: vLLM's `quant_method.apply`, which computes with the tensors that the layer has.
        far, far_pages: on a GPU, rows of all experts in far memory by name, and their pages.
        is_waiting: slots take its tensors' place when the model is loaded.
        copies: its experts in 4 bit, by name; empty without a fallback, and until it is processed.
        copy_shapes: their shapes.
        experts: None until the layer is processed.
        begin_step: called with the number of tokens before the layer computes.
    """

    def __init__(self, layer: Any, *, stored: bool) -> None:
        self.layer = layer
        self.stored = stored
        self.drafts: list[Draft] = []
        self.apply: Callable[..., torch.Tensor] = layer.quant_method.apply
        self.process: Callable[[Any], None] = layer.quant_method.process_weights_after_loading
        self.far: dict[str, torch.Tensor] = {}
        self.far_pages: dict[str, PageBuffer] = {}
        self.is_waiting = False
        self.copies: dict[str, torch.Tensor] = {}
        self.copy_shapes: dict[str, torch.Tensor] = {}
        self.experts: ExpertLayer | None = None
        self.begin_step: Callable[[int], None] | None = None

    def close_drafts(self) -> None:
        """Delete the files that hold the checkpoint's tensors. Idempotent."""
        for draft in self.drafts:
            draft.close()
        self.drafts = []


class ExpertsEngine:
    """Experts of one rank of an engine.

    Args:
        config: the ``experts`` section, with near memory.
        context: vLLM's modules that ops find by name (``static_forward_context``).
        model: returns the identity of the model's weights, for the file of stored experts.
        rank, num_ranks: tensor-parallel rank and number of ranks.
    """

    def __init__(
        self,
        config: ExpertsConfig,
        *,
        context: dict[str, Any],
        model: Callable[[], Mapping[str, str]],
        rank: int,
        num_ranks: int,
    ) -> None:
        self._config, self._context = config, context
        self._model = model
        self._rank, self._num_ranks = rank, num_ranks
        self._device = make_device()
        self._layers: list[_Adopted] = []
        self._file: ExpertFile | None = None
        self._far_bytes = 0
        self._far_budget: float | None = None
        self._stored_bytes = 0
        self._num_slots = 0
        self._is_complete = False
        self._near_bytes = self._far_bytes_now = 0
        self._compute_device = torch.device("cpu")
        self._before: dict[str, float] = {}
        self._stated: manifest.ExpertsManifest | None = None
        register_op()

    @property
    def _has_fallback(self) -> bool:
        return self._config.fallback != "none"

    def is_of(self, context: dict[str, Any]) -> bool:
        """Return whether these experts belong to the engine with ``context``."""
        return self._context is context

    # A layer's life ---------------------------------------------------------------------

    def adopt(self, layer: Any) -> None:
        """Give a new layer's tensors their memory, and attach to it.

        Raises:
            UnsupportedError: the layer's experts cannot pass through slots; the message says why.
            ConfigError, BudgetError: the file of stored experts cannot be made or used.
        """
        check_layer(layer)
        if self._has_fallback:
            copies.check(layer)
        self._move_to_host(layer)
        if self._config.storage_path is not None and self._file is None:
            self._file = self._open_file(self._config.storage_path, layer)
        tensors = expert_tensors(layer)
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        adopted = _Adopted(layer, stored=self._is_stored(layer, num_bytes))
        if self._has_fallback:
            adopted.copy_shapes = copies.shapes_of(layer)
        self._layers.append(adopted)
        if not adopted.stored:
            self._far_bytes += num_bytes
        else:
            self._prepare_loading(adopted, bundle_of(tensors))
        name = f"tiered.experts.{layer.layer_name}"
        method = layer.quant_method
        method.process_weights_after_loading = partial(self._process, adopted)
        method.apply = partial(_apply, name)
        self._context[name] = adopted

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
                self._attach(adopted)
            self._move_rest(adopted.layer)
        self._look_ahead(model)
        self._is_complete = True
        stated = self._stated = self._manifest()
        manifest.publish_experts(stated)
        totals.publish("experts", self.total_use)
        totals.publish(totals.EXPERT_LAYERS, self.hit_ratios)
        if self._rank == 0:
            logger.info("%s", stated.describe())

    def _move_to_host(self, layer: Any) -> None:
        """Let a layer's tensors be loaded to host memory: a GPU holds one layer's at a time.

        vLLM moves them to the GPU to process them, and back.
        """
        for name, tensor in expert_tensors(layer).items():
            if tensor.device.type != "cpu":
                self._compute_device = tensor.device
                layer.get_parameter(name).data = torch.empty_like(tensor, device="cpu")

    def _move_rest(self, layer: Any) -> None:
        """Move what vLLM has left in host memory to the GPU, all experts if each has a slot."""
        for parameter in layer.parameters(recurse=False):
            if parameter.device.type != self._compute_device.type:
                parameter.data = parameter.data.to(self._compute_device)

    def _look_ahead(self, model: torch.nn.Module) -> None:
        """Let each layer load what the next one's router would choose for its hidden states.

        Raises:
            UnsupportedError: this is asked for, and the model's routers cannot be called alone.
        """
        asked = self._config.prefetch == "on"
        if self._device.has_device_memory and asked:
            raise UnsupportedError("experts.prefetch does not work on a GPU yet: leave it out")
        # With a fallback, what arrived in time would decide what is computed in 4 bit.
        if self._device.has_device_memory or self._config.prefetch == "off":
            return
        if self._has_fallback and not asked:
            return
        in_slots = [one for one in self._layers if one.experts is not None]
        pairs = [(one.layer, one.experts) for one in in_slots if one.experts is not None]
        lookahead = Lookahead(model, pairs, is_always_on=asked, logs=self._rank == 0)
        if lookahead.num_layers:
            in_slots[0].begin_step = lookahead.begin_step
        elif asked and len(in_slots) > 1:
            raise UnsupportedError(
                f"{in_slots[1].layer.layer_name}: its router cannot be called alone: leave "
                "experts.prefetch out"
            )

    def close(self) -> None:
        """Free memory and close files. Idempotent."""
        for adopted in self._layers:
            adopted.close_drafts()
        self._layers, self._context = [], {}
        if self._file is not None:
            self._file.cancel()
        self._device.close()
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._stated is not None:
            manifest.withdraw_experts(self._stated)
        totals.withdraw("experts", self.total_use)
        totals.withdraw(totals.EXPERT_LAYERS, self.hit_ratios)

    def take_use(self) -> dict[str, float]:
        """Return the increase of each figure since the last call; empty before :meth:`finish`."""
        use = self.total_use()
        before, self._before = self._before, use
        return {name: value - before.get(name, 0.0) for name, value in use.items()}

    def hit_ratios(self) -> dict[str, float]:
        """Return the hit ratio of each layer with slots since the start, by the layer's name."""
        layers = [one.experts for one in self._layers if one.experts]
        wanted = [(layer, layer.stats.hits + layer.stats.misses) for layer in layers]
        return {layer.name: layer.stats.hits / number for layer, number in wanted if number}

    def total_use(self) -> dict[str, float]:
        """Return each figure since the start; empty before :meth:`finish`."""
        if not self._is_complete:
            return {}
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
        usable = read_host_memory().usable_bytes // self._num_ranks
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
            usable = read_host_memory().usable_bytes // self._num_ranks
            far_gib = self._config.far_gib
            self._far_budget = FAR_SHARE * usable if far_gib == "auto" else float(far_gib) * GIB
        return self._far_bytes + num_bytes > self._far_budget

    def _prepare_loading(self, adopted: _Adopted, bundle: ExpertBundle) -> None:
        """Let the loader skip a stored layer's tensors, or write large ones to files on the disk.

        New tensors take no memory until something writes to them.

        Raises:
            BudgetError: the disk has no space for two copies of the stored experts.
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
        free_bytes = shutil.disk_usage(folder).free
        if self._stored_bytes > free_bytes:
            old = self._file.path
            hint = f", or remove {old}, which would be replaced" if old.exists() else ""
            raise BudgetError(
                f"{format_bytes(self._stored_bytes)} of experts or more are to be stored in "
                f"{KNOB} {folder}, twice while they are made from the checkpoint, and "
                f"{format_bytes(free_bytes)} are free beside the first copy: make room{hint}"
            )

    def _process(self, adopted: _Adopted, layer: Any) -> None:
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
        if not self._num_slots:
            self._num_slots = num_slots(
                int(float(self._config.near_gib) * GIB),
                [bundle] * len(self._layers),
                num_experts=layer.local_num_experts,
                top_k=layer.top_k,
                resident_bytes=sum(
                    shape.nbytes for one in self._layers for shape in one.copy_shapes.values()
                ),
            )
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
        elif self._num_slots < layer.local_num_experts or adopted.stored:
            if self._device.has_device_memory:
                # vLLM moves the tensors back to the host after this: slots come later.
                self._move_to_far(adopted, tensors, bundle)
                keep_one_expert(layer, bundle)
                adopted.is_waiting = True
            else:
                self._attach(adopted)
        else:  # a slot for each expert: nothing to do better than vLLM
            layer.quant_method.apply = adopted.apply
            adopted.copies = {}
            self._near_bytes += bundle.num_bytes * layer.local_num_experts

    def _move_to_far(
        self, adopted: _Adopted, tensors: Mapping[str, torch.Tensor], bundle: ExpertBundle
    ) -> None:
        """Copy the rows of a layer that is not stored to memory that a GPU's copies read."""
        if adopted.stored:
            return
        for tensor in bundle.tensors:
            rows = tensors[tensor.name]
            if not rows.is_contiguous():
                raise UnsupportedError(
                    f"{adopted.layer.layer_name}: its kernel lays {tensor.name} out in an order of "
                    "its own: leave tiered.experts.near_gib out for this model"
                )
            if tensor.page_bytes is None:
                adopted.far[tensor.name] = rows.cpu()
            else:
                pages = self._device.far_buffer(rows.nbytes // bundle.page_bytes, bundle.page_bytes)
                held = pages.data.view(-1).view(rows.dtype).view(rows.shape)
                adopted.far[tensor.name] = held.copy_(rows)
                adopted.far_pages[tensor.name] = pages

    def _attach(self, adopted: _Adopted) -> None:
        """Put slots in the place of the layer's tensors."""
        layer = adopted.layer
        tensors = processed_tensors(layer)
        bundle = bundle_of(tensors)
        page_bytes = bundle.page_bytes
        stored: dict[str, torch.Tensor] = {}
        if adopted.stored:
            assert self._file is not None
            held = self._file.bundle
            if (held and held.in_slots, self._file.num_experts) != (
                bundle,
                layer.local_num_experts,
            ):
                raise ConfigError(
                    f"{self._file.path} has other tensors than {layer.layer_name}: remove it, and "
                    "the next start fills it anew"
                )
            stored = self._file.small_rows(layer.layer_name)
            adopted.copies = copies.from_rows(stored, adopted.copy_shapes)
        paged: list[PagedRows] = []
        host: list[HostRows] = []
        offsets = iter(self._file.offsets() if adopted.stored and self._file else ())
        for tensor in bundle.tensors:
            rows = adopted.far.get(tensor.name, tensors[tensor.name])
            parameter = layer.get_parameter(tensor.name)
            shape = (self._num_slots, *rows.shape[1:])
            if tensor.page_bytes is None:
                slots = rows.new_zeros(shape, device=self._compute_device)
                of_all = rows.clone()
                if tensor.name in stored:
                    whole = (layer.local_num_experts, *rows.shape[1:])
                    of_all = stored[tensor.name].view(-1).view(rows.dtype).view(whole)
                host.append(HostRows(of_all, slots))
                self._far_bytes_now += of_all.nbytes
            else:
                num_pages = tensor.row_bytes // page_bytes
                memory = aligned_pages(
                    self._num_slots * num_pages, page_bytes, self._compute_device
                )
                memory.zero_()
                slots = memory.view(-1).view(rows.dtype).view(shape)
                if adopted.stored and self._file is not None:
                    source = self._file.source(layer.layer_name)
                    stride, offset = bundle.file_pages, next(offsets)
                else:
                    source = adopted.far_pages.get(
                        tensor.name, PageBuffer(rows.view(torch.uint8).view(-1, page_bytes))
                    )
                    stride, offset = num_pages, 0
                    self._far_bytes_now += rows.nbytes
                paged.append(PagedRows(source, PageBuffer(memory), num_pages, stride, offset))
            parameter.data = slots
            self._near_bytes += slots.nbytes
        adopted.experts = ExpertLayer(
            name=layer.layer_name,
            device=self._device,
            table=SlotTable(
                self._num_slots, POLICIES[self._config.policy](layer.local_num_experts)
            ),
            paged=paged,
            host=host,
            is_stored=adopted.stored,
            # vLLM multiplies inputs with routing weights in the model's dtype.
            in_float32=takes_float32(layer.quant_method) and not layer.apply_router_weight_on_input,
            fallback=copies.fallback(layer, adopted.copies, self._config.fallback_share)
            if self._has_fallback
            else None,
        )
        self._near_bytes += sum(copy.nbytes for copy in adopted.copies.values())

    def _manifest(self) -> manifest.ExpertsManifest:
        first = self._layers[0]
        return manifest.ExpertsManifest(
            num_layers=len(self._layers),
            num_experts=first.layer.local_num_experts,
            top_k=first.layer.top_k,
            slots=self._num_slots,
            policy=self._config.policy,
            near_bytes=self._near_bytes,
            far_bytes=self._far_bytes_now,
            storage_bytes=self._file.num_bytes if self._file is not None else 0,
        )


def register_op() -> None:
    """Define the op ``tiered::routed_experts``. Idempotent."""
    global _library
    if _library is None:
        _library = torch.library.Library("tiered", "FRAGMENT")
        _library.define("routed_experts(Tensor x, Tensor weights, Tensor ids, str name) -> Tensor")
        _library.impl("routed_experts", _routed_experts, "CompositeExplicitAutograd")
        _library._register_fake("routed_experts", lambda x, weights, ids, name: torch.empty_like(x))


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
    adopted: _Adopted, x: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    return adopted.apply(
        layer=adopted.layer,
        x=x,
        topk_weights=weights,
        topk_ids=slots,
        shared_experts=None,
        shared_experts_input=None,
    )
