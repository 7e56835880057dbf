# SPDX-License-Identifier: Apache-2.0
"""Translation of all groups' block tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_tiered.adapter.kv.translation import LayerTranslator


class GroupTranslator:
    """Translator of a step's block tables, group by group.

    Args:
        translators: one for each group.
        targets: by name of a layer that reads another's KV cache, the name of that other layer.
    """

    def __init__(self, translators: Sequence[LayerTranslator], targets: Mapping[str, str]) -> None:
        self._translators = translators
        self._targets = targets

    def translate(self, forward_context: Any, *, keeps_pages: bool = False) -> None:
        """Give every layer its own metadata in ``forward_context``.

        Args:
            keeps_pages: every block of the step has the same pages as in the previous step.
        """
        for translator in self._translators:
            translator.translate(forward_context, keeps_pages=keeps_pages)
        if self._targets:
            self._give_targets_pages(forward_context)

    def _give_targets_pages(self, forward_context: Any) -> None:
        """Let layers without a KV cache of their own read their targets' pages."""
        # The translators have replaced vLLM's dictionaries by copies.
        metadata, slots = forward_context.attn_metadata, forward_context.slot_mapping
        for name, target in self._targets.items():
            metadata[name], slots[name] = metadata[target], slots[target]
