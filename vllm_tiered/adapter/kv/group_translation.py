# SPDX-License-Identifier: Apache-2.0
"""Translation of all groups' block tables."""

from collections.abc import Sequence
from typing import Any

from vllm_tiered.adapter.kv.translation import LayerTranslator


class GroupTranslator:
    """Translator of a step's block tables, group by group.

    Args:
        translators: one for each group.
    """

    def __init__(self, translators: Sequence[LayerTranslator]) -> None:
        self._translators = translators

    def translate(self, forward_context: Any, *, keeps_pages: bool = False) -> None:
        """Give every layer its own metadata in ``forward_context``.

        Args:
            keeps_pages: every block of the step has the same pages as in the previous step.
        """
        for translator in self._translators:
            translator.translate(forward_context, keeps_pages=keeps_pages)
