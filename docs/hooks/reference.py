# SPDX-License-Identifier: Apache-2.0
"""MkDocs hook that writes the reference pages from the code: options, CLI, metrics, checks.

A page is generated from the objects that the program uses, so it cannot disagree with them. MkDocs
calls `on_files`; the pages exist in the site only.
"""

import argparse
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to MkDocs' files."""
    for name, make_page in PAGES.items():
        files.append(File.generated(config, f"reference/{name}.md", content=make_page()))
    return files


def configuration_page() -> str:
    """Return the page of every option, from the dataclasses of `vllm_tiered.config`."""
    from vllm_tiered import config

    lines = [
        "# Options",
        "",
        "Set them as described in [Configure the plugin](../guides/configuration.md). "
        "An unknown key is an error.",
        "",
    ]
    for spec in dataclasses.fields(config.TieredConfig):
        section = spec.type if inspect.isclass(spec.type) else getattr(config, str(spec.type))
        lines += [f"## tiered.{spec.name}", "", inspect.cleandoc(section.__doc__ or ""), ""]
        lines += [*table(("option", "values", "default"), option_rows(spec.name, section)), ""]
    return "\n".join(lines)


def option_rows(section_name: str, section: type) -> Iterator[tuple[str, str, str]]:
    for spec in dataclasses.fields(section):
        values = spec.type if isinstance(spec.type, str) else format_type(spec.type)
        values = values.replace("Literal[", "").replace("]", "").replace("|", "or")
        yield f"`{section_name}.{spec.name}`", f"`{values}`", f"`{spec.default!r}`"


def format_type(annotation: Any) -> str:
    name = annotation.__name__ if inspect.isclass(annotation) else str(annotation)
    return name.replace("typing.", "")


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
    from vllm_tiered.adapter.telemetry import metrics

    lines = ["# Metrics", "", "On vLLM's own `/metrics`, summed over ranks.", ""]
    for title, names in (("Counters", metrics.COUNTERS), ("Gauges", metrics.GAUGES)):
        rows = ((f"`vllm:tiered_{name}`", text) for name, text in names.items())
        lines += [f"## {title}", "", *table(("metric", "meaning"), rows), ""]
    return "\n".join(lines)


def compatibility_page() -> str:
    """Return the page of what works with what, from the compatibility checks."""
    from vllm_tiered.adapter import checks

    return f"# What works with what\n\n{checks.__doc__}\n"


def table(headings: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> list[str]:
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
