# SPDX-License-Identifier: Apache-2.0
"""The page that a browser gets from GET /tiered: one file, and the headers it is served with."""

import base64
import functools
import hashlib
import re
from pathlib import Path


@functools.cache
def page() -> str:
    """Return the page's HTML."""
    return Path(__file__).with_name("page.html").read_text(encoding="utf-8")


@functools.cache
def security_policy() -> str:
    """Return its Content-Security-Policy: its own script and style, and this server alone."""
    sources = {}
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page(), flags=re.DOTALL)
        digest = hashlib.sha256(text.encode()).digest()
        sources[tag] = f"'sha256-{base64.b64encode(digest).decode()}'"
    return (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def prefers_html(accept: str) -> bool:
    """Return whether an Accept header names HTML, and does not prefer JSON; `*/*` is no browser."""
    weights = {"text/html": 0.0, "application/json": 0.0}
    for entry in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in entry.split(";"))
        if kind in weights:
            weights[kind] = max(weights[kind], _weight(parameters))
    return weights["text/html"] > weights["application/json"]


def _weight(parameters: list[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
