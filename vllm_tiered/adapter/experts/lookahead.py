# SPDX-License-Identifier: Apache-2.0
"""Reading ahead: a layer of vLLM's loads what the next one's router names for its hidden states."""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from vllm_tiered.experts.layer import ExpertLayer
from vllm_tiered.experts.lookahead import MOST_TOKENS, likeliest
from vllm_tiered.experts.policy import Experts
from vllm_tiered.trial import StepTrial

logger = logging.getLogger("vllm.tiered")

Routing = Callable[[torch.Tensor], Experts]
"""Hidden states [M, H] to the experts that a layer's router chooses for them, likeliest first."""


class Lookahead:
    """Reading ahead in the layers of one rank.

    Args:
        model: the loaded model.
        layers: vLLM's `RoutedExperts` in the order of use, each with its slots.
        is_always_on: no trial decides.
        logs: whether this rank logs verdicts.

    Attributes:
        num_layers: layers whose experts are read ahead.
        trial: decides whether they are.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[tuple[Any, ExpertLayer]],
        *,
        is_always_on: bool,
        logs: bool,
    ) -> None:
        self.trial = StepTrial(is_always_on=is_always_on, most_tokens=MOST_TOKENS)
        self._logs = logs
        self.num_layers = 0
        for (layer, experts), (following, its_experts) in pairwise(layers):
            routing = routing_of(model, following, layer.moe_config.hidden_dim)
            if routing is not None:
                experts.look_ahead = partial(self._load, routing, its_experts)
                self.num_layers += 1

    def begin_step(self, num_tokens: int) -> None:
        """Decide for a step of the first layer, and log what a trial has found."""
        measured = self.trial.begin_step(num_tokens)
        if measured is not None and self._logs:
            logger.info(
                "tiered experts: with batches of about %d, reading ahead takes %.2f of the time "
                "without: %s",
                measured.batch_size,
                measured.ratio,
                "kept" if measured.is_kept else "switched off",
            )

    def _load(self, routing: Routing, experts: ExpertLayer, x_MH: torch.Tensor) -> None:
        if self.trial.is_on and len(x_MH) <= MOST_TOKENS:
            experts.load_ahead(routing(x_MH))


def routing_of(model: nn.Module, layer: nn.Module, hidden_size: int) -> Routing | None:
    """Return the routing of one of the model's `RoutedExperts`; None if it cannot be called alone.

    The router belongs to vLLM's runner around the layer; the gate, which makes its logits, to the
    runner or to the model's own block around that. Both are tried once: some routers want the
    tokens' ids, too.

    Args:
        hidden_size: of the hidden states that it will be called with.
    """
    config: Any = layer.moe_config
    router, gate = None, None
    for module in _around(model, layer):
        router = router if router is not None else getattr(module, "router", None)
        if gate is None:
            shape = (config.num_logical_experts, config.hidden_dim)
            gate = next((child for child in module.children() if _is_gate(child, shape)), None)
    compute = getattr(router, "_compute_routing", None)
    if gate is None or compute is None:
        return None
    routing = partial(_choose, gate, compute, config.num_logical_experts)
    try:
        with torch.inference_mode():
            routing(torch.zeros((1, hidden_size), dtype=config.in_dtype))
    except Exception as error:
        logger.debug("tiered experts: no reading ahead for %s: %s", layer.layer_name, error)
        return None
    return routing


def _around(model: nn.Module, layer: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that contain a layer, up to three of them, the smallest first."""
    path = next((name for name, module in model.named_modules() if module is layer), "")
    for _ in range(min(3, path.count("."))):
        path = path.rpartition(".")[0]
        yield model.get_submodule(path)


def _is_gate(module: nn.Module, shape: tuple[int, int]) -> bool:
    # vLLM's linear layers on the CPU keep packed weights alone.
    sizes = (getattr(module, "output_size", None), getattr(module, "input_size", None))
    weight = getattr(module, "weight", None)
    return sizes == shape or (isinstance(weight, torch.Tensor) and tuple(weight.shape) == shape)


def _choose(
    gate: nn.Module, compute: Callable[..., Any], num_experts: int, x_MH: torch.Tensor
) -> Experts:
    logits = gate(x_MH)
    logits_ME = logits[0] if isinstance(logits, tuple) else logits
    weights_MK, ids_MK = compute(x_MH, logits_ME, None)
    return likeliest(weights_MK, ids_MK, num_experts)
