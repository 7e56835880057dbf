# SPDX-License-Identifier: Apache-2.0
"""Division of far memory among NUMA nodes, or other tiers, of different bandwidth (HeLM).

A device that reads nodes at once, each with a thread, divides far memory by bandwidth, so that all
reads end together. A device that reads them in turn uses the fastest first. In both cases each
sublayer then gets the same shares of all nodes.
"""

from collections.abc import Iterable, Sequence


def divide_at_once(
    num_bytes: int, tiers: Sequence[tuple[int, float]], unit_bytes: int = 1
) -> list[int]:
    """Divide bytes among tiers that are read at once, so that all reads end together if they can.

    Args:
        num_bytes: bytes to divide.
        tiers: (capacity in bytes, bytes/s) of each tier; capacities are multiples of the unit.
        unit_bytes: parts are multiples of it, except where ``num_bytes`` is not.

    Returns:
        Bytes of each tier, in sum ``num_bytes``, or all capacities if that is less.
    """
    parts = [0] * len(tiers)
    open_tiers = list(range(len(tiers)))
    while open_tiers:
        left = num_bytes - sum(parts)
        seconds = left / sum(tiers[at][1] for at in open_tiers)
        full = [at for at in open_tiers if tiers[at][0] <= tiers[at][1] * seconds]
        for at in full:
            parts[at] = tiers[at][0]
        if not full:
            for at in open_tiers:
                parts[at] = int(tiers[at][1] * seconds) // unit_bytes * unit_bytes
            break
        open_tiers = [at for at in open_tiers if at not in full]
    for at in open_tiers:  # what rounding left
        parts[at] += min(num_bytes - sum(parts), tiers[at][0] - parts[at])
    return parts


def interleave(
    extents: Iterable[int], parts: Sequence[tuple[int, int]], page_bytes: int
) -> list[tuple[int, int]]:
    """Give each extent the same shares of all nodes.

        parts   │ node 2                │ node 1    │     one node after the other
        runs    │ 2    │ 1 │ 2    │ 1 │ 2    │ 1 │       extent after extent

    Args:
        extents: bytes of consecutive extents, multiples of ``page_bytes``.
        parts: (node, bytes) from :func:`spread` for all extents together.
        page_bytes: the unit in which nodes take memory; a multiple of the system's pages.

    Returns:
        (node, bytes) in the order of addresses; in sum those of ``parts``.
    """
    left = [num_bytes // page_bytes for _, num_bytes in parts]
    runs: list[tuple[int, int]] = []
    for extent in extents:
        pages, rest = extent // page_bytes, sum(left)
        for index, (node, _) in enumerate(parts):
            if not rest:
                break
            # Rounded to nearest. Never more than a node has left, and the last takes what remains.
            taken = (2 * left[index] * pages + rest) // (2 * rest)
            rest -= left[index]
            pages -= taken
            left[index] -= taken
            if taken and runs and runs[-1][0] == node:
                runs[-1] = (node, runs[-1][1] + taken * page_bytes)
            elif taken:
                runs.append((node, taken * page_bytes))
    return runs
