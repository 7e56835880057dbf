# SPDX-License-Identifier: Apache-2.0
"""Algorithm 1 on small graphs: what is prefetched where, and that results do not change."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor.utils import fresh_cache

from tests.fixtures.l2_models import (
    ATTENTION_BYTES,
    FFN_BYTES,
    NAMES,
    QKV_BYTES,
    calls,
    inputs,
    products,
    traced,
)
from vllm_tiered.l2 import ops
from vllm_tiered.l2.cuda import find_device_obstacle
from vllm_tiered.l2.graph import plan_prefetches
from vllm_tiered.l2.graph_pass import PrefetchPass

AMPLE = 1 << 20


class Recorder:
    """A runtime that records its calls in order."""

    def __init__(self) -> None:
        self.events: list[tuple] = []

    def prefetch(self, weights) -> None:
        self.events.append(("weights", [weight.data_ptr() for weight in weights]))

    def prefetch_kv(self, attention, max_bytes) -> None:
        self.events.append(("kv", attention, max_bytes))

    def join(self) -> None:
        self.events.append(("join",))


@pytest.fixture
def recorder():
    recorder = Recorder()
    ops.set_runtime(recorder)
    yield recorder
    ops.set_runtime(None)


def placeholders(graph):
    """x, then qkv, out, first and second FFN matrix of both layers."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def planned(budget_bytes, **options):
    graph = traced(**options).graph
    groups = plan_prefetches(graph, NAMES, budget_bytes)
    inputs = placeholders(graph)
    return [([inputs.index(w) for w in group.weights], group.attention) for group in groups]


def test_each_all_reduce_prefetches_the_weights_used_before_the_next() -> None:
    """The residual connection leads around it: its consumers behind are not taken."""
    assert planned(AMPLE) == [
        ([3, 4], None),  # after attention 0: FFN 0
        ([5, 6], 1),  # after FFN 0: attention 1
        ([7, 8], None),
        ([], None),  # nothing follows
    ]


def test_a_collective_that_is_waited_for_later_is_joined_there() -> None:
    graph = traced(waits=True).graph
    groups = plan_prefetches(graph, NAMES, AMPLE)
    assert [str(group.result.target) for group in groups] == ["tiered_test.wait.default"] * 4
    assert planned(AMPLE, waits=True) == planned(AMPLE)


@pytest.mark.parametrize(
    ("budget_bytes", "expected"),
    [
        (2 * FFN_BYTES, [([3, 4], None), ([5, 6], 1), ([7, 8], None), ([], None)]),
        (2 * FFN_BYTES - 1, [([3], None), ([5, 6], 1), ([7], None), ([], None)]),
        (ATTENTION_BYTES, [([3], None), ([5, 6], None), ([7], None), ([], None)]),
        (FFN_BYTES - 1, [([], None), ([5], 1), ([], None), ([], None)]),
        (QKV_BYTES - 1, [([], None)] * 4),
    ],
)
def test_the_budget_holds(budget_bytes, expected) -> None:
    """The first that does not fit ends it; KV is bounded by what weights leave."""
    assert planned(budget_bytes) == expected
    for group in plan_prefetches(traced().graph, NAMES, budget_bytes):
        assert group.weight_bytes + group.kv_bytes <= budget_bytes


def test_a_weight_behind_a_handle_is_counted_and_skipped() -> None:
    graph = traced(packs=True).graph
    prefetches = PrefetchPass(NAMES, AMPLE)
    prefetches(graph)
    assert prefetches.inserted is not None
    assert prefetches.inserted.num_hidden == 1  # layer 1's; no all-reduce is before layer 0's
    assert prefetches.inserted.num_weights == 5
    assert prefetches.inserted.num_attentions == 1


def test_prefetches_are_inserted_around_their_all_reduce() -> None:
    graph = traced().graph
    before = len(graph.nodes)
    prefetches = PrefetchPass(NAMES, AMPLE)
    prefetches(graph)
    graph.lint()
    counts = {
        name: len(calls(graph, name)) for name in ("l2_prefetch", "l2_prefetch_kv", "l2_join")
    }
    assert counts == {"l2_prefetch": 3, "l2_prefetch_kv": 1, "l2_join": 3}
    assert len(graph.nodes) == before + 7
    inserted = prefetches.inserted
    assert inserted is not None
    assert (inserted.num_weights, inserted.num_attentions) == (6, 1)
    assert inserted.weight_bytes == 4 * FFN_BYTES + ATTENTION_BYTES
    order = {node: index for index, node in enumerate(graph.nodes)}
    for fork, join in zip(calls(graph, "l2_prefetch"), calls(graph, "l2_join"), strict=True):
        result: Any = join.args[0]
        assert fork.args[0] is result.args[0], "both are of the same all-reduce"
        assert order[fork] < order[result] < order[join]
        assert all(order[join] < order[user] for user in result.users if user is not join)


