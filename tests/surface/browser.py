# SPDX-License-Identifier: Apache-2.0
"""What tests read in a page that a browser has open (the fixture `opened`)."""

from typing import Any


def text_of(tab: Any, selector: str = "body") -> str:
    """Return the text that a user sees in an element."""
    text: str = tab.locator(selector).inner_text()
    return text


def wait_for_text(tab: Any, selector: str, text: Any) -> None:
    """Wait until an element shows a text, or one that a pattern finds."""
    tab.locator(selector, has_text=text).first.wait_for()
