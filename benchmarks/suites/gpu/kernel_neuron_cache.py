# SPDX-License-Identifier: Apache-2.0
"""`neuron_cache`: cache index update of a step on the GPU, against the host's index.

The host's index has to wait for the ranks first. The kernel moves little data: its time goes into
the passes of one program, so there is no target. Consecutive steps need mostly the same neurons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.suites.gpu.kernels import Case

_NEURONS = {"OPT-6.7B": 16384, "Llama-13B": 13824}

_SHARES = {"one precision, 10 %": (0.1, 0.0, 0.0), "three precisions, all": (0.25, 0.25, 0.5)}
"""Shares of the layer's neurons in full precision, 8 bit and 4 bit."""

_KEPT = 0.8
"""Share of a step's neurons that the next step needs too (ReLU models in LLM in a flash)."""

_STEPS = 8
_BITS = (7, 6, 4)


def cases(torch: Any) -> Iterator[Case]:
    """Yield each model's layer, in one precision and in three, for both policies."""
    for model, num_neurons in _NEURONS.items():
        for mix, shares in _SHARES.items():
            for policy, window in (("atu", 1), ("window", 4)):
                yield _case(torch, f"{model}, {mix}, {policy}", num_neurons, shares, window)


def _case(torch: Any, name: str, num_neurons: int, shares: tuple[float, ...], window: int) -> Case:
    from vllm_tiered.kernels.neuron_cache import api, index, reference

    steps = _steps(torch, num_neurons, shares)
    capacities = [min(num_neurons, round(2 * share * num_neurons)) for share in shares]
    mine = index.empty_index(num_neurons, capacities, window, steps[0].device)
    device_name = torch.cuda.get_device_name()
    turns = _turns(steps)

    def run() -> Any:
        return api.plan(mine, next(turns), device_name=device_name)

    def is_right() -> bool:
        one = index.empty_index(num_neurons, capacities, window, steps[0].device)
        other = index.empty_index(num_neurons, capacities, window, torch.device("cpu"))
        for reached_N in steps[:2]:
            found = api.plan(one, reached_N, device_name=device_name)
            expected = reference.plan(other, reached_N.cpu())
            if not torch.equal(found.counts_P4.cpu(), expected.counts_P4):
                return False
        return bool(torch.equal(one.location_N.cpu(), other.location_N))

    host = _on_host(torch, num_neurons, capacities, window, steps)
    return Case(
        name=name,
        num_bytes=num_neurons * (1 + 4 + 4) * 2,
        run=run,
        torch_runs={"the host's": host},
        is_right=is_right,
    )


def _turns(steps: list[Any]) -> Iterator[Any]:
    while True:
        yield from steps


def _steps(torch: Any, num_neurons: int, shares: tuple[float, ...]) -> list[Any]:
    """Return the ranks of some steps, uint8 [N] each."""
    edges = [round(sum(shares[: i + 1]) * num_neurons) for i in range(3)]
    order_N = torch.randperm(num_neurons)
    steps = []
    for _ in range(_STEPS):
        reached_N = torch.zeros(num_neurons, dtype=torch.uint8)
        for bits, first, last in zip(_BITS, (0, *edges), edges, strict=False):
            reached_N[order_N[first:last]] = bits
        steps.append(reached_N.to("cuda"))
        # Some neurons swap ranks with any others.
        moved = torch.rand(num_neurons).argsort()[: round((1 - _KEPT) * num_neurons)]
        order_N[moved] = order_N[moved[torch.randperm(len(moved))]]
    return steps


def _on_host(
    torch: Any, num_neurons: int, capacities: list[int], window: int, steps: list[Any]
) -> Callable[[], object]:
    """Return a function that waits for the ranks and updates the host's index.

    It copies nothing back to the GPU.
    """
    from vllm_tiered.ffn.cache.layer_cache import LayerCache
    from vllm_tiered.ffn.cache.window import WindowCache
    from vllm_tiered.ffn.layout import Precision
    from vllm_tiered.ffn.selection import ALL
    from vllm_tiered.ffn.selector import Selector

    rows = {p: count for p, count in zip(Precision, capacities, strict=True) if count}
    cache = LayerCache({p: WindowCache(count, num_neurons, window) for p, count in rows.items()})
    choice, turns = Selector(ALL, 0.0), _turns(steps)

    def run() -> None:
        selection = choice.decode(next(turns).cpu())
        cache.commit(cache.plan({p: selection.neurons_in(p) for p in rows}))

    return run
