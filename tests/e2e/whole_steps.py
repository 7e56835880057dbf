# SPDX-License-Identifier: Apache-2.0
"""Full CUDA graphs, emulated under the real engine on the CPU backend.

vLLM sees that graphs exist, and chooses among them as on a GPU. A piecewise graph runs the model
unchanged. A full graph runs the model with what a capture would have: the KV cache views are those
of the start, and the connector's hooks are not called.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from vllm_tiered.adapter import engine_config
from vllm_tiered.adapter.kv.worker import TieredWorker

SIZES = list(range(1, 17))
"""One graph for each number of requests, so that nothing is padded."""


class WholeSteps:
    """Records the replayed graphs.

    Attributes:
        steps: for each computing step, its mode and whether pages were laid out as vLLM does.
    """

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[str, bool]] = []
        self._worker: TieredWorker | None = None
        self._views: dict[str, Any] = {}
        self._patched = patched
        self._patch_config()

    def count(self, mode: str, *, as_vllm: bool) -> int:
        return self.steps.count((mode, as_vllm))

    @property
    def layers(self) -> list[Any]:
        """Return vLLM's attention layers."""
        assert self._worker is not None
        return [self._worker._layers[name] for name in self._views]

    def _patch_config(self) -> None:
        from vllm.config import CompilationConfig, CUDAGraphMode
        from vllm.platforms import current_platform
        from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
        from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        adjust, register = engine_config._adjust_vllm_config, TieredWorker.register_kv_caches

        def with_graphs(config: Any, vllm_config: Any) -> None:
            adjust(config, vllm_config)
            compilation = vllm_config.compilation_config
            compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
            compilation.cudagraph_capture_sizes = list(SIZES)
            compilation.max_cudagraph_capture_size = SIZES[-1]

        def registered(worker: TieredWorker, kv_caches: Any) -> None:
            register(worker, kv_caches)
            self._worker = worker
            self._views = {name: worker._layers[name].kv_cache for name in kv_caches}

        patch = self._patched.setattr
        patch(engine_config, "_adjust_vllm_config", with_graphs)
        patch(TieredWorker, "register_kv_caches", registered)
        patch(CompilationConfig, "is_attention_compiled_piecewise", lambda config: True)
        patch(
            CompilationConfig,
            "resolve_cudagraph_mode_and_sizes",
            lambda config, *_, **__: config.cudagraph_mode,
        )
        patch(type(current_platform), "get_global_graph_pool", lambda _: None, raising=False)
        self._patch_first(GPUModelRunner)
        self._patch_second(ModelCudaGraphManager, ActiveKVConnector)

    def _patch_first(self, runner_class: Any) -> None:
        from vllm.forward_context import get_forward_context

        forward = runner_class._model_forward

        def _model_forward(runner: Any, *args: Any, **kwargs: Any) -> Any:
            with self._step(get_forward_context().cudagraph_runtime_mode.name):
                return forward(runner, *args, **kwargs)

        self._patched.setattr(runner_class, "_model_forward", _model_forward)

    def _patch_second(self, manager_class: Any, connector_class: Any) -> None:
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import set_forward_context
        from vllm.v1.worker.gpu import model_runner

        init, before = manager_class.__init__, connector_class.pre_forward
        execute, slots_of = (
            model_runner.GPUModelRunner.execute_model,
            model_runner.build_slot_mappings_by_layer,
        )
        now: dict[str, Any] = {}

        def captured(manager: Any, *args: Any, **kwargs: Any) -> None:
            init(manager, *args, **kwargs)
            manager.graphs = dict.fromkeys(manager._capture_descs[CUDAGraphMode.FULL])
            manager._graphs_captured = True

        def pre_forward(connector: Any, output: Any, *args: Any, **kwargs: Any) -> None:
            now["batch"] = args[0] if args else None
            now["attn_metadata"] = kwargs.get("attn_metadata")
            before(connector, output, *args, **kwargs)

        def build_slot_mappings_by_layer(*args: Any) -> Any:
            now["slots"] = slots_of(*args)
            return now["slots"]

        def execute_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
            now["runner"] = runner
            return execute(runner, *args, **kwargs)

        def run_pw_graph(manager: Any, model: Any, inputs: Any) -> Any:
            with self._step("PIECEWISE"):
                return model(**inputs)

        def run_fullgraph(manager: Any, desc: Any) -> Any:
            assert desc in manager.graphs, f"No cudagraph for {desc}"
            runner, batch = now["runner"], now["batch"]
            inputs = {
                "input_ids": batch.input_ids,
                "positions": batch.positions,
                "inputs_embeds": None,
                "intermediate_tensors": None,
                **runner.model_state.prepare_inputs(batch, runner.req_states),
            }
            context = set_forward_context(
                now["attn_metadata"],
                runner.vllm_config,
                num_tokens=batch.num_tokens_after_padding,
                slot_mapping=now["slots"],
            )
            with context, self._step("FULL"):
                return runner.model(**inputs)

        patch = self._patched.setattr
        patch(manager_class, "__init__", captured)
        patch(manager_class, "run_pw_graph", run_pw_graph)
        patch(manager_class, "run_fullgraph", run_fullgraph)
        patch(connector_class, "pre_forward", pre_forward)
        patch(model_runner, "build_slot_mappings_by_layer", build_slot_mappings_by_layer)
        patch(model_runner.GPUModelRunner, "execute_model", execute_model)

    @contextlib.contextmanager
    def _step(self, mode: str) -> Iterator[None]:
        worker = self._worker
        if worker is None:  # a profile run
            yield
            return
        self.steps.append((mode, worker.swapper.is_laid_out_as_vllm))
        with self._as_captured() if mode == "FULL" else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def _as_captured(self) -> Iterator[None]:
        from vllm.distributed.kv_transfer import kv_transfer_state

        layers = self.layers
        views = [layer.kv_cache for layer in layers]
        waits = [layer.impl.__dict__.pop("do_kv_cache_update", None) for layer in layers]
        agent = kv_transfer_state._KV_CONNECTOR_AGENT
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        for layer, view in zip(layers, self._views.values(), strict=True):
            layer.kv_cache = view
        try:
            yield
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = agent
            for layer, view, wait in zip(layers, views, waits, strict=True):
                layer.kv_cache = view
                if wait is not None:
                    layer.impl.do_kv_cache_update = wait
