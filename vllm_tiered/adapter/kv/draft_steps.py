# SPDX-License-Identifier: Apache-2.0
"""Forward steps of a draft model, which vLLM runs behind the target's, without connector hooks."""

from typing import Any, Protocol

from vllm_tiered.adapter.compat import wrap_once


class DrafterWatcher(Protocol):
    """A worker whose draft model reads and writes pages of the pool."""

    def translate_drafter(self, forward_context: Any) -> None:
        """Give the draft model's layers their translated block tables."""


_watchers: list[DrafterWatcher] = []


def watch(worker: DrafterWatcher) -> None:
    """Let a worker translate each forward context that vLLM makes from now on."""
    from vllm import forward_context

    wrap_once(forward_context, "create_forward_context", _create_forward_context)
    _watchers.append(worker)


def unwatch(worker: DrafterWatcher) -> None:
    """Undo ``watch``; ignore a worker that does not watch."""
    if worker in _watchers:
        _watchers.remove(worker)


def _create_forward_context(original: Any, *args: Any, **kwargs: Any) -> Any:
    context = original(*args, **kwargs)
    for watcher in _watchers:
        watcher.translate_drafter(context)
    return context
