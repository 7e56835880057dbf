# SPDX-License-Identifier: Apache-2.0
"""Graph pass that inserts prefetches around the all-reduces of a compiled model.

A decoder layer before, on one of several ranks, and after:

    o = mm(attended, w_o)                o = mm(attended, w_o)
                                         l2_prefetch(o!, [w_gate_up, w_down])    fork
    s = all_reduce(o)                    s = all_reduce(o)
                                         l2_join(s!)                             join
    h = norm(s + r)                      h = norm(s + r)
    d = mm(act(mm(h, w_gate_up)), w_down)    …
                                         l2_prefetch(d!, [w_qkv, w_o])
                                         l2_prefetch_kv(d!, 1, budget - weights)
    t = all_reduce(d)                    t = all_reduce(d)
                                         l2_join(t!)
    q = mm(norm(t + …), w_qkv)           q = mm(norm(t + …), w_qkv)

The operators declare that they write the tensor marked ``!``, although they do not. This makes the
compiler keep the operators and their order.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from vllm_tiered.l2.graph import Group, OpNames, plan_prefetches
from vllm_tiered.l2.ops import register_ops

_SOURCES = ("graph.py", "graph_pass.py", "ops.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Inserted:
    """Counts of what a pass inserted into a graph.

    Attributes:
        num_weights: weights prefetched, ``weight_bytes`` in total.
        num_attentions: attentions whose KV is prefetched.
        num_hidden: weights behind a handle, which are not prefetched.
    """

    num_weights: int
    weight_bytes: int
    num_attentions: int
    num_hidden: int


class PrefetchPass(CustomGraphPass):
    """Custom pass that inserts the prefetches of algorithm 1 into post-grad graphs.

    Args:
        names: the engine's operators.
        budget_bytes: most bytes to prefetch during one all-reduce, the paper's C.

    Attributes:
        inserted: what was inserted into the last graph.
    """

    def __init__(self, names: OpNames, budget_bytes: int) -> None:
        self.names = names
        self.budget_bytes = budget_bytes
        self.inserted: Inserted | None = None

    def __call__(self, graph: fx.Graph) -> None:
        register_ops()
        groups = plan_prefetches(graph, self.names, self.budget_bytes)
        for group in groups:
            if not group.is_empty:
                _insert(graph, group)
        self.inserted = Inserted(
            num_weights=sum(len(group.weights) for group in groups),
            weight_bytes=sum(group.weight_bytes for group in groups),
            num_attentions=sum(group.attention is not None for group in groups),
            num_hidden=sum(group.num_hidden for group in groups),
        )

    def uuid(self) -> str:
        """Return the key for the compile cache, made of budget, names and version."""
        folder = Path(__file__).parent
        text = [str(self.budget_bytes), self.names.key()]
        text += [(folder / name).read_text(encoding="utf-8") for name in _SOURCES]
        return hashlib.sha256("\0".join(text).encode()).hexdigest()


def _insert(graph: fx.Graph, group: Group) -> None:
    ops = torch.ops.tiered
    with graph.inserting_before(group.collective):
        if group.weights:
            graph.call_function(ops.l2_prefetch.default, (group.reduced, group.weights))
        if group.attention is not None:
            arguments = (group.reduced, group.attention, group.kv_bytes)
            graph.call_function(ops.l2_prefetch_kv.default, arguments)
    with graph.inserting_after(group.result):
        graph.call_function(ops.l2_join.default, (group.result,))
