# SPDX-License-Identifier: Apache-2.0
"""A small decoder over operators of its own, as a graph: what the pass works on."""

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from vllm_tiered.l2.graph import OpNames

HIDDEN, FFN = 64, 128
BYTES = 4
QKV_BYTES = OUT_BYTES = HIDDEN * HIDDEN * BYTES
FFN_BYTES = HIDDEN * FFN * BYTES
ATTENTION_BYTES = QKV_BYTES + OUT_BYTES

NAMES = OpNames(
    collectives={"tiered_test.all_reduce": "x"},
    waits=frozenset({"tiered_test.wait"}),
    matmuls={"aten.mm": "mat2", "tiered_test.packed_mm": None},
    attentions=frozenset({"tiered_test.attention"}),
)


def library() -> torch.library.Library:
    """Doubles what it reduces: two ranks with the same values."""
    made = torch.library.Library("tiered_test", "FRAGMENT")
    for schema, implementation in (
        ("all_reduce(Tensor x) -> Tensor", lambda x: 2 * x),
        ("wait(Tensor x) -> Tensor", lambda x: x.clone()),
        ("attention(Tensor q, int layer) -> Tensor", lambda q, layer: torch.tanh(q)),
        ("packed_mm(Tensor x, int handle) -> Tensor", lambda x, handle: x.clone()),
    ):
        name = schema.partition("(")[0]
        made.define(schema)
        made.impl(name, implementation, "CompositeExplicitAutograd")
        made._register_fake(name, lambda x, *args: torch.empty_like(x))
    return made


def layer(x, weights, index, *, reduces=True, waits=False, packs=False):
    """A decoder layer of one rank; ``weights`` are qkv, out, first and second FFN matrix."""
    ops = torch.ops.tiered_test
    qkv, out, first, second = weights

    def reduce(values):
        if not reduces:
            return values
        reduced = ops.all_reduce(values)
        return ops.wait(reduced) if waits else reduced

    normed = torch.nn.functional.rms_norm(x, (HIDDEN,))
    queries = ops.packed_mm(normed, 7) if packs else normed @ qkv
    x = x + reduce(ops.attention(queries, index) @ out)
    hidden = torch.relu(torch.nn.functional.rms_norm(x, (HIDDEN,)) @ first)
    return x + reduce(hidden @ second)


def two_layers(x, *weights, **options):
    for index in range(2):
        x = layer(x, weights[4 * index : 4 * index + 4], index, **options)
    return x


def products(x, *weights):
    """The two layers without what lies between their products."""
    ops = torch.ops.tiered_test
    for index in range(2):
        qkv, out, first, second = weights[4 * index : 4 * index + 4]
        x = ops.all_reduce(ops.attention(x @ qkv, index) @ out)
        x = ops.all_reduce(x @ first @ second)
    return x


LIBRARY = library()


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, FFN), (FFN, HIDDEN)] * 2
    tensors = [torch.randn(shape, generator=generator) / 8 for shape in shapes]
    return [torch.randn(3, HIDDEN, generator=generator), *tensors]


def traced(**options) -> fx.GraphModule:
    """The two layers' graph; placeholders are x, then the weights of each layer."""
    module: fx.GraphModule = make_fx(
        lambda *args: two_layers(*args, **options), tracing_mode="fake"
    )(*inputs())
    return module


def calls(graph: fx.Graph, name: str) -> list[fx.Node]:
    return [node for node in graph.nodes if str(node.target).startswith(f"tiered.{name}.")]
