# SPDX-License-Identifier: Apache-2.0
"""Worker side of the connector: runs the swapper from vLLM's hooks around each layer."""

import dataclasses
import logging
import sys
import time
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_tiered.adapter.checks import Part
from vllm_tiered.adapter.device import make_device
from vllm_tiered.adapter.kv import draft_steps
from vllm_tiered.adapter.kv.block_views import BlockViews
from vllm_tiered.adapter.kv.device_translation import make_translator
from vllm_tiered.adapter.kv.full_graphs import FullGraphs
from vllm_tiered.adapter.kv.gauges import kv_gauges
from vllm_tiered.adapter.kv.layer_trace import LayerTrace
from vllm_tiered.adapter.kv.plan import KvPlan, far_homes
from vllm_tiered.adapter.kv.step_figures import StepFigures
from vllm_tiered.adapter.kv.steps import StepReport
from vllm_tiered.adapter.kv.translation import LayerTranslator
from vllm_tiered.adapter.telemetry import link_peak, manifest, totals
from vllm_tiered.adapter.telemetry.metrics import TieredStats
from vllm_tiered.devices.narrow_pages import narrow_codec
from vllm_tiered.devices.pages import PageBuffer
from vllm_tiered.errors import IntegrityError, UnsupportedError
from vllm_tiered.kv.block_order import BlockOrderedPages
from vllm_tiered.kv.far_tier import FarHomes
from vllm_tiered.kv.layout import Level
from vllm_tiered.kv.step_plan import StepPlan
from vllm_tiered.kv.swapper import Swapper
from vllm_tiered.storage.direct_file import MEMORY_FILE_SYSTEMS, file_system
from vllm_tiered.units import format_bytes

logger = logging.getLogger("vllm.tiered")


