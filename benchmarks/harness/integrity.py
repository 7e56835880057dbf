# SPDX-License-Identifier: Apache-2.0
"""Checks the plugin's structures at every engine step, in an engine process that asks for it.

The plugin's own `check_integrity()` functions state the conservation laws (pages, blocks, homes)
and raise IntegrityError with the numbers. This module calls them after each planned step and after
each executed step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_checks_made = 0


def num_checks() -> int:
    """Return how many checks passed in this process."""
    return _checks_made


def install() -> None:
    """Check every scheduler and worker of the plugin from now on (call once)."""
    from vllm_tiered.adapter.kv.scheduler import TieredScheduler
    from vllm_tiered.adapter.kv.worker import TieredWorker

    check_after(TieredScheduler, "build_metadata", lambda scheduler: scheduler.elastic)
    check_after(TieredWorker, "end_step", lambda worker: worker.swapper)


def check_after(owner: type, method_name: str, part_of: Callable[[Any], Any]) -> None:
    """Call `part_of(self).check_integrity()` after each call of the owner's method."""
    method = getattr(owner, method_name)

    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _checks_made
        result = method(self, *args, **kwargs)
        part_of(self).check_integrity()
        _checks_made += 1
        return result

    setattr(owner, method_name, checked)
