# SPDX-License-Identifier: Apache-2.0
"""Sparse FFN of an engine, which replaces the model's dense FFNs and computes from a neuron store.

layers are built     each layer's dense FFN is replaced as soon as the layer is built
weights are loaded   vLLM's loader skips the weights of the replaced modules
the model is loaded  the store is opened, cache buffers are allocated, and layers can compute
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank

from vllm_tiered.adapter.device import make_device
from vllm_tiered.adapter.ffn.modules import (
    FfnEnd,
    FfnSizes,
    SparseFfn,
    named,
    register_op,
    replace_ffn,
)
from vllm_tiered.adapter.telemetry import manifest, preload, totals
from vllm_tiered.config import FfnConfig
from vllm_tiered.devices.base import Device
from vllm_tiered.errors import ConfigError, IntegrityError, UnsupportedError
from vllm_tiered.ffn.layer import FfnLayer
from vllm_tiered.ffn.memory_plan import FfnPlan
from vllm_tiered.ffn.open import open_runtime
from vllm_tiered.ffn.runtime import FfnRuntime
from vllm_tiered.ffn.store.reader import NeuronStore

logger = logging.getLogger("vllm.tiered")


class FfnEngine:
    """Sparse FFN of one rank of an engine.

    Args:
        config: the ``ffn`` section, with a store.
        context: vLLM's modules that ops find by name (``static_forward_context``).
        fingerprint: returns the fingerprint of the model that the engine serves.
        activation: the model's, a name of ``ffn.activation``; None if it is not known.

    Attributes:
        runtime: the FFN layers; None until the model is loaded.
    """

    def __init__(
        self,
        config: FfnConfig,
        context: dict[str, Any],
        fingerprint: Callable[[], str],
        activation: str | None = None,
        *,
        ranks_here: int = 1,
    ) -> None:
        assert config.store is not None
        self._config, self._folder = config, config.store
        self._context = context
        self._fingerprint, self._activation = fingerprint, activation
        self._ranks_here = ranks_here
        self._modules: list[tuple[SparseFfn, FfnEnd]] = []
        self._before: dict[str, float] = {}
        self._failure: Exception | None = None
        self._rehearsed_tokens = 0
        self._num_said = 0
        self.runtime: FfnRuntime | None = None
        self._preload: preload.Source | None = None
        register_op()

    def is_of(self, context: dict[str, Any]) -> bool:
        """Return whether this FFN belongs to the engine with ``context``; there may be several."""
        return self._context is context

    def take_out(self, layers: Iterable[nn.Module]) -> Iterator[nn.Module]:
        """Replace the FFN of each layer as it is built, and yield the layer.

        Raises:
            UnsupportedError: a layer's FFN has an unknown form, or the model has a second stack of
                layers.
        """
        if self._modules:
            raise UnsupportedError(
                "the model has more than one stack of layers (a draft model, an encoder), and a "
                "neuron store serves one: leave tiered.ffn.store out"
            )
        for name, layer in named(iter(layers)):
            start, end = replace_ffn(layer, name)
            self._context[name] = start
            self._modules.append((start, end))
            yield layer

    def start(self, near_device: torch.device) -> None:
        """Open the store, allocate memory, and connect the layers to the replaced modules.

        Args:
            near_device: torch device of the model.

        Raises:
            ConfigError: the store does not fit the model, or lacks what the configuration needs.
            UnsupportedError: no layer's FFN was replaced, or the model's device is not supported.
            BudgetError: a tier does not have the memory.
            IntegrityError: a bundle is damaged.
        """
        if not self._modules:
            raise UnsupportedError(
                "the model does not build its layers where their FFN can be taken out (vLLM's "
                "Transformers backend does not): leave tiered.ffn.store out"
            )
        sizes = self._modules[0][0].sizes
        rank = get_tensor_model_parallel_rank()
        store = NeuronStore.open(
            self._folder,
            self._fingerprint(),
            first_neuron=rank * sizes.neurons,
            num_neurons=sizes.neurons,
        )
        device = make_device()
        try:
            _check_device(device, near_device)
            _check(store, sizes, len(self._modules))
            if self._activation not in (None, store.activation):
                raise ConfigError(
                    f"{store.path} was prepared with {store.activation}, and the model is served "
                    f"with {self._activation}: set hidden_act in its config.json, not in "
                    "--hf-overrides, and prepare it again"
                )
            self.runtime = open_runtime(
                self._config, store, device, num_ranks=self._ranks_here, near_device=near_device
            )
        except BaseException:
            device.close()
            store.close()
            raise
        for (start, end), layer in zip(self._modules, self.runtime.layers, strict=True):
            start.compute = partial(self._compute, layer)
            end.bias_H = layer.down_bias
        if device.has_device_memory:
            self._modules[0][0].rehearse = self._rehearse
        stated = manifest.FfnManifest.of(self.runtime, self._config)
        manifest.publish_ffn(stated)
        totals.publish("ffn", self.total_use)
        self._preload = self.runtime.preload or _why_no_preload(self._config, self.runtime.plan)
        preload.publish("ffn", self._preload)
        if rank == 0:
            logger.info("%s", stated.describe())

    def take_use(self) -> dict[str, float]:
        """Return the increase of each metric since the last call; empty before :meth:`start`."""
        self._say_verdicts()
        stats = self.total_use()
        before, self._before = self._before, stats
        return {name: value - before.get(name, 0.0) for name, value in stats.items()}

    def _say_verdicts(self) -> None:
        """Log what trials of reading ahead have found since the last call."""
        tried = None if self.runtime is None else self.runtime.preload
        verdicts = () if tried is None else tried.verdicts
        for found in verdicts[self._num_said :]:
            logger.info(
                "tiered ffn: with batches of about %d, reading ahead takes %.2f of the time "
                "without: %s",
                found.batch_size,
                found.ratio,
                "kept" if found.is_kept else "switched off",
            )
        self._num_said = len(verdicts)

    def total_use(self) -> dict[str, float]:
        """Return each metric since the start; empty before :meth:`start`."""
        if self.runtime is None:
            return {}
        backend, layers = self.runtime.backend.stats, self.runtime.stats
        return {
            "ffn_far_bytes": float(backend.far_bytes),
            "ffn_storage_bytes": float(backend.storage_bytes),
            "ffn_wait_seconds": backend.wait_seconds,
            "ffn_hits": float(layers.hits),
            "ffn_misses": float(layers.misses),
            "ffn_sparse_steps": float(layers.sparse_steps),
            "ffn_dense_steps": float(layers.dense_steps),
        }

    def close(self) -> None:
        """Free memory and close files. Idempotent."""
        for start, _ in self._modules:
            start.compute = start.rehearse = None
        # vLLM's offloader outlives the engine and refers to this object. The context refers to the
        # KV cache, which would not be freed.
        self._modules, self._context = [], {}
        if self.runtime is not None:
            self.runtime.close()
            preload.withdraw("ffn", self._preload)
        self.runtime = None
        manifest.publish_ffn(None)
        totals.withdraw("ffn", self.total_use)

    def _rehearse(self, x_BH: torch.Tensor) -> None:
        """Compute one layer in a dummy step that is larger than the dummy steps before it.

        vLLM gives the KV cache the GPU memory that its dummy steps leave free. So these steps must
        allocate as much as a layer does for a prompt.
        """
        if self.runtime is not None and len(x_BH) > self._rehearsed_tokens:
            self._rehearsed_tokens = len(x_BH)
            self.runtime.layers[0].compute(x_BH, only_decodes=False)

    def _compute(self, layer: FfnLayer, x_BH: torch.Tensor, only_decodes: bool) -> torch.Tensor:
        """Compute a layer's step; raise IntegrityError if an earlier step has failed.

        vLLM counts a step's tokens as computed even if the step's error is caught. Its KV cache
        would then have blocks that were never written.
        """
        if self._failure is not None:
            raise IntegrityError(
                f"an earlier step failed ({self._failure}), and its results are missing: "
                "start the engine again"
            ) from self._failure
        try:
            return layer.compute(x_BH, only_decodes)
        except Exception as error:
            self._failure = error
            raise


def _why_no_preload(config: FfnConfig, plan: FfnPlan) -> str:
    """Return why no neurons are read ahead."""
    if config.preload == "off":
        return 'ffn.preload is "off"'
    if plan.mix is None:
        return "ffn.exact computes all neurons"
    if plan.num_far_layers == plan.shape.num_layers:
        return "far memory holds all layers"
    return "ffn.far_gib leaves no room for it"


def _check_device(device: Device, near_device: torch.device) -> None:
    if near_device.type != "cpu" and not device.has_device_memory:
        raise UnsupportedError(
            f"the model is on {near_device}, to which {type(device).__name__} does not copy: "
            "FFNs from a neuron store are for vLLM's CPU backend and for NVIDIA GPUs"
        )


def _check(store: NeuronStore, sizes: FfnSizes, num_layers: int) -> None:
    shape = store.shape
    found = (shape.num_layers, shape.hidden, shape.gated, store.dtype)
    expected = (num_layers, sizes.hidden, sizes.gated, sizes.dtype)
    if found != expected:
        names = ("layers", "hidden size", "gated", "dtype")
        wrong = ", ".join(
            f"{name} {have} instead of {want}"
            for name, have, want in zip(names, found, expected, strict=True)
            if have != want
        )
        raise ConfigError(
            f"{store.path} does not fit the model: {wrong}. Prepare it from this model, with "
            "--dtype of the engine's dtype"
        )