class TieredWorker:
    """Worker side of one rank; it owns the swapper.

    Args:
        plan: the KV plan, with layers that are offloaded or may become so.
        layers: vLLM's attention layers by name (the static forward context).
        world_size: the number of ranks, which share the far budget.
        is_first: this rank logs the manifest.
        trace_every: number of steps between two that are traced layer by layer; 0 for none. A step
            that is one CUDA graph cannot be traced.

    Attributes:
        full_graphs: the whole-step graphs that must be removed before a page moves; None without
            CUDA graphs.
        after_wait: is called with a layer's name when its pages are there, before its attention;
            None without another KV connector.
    """

    def __init__(
        self,
        plan: KvPlan,
        layers: dict[str, Any],
        world_size: int,
        *,
        is_first: bool = True,
        trace_every: int = 0,
    ) -> None:
        self._plan = plan
        self._world_size = world_size
        self._is_first = is_first
        self._trace_every = trace_every
        self._trace: LayerTrace | None = None
        self._layers = layers
        self._device = make_device()
        self.swapper: Swapper
        self.full_graphs: FullGraphs | None = None
        self.after_wait: Callable[[str], None] | None = None
        self._near: PageBuffer
        self._translators: Sequence[LayerTranslator] = ()  # one for each group
        self._drafter_translator: LayerTranslator | None = None
        self._drafter_step = 0  # the step that it has translated last
        self._translates = False
        self._is_translated = False  # the latest step was translated
        self._row_of: dict[str, int] = {}  # all layers, by their row in the mapping table
        self._layer_of: dict[str, int] = {}  # layers that a step may have to wait for
        self._waits_here: dict[str, int] = {}  # of these, layers whose KV update does not wait
        self._last_readers: dict[str, str] = {}  # by name of an offloadable layer
        self._offloaded: dict[str, int] = {}  # offloaded layers by name of their last reader
        self._to_come: Container[int] = ()  # layers that this step must wait for
        self._updated: set[int] = set()  # layers whose KV update this step has called
        self._why_not = ""  # why the expansion cannot grow, found while the model runs
        self._report: StepReport | None = None
        self._lost: set[int] = set()
        self._step_start = 0.0
        self._outer_error: BaseException | None = None  # exception in handling as the step began
        self._figures = StepFigures(self._device)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Make vLLM's allocation the page pool, and set every layer's view of it.

        Raises:
            UnsupportedError: the views are not contiguous whole pages, or layers share them; what
                is known of this before is an obstacle (obstacles.py).
            BudgetError: the far tier does not have the memory.
        """
        geometry, near_pages, groups = self._plan.geometry, self._plan.near_pages, self._plan.groups
        assert groups is not None, "there are groups where layers may be offloaded"
        names, rows = groups.layer_names, groups.all_names
        # The l-th layers of all groups share their pages.
        self._row_of = {
            name: row
            for group_names in (rows, *(group.layer_names for group in groups.resident))
            for row, name in enumerate(group_names)
        }
        self._row_of |= {name: self._row_of[target] for name, target in groups.targets.items()}
        if kv_caches.keys() != self._row_of.keys():
            raise UnsupportedError(
                f"{len(kv_caches)} layers use {len(self._row_of)} layers' KV caches: "
                f"{Part.KV.off_switch}"
            )
        # As the kernels see them: latent attention drops a dimension of the registered views.
        views = {name: self._layers[name].kv_cache for name in kv_caches}
        states = {
            name: row
            for group in groups.resident
            if group.has_states
            for row, name in enumerate(group.layer_names)
        }
        for name, own in views.items():
            for tensor in own if name in states else [own]:
                self._check_pages(name, tensor, num_blocks=len(kv_caches[name]))
        view = views[names[0]]
        # Only now: "auto" takes up to half of the memory that the near pages have left.
        homes = self._homes = far_homes(self._plan, self._world_size)
        far_bytes, storage_bytes = self._plan.bytes_in(homes)
        self._figures.gauges = {
            "kv_far_bytes": far_bytes * self._world_size,
            "kv_storage_bytes": storage_bytes * self._world_size,
        }
        near = view.new_empty(0, dtype=torch.uint8).set_(view.untyped_storage())
        self._near = PageBuffer(near.view(near_pages, geometry.page_bytes))
        self.swapper = Swapper(
            order=self._plan.order,
            num_blocks=self._plan.num_blocks,
            near=self._near,
            device=self._device,
            offloadable_layers=self._plan.offloadable_layers,
            homes=homes,
            orders=self._plan.orders,
            released=self._plan.released_blocks,
            num_slots=self._plan.num_slots,
            codec=None if geometry.far_format is None else narrow_codec(geometry.far_format),
        )
        if self._plan.swaps:
            link_peak.measure(near.device)
        # Only now: the log must not say that there is a file before there is one.
        announce(self._plan, homes, log=self._is_first)
        if self._is_first and homes.path is not None:
            _warn_if_memory(homes.path, storage_bytes * self._world_size)
        totals.publish("kv", self.total_stats)
        pages = self.swapper.table.pages
        self._translators = [
            make_translator(pages[: len(names)], names, geometry.block_tokens, view.device)
        ]
        self._translators += [
            make_translator(
                pages[: len(group.layer_names)], group.layer_names, group.block_tokens, view.device
            )
            for group in groups.resident
            if not group.has_states
        ]
        for translator in self._translators:
            translator.share(groups.targets)
        if groups.draft_names:
            self._drafter_translator = make_translator(
                pages[len(names) :], groups.draft_names, geometry.block_tokens, view.device
            )
            draft_steps.watch(self)
        self._pool_views = {
            name: own.as_strided((near_pages, *own.shape[1:]), own.stride(), 0)
            for name, own in views.items()
            if name not in states
        }
        for name, row in states.items():
            self._layers[name].kv_cache = self._own_columns(views[name], row)
        self._names = names
        awaited: Iterable[int] = sorted(self._plan.offloadable_layers)
        if self._plan.num_slots is not None:
            awaited = range(len(names))
        self._layer_of = {names[layer]: layer for layer in awaited}
        self._last_readers = dict(zip(names, groups.last_readers, strict=True))
        self._waits_here = {
            name: layer
            for name, layer in self._layer_of.items()
            if not self._wait_before_update(self._layers[name].impl, layer)
        }
        for name in names:
            self._hook_direct_calls(name)
        self._bind_views()

    def _own_columns(self, states: Sequence[torch.Tensor], row: int) -> tuple[torch.Tensor, ...]:
        """Return a recurrent layer's states in the pages of its row: column c is index c."""
        num_columns = self._plan.near_pages // self._plan.num_layers
        return tuple(
            state.as_strided(
                (num_columns, *state.shape[1:]),
                state.stride(),
                state.storage_offset() + row * num_columns * state.stride(0),
            )
            for state in states
        )

    def _check_pages(self, name: str, view: torch.Tensor, *, num_blocks: int) -> None:
        page_bytes = view.stride(0) * view.element_size()
        if page_bytes == self._plan.geometry.page_bytes and len(view) == num_blocks:
            return
        raise UnsupportedError(
            f"KV pages of {name} are not contiguous: kernels see {num_blocks} pages of "
            f"{self._plan.geometry.page_bytes} bytes as {len(view)}, {page_bytes} bytes apart; "
            "choose another --block-size, or set the environment variable "
            "VLLM_KV_CACHE_LAYOUT=LBHNC"
        )

    def _bind_views(self) -> None:
        """Give every layer the view of the pool that the current layout needs.

        While no page has moved, block b of a layer is where vLLM would put it. Then each layer's
        view has only its own pages, and nothing is translated. Otherwise it has the whole pool.
        """
        offloaded = set(self.swapper.order.offloaded)
        self._offloaded = {
            self._last_readers[name]: layer
            for name, layer in self._layer_of.items()
            if layer in offloaded
        }
        self._num_far = self.swapper.order.num_far
        self._translates = not self.swapper.is_laid_out_as_vllm
        own_pages = self._plan.near_pages // self._plan.num_layers
        for name, pool in self._pool_views.items():
            row = self._row_of[name]
            if not self._translates:
                pool = pool[row * own_pages : (row + 1) * own_pages]
            self._layers[name].kv_cache = pool

    def open_block_views(self) -> BlockViews:
        """Return the layers' tensors in the order of block ids, for other KV connectors."""
        pages = BlockOrderedPages(self.swapper.table, self._near)
        return BlockViews(pages, self._layers, self._row_of, self._pool_views)

    def stays_as_vllm(self, plan: StepPlan) -> bool:
        """Return whether a step with this plan needs no translation."""
        return self.swapper.will_be_laid_out_as_vllm(plan)

    # vLLM's hooks, in the order of a step ------------------------------------------------

    def begin_step(self, plan: StepPlan, planning_seconds: float = 0.0) -> None:
        """Apply the plan to the pages, and queue the step's copies.

        Raises:
            IntegrityError: a page moved, but a whole-step CUDA graph may still be replayed; or the
                plan does not fit the pages.
        """
        start = time.perf_counter()
        self._step_start = start
        self._outer_error = sys.exception()
        if self._trace_every and self.swapper.num_steps % self._trace_every == 0:
            self._trace = LayerTrace(self.swapper, start)
        self.swapper.begin_step(plan)
        if self.full_graphs and not self.swapper.is_laid_out_as_vllm:
            self.full_graphs.check_removed()
        if self.swapper.order.num_far != self._num_far and not self._why_not:
            stated = manifest.KvManifest.of(self._plan, self._homes, self.swapper.order)
            manifest.publish_kv(stated)
        if (
            self.swapper.order.num_far != self._num_far
            or self.swapper.is_laid_out_as_vllm == self._translates
        ):
            self._bind_views()
        self._to_come = self.swapper.layers_to_come
        self._updated.clear()
        self._figures.bookkeeping_seconds = time.perf_counter() - start + planning_seconds

    def translate(self, forward_context: Any) -> None:
        """Give the layers their translated block tables.

        Without a ``forward_context`` the step either computes nothing or is one CUDA graph. Such
        graphs exist only while nothing is translated.

        Raises:
            IntegrityError: vLLM chose a whole-step graph, which would not see the translation.
        """
        was_translated, self._is_translated = self._is_translated, False
        if self.full_graphs and _is_one_graph(forward_context):
            self.swapper.wait_for_all_layers()
        if forward_context is None or forward_context.attn_metadata is None or not self._translates:
            return
        self._check_no_full_graph(forward_context)
        start = time.perf_counter()
        # A translator keeps the tables of the last step that it translated.
        keeps_pages = was_translated and self.swapper.keeps_pages
        for translator in self._translators:
            translator.translate(forward_context, keeps_pages=keeps_pages)
        self._is_translated = True
        self._figures.bookkeeping_seconds += time.perf_counter() - start

    def translate_drafter(self, forward_context: Any) -> None:
        """Give the draft model's layers their translated block tables, in each of its steps.

        Raises:
            IntegrityError: vLLM chose a whole-step graph, which would not see the translation.
        """
        assert self._plan.groups is not None and self._drafter_translator is not None
        if forward_context.no_compile_layers is not self._layers:
            return  # another engine's
        metadata = forward_context.attn_metadata
        is_drafter = isinstance(metadata, dict) and self._plan.groups.draft_names[0] in metadata
        if not is_drafter or not self._translates or self._names[0] in metadata:
            return
        self._check_no_full_graph(forward_context)
        start = time.perf_counter()
        # Pages change at a step's begin, and the draft model runs several times a step.
        keeps_pages = self._drafter_step == self.swapper.num_steps
        self._drafter_translator.translate(forward_context, keeps_pages=keeps_pages)
        self._drafter_step = self.swapper.num_steps
        self._figures.bookkeeping_seconds += time.perf_counter() - start

    def wait_layer(self, layer_name: str) -> None:
        """Wait for the layer's pages, unless its KV update has waited for them.

        Raises:
            UnsupportedError: the model wrote the layer's new KV without the backend's KV update, so
                into pages that were not there yet.
        """
        layer = self._layer_of.get(layer_name)
        is_awaited = layer is not None and layer in self._to_come
        waits_here = layer_name in self._waits_here
        if layer is not None and not waits_here and layer not in self._updated:
            reason = (
                f"{layer_name} writes its KV by other means than its attention backend's "
                "do_kv_cache_update (a fused operation)"
            )
            if is_awaited:
                raise UnsupportedError(
                    f"{reason}, before its pages are there: {Part.KV.off_switch}"
                )
            self._step_aside(reason)
        if self._trace and layer_name in self._names:
            self._traced_wait(self._names.index(layer_name))
        elif layer is not None and is_awaited and waits_here:
            self._wait(layer)
        if self.after_wait is not None:
            self.after_wait(layer_name)

    def layer_done(self, layer_name: str) -> None:
        """Release the staging buffer whose last reader the layer is; its attention is queued."""
        layer = self._offloaded.get(layer_name)
        if layer is None:
            return
        start = time.perf_counter()
        self.swapper.layer_done(layer)
        self._figures.bookkeeping_seconds += time.perf_counter() - start

    def end_step(self) -> None:
        """End the step and record its measurements."""
        error = sys.exception()
        if error is not None and error is not self._outer_error:
            # vLLM also ends a step whose forward pass raised or was interrupted by a signal. The
            # caller must see that error, not one about layers that were not computed.
            self.swapper.abandon(error)
            return
        start = time.perf_counter()
        self.swapper.end_step()
        end = time.perf_counter()
        self._figures.bookkeeping_seconds += end - start
        self._lost |= self._take_lost()
        self._count(step_seconds=end - self._step_start)

    def drain_stats(self) -> TieredStats:
        """Return the metrics since the last call."""
        return self._figures.drain()

    def total_stats(self) -> dict[str, float]:
        """Return the counters since the start, and the gauges that a worker knows now."""
        order = self.swapper.order
        gauges = kv_gauges(
            self._plan,
            self._world_size,
            # The scheduler's bound is not known here; less is released where blocks are partial.
            level=Level(order.num_far, max_blocks=self.swapper.num_released),
            num_reserved=self._plan.num_blocks - 1 - self._plan.released_blocks,
        ).data
        if self.swapper.num_steps:  # then only the scheduler knows these
            for name in ("kv_partial_blocks_far", "kv_blocks_released", "kv_blocks_reserved"):
                del gauges[name]
        failed = {"kv_storage_failed": 1} if self._device.storage_failure() else {}
        return self._figures.total() | gauges | self._figures.gauges | failed

    def take_lost_blocks(self) -> set[int]:
        """Return the blocks that have lost a page since the last call.

        With speculative decoding vLLM asks before it ends the step, behind the drafter.
        """
        lost, self._lost = self._lost | self._take_lost(), set()
        return lost

    def drain_report(self) -> StepReport | None:
        """Return the report of the last step; None if it was already returned."""
        report, self._report = self._report, None
        return report

    def end_copies(self) -> None:
        """Block until no copy reads or writes a near page; no step is running."""
        self.swapper.end_copies()

    def restore_near_pages(self) -> None:
        """Clear the near pages, whose memory was given up and is there again.

        The next step writes the tables on the device anew, wherever their memory is.
        """
        self.swapper.restore_near_pages()
        self._is_translated = False
        self._drafter_step = 0

    def close(self) -> None:
        """Close the device."""
        totals.withdraw("kv", self.total_stats)
        draft_steps.unwatch(self)
        self._device.close()

    def _take_lost(self) -> set[int]:
        lost = self.swapper.take_lost()
        self._figures.num_lost += len(lost)
        return lost

    def _wait_before_update(self, impl: Any, layer: int) -> bool:
        """Wrap the layer's KV update, so that it waits for the layer's pages.

        vLLM writes a layer's new KV before it calls the connector's wait for the layer.

        Returns:
            Whether there is such an update. If not, the attention call itself writes the KV, after
            the connector's wait.
        """
        update: Callable[..., Any] | None = getattr(impl, "do_kv_cache_update", None)
        if update is None:
            return False

        def do_kv_cache_update(*args: Any, **kwargs: Any) -> Any:
            self._updated.add(layer)
            if self._trace:
                self._traced_wait(layer)
            elif layer in self._to_come:
                self._wait(layer)
            return update(*args, **kwargs)

        impl.do_kv_cache_update = do_kv_cache_update
        return True

    @staticmethod
    def _check_no_full_graph(forward_context: Any) -> None:
        if _is_one_graph(forward_context):
            raise IntegrityError("vLLM chose a CUDA graph of a whole step, and KV pages have moved")

    def _hook_direct_calls(self, layer_name: str) -> None:
        """Call the hooks around an attention that vLLM calls without them (MLA on the CPU)."""
        layer = self._layers[layer_name]
        if not (getattr(layer, "use_direct_call", False) and hasattr(layer, "forward_impl")):
            return
        forward_impl = layer.forward_impl

        def hooked(*args: Any, **kwargs: Any) -> Any:
            self.wait_layer(layer_name)
            output = forward_impl(*args, **kwargs)
            self.layer_done(layer_name)
            return output

        layer.forward_impl = hooked

    def _step_aside(self, reason: str) -> None:
        """State that no layer becomes far; the scheduler learns it from the step's report."""
        if self._why_not or not self._plan.is_adaptive:
            return
        self._why_not = reason
        stated = manifest.KvManifest.of(self._plan, self._homes)
        stated = dataclasses.replace(
            stated,
            active=False,
            why_not=reason,
            is_supported=False,
            max_far_layers=0,
            max_expansion=1.0,
            num_blocks=self._plan.released_blocks,
        )
        manifest.publish_kv(stated)
        if self._is_first:
            logger.info("%s", stated.describe())

    def _wait(self, layer: int) -> None:
        start = time.perf_counter()
        self.swapper.wait_layer(layer)
        self._figures.wait_seconds += time.perf_counter() - start

    def _traced_wait(self, layer: int) -> None:
        assert self._trace is not None
        self._trace.record_read(layer)
        begin = time.perf_counter()
        self.swapper.wait_layer(layer)
        self._trace.record_wait(layer, begin, time.perf_counter())

    def _count(self, *, step_seconds: float) -> None:
        report = self._report = self._figures.count(self.swapper.stall_seconds, step_seconds)
        report.why_not = self._why_not
        if failure := self._device.storage_failure():
            report.storage_failure = failure
            report.memory_layers = self._homes.memory_layers or 0
        if self._trace:
            layers = self._trace.finish(self._step_start + step_seconds)
            report.layers += [] if layers is None else [layers]
            self._trace = None


def _is_one_graph(forward_context: Any) -> bool:
    """Return whether a step is a CUDA graph of a whole step, or computes nothing."""
    return forward_context is None or forward_context.cudagraph_runtime_mode.name == "FULL"


def announce(plan: KvPlan, homes: FarHomes, *, log: bool) -> None:
    """Publish this process's manifest, and log it if ``log``."""
    stated = manifest.KvManifest.of(plan, homes)
    manifest.publish_kv(stated)
    if log:
        logger.info("%s", stated.describe())


def _warn_if_memory(folder: Path, num_bytes: int) -> None:
    """Warn if the KV file lies in a file system whose files are memory."""
    if num_bytes and file_system(folder) in MEMORY_FILE_SYSTEMS:
        logger.warning(
            "tiered kv: kv.path %s is in a file system that is memory itself: its %s of KV take "
            "RAM, beside kv.far_gib; give a folder on an SSD",
            folder,
            format_bytes(num_bytes),
        )
