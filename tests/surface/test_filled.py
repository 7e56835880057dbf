# SPDX-License-Identifier: Apache-2.0
"""Notice of a filled parameter: every way in which vLLM's loaders write one."""

import pytest
import torch

from vllm_tiered.adapter.weights.filled import when_filled
from vllm_tiered.errors import UnsupportedError


def watched(load=None):
    """Return a parameter [6, 4] that is watched, and the list of its contents when it was full."""
    parameter = torch.nn.Parameter(torch.full((6, 4), torch.nan), requires_grad=False)
    if load is not None:
        parameter.weight_loader = load  # type: ignore[attr-defined]
    seen: list[torch.Tensor] = []
    when_filled(parameter, lambda: seen.append(parameter.data.clone()))
    return parameter, seen


def load_part(parameter, loaded, part) -> None:
    """Copy a third of the rows, as a layer of queries, keys and values does."""
    parameter.data.narrow(0, 2 * part, 2).copy_(loaded)


def test_one_tensor_by_the_default_loader() -> None:
    parameter, seen = watched()
    parameter.weight_loader(parameter, torch.ones(6, 4))
    assert [one.tolist() for one in seen] == [torch.ones(6, 4).tolist()]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_parts_in_any_order(order) -> None:
    parameter, seen = watched(load_part)
    for count, part in enumerate(order):
        assert len(seen) == 0, count
        parameter.weight_loader(parameter, torch.full((2, 4), float(part)), part)
    (whole,) = seen
    assert whole[:, 0].tolist() == [0, 0, 1, 1, 2, 2]


def test_a_part_that_is_transformed_in_place_counts_once() -> None:
    def load(parameter, loaded, part) -> None:
        load_part(parameter, loaded, part)
        load_part(parameter, -loaded, part)

    parameter, seen = watched(load)
    for part in range(3):
        assert not seen, "one part is missing"
        parameter.weight_loader(parameter, torch.ones(2, 4), part)
    assert seen[0].tolist() == (-torch.ones(6, 4)).tolist()


def test_copies_elsewhere_do_not_count() -> None:
    def load(parameter, loaded, part) -> None:
        torch.empty(6, 4).copy_(torch.ones(6, 4))  # a copy of a loader's own
        load_part(parameter, loaded, part)

    parameter, seen = watched(load)
    for part in range(2):
        parameter.weight_loader(parameter, torch.ones(2, 4), part)
    assert not seen


def test_a_parameter_written_in_another_way_is_left_for_later() -> None:
    def load(parameter, loaded) -> None:
        parameter.data[torch.tensor([0, 1, 2, 3, 4, 5])] = loaded

    parameter, seen = watched(load)
    parameter.weight_loader(parameter, torch.ones(6, 4))
    assert not seen


def test_more_after_all_of_it_is_refused() -> None:
    parameter, _ = watched()
    parameter.weight_loader(parameter, torch.ones(6, 4))
    with pytest.raises(UnsupportedError, match=r"shape \(6, 4\) .* weights\.compress"):
        parameter.weight_loader(parameter, torch.zeros(6, 4))
    assert parameter.data.tolist() == torch.ones(6, 4).tolist()
