# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs with experts in slots, which no graph captures.

The host plans a layer's experts in most steps. So a layer's experts run between graphs, as
attention does in vLLM's piecewise mode:

    graph │ attention │ graph │ experts │ graph │ attention │ ...

vLLM's op around a layer's experts allocates what it returns. Between graphs that has another
address each time, and a graph reads the address of its capture. So an op of ours takes its place,
which writes to memory that the graph before it has allocated.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context

from vllm_tiered.adapter import cuda_graphs

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OP = "tiered::moe_forward"

_library: torch.library.Library | None = None


def split_at_experts(vllm_config: "VllmConfig") -> None:
    """Split CUDA graphs at each layer's experts, or disable them if the model cannot be split."""
    cuda_graphs.run_between_graphs(
        [OP],
        vllm_config.compilation_config,
        part="experts",
        why="the host plans a layer's experts",
    )


def write_to_fixed_memory(runner: Any) -> None:
    """Let a layer of vLLM's write what it returns to memory that is allocated outside of its op.

    Args:
        runner: vLLM's MoERunner.
    """
    _register_op()
    has_shared = runner.shared_experts is not None
    runner._forward_entry = partial(_forward, runner.layer_name, has_shared)


def _forward(
    name: str,
    has_shared: bool,
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    shared_experts_input: torch.Tensor | None,
    input_ids: torch.Tensor | None,
    layer_name: Any,
    hidden_dim_unpadded: int,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Stand in for vLLM's op; shapes are those of its fakes."""
    hidden_dim = hidden_dim_unpadded or hidden_states.shape[-1]
    routed = hidden_states.new_empty((*hidden_states.shape[:-1], hidden_dim))
    shared = None
    if has_shared:
        like = hidden_states if shared_experts_input is None else shared_experts_input
        shared = torch.empty_like(like)
    torch.ops.tiered.moe_forward(
        hidden_states, router_logits, shared_experts_input, input_ids, routed, shared, name
    )
    return routed if shared is None else (shared, routed)


def _register_op() -> None:
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("tiered", "FRAGMENT")
    _library.define(
        "moe_forward(Tensor(a!) hidden_states, Tensor router_logits, Tensor? shared_input, "
        "Tensor? input_ids, Tensor(b!) routed, Tensor(c!)? shared, str name) -> ()"
    )
    _library.impl("moe_forward", _moe_forward, "CompositeExplicitAutograd")
    _library._register_fake("moe_forward", lambda *given: None)


def _moe_forward(
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    shared_input: torch.Tensor | None,
    input_ids: torch.Tensor | None,
    routed: torch.Tensor,
    shared: torch.Tensor | None,
    name: str,
) -> None:
    runner = get_forward_context().no_compile_layers[name]
    result = runner._forward_impl(hidden_states, router_logits, shared_input, input_ids)
    if shared is None:
        routed.copy_(result)
    else:
        shared.copy_(result[0])
        routed.copy_(result[1])
