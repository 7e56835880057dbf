# SPDX-License-Identifier: Apache-2.0
"""Hooks in vLLM's model runners, at moments when vLLM does not ask the connector.

Model runner V2 asks the connector late: it has chosen a CUDA graph and copied recurrent states
between blocks by then. And it keeps the addresses of these states from before the connector has
bound the layers to their rows.
"""

from typing import Any, Protocol

from vllm_tiered.adapter.compat import wrap_once


class RunnerWatcher(Protocol):
    """What takes part in the steps of one engine's model runner."""

    def begin_runner_step(self, runner: Any, metadata: Any) -> None:
        """Prepare the step, before the runner does anything for it.

        ``metadata`` is the connector's, or None in a step without requests, such as a capture.
        """


_engines: list[tuple[Any, RunnerWatcher]] = []
"""The VllmConfig and the watcher of each of this process's engines."""


def watch(vllm_config: Any, watcher: RunnerWatcher) -> None:
    """Wrap the steps of the model runner with this configuration, and its start.

    Raises:
        VersionError: vLLM has no such runner.
    """
    runner_class = _runner_class(vllm_config)
    wrap_once(runner_class, "execute_model", _execute)
    if vllm_config.use_v2_model_runner:
        wrap_once(runner_class, "initialize_kv_cache", _initialize_kv_cache)
    _engines.append((vllm_config, watcher))


def unwatch(vllm_config: Any) -> None:
    """Drop the watcher of the engine with this configuration. Idempotent."""
    _engines[:] = [entry for entry in _engines if entry[0] is not vllm_config]


def _watchers(runner: Any) -> list[RunnerWatcher]:
    return [watcher for config, watcher in _engines if config is runner.vllm_config]


def _execute(original: Any, runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
    for watcher in _watchers(runner):
        watcher.begin_runner_step(runner, scheduler_output.kv_connector_metadata)
    return original(runner, scheduler_output, *args, **kwargs)


def _initialize_kv_cache(original: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """Let the model's state look up the layers' memory again, once the connector has bound it.

    No graph has been captured yet that could have the buffers of the first time.
    """
    original(runner, *args, **kwargs)
    if _watchers(runner):
        runner.model_state.initialize_kv_cache(runner.kv_cache_config, runner.block_tables)


def _runner_class(vllm_config: Any) -> type:
    if vllm_config.use_v2_model_runner:
        from vllm.v1.worker.gpu import model_runner

        return model_runner.GPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return GPUModelRunner
