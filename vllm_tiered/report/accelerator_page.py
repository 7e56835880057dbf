# SPDX-License-Identifier: Apache-2.0
"""Markdown page of `vllm-tiered dse --out`, and its picture files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_tiered.errors import ConfigError
from vllm_tiered.report.accelerator_figure import accelerator_pictures
from vllm_tiered.report.accelerator_tables import Table, assumptions, markdown, summary, tables

PAGE = "accelerator.md"
PICTURES = "accelerator"
"""Folder of the PNGs, next to the page."""


def write_page(answer: Mapping[str, Any], folder: Path, command: str) -> Path:
    """Write the page and its pictures into `folder`; return the page's path.

    Args:
        command: command that made the page, which the page shows.

    Raises ConfigError if the folder cannot be written.
    """
    page = folder / PAGE
    try:
        (folder / PICTURES).mkdir(parents=True, exist_ok=True)
        pictures = accelerator_pictures(answer)
        for name, png in pictures.items():
            (folder / PICTURES / f"{name}.png").write_bytes(png)
        page.write_text(_text(answer, command, set(pictures)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from error
    return page


def _text(answer: Mapping[str, Any], command: str, drawn: set[str]) -> str:
    parts = [
        "# The accelerator that L2 prefetching asks for",
        f"Written by `{command}`; do not edit.",
        "PRESERVE prefetches weights and KV cache from HBM to L2 while all-reduces run, and asks "
        "in its section 5 how large that L2 should be. This is its model of compute, memory, link "
        "and die area (`vllm_tiered/accelerator/`), with table 2's figures.",
        "\n".join(f"* {line}" for line in summary(answer)),
        *(_section(table, drawn) for table in tables(answer)),
        _section(assumptions(answer), drawn),
    ]
    return "\n\n".join(parts) + "\n"


def _section(table: Table, drawn: set[str]) -> str:
    picture = [f"![{table.title}]({PICTURES}/{table.name}.png)"] if table.name in drawn else []
    note = [table.note] if table.note else []
    return "\n\n".join([f"## {table.title}", *picture, markdown(table), *note])
