# SPDX-License-Identifier: Apache-2.0
"""Far weights in vLLM's model: homes as layers are built, slots when they are loaded (HeLM, V).

vLLM hands each decoder layer to its offloader as it builds it. There the layer's parameters leave
the near tier, so that a model larger than it can be built; when all layers are known, the placement
gives every parameter its home, into which vLLM's loader then writes.

    wrap_modules   homes         far parameters are views of far memory
    (loading)                    weights are written to their homes
    post_init      slots         far parameters are views of the staging slots, always the same ones
    forward        enter, leave  each module with far parameters waits, and frees its slot

The two calls go through vLLM's own custom ops for offloaders where the model is compiled.
"""

import logging
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.offloader.base import BaseOffloader

from vllm_tiered.adapter import compat, manifest
from vllm_tiered.adapter.device import make_device
from vllm_tiered.adapter.weights_plan import plan_with_kv
from vllm_tiered.adapter.weights_times import measure
from vllm_tiered.config import ROOT_KEY, TieredConfig, WeightsConfig
from vllm_tiered.cost.latency import place_for_latency
from vllm_tiered.cost.weights import Placement, place, sublayers_of
from vllm_tiered.errors import UnsupportedError
from vllm_tiered.tiers.base import Direction
from vllm_tiered.units import GIB
from vllm_tiered.weights.far_weights import FarWeights
from vllm_tiered.weights.ring import WeightRing

logger = logging.getLogger("vllm.tiered")

_NOT_AFTER_STAGING = (
    "reload_weights",
    "save_sharded_state",
    "save_tensorized_model",
    "start_weight_update",
    "update_weights",
)
"""What vLLM's workers do with parameters beside computing."""


def install() -> None:
    """Let workers of engines that place weights take our offloader. Idempotent.

    Both of vLLM's runners import the function that makes one by name, and importing them takes
    seconds; so they are wrapped when a worker that needs it starts.
    """
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    compat.wrap_once(WorkerWrapperBase, "init_device", _init_device)
    compat.wrap_once(WorkerWrapperBase, "shutdown", _shutdown)


def _init_device(original: Any, wrapper: Any, *args: Any, **kwargs: Any) -> None:
    from vllm.model_executor.offloader import get_offloader

    places = _weights_config(wrapper.vllm_config).places
    if places:
        from vllm.v1.worker import cpu_model_runner, gpu_model_runner

        compat.wrap_once(gpu_model_runner, "create_offloader", _create_offloader)
        compat.wrap_once(cpu_model_runner.CPUModelRunner, "load_model", _load_model)
    original(wrapper, *args, **kwargs)
    if places:
        wrapper.tiered_offloader = get_offloader()
        for name in _NOT_AFTER_STAGING:
            if hasattr(wrapper.worker, name):
                setattr(wrapper.worker, name, partial(_refuse, name))


def _refuse(name: str, *args: Any, **kwargs: Any) -> None:
    raise UnsupportedError(
        f"{name} reads or writes the model's parameters, and those of far weights are staging "
        "slots: start an engine with tiered.weights.placement=off for it"
    )


def _shutdown(original: Any, wrapper: Any) -> None:
    """An engine in the user's own process may have a successor."""
    from vllm.model_executor.offloader import get_offloader, set_offloader

    original(wrapper)
    offloader = getattr(wrapper, "tiered_offloader", None)
    if isinstance(offloader, TieredOffloader):
        offloader.close()
        if get_offloader() is offloader:
            set_offloader(None)


def take_use() -> dict[str, float]:
    """What this process's weights took since the last call, by metric; empty if none is placed."""
    from vllm.model_executor.offloader import get_offloader

    offloader = get_offloader()
    return offloader.take_use() if isinstance(offloader, TieredOffloader) else {}


def _weights_config(vllm_config: Any) -> WeightsConfig:
    additional = getattr(vllm_config, "additional_config", None)
    tables = additional if isinstance(additional, Mapping) else {}
    return TieredConfig.from_dict(tables.get(ROOT_KEY, {})).weights


def _create_offloader(original: Any, *args: Any, **kwargs: Any) -> BaseOffloader:
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.offloader import get_offloader

    vllm_config = get_current_vllm_config()
    config = _weights_config(vllm_config)
    if config.places:
        # vLLM's compiled code asks for the one offloader of its process.
        other = get_offloader()
        if isinstance(other, TieredOffloader) and other.ring is not None:
            raise UnsupportedError(
                "another engine in this process has its weights placed: shut it down first, or set "
                "weights.placement=off"
            )
        is_first = vllm_config.parallel_config.rank == 0
        return TieredOffloader(config, is_first=is_first)
    offloader: BaseOffloader = original(*args, **kwargs)
    return offloader


