# SPDX-License-Identifier: Apache-2.0
"""Far pages on several NUMA nodes, which a copy thread reads at once, each node with a thread."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vllm_tiered.devices.pages import PageBuffer, Pages


class SpreadPages(PageBuffer):
    """Buffer whose pages lie on several nodes.

    Args:
        data: as for :class:`PageBuffer`.
        nodes: node of each page, int64 [num_pages].
    """

    __slots__ = ("nodes",)

    def __init__(self, data: torch.Tensor, nodes: npt.NDArray[np.int64]) -> None:
        super().__init__(data)
        self.nodes = nodes

    def part(self, first_page: int, num_pages: int) -> "SpreadPages":
        part = slice(first_page, first_page + num_pages)
        return SpreadPages(self.data[part], self.nodes[part])


class NodePart(NamedTuple):
    """Part of a copy whose source pages lie on one node."""

    node: int
    sources: Pages
    targets: Pages


def spread_pages(data: torch.Tensor, runs: Sequence[tuple[int, int]]) -> SpreadPages | PageBuffer:
    """Return a buffer of pages that :func:`~vllm_tiered.devices.numa.bind` bound to nodes.

    Args:
        data: uint8 [num_pages, page_bytes].
        runs: (node, bytes) in the order of addresses; whole pages if there are several nodes.
    """
    numbers = [node for node, _ in runs]
    page_bytes = data.shape[1]
    if len(set(numbers)) < 2 or any(size % page_bytes for _, size in runs):
        return PageBuffer(data)
    nodes = np.repeat(np.array(numbers), [size // page_bytes for _, size in runs])
    return SpreadPages(data, nodes)


def parts_by_node(source: PageBuffer, sources: Pages, targets: Pages) -> list[NodePart]:
    """Divide a copy by the nodes of its source pages; empty if they lie on one, or are not known.

    No page is in two parts, so the parts may be copied at once.
    """
    if not isinstance(source, SpreadPages):
        return []
    at = source.nodes[sources.ids]
    numbers = np.unique(at)
    if len(numbers) < 2:
        return []
    return [
        NodePart(int(number), Pages(sources.ids[at == number]), Pages(targets.ids[at == number]))
        for number in numbers
    ]
