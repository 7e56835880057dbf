# SPDX-License-Identifier: Apache-2.0
"""Tables and lines that `vllm-tiered probe` prints."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_tiered.planner.from_probe import machine_from_probe
from vllm_tiered.units import format_bytes

DISTURBED_SHARE = 0.05
"""Share of the CPU used by other processes above which figures are not reliable."""

_NARROW = {
    "int4": "with our weights in 4 bit",
    "w4a16": "with a 4-bit checkpoint's weights",
}
"""GEMMs of few bits by their name in a probe's file, in words."""


def print_probe(probe: Mapping[str, Any]) -> None:
    """Print a probe's result."""
    console = Console(width=None if Console().is_terminal else 120, highlight=False)
    machine = probe["machine"]
    console.print(
        f"{machine['name']}, {machine['threads']} of {machine['cores']} cores compute; "
        f"{probe['seconds']:.0f} s"
    )
    if probe["foreign_cpu_share"] > DISTURBED_SHARE:
        console.print(
            f"Other processes took {probe['foreign_cpu_share']:.0%} of the CPU meanwhile: stop "
            "them and measure again."
        )
    reads, writes = probe["links"]["read"], probe["links"]["write"]
    _table(
        console,
        ("transfer", "far to near GB/s", "us", "near to far GB/s", "us"),
        [
            (
                format_bytes(read["num_bytes"]),
                *_rate(read),
                *_rate(write),
            )
            for read, write in zip(reads, writes, strict=True)
        ],
    )
    if tiers := probe.get("far_tiers"):
        _table(
            console,
            ("far memory, in order of use", "GB/s", "read", "may take"),
            [
                (
                    f"node {tier['node']}",
                    f"{tier['num_bytes'] / tier['seconds'] / 1e9:.2f}",
                    format_bytes(tier["num_bytes"]),
                    format_bytes(tier["capacity_bytes"]),
                )
                for tier in tiers["nodes"]
            ],
        )
    if host := probe.get("host_read"):
        console.print(f"The host's processor reads its memory at {_rate(host)[0]} GB/s.")
    near = probe["gemms"]["near"]
    row_counts = sorted({entry["rows"] for entry in near})
    sizes = sorted({entry["num_bytes"] for entry in near})
    headings = [f"{where}, {rows}" for rows in row_counts for where in ("near", "far")]
    seconds = {
        (where, entry["num_bytes"], entry["rows"]): entry["seconds"]
        for where in probe["gemms"]
        for entry in probe["gemms"][where]
    }
    _table(
        console,
        (f"ms of a matmul by {probe['gemms_of']}, rows:", *headings),
        [
            (
                format_bytes(size),
                *(
                    f"{1e3 * seconds[where, size, rows]:.2f}"
                    for rows in row_counts
                    for where in ("near", "far")
                ),
            )
            for size in sizes
        ],
    )
    for kind, heading in _NARROW.items():
        if kind in probe["gemms"]:
            _table(
                console,
                (f"ms of a matmul {heading}, rows:", *map(str, row_counts)),
                [
                    (
                        f"{format_bytes(size)} without compression",
                        *(f"{1e3 * seconds[kind, size, rows]:.2f}" for rows in row_counts),
                    )
                    for size in sizes
                ],
            )
    contention = probe["contention"]
    console.print(
        f"Matmuls take {contention['compute_slowdown']:.2f} times as long while copies run, and "
        f"copies take {contention['link_slowdown']:.2f} times as long while matmuls run."
    )
    _print_storage(console, probe["storage"])
    if probe["sublayers"]:
        by_name: dict[str, list[str]] = {}
        for entry in probe["sublayers"]:
            by_name.setdefault(entry["name"], []).append(f"{1e3 * entry['seconds']:.2f}")
        _table(
            console,
            ("ms of a sublayer, tokens:", *map(str, row_counts)),
            [(name, *times) for name, times in by_name.items()],
        )
    _, figures = machine_from_probe(probe)
    _table(
        console,
        ("figure", "value", "kind", "from"),
        [
            (name, f"{figure['value']:.4g}", str(figure["kind"]), str(figure["source"]))
            for name, figure in figures.items()
        ],
    )


def _print_storage(console: Console, storage: Mapping[str, Any] | None) -> None:
    if storage is None:
        console.print("Storage was not measured: name a folder with --path.")
        return
    if not storage["is_direct"]:
        console.print("The file system does not support O_DIRECT: reads may come from memory.")
    readers = sorted({read["readers"] for read in storage["reads"]})
    rates: dict[tuple[str, int], list[str]] = {}
    for read in storage["reads"]:
        text = f"{read['gb_per_s']:.2f} ({1e6 * read['latency_s']:.0f})"
        rates.setdefault((read["pattern"], read["request_bytes"]), []).append(text)
    _table(
        console,
        ("GB/s (us) of reads, readers:", *map(str, readers)),
        [(f"{pattern} {format_bytes(size)}", *texts) for (pattern, size), texts in rates.items()],
    )
    _table(
        console,
        ("reads as weights are read", "GB/s", "us"),
        [(format_bytes(read["num_bytes"]), *_rate(read)) for read in storage["weight_reads"]],
    )
    slower = storage["contention"]
    console.print(
        f"Matmuls take {slower['compute_slowdown']:.2f} times as long while storage is read, and "
        f"reads take {slower['link_slowdown']:.2f} times as long while matmuls run."
    )
    console.print(f"The disk writes {storage['write_gb_per_s']:.2f} GB/s.")


def _rate(sample: Mapping[str, Any]) -> tuple[str, str]:
    return (
        f"{sample['num_bytes'] / sample['seconds'] / 1e9:.2f}",
        f"{1e6 * sample['seconds']:.0f}",
    )


def _table(console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print()