def _load_model(original: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """vLLM's CPU runner does not tell its offloader that the weights are loaded."""
    from vllm.model_executor.offloader import get_offloader

    original(runner, *args, **kwargs)
    offloader = get_offloader()
    if not isinstance(offloader, TieredOffloader):
        return
    if not offloader.is_used:
        raise UnsupportedError(
            f"{type(runner.model).__name__} does not build its layers where weights can be placed "
            "(vLLM's Transformers backend does not): set weights.placement=off"
        )
    offloader.post_init()


class TieredOffloader(BaseOffloader):
    """Places the parameters of the decoder layers, and brings far ones in time.

    Args:
        config: the placement and its budgets.
        is_first: the rank that logs.

    Attributes:
        placement: of the layers, when they are built.
        ring: the staging slots, when all weights are loaded.
        is_used: it has the layers of a model.
    """

    def __init__(self, config: WeightsConfig, *, is_first: bool = True) -> None:
        self._config = config
        self._is_first = is_first
        self._device = make_device()
        self._weights: FarWeights | None = None
        self._far: list[tuple[nn.Module, str, nn.Parameter]] = []
        self.placement: Placement | None = None
        self.ring: WeightRing | None = None
        self.is_used = False
        self._use_before: dict[str, float] = {}

    def wrap_modules(
        self, modules_generator: Generator[nn.Module, None, None], prefix: str = ""
    ) -> list[nn.Module]:
        """Give each parameter of each layer its home.

        Raises:
            UnsupportedError: the model has a second stack of layers, or parameters that are not
                plain.
            BudgetError: the placement does not fit its budgets.
        """
        if self.is_used:
            raise UnsupportedError(
                "the model has more than one stack of layers (a draft model, an encoder), and "
                "weights are staged in one order: set weights.placement=off"
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
            _leave_near(layer)
            layers.append(layer)
        self.placement = placement = self._place(layers, near_device)
        far = [
            (layers[sublayer.layer], [parameter.name for parameter in parameters])
            for sublayer, parameters in zip(placement.sublayers, placement.far, strict=True)
            if parameters
        ]
        groups = [[layer.get_parameter(name) for name in names] for layer, names in far]
        self._far = [
            (layer, name, parameter)
            for (layer, names), group in zip(far, groups, strict=True)
            for name, parameter in zip(names, group, strict=True)
        ]
        if len({id(parameter) for *_, parameter in self._far}) < len(self._far):
            raise UnsupportedError(
                "layers share parameters, and a sublayer is staged with its own: set "
                "weights.placement=off"
            )
        self._weights = FarWeights(self._device, groups, near_device)
        far_names: dict[nn.Module, set[str]] = {layer: set() for layer in layers}
        for position, (layer, names) in enumerate(far):
            far_names[layer].update(names)
            self._watch(layer, names, position)
        for layer in layers:
            _return_near(layer, far_names[layer], near_device)
        self._announce(placement, self._weights)
        return layers

    def close(self) -> None:
        """Give far memory and slots back; the model cannot run any more. Idempotent."""
        self._device.close()
        self._weights = self.ring = None
        manifest.publish_weights(None)

    def post_init(self) -> None:
        """All weights are loaded: they pass through the slots from now on. Idempotent.

        Raises:
            UnsupportedError: a far parameter is not what the layer computes with any more.
        """
        if self.ring is not None or self._weights is None:
            return
        for layer, name, parameter in self._far:
            if dict(layer.named_parameters()).get(name) is not parameter:
                raise UnsupportedError(
                    f"{name} was replaced by another tensor while the model was loaded (packed, or "
                    "quantized), so it cannot be staged: set weights.placement=off"
                )
        for layer, name, _ in self._far:
            module = layer.get_submodule(name.rpartition(".")[0])
            if hasattr(module, "cpu_linear"):
                setattr(module, "cpu_linear", cpu_linear)  # noqa: B010 (a module's types are its own)
        self.ring = self._weights.stage()
        self.take_use()  # what was measured before is not the model's

    def take_use(self) -> dict[str, float]:
        """Bytes and seconds of the link, and of compute waiting, since the last call."""
        if self.ring is None:
            return {}
        link = self._device.use(Direction.READ)
        use = {
            "weights_read_bytes": float(link.num_bytes),
            "weights_read_seconds": link.busy_seconds,
            "weights_stall_seconds": self.ring.stall_seconds,
        }
        before, self._use_before = self._use_before, use
        return {name: value - before.get(name, 0.0) for name, value in use.items()}

    # Called in the forward pass, by the hooks or by vLLM's custom ops in compiled code.

    def _wait_for_layer(self, layer_idx: int) -> None:
        assert self.ring is not None, "the model runs before its weights are loaded"
        self.ring.enter(layer_idx)

    def _start_prefetch(self, layer_idx: int) -> None:
        assert self.ring is not None
        self.ring.leave(layer_idx)

    def _place(self, layers: Sequence[nn.Module], near_device: torch.device) -> Placement:
        sublayers = [
            sublayer
            for index, layer in enumerate(layers)
            for sublayer in sublayers_of(index, _sizes(layer), _movable(layer))
        ]
        config = self._config
        near_bytes, far_bytes = _in_bytes(config.near_gib), _in_bytes(config.far_gib)
        if config.shares_with_kv:
            placement = plan_with_kv(
                config, self._device, layers, sublayers, near_device, is_first=self._is_first
            )
        elif config.placement == "latency":
            assert near_bytes is not None, "checked by the configuration"
            measured = measure(self._device, layers, sublayers, near_device)
            placement = place_for_latency(
                sublayers, measured.times, measured.link, near_bytes, far_bytes
            )
        else:
            placement = place(config.placement, sublayers, config.percents)
        placement.check_budget(near_bytes, far_bytes)
        return placement

    def _watch(self, layer: nn.Module, names: Sequence[str], position: int) -> None:
        """Let each module that has far parameters itself wait for them."""
        for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
            module = layer.get_submodule(path)
            # vLLM's CPU linear layers keep a packed copy of their weights near otherwise.
            module._cpu_skip_gemm_dispatch = True  # type: ignore[assignment]
            module.register_forward_pre_hook(self._before(position), with_kwargs=True)
            module.register_forward_hook(self._after(position))

    def _before(self, position: int) -> Any:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.compiler.is_compiling():
                torch.ops.vllm.wait_prefetch(_first_tensor((*args, *kwargs.values())), position)
            else:
                self._wait_for_layer(position)

        return before

    def _after(self, position: int) -> Any:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                torch.ops.vllm.start_prefetch(_first_tensor(output), position)
            else:
                self._start_prefetch(position)

        return after

    def _announce(self, placement: Placement, weights: FarWeights) -> None:
        stated = manifest.WeightsManifest.of(placement)
        manifest.publish_weights(stated)
        if self._is_first:
            logger.info("%s", stated.describe())


def cpu_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product with a weight as the checkpoint has it, where vLLM would have packed it.

    For several rows torch is faster with the weight on the left: 2048 x 8192 in bfloat16, 8, 38 and
    256 rows on one core: 2.4, 4.2 and 7.8 ms against 2.9, 6.0 and 9.9; packed 2.5, 4.2 and 10.1
    (Xeon with AMX, 2026-11-22).
    """
    # Compiled code serves any number of rows: it must not depend on it.
    if torch.compiler.is_compiling() or x.ndim != 2 or len(x) < 4:
        return torch.nn.functional.linear(x, weight, bias)
    product = torch.matmul(weight, x.t()).t().contiguous()
    return product if bias is None else product.add_(bias)


def _sizes(layer: nn.Module) -> dict[str, int]:
    return {name: parameter.nbytes for name, parameter in layer.named_parameters()}


def _movable(layer: nn.Module) -> set[str]:
    """Parameters that a linear layer alone multiplies with, or adds within its own call.

    Others are read by somebody else, at any time: convolutions of state-space models, biases that
    are returned to be added later.
    """
    names: set[str] = set()
    for path, module in layer.named_modules():
        if not isinstance(module, LinearBase | nn.Linear) or module.weight.ndim != 2:
            continue
        prefix = f"{path}." if path else ""
        names.add(f"{prefix}weight")
        if not getattr(module, "skip_bias_add", False):
            names.add(f"{prefix}bias")
    return names


def _in_bytes(gib: float | str) -> int | None:
    return None if isinstance(gib, str) else int(gib * GIB)


def _leave_near(layer: nn.Module) -> None:
    """As soon as it is built: a model larger than the near tier can be."""
    for name, parameter in layer.named_parameters():
        if not parameter.is_contiguous():
            raise UnsupportedError(
                f"parameter {name} of shape {tuple(parameter.shape)} is not contiguous: set "
                "weights.placement=off for this model"
            )
        parameter.data = parameter.data.to("cpu")


def _return_near(layer: nn.Module, far_names: Collection[str], near_device: torch.device) -> None:
    """What has no home in far memory."""
    for name, parameter in layer.named_parameters():
        if name not in far_names:
            parameter.data = parameter.data.to(near_device)


def _first_tensor(values: Any) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values
    return next(value for value in values if isinstance(value, torch.Tensor))
