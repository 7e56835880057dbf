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
    computed: int = 0
    placeholders: int = 0  # sampled by steps that have not run yet
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

    @property
    def end_tokens(self) -> int:
        return self.scheduled.computed_tokens + self.scheduled.scheduled_tokens


@dataclass(frozen=True, kw_only=True)
class Step:
    number: int
    parts: tuple[Part, ...]
    plan: StepPlan
    released: frozenset[int]  # blocks that are released in the worker while the step runs
