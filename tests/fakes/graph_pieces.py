# SPDX-License-Identifier: Apache-2.0
"""vLLM's pieces between splitting ops, compiled and split on the CPU as they would be on a GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten

from vllm_tiered.adapter import engine_config

capturing = False
"""A piece runs as if it were captured."""


class CapturedPiece:
    """Fake of vLLM's wrapper that captures a piece; each run counts as a capture."""

    def __init__(self, runnable: Any, *args: Any, **kwargs: Any) -> None:
        self.runnable = runnable

    def __getattr__(self, key: str) -> Any:
        return getattr(self.runnable, key)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        global capturing
        assert not capturing
        capturing = True
        try:
            return self.runnable(*args, **kwargs)
        finally:
            capturing = False


class ReplayedPiece(CapturedPiece):
    """Fake of vLLM's wrapper: runs after a piece's first one, for each batch, are replays.

    A replay reads and writes the memory of the capture, whatever it is called with.
    """

    def __init__(self, runnable: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(runnable, *args, **kwargs)
        self._captured: dict[Any, tuple[Any, Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert not kwargs
        key = tuple(one.shape if isinstance(one, torch.Tensor) else one for one in args)
        if key not in self._captured:
            self._captured[key] = args, super().__call__(*args)
            return self._captured[key][1]
        given, returned = self._captured[key]
        found, kept = tree_flatten(super().__call__(*given))[0], tree_flatten(returned)[0]
        for new, old in zip(found, kept, strict=True):
            if isinstance(old, torch.Tensor):
                old.copy_(new)
        return returned


def compile_as_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    cache: Path,
    split: Callable[[Any, Any], None],
    wrapper: type[CapturedPiece],
) -> None:
    """Make vLLM compile and split as on a GPU, in engines without ``enforce_eager``.

    Args:
        cache: an empty folder for what vLLM compiles.
        split: splits graphs, given our configuration and vLLM's.
        wrapper: runs each piece.
    """
    from vllm.config import CompilationMode, CUDAGraphMode, PassConfig
    from vllm.platforms import current_platform

    adjust = engine_config._adjust_vllm_config

    def as_on_a_gpu(config: Any, vllm_config: Any) -> None:
        adjust(config, vllm_config)
        if vllm_config.model_config.enforce_eager:
            return
        compilation = vllm_config.compilation_config
        compilation.mode = CompilationMode.VLLM_COMPILE
        compilation.backend, compilation.compile_sizes = "eager", []
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = [1, 4], 4
        compilation.post_init_cudagraph_sizes()
        compilation.pass_config = PassConfig()  # without passes for CUDA kernels
        compilation.splitting_ops = None
        compilation.set_splitting_ops_for_v1(all2all_backend="", data_parallel_size=1)
        compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
        split(config, vllm_config)
        assert compilation.cudagraph_mode == CUDAGraphMode.PIECEWISE

    monkeypatch.setattr(engine_config, "_adjust_vllm_config", as_on_a_gpu)
    name = f"{__name__}.{wrapper.__name__}"
    monkeypatch.setattr(type(current_platform), "get_static_graph_wrapper_cls", lambda *_: name)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(cache))
