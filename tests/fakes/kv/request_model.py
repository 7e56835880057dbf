# SPDX-License-Identifier: Apache-2.0
"""Requests of the engine model, and their parts in a step."""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from vllm_tiered.kv.step_plan import ScheduledRequest, StepPlan


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Turn(NamedTuple):
    """Next turn of a streaming session: the client's input and the number of sampled tokens."""

    token: int
    num_prompt: int
    num_output: int


@dataclass(eq=False, kw_only=True)
class Request:
    """Request whose tokens are fixed in advance.

    ``tokens`` has the prompt and all tokens that will be sampled; the first ``known`` exist now.
    """

    request_id: str
    tokens: tuple[int, ...]
    num_prompt: int
    turns: deque[Turn] = field(default_factory=deque)
    known: int = 0
    computed: int = 0  # with the drafts of steps that have not run yet
    placeholders: int = 0  # sampled by steps that have not run yet, drafts included
    late_drafts: int = 0  # of the latest step, if its outcome is not known
    certain: int = 0  # computed tokens without the drafts that will be rejected
    preemptions: int = 0
    last_step: int = 0
    drop_until: int = 0  # samples of steps up to this one are dropped
    status: Status = Status.WAITING
    blocks: list[int] = field(default_factory=list)
    window_blocks: list[int] = field(default_factory=list)  # 0 where the window has passed
    state_block: int = 0
    processed: int = 0  # tokens of steps that have run

    def __post_init__(self) -> None:
        self.known = self.num_prompt

    @property
    def remaining(self) -> int:
        return self.known + self.placeholders - self.computed


@dataclass(frozen=True, kw_only=True)
class Part:
    """A request's part in a step, as it was when the step was scheduled."""

    request: Request
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    window_blocks: tuple[int, ...]
    state_block: int
    state_column: int
    scheduled: ScheduledRequest
    samples: bool
    preemptions: int
    first: int  # position of the first token that the step computes
    num_tokens: int  # with its drafts
    num_drafts: int = 0
    num_accepted: int = 0  # drafts that the step will accept

    @property
    def end_tokens(self) -> int:
        """End of the tokens that the step computes, rejected drafts included."""
        return self.first + self.num_tokens

    @property
    def kept_end(self) -> int:
        """End of the tokens that the step computes and that are kept."""
        return self.end_tokens - self.num_drafts + self.num_accepted


@dataclass(frozen=True, kw_only=True)
class Step:
    number: int
    parts: tuple[Part, ...]
    plan: StepPlan
    released: frozenset[int]  # blocks that are released in the worker while the step runs
