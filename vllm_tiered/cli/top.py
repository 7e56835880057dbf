# SPDX-License-Identifier: Apache-2.0
"""`vllm-tiered top URL`: what a running server's tiers do, live in a terminal.

The same as the page of GET /tiered: each part with its reason, bytes per tier, rates, and events.
"""

import argparse
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vllm_tiered.cli.live_rates import (
    PARTS,
    Rates,
    bytes_by_tier,
    events_between,
    rates_between,
)
from vllm_tiered.cli.top_rows import figure_rows
from vllm_tiered.errors import TieredError
from vllm_tiered.units import MIB, format_bytes
from vllm_tiered.untrusted import parse_json

INTERVAL_S = 2.0
TIMEOUT_S = 15.0
"""The server itself answers within 10 s, also when its workers hang."""

_MAX_ANSWER_BYTES = 64 * MIB

_BAR = 24
_COLOURS = {"on": "green", "stepped aside": "yellow", "starting": "yellow"}


class ServerError(TieredError):
    """The server does not answer as one with vllm-tiered does."""


def add_parser(subcommands: Any) -> None:
    """Add the subcommand."""
    parser = subcommands.add_parser(
        "top",
        help="show live what a running server's tiers do",
        description=__doc__.partition("\n")[2].strip(),
    )
    parser.add_argument("url", help="the server, such as http://localhost:8000")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("VLLM_API_KEY"),
        help="the server's key; by default that of VLLM_API_KEY",
    )
    parser.add_argument(
        "--once", action="store_true", help="print one picture, over one interval, and end"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show pictures until the user stops it; return the exit status.

    Raises:
        ServerError: the server cannot be reached, wants another key, or is not tiered.
    """
    console = Console()
    before = ask(args.url, args.api_key)
    if args.once:
        time.sleep(INTERVAL_S)
        now = ask(args.url, args.api_key)
        console.print(picture(now, rates_between(before, now), events_between(before, now)))
        return 0
    events: deque[str] = deque(maxlen=8)
    try:
        with Live(picture(before, Rates(), events), console=console, screen=True) as live:
            while True:
                time.sleep(INTERVAL_S)
                try:
                    now = ask(args.url, args.api_key)
                except ServerError as error:
                    live.update(
                        Group(Text(str(error), "bold red"), picture(before, Rates(), events))
                    )
                    continue
                clock = time.strftime("%H:%M:%S")
                events.extendleft(f"{clock}  {text}" for text in events_between(before, now))
                live.update(picture(now, rates_between(before, now), events))
                before = now
    except KeyboardInterrupt:
        return 0


def ask(url: str, api_key: str | None) -> dict[str, Any]:
    """Return the answer of GET /tiered.

    Raises:
        ServerError: see `run`.
    """
    parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ServerError(
            f"{url} is no address of a server: give one such as http://localhost:8000"
        )
    address = (
        f"{parts.scheme}://{parts.netloc}{parts.path.removesuffix('/tiered').rstrip('/')}/tiered"
    )
    headers = {"Accept": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    try:
        request = urllib.request.Request(address, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            answer = parse_json(response.read(_MAX_ANSWER_BYTES), any_number=True)
    except urllib.error.HTTPError as error:
        raise ServerError(f"{address}: {_refusal(error)}") from error
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise ServerError(f"{address} cannot be reached ({reason}): is the server up?") from error
    except ValueError as error:
        raise ServerError(f"{address} does not answer with JSON: is it a vLLM server?") from error
    if not isinstance(answer, dict) or "workers" not in answer or "engines" not in answer:
        raise ServerError(f"{address} is not vllm-tiered's")
    return answer


def _refusal(error: urllib.error.HTTPError) -> str:
    if error.code == 401:
        return "the server wants its API key: give it with --api-key"
    if error.code == 404:
        return "there is no such route: start the server with --plugin tiered"
    try:
        return str(parse_json(error.read(_MAX_ANSWER_BYTES))["error"])
    except (ValueError, KeyError, TypeError):
        return f"the server answers {error.code}"


def picture(now: dict[str, Any], rates: Rates, events: Any) -> Group:
    """Return what is shown of one answer."""
    header = Text(f"vllm-tiered {now['version']}, {len(now['workers'])} ranks", "bold")
    if rates.tokens is not None:
        header.append(f"    {rates.tokens:.0f} tokens/s")
    server = now.get("server", {})
    for name in ("running", "waiting"):
        if (number := server.get(f"requests_{name}")) is not None:
            header.append(f"    {number:.0f} {name}")
    return Group(header, _parts(now), _tiers(now), _figures(now, rates), *_events(events))


def _parts(now: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE)
    for title in ("part", "state", "reason"):
        table.add_column(title)
    for worker in now["workers"][:1]:
        for part, name in PARTS.items():
            state, reason = worker[part]["state"], worker[part]["reason"] or ""
            colour = "red" if state == "on" and reason else _COLOURS.get(state, "dim")
            table.add_row(name, Text(state, colour), Text(reason))
    return table


def _tiers(now: dict[str, Any]) -> Table:
    table = Table(box=None, show_header=False)
    found = bytes_by_tier(now)
    most = max(*found.values(), 1)
    for tier, num_bytes in found.items():
        bar = "█" * max(round(_BAR * num_bytes / most), int(num_bytes > 0))
        table.add_row(tier, Text(bar.ljust(_BAR), "blue"), format_bytes(num_bytes))
    return table


def _figures(now: dict[str, Any], rates: Rates) -> Table:
    table = Table(box=box.SIMPLE, show_header=False)
    for title, text in figure_rows(now, rates):
        table.add_row(title, Text(text))
    return table


def _events(events: Any) -> list[Text]:
    return [Text(text, "dim") for text in events]
