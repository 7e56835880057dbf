# SPDX-License-Identifier: Apache-2.0
"""Drafts of speculative decoding in the steps that vLLM schedules: which tokens are certain.

A step computes a request's next token and some drafts behind it, of which a prefix is accepted.
Under asynchronous scheduling the next step is scheduled before that is known. vLLM then counts all
drafts as computed, and corrects the number a step later.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm_tiered.kv.layout import PartialBlocks


class Certain(NamedTuple):
    """A request's part in a step.

    Attributes:
        computed_tokens: tokens whose KV exists for certain.
        scheduled_tokens: tokens that the step computes, and that will be kept.
        draft_tokens: tokens behind these whose KV the step may write, and which may be rejected.
    """

    computed_tokens: int
    scheduled_tokens: int
    draft_tokens: int


class _InDoubt(NamedTuple):
    certain_end: int
    num_drafts: int


class Drafts:
    """Tracker of the drafts in the steps whose outcome is not known.

    Attributes:
        num_accepted: accepted drafts that the step which is being planned has learned of.
    """

    def __init__(self) -> None:
        self._drafts: Mapping[str, Sequence[int]] = {}
        self._in_flight: Any = None  # the latest step, until its outcome is known
        self._before: dict[str, _InDoubt] = {}
        self._now: dict[str, _InDoubt] = {}
        self.num_accepted = 0

    def begin_step(self, scheduler_output: Any) -> None:
        """Begin to plan the step that was just scheduled."""
        self._drafts = scheduler_output.scheduled_spec_decode_tokens
        self._before, self._now = self._now, {}
        if self._in_flight is None:
            self._before = {
                name: part._replace(num_drafts=0) for name, part in self._before.items()
            }
        self._in_flight = scheduler_output
        self.num_accepted = 0

    def end_step(self, scheduler_output: Any) -> None:
        """Record that the outcome of this step is known."""
        if scheduler_output is self._in_flight:
            self._in_flight = None

    def split(
        self, request_id: str, computed_tokens: int, scheduled_tokens: int, *, restarts: bool
    ) -> Certain:
        """Return what is certain of vLLM's numbers for a request.

        Args:
            restarts: no earlier step of the request is in doubt.
        """
        before = None if restarts else self._before.get(request_id)
        late_drafts = before.num_drafts if before else 0
        num_drafts = len(self._drafts.get(request_id, ()))
        certain = Certain(
            computed_tokens - late_drafts, scheduled_tokens - num_drafts, num_drafts + late_drafts
        )
        end = certain.computed_tokens + certain.scheduled_tokens
        if before:
            self.num_accepted += certain.computed_tokens - before.certain_end
        if certain.draft_tokens:
            self._now[request_id] = _InDoubt(end, num_drafts)
        return certain


def has_drafts(scheduler_output: Any) -> bool:
    """Return whether a step computes drafts."""
    return bool(scheduler_output.scheduled_spec_decode_tokens)


def num_draft_tokens(vllm_config: Any) -> int:
    """Return the most drafts of a request in a step; 0 without speculative decoding."""
    speculation = vllm_config.speculative_config
    return 0 if speculation is None else int(speculation.num_speculative_tokens or 0)


def partial_blocks(vllm_config: Any, block_tokens: int) -> PartialBlocks:
    """Return the most partial blocks that one request has in a step."""
    num_drafts = num_draft_tokens(vllm_config)
    if not num_drafts:
        return PartialBlocks()
    in_doubt = num_drafts * (2 if vllm_config.scheduler_config.async_scheduling else 1)
    return PartialBlocks.of_drafts(num_drafts, in_doubt, block_tokens)
