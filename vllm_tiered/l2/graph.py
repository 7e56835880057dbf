# SPDX-License-Identifier: Apache-2.0
"""Plan of the prefetches that a compiled graph overlaps with all-reduces (PRESERVE, algorithm 1).

The planner is pure: it reads a graph and returns a plan, which ``graph_pass.py`` applies.
"""

import operator
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx


@dataclass(frozen=True, kw_only=True, slots=True)
class OpNames:
    """Names of an engine's operators in its graphs: ``namespace.operator``, without overloads.

    Attributes:
        collectives: all-reduces, with the name of the argument that they reduce.
        waits: operators that wait for an asynchronous collective.
        matmuls: matmuls, with the name of the weight argument; None if the weight is packed behind
            a handle and so has no address.
        attentions: operators of self-attention over a KV cache.
    """

    collectives: Mapping[str, str]
    waits: frozenset[str]
    matmuls: Mapping[str, str | None]
    attentions: frozenset[str]

    def key(self) -> str:
        """Return a string that is equal for equal names."""
        parts = (sorted(self.collectives.items()), sorted(self.waits), sorted(self.attentions))
        return repr((*parts, sorted((op, arg or "") for op, arg in self.matmuls.items())))


@dataclass(kw_only=True, slots=True)
class Group:
    """Prefetches that overlap one all-reduce.

    Attributes:
        collective: the all-reduce.
        reduced: its input; the prefetch may begin when it is ready.
        result: its output, after the wait.
        weights: the weights to prefetch, in the order of their use.
        weight_bytes: the bytes of these weights.
        attention: index in the graph of the attention whose KV is prefetched; None for none.
        kv_bytes: the part of the budget left for that KV.
        num_hidden: matmuls found whose weights are behind a handle.
    """

    collective: fx.Node
    reduced: fx.Node
    result: fx.Node
    weights: list[fx.Node] = field(default_factory=list)
    weight_bytes: int = 0
    attention: int | None = None
    kv_bytes: int = 0
    num_hidden: int = 0

    @property
    def is_empty(self) -> bool:
        return not self.weights and self.attention is None


def plan_prefetches(graph: fx.Graph, names: OpNames, budget_bytes: int) -> list[Group]:
    """Plan the prefetches by algorithm 1.

    The algorithm searches breadth-first from each all-reduce through its consumers until the next
    one. It differs from the paper's listing in two ways. First, a residual connection bypasses the
    next all-reduce, so a consumer counts only if no later all-reduce is among its ancestors.
    Second, the number of KV bytes that a step reads is not known here. So weights take the budget
    first, and the rest limits the attention's prefetch.

    Returns:
        A group for each all-reduce, empty ones included.
    """
    latest = _latest_collectives(graph, names)
    attentions = [node for node in graph.nodes if operator_name(node) in names.attentions]
    groups = []
    for node in graph.nodes:
        argument = names.collectives.get(operator_name(node) or "")
        if argument is None:
            continue
        reduced, result = argument_of(node, argument), _result(node, names)
        # An input of the graph cannot order operators.
        if isinstance(reduced, fx.Node) and reduced.op != "placeholder" and result is not None:
            group = Group(collective=node, reduced=reduced, result=result)
            _fill(group, names, budget_bytes, latest, attentions)
            groups.append(group)
    return groups


def _fill(
    group: Group,
    names: OpNames,
    budget_bytes: int,
    latest: Mapping[fx.Node, fx.Node | None],
    attentions: list[fx.Node],
) -> None:
    is_full = False
    for node in _consumers(group.collective, latest):
        name = operator_name(node) or ""
        if name in names.matmuls:
            weight = _stored(argument_of(node, names.matmuls[name]))
            if weight is None:
                group.num_hidden += 1
            elif weight in group.weights:
                continue
            elif is_full or group.weight_bytes + _num_bytes(weight) > budget_bytes:
                is_full = True
            else:
                group.weights.append(weight)
                group.weight_bytes += _num_bytes(weight)
        elif name in names.attentions and group.attention is None and not is_full:
            group.attention = attentions.index(node)
    group.kv_bytes = 0 if group.attention is None else budget_bytes - group.weight_bytes
    if group.kv_bytes <= 0:
        group.attention, group.kv_bytes = None, 0


def _consumers(start: fx.Node, latest: Mapping[fx.Node, fx.Node | None]) -> Iterator[fx.Node]:
    """Yield breadth-first the consumers that depend on no later all-reduce."""
    queue, seen = deque([start]), {start}
    while queue:
        for user in queue.popleft().users:
            if user not in seen and latest[user] is start:
                seen.add(user)
                queue.append(user)
                yield user


def _latest_collectives(graph: fx.Graph, names: OpNames) -> dict[fx.Node, fx.Node | None]:
    """Return for each node the last all-reduce among itself and its ancestors."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    latest: dict[fx.Node, fx.Node | None] = {}
    for node in graph.nodes:
        if operator_name(node) in names.collectives:
            latest[node] = node
            continue
        before = [found for arg in node.all_input_nodes if (found := latest[arg]) is not None]
        latest[node] = max(before, key=order.__getitem__, default=None)
    return latest


def operator_name(node: fx.Node) -> str | None:
    """Return ``namespace.operator`` of a call, functionalized or not; None for other nodes."""
    overload = _overload(node)
    return None if overload is None else str(overload._schema.name).replace("::", ".")


def argument_of(node: fx.Node, name: str | None) -> object:
    """Return the argument that the operator's schema calls ``name``; None if it has none."""
    overload = _overload(node)
    if overload is None or name is None:
        return None
    if name in node.kwargs:
        return node.kwargs[name]
    if _is_functionalised(node):
        return None
    index = [argument.name for argument in overload._schema.arguments].index(name)
    return node.args[index] if index < len(node.args) else None


def _overload(node: fx.Node) -> torch._ops.OpOverload | None:
    if node.op != "call_function":
        return None
    target = node.args[0] if _is_functionalised(node) else node.target
    return target if isinstance(target, torch._ops.OpOverload) else None


def _is_functionalised(node: fx.Node) -> bool:
    return node.target is torch.ops.higher_order.auto_functionalized


def _result(collective: fx.Node, names: OpNames) -> fx.Node | None:
    """Return the node with the reduced result; None if nothing reads it."""
    users = list(collective.users)
    if _is_functionalised(collective):
        mutated = [u for u in users if u.target is operator.getitem and u.args[1] == 1]
        return mutated[0] if mutated else None
    waits = [user for user in users if operator_name(user) in names.waits]
    return waits[0] if waits else (collective if users else None)


_VIEWS = frozenset({"aten.permute", "aten.t", "aten.transpose", "aten.view", "aten.reshape"})


def _stored(argument: object) -> fx.Node | None:
    """Return the graph input or attribute behind a weight or a view of it."""
    node = argument
    while isinstance(node, fx.Node) and operator_name(node) in _VIEWS:
        node = node.args[0]
    is_stored = isinstance(node, fx.Node) and node.op in ("placeholder", "get_attr")
    return node if is_stored and isinstance(node, fx.Node) and _num_bytes(node) else None


def _num_bytes(node: fx.Node) -> int:
    """Return the bytes of a tensor of known size; 0 for other nodes."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    num_elements = value.numel()
    return num_elements * value.element_size() if isinstance(num_elements, int) else 0
