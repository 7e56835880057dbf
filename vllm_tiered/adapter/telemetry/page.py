# SPDX-License-Identifier: Apache-2.0
"""The page that GET /tiered shows in a browser: one file without data, which asks for the JSON."""

import base64
import functools
import hashlib
import re
from importlib import resources

JSON, HTML = "application/json", "text/html"

_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)
_STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)


@functools.cache
def load_page() -> str:
    """Return the page's HTML."""
    return resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")


@functools.cache
def page_headers() -> dict[str, str]:
    """Return the page's headers: only its own script and style, and questions to its own server."""
    scripts, styles = (_hashes(pattern, load_page()) for pattern in (_SCRIPT, _STYLE))
    policy = {
        "default-src": "'none'",
        "script-src": scripts,
        "style-src": styles,
        "connect-src": "'self'",
        "img-src": "data:",  # the empty icon, without which a browser asks for /favicon.ico
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def prefers_html(accept: str) -> bool:
    """Return whether an Accept header names text/html and ranks it above JSON (RFC 9110, 12.5.1).

    A browser's does. ``*/*``, which curl and Python's clients send, does not.
    """
    weights = _parse_accept(accept)
    html = weights.get(HTML, 0.0)
    json = next((weights[name] for name in (JSON, "application/*", "*/*") if name in weights), 0.0)
    return html > json


def _parse_accept(accept: str) -> dict[str, float]:
    """Return the weight of each media range; a weight that is not a number counts as 0."""
    weights = {}
    for media_range in accept.lower().split(","):
        name, *parameters = (part.strip() for part in media_range.split(";"))
        weight = next((p.removeprefix("q=") for p in parameters if p.startswith("q=")), "1")
        is_number = re.fullmatch(r"[01](\.\d{0,3})?", weight) is not None
        weights[name] = float(weight) if is_number else 0.0
    return weights


def _hashes(pattern: re.Pattern[str], html: str) -> str:
    """Return the CSP sources of the inline elements that a pattern finds."""
    digests = (hashlib.sha256(text.encode()).digest() for text in pattern.findall(html))
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
