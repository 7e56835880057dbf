# SPDX-License-Identifier: Apache-2.0
"""MkDocs hook that writes the reference pages from the code: options, CLI, metrics, checks.

A page is generated from the objects that the program uses, so it cannot disagree with them. MkDocs
calls `on_files`; the pages exist in the site only.
"""

import argparse
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from vllm_tiered.adapter.checks import Conflict


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to MkDocs' files."""
    for name, make_page in PAGES.items():
        files.append(File.generated(config, f"reference/{name}.md", content=make_page()))
    return files


def configuration_page() -> str:
    """Return the page of every option, from the sections of `vllm_tiered.config`."""
    from vllm_tiered.config import SECTIONS

    lines = [
        "# Options",
        "",
        "Set them as described in [Configure the plugin](../guides/configuration.md).",
        "",
    ]
    for section in SECTIONS:
        rows = (
            (f"`{key.name}`", key.values, f"`{show(key.default)}`", key.meaning)
            for key in section.reference()
        )
        lines += [f"## tiered.{section.NAME}", "", inspect.cleandoc(section.__doc__ or ""), ""]
        lines += [*table(("option", "values", "default", "meaning"), rows), ""]
    return "\n".join(lines)


def show(default: object) -> str:
    return json.dumps(default)


def cli_page() -> str:
    """Return the page of every subcommand, from the argument parser of `vllm-tiered`."""
    from vllm_tiered.cli.main import make_parser

    parser = make_parser()
    lines = ["# Commands", "", "```", parser.format_help().rstrip(), "```", ""]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, subparser in action.choices.items():
                lines += [f"## vllm-tiered {name}", ""]
                lines += ["```", subparser.format_help().rstrip(), "```", ""]
    return "\n".join(lines)


def metrics_page() -> str:
    """Return the page of every metric, from the tables that register them."""
    from vllm_tiered.adapter.telemetry import figures

    lines = ["# Metrics", "", "On vLLM's own `/metrics`, summed over ranks.", ""]
    for title, suffix, metrics in (
        ("Counters", "_total", figures.COUNTER_METRICS),
        ("Gauges", "", figures.GAUGE_METRICS),
    ):
        rows = (
            (
                f"`{figures.PREFIX}{metric.name}{suffix}`",
                f"`{metric.label}`: {', '.join(metric.figures)}" if metric.label else "",
                metric.help,
            )
            for metric in metrics
        )
        lines += [f"## {title}", "", *table(("metric", "label", "meaning"), rows), ""]
    lines += [
        f"`{figures.PREFIX}{figures.PART_ACTIVE}` has the labels `part` and `reason`: 1 for the "
        "reason that holds now, 0 for reasons that held before.",
        "",
        *table(("reason", "meaning"), ((f"`{r}`", m) for r, m in figures.PART_REASONS.items())),
        "",
    ]
    lines += ["## Histograms", "", "Seconds that compute of a rank waited in an engine step.", ""]
    lines += [f"* `{figures.PREFIX}{name}`" for name in figures.STEP_HISTOGRAMS]
    return "\n".join([*lines, ""])


def compatibility_page() -> str:
    """Return the support matrix and its reasons, from the compatibility checks of the adapter."""
    from vllm_tiered.adapter.checks import ENGINE_ARGS_CHECKS, VLLM_CONFIG_CHECKS, Part

    parts = list(Part)
    lines = [
        "# What works with what",
        "",
        "Generated from the checks that run at start. *no*: a part that was switched on by hand "
        "is refused at start, with the reason and what to change. `tiered.kv`, which is on by "
        "default, steps aside instead, unless `expansion` is a number above 1, `tier` is "
        '`"storage"` or `policy` is not `"interleave"`: the server starts with vLLM\'s own KV '
        "cache. A blank cell: nothing rules it out. Beside these checks the KV cache needs some "
        "layers of full attention or MLA, and in a pipeline all, so it steps aside for models with "
        "windows alone.",
        "",
    ]
    for title, kind in (("Kinds of models", "model"), ("Options of vLLM", "option")):
        conflicts: dict[str, dict[Part, Conflict]] = {}
        for check in (*VLLM_CONFIG_CHECKS, *ENGINE_ARGS_CHECKS):
            if check.kind == kind:
                known = conflicts.setdefault(check.feature.replace("_", " "), {})
                for part, conflict in check.conflicts.items():
                    known.setdefault(part, conflict)
        rows = (
            (feature, *("no" if part in by_part else "" for part in parts))
            for feature, by_part in conflicts.items()
        )
        headings = ("", *(f"`tiered.{part.value}`" for part in parts))
        lines += [f"## {title}", "", *table(headings, rows), ""]
        for feature, by_part in conflicts.items():
            lines += [f"**{feature}**", ""]
            lines += [
                f"* `tiered.{part.value}`: {by_part[part].reason}. What to do: "
                f"{by_part[part].remedy}, or {part.off_switch}."
                for part in parts
                if part in by_part
            ]
            lines += [""]
    return "\n".join(lines)


def table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [" | ".join(("", *headings, "")).strip(), "|" + "---|" * len(headings)]
    for row in rows:
        cells = (cell.replace("|", "\\|").replace("\n", " ") for cell in row)
        lines.append(" | ".join(("", *cells, "")).strip())
    return lines


PAGES: Mapping[str, Callable[[], str]] = {
    "configuration": configuration_page,
    "cli": cli_page,
    "metrics": metrics_page,
    "compatibility": compatibility_page,
}
