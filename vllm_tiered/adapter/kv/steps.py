# SPDX-License-Identifier: Apache-2.0
"""Measurements of engine steps in the scheduler, for the controller and for the timeline."""

import time
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from vllm_tiered.adapter.kv.drafts import has_drafts
from vllm_tiered.report.records import ExpertUse, LayerTimeline


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """Measurements of one step that a worker sends to the scheduler.

    Seconds are the slowest rank's; bytes and joules are summed over ranks.

    Attributes:
        layers: the step layer by layer, if it was traced.
        experts: use of experts by layer since an earlier report, about once a second.
        storage_failure: why the storage tier keeps no page any more; "" while it works.
        memory_layers: layers whose far regions are in memory, if the storage tier fails.
        why_not: why no layer can become far, found while the model runs; "" if nothing was.
    """

    stall_seconds: float = 0.0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    read_bytes: int = 0
    write_bytes: int = 0
    joules: float = 0.0
    assumed_joules: float = 0.0
    layers: list[LayerTimeline] = field(default_factory=list)
    experts: list[ExpertUse] = field(default_factory=list)
    storage_failure: str = ""
    memory_layers: int = 0
    why_not: str = ""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReport":
        """Return the combined report of two ranks about the same step."""
        assert isinstance(other, StepReport)
        return StepReport(
            stall_seconds=max(self.stall_seconds, other.stall_seconds),
            read_seconds=max(self.read_seconds, other.read_seconds),
            write_seconds=max(self.write_seconds, other.write_seconds),
            read_bytes=self.read_bytes + other.read_bytes,
            write_bytes=self.write_bytes + other.write_bytes,
            joules=self.joules + other.joules,
            assumed_joules=self.assumed_joules + other.assumed_joules,
            layers=self.layers or other.layers,
            experts=self.experts or other.experts,
            storage_failure=self.storage_failure or other.storage_failure,
            memory_layers=max(self.memory_layers, other.memory_layers),
            why_not=self.why_not or other.why_not,
        )

    def followed_by(self, later: "StepReport") -> "StepReport":
        """Return the combined report of two consecutive steps."""
        return StepReport(
            stall_seconds=self.stall_seconds + later.stall_seconds,
            read_seconds=self.read_seconds + later.read_seconds,
            write_seconds=self.write_seconds + later.write_seconds,
            read_bytes=self.read_bytes + later.read_bytes,
            write_bytes=self.write_bytes + later.write_bytes,
            joules=self.joules + later.joules,
            assumed_joules=self.assumed_joules + later.assumed_joules,
            layers=self.layers + later.layers,
            experts=self.experts + later.experts,
            storage_failure=later.storage_failure,
            memory_layers=later.memory_layers,
            why_not=later.why_not,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Measurements of one engine step that are known when the next step is planned.

    Attributes:
        end: time.perf_counter() at the step's end.
        seconds: wall time of the step, with scheduling.
        report: the workers' reports since the previous step; under asynchronous scheduling they are
            about an earlier step.
        is_blocked: a request could not get the blocks that it asked for.
        num_preempted: requests that lost their blocks to other requests.
        tokens: output tokens of the step.
        num_running, num_waiting: numbers of requests.
        used_blocks: blocks that requests hold.
        longest: tokens of the longest live request.
        num_sessions: streamed sessions.
        session_blocks: blocks that streamed sessions hold if they share none. Between two turns
            sessions keep their blocks and cannot be preempted.
        longest_beside_sessions: tokens of the longest live request that is not a session.
        is_prefill: as in the controller's signals.
    """

    end: float
    seconds: float
    report: StepReport
    is_blocked: bool
    num_preempted: int
    tokens: int
    num_running: int
    num_waiting: int
    used_blocks: int
    longest: int
    num_sessions: int = 0
    session_blocks: int = 0
    longest_beside_sessions: int = 0
    is_prefill: bool = False


class FirstPrefills:
    """Detector of steps that compute a part of a prompt for the first time.

    What is computed again after a preemption does not count, nor do drafts.

    Attributes:
        is_recent: whether one of the two latest steps is such a step. The time of the latest is not
            known before the next is planned, a step later under asynchronous scheduling.
    """

    def __init__(self) -> None:
        self.is_recent = False
        self._is_latest = False
        self._preempted: set[str] = set()

    def add(self, scheduler_output: Any, *, continues: bool) -> None:
        """Add a step that is planned; `continues` as of :meth:`DecodeStreak.continues`."""
        self._preempted.update(scheduler_output.preempted_req_ids or ())
        self._preempted -= scheduler_output.finished_req_ids
        before, self._is_latest = self._is_latest, False
        if not continues:
            drafts = scheduler_output.scheduled_spec_decode_tokens
            self._is_latest = any(
                count > 1 + len(drafts.get(name, ())) and name not in self._preempted
                for name, count in scheduler_output.num_scheduled_tokens.items()
            )
        self.is_recent = before or self._is_latest


class DecodeStreak:
    """Detector of steps that repeat the previous step with one token more for each request.

    Some requests may have got a new block for that token. A step with drafts repeats none, nor does
    the one behind it.
    """

    def __init__(self) -> None:
        self._request_ids: list[str] = []
        self._had_drafts = False
        self._computed_tokens = 0

    def continues(self, scheduler_output: Any) -> bool:
        """Return whether the step continues the streak; call it once a step.

        It does not notice requests that ended.
        """
        cached = scheduler_output.scheduled_cached_reqs
        before, num_before = self._request_ids, self._computed_tokens
        self._request_ids, self._computed_tokens = [], 0
        had_drafts, self._had_drafts = self._had_drafts, has_drafts(scheduler_output)
        if had_drafts or self._had_drafts:
            return False
        if scheduler_output.scheduled_new_reqs or cached.resumed_req_ids:
            return False
        self._request_ids = list(cached.req_ids)
        self._computed_tokens = sum(cached.num_computed_tokens)
        num_requests = len(before)
        return (
            bool(before)  # False after an empty step, or one in which a request began or resumed
            and self._request_ids == before
            and scheduler_output.total_num_scheduled_tokens == num_requests
            and self._computed_tokens == num_before + num_requests
        )


class StepWatch:
    """Tracker of live requests and of worker reports between two steps."""

    def __init__(self, block_tokens: int) -> None:
        self.is_blocked = False
        self._block_tokens = block_tokens
        self._tokens: dict[str, int] = {}
        self._sessions: set[str] = set()
        self._last_time: float | None = None
        self._pending: StepReport | None = None

    def begin_request(self, request_id: str, num_tokens: int, *, is_session: bool = False) -> None:
        self._tokens[request_id] = num_tokens
        if is_session:
            self._sessions.add(request_id)

    def update_tokens(self, request_id: str, num_tokens: int) -> None:
        """Record the number of tokens that the request has or is about to have.

        The number never falls. vLLM computes a long prompt in chunks, also after a preemption, but
        it will need blocks for all of it.
        """
        known = self._tokens.get(request_id)
        if known is not None and num_tokens > known:
            self._tokens[request_id] = num_tokens

    def record_blocked(self, request_id: str, num_tokens: int) -> None:
        """Record that there were no blocks for the request, and its number of tokens.

        A session's next turn may have made it longer.
        """
        self.is_blocked = True
        self.update_tokens(request_id, num_tokens)

    def end_request(self, request_id: str) -> None:
        self._tokens.pop(request_id, None)
        self._sessions.discard(request_id)
        if not self._tokens:
            self._last_time = None  # the idle time that follows belongs to no step

    def report(self, report: StepReport) -> None:
        self._pending = self._pending.followed_by(report) if self._pending else report

    def take_step(
        self,
        *,
        tokens: int,
        num_running: int,
        num_preempted: int,
        used_blocks: int,
        is_prefill: bool = False,
    ) -> Step | None:
        """Return the step that ends now; None if the engine was idle before."""
        now = time.perf_counter()
        last_time, self._last_time = self._last_time, now
        if last_time is None:
            return None
        longest = max(self._tokens.values(), default=0)
        step = Step(
            end=now,
            seconds=now - last_time,
            report=self._pending or StepReport(),
            is_blocked=self.is_blocked,
            # If no request was blocked, the cause was a cache reset or a lost page, not blocks.
            num_preempted=num_preempted if self.is_blocked else 0,
            tokens=tokens,
            num_running=num_running,
            num_waiting=max(0, len(self._tokens) - num_running),
            used_blocks=used_blocks,
            longest=longest,
            num_sessions=len(self._sessions),
            session_blocks=sum(
                self._tokens[session] // self._block_tokens + 1 for session in self._sessions
            ),
            longest_beside_sessions=longest if not self._sessions else self._longest_other(),
            is_prefill=is_prefill,
        )
        self._pending = None
        self.is_blocked = False
        return step

    def _longest_other(self) -> int:
        others = (self._tokens[request] for request in self._tokens.keys() - self._sessions)
        return max(others, default=0)