def test_without_an_all_reduce_it_must_not_fire() -> None:
    module = traced(reduces=False)
    before = module.code
    PrefetchPass(NAMES, AMPLE)(module.graph)
    module.recompile()
    assert module.code == before


@pytest.mark.parametrize(
    ("device", "architecture", "problem"),
    [
        ("cpu", None, None),
        ("cuda", 80, None),
        ("cuda", 100, None),
        ("cuda", 75, "no prefetch kernel for sm_75, only from sm_80"),
        ("cuda", None, "does not report its architecture"),
        ("xpu", None, 'no prefetch kernel for the device "xpu"'),
    ],
)
def test_devices(device, architecture, problem) -> None:
    found = find_device_obstacle(device, architecture)
    assert found is None if problem is None else problem in (found or "")


def run_compiled(prefetches: PrefetchPass, arguments: Any, *, fx_graph_cache: bool) -> Any:
    """What inductor's code of the products gives, with the pass."""
    options: dict[str, Any] = {
        "post_grad_custom_post_pass": prefetches,
        "fx_graph_cache": fx_graph_cache,
    }
    compiled = torch.compile(products, fullgraph=True, dynamic=False, options=options)
    with torch.no_grad(), functorch_config.patch(enable_autograd_cache=False):
        return compiled(*arguments)


def test_results_stay_the_same_through_the_compiler(recorder) -> None:
    """Inductor keeps every operator, in its place between producer and consumers.

    Products alone: each other operation would be a kernel for the C++ compiler, of 10 s.
    """
    arguments = inputs()
    expected = products(*arguments)
    prefetches = PrefetchPass(NAMES, AMPLE)
    found = run_compiled(prefetches, arguments, fx_graph_cache=False)
    torch.testing.assert_close(found, expected)
    assert prefetches.inserted is not None
    addresses = [argument.data_ptr() for argument in arguments]
    assert recorder.events == [
        ("weights", addresses[3:5]),
        ("join",),
        ("weights", addresses[5:7]),
        ("kv", 1, AMPLE - ATTENTION_BYTES),
        ("join",),
        ("weights", addresses[7:9]),
        ("join",),
    ]


def test_a_second_start_finds_the_compiled_graph(recorder) -> None:
    """In inductor's cache, prefetches and all; with another budget it is compiled again."""
    arguments = inputs()

    def start(budget_bytes: int) -> tuple[PrefetchPass, int, int]:
        torch._dynamo.reset()
        counters.clear()
        prefetches = PrefetchPass(NAMES, budget_bytes)
        run_compiled(prefetches, arguments, fx_graph_cache=True)
        found = counters["inductor"]
        return prefetches, found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]

    with fresh_cache():
        first, *hits_and_misses = start(AMPLE)
        assert first.inserted is not None and hits_and_misses == [0, 1]
        events = recorder.events[:]
        recorder.events.clear()
        second, *hits_and_misses = start(AMPLE)
        assert second.inserted is None and hits_and_misses == [1, 0]
        assert recorder.events == events
        _, *hits_and_misses = start(0)
        assert hits_and_misses == [0, 1]


def test_nothing_happens_without_a_runtime() -> None:
    ops.register_ops()
    x = torch.zeros(2)
    torch.ops.tiered.l2_prefetch(x, [x])
    torch.ops.tiered.l2_prefetch_kv(x, 0, 1)
    torch.ops.tiered.l2_join(x)
    assert x.tolist() == [0, 0]


def test_the_compile_cache_tells_passes_apart() -> None:
    renamed = dataclasses.replace(NAMES, attentions=NAMES.attentions | {"other.attention"})
    made = [
        PrefetchPass(NAMES, AMPLE),
        PrefetchPass(NAMES, AMPLE - 1),
        PrefetchPass(renamed, AMPLE),
    ]
    assert made[0].uuid() == PrefetchPass(NAMES, AMPLE).uuid()
    for one, other in itertools.combinations(made, 2):
        assert one.uuid() != other.uuid()
