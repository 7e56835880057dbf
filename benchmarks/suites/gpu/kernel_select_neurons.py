# SPDX-License-Identifier: Apache-2.0
"""`select_neurons`: from a layer's scores to neuron lists by precision, against `torch.topk`.

The kernel is small: its time goes into launches and passes over scores in registers, not memory, so
there is no target. The torch version also waits for the GPU, since the lists' lengths are tensor
shapes there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.suites.gpu.kernels import Case

_NEURONS = {"Llama-13B": 13824, "OPT-13B": 20480}
_TOKENS = (1, 4, 16, 64)

_SHARES = (0.05, 0.1, 0.25)
"""Shares in full precision, 8 bit and 4 bit."""


def cases(torch: Any) -> Iterator[Case]:
    """Yield each model's layer by number of tokens, with and without a threshold."""
    for shape, num_neurons in _NEURONS.items():
        for num_tokens in _TOKENS:
            for threshold in (None, 0.0):
                yield _case(torch, shape, num_neurons, num_tokens, threshold)


def _case(
    torch: Any, shape: str, num_neurons: int, num_tokens: int, threshold: float | None
) -> Case:
    from vllm_tiered.kernels.select_neurons import api, reference

    scores_BN = torch.randn((num_tokens, num_neurons), device="cuda")
    edges = api.edges_of(_SHARES, scores_BN.device)
    device_name = torch.cuda.get_device_name()

    def run() -> Any:
        return api.select(scores_BN, edges, threshold, device_name=device_name)

    def in_torch() -> Any:
        return _select_in_torch(torch, scores_BN, edges.tolist())

    expected = reference.select(scores_BN, edges.tolist(), threshold)

    def is_right() -> bool:
        ids_3N, counts_3 = run()
        lists = [ids[:count] for ids, count in zip(ids_3N, counts_3.tolist(), strict=True)]
        if threshold is None and not _are_equal(torch, in_torch(), expected):
            return False
        return _are_equal(torch, lists, expected)

    above = "" if threshold is None else f", above {threshold}"
    return Case(
        name=f"{shape}, {num_neurons} neurons, {num_tokens} tokens{above}",
        num_bytes=scores_BN.nbytes + 8 * sum(map(len, expected)),
        run=run,
        torch_runs={} if threshold is not None else {"topk": in_torch},
        is_right=is_right,
    )


def _are_equal(torch: Any, found: Any, expected: Any) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def _select_in_torch(torch: Any, scores_BN: Any, edges: list[float]) -> list[Any]:
    """Return each precision's neurons, ascending."""
    num_neurons = scores_BN.shape[1]
    counts = [round(edge * num_neurons) for edge in edges]
    order_Bk = torch.topk(scores_BN, counts[-1], dim=1).indices
    taken_N = torch.zeros(num_neurons, dtype=torch.bool, device=scores_BN.device)
    lists = []
    for count in counts:
        chosen_N = torch.zeros_like(taken_N)
        chosen_N[order_Bk[:, :count].flatten()] = True
        lists.append((chosen_N & ~taken_N).nonzero()[:, 0])
        taken_N |= chosen_N
    return lists
