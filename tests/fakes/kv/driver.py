# SPDX-License-Identifier: Apache-2.0
"""Driver of the engine model, the worker model and a device, for hypothesis and plain seeds."""

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.fakes.kv.engine_model import EngineModel
from tests.fakes.kv.halved_pages import HalvedPages
from tests.fakes.kv.request_model import Request, Step, Turn
from tests.fakes.kv.simulated_device import SimulatedDevice
from tests.fakes.kv.worker_model import WorkerModel
from vllm_tiered.devices.base import Device
from vllm_tiered.kv.layout import KvGeometry, KvLevels, Level, PartialBlocks
from vllm_tiered.kv.policy import POLICIES, SwapOrder, far_order, interleave


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Sizes of a model, a near budget and an engine.

    Attributes:
        sure_blocks: number of blocks that one request can always have.
        spare_pages: near pages beyond the minimum for ``sure_blocks``.
        unused_blocks: blocks to subtract from the limit, as if the far tier were too small for
            them; ``sure_blocks`` are always left.
        ahead: the engine schedules the next step before the last one has run.
        defer_frees: with ``ahead``, blocks are freed only after the steps that write them.
        adaptive: start without far layers, and have up to ``num_far`` of them while requests run.
        offloads_partial_blocks: partial blocks do not stay near; if adaptive, only at the higher
            levels.
        window_tokens: tokens that the layers of a second group see; 0 without such a group.
        has_states: a third group has a block per request for a recurrent state.
        staging_buffers: buffers that several offloaded layers need.
        num_drafts: the most drafts of speculative decoding of a request in a step.
        spare_slots: slots of a prefix store beyond one for each block; None without a store.
        halves_pages: far pages are narrower; only with blocks of several tokens.
        keeps_blocks: full blocks stay near while there are pages for them.
        by_blocks: if adaptive, the levels differ in the number of blocks.
        has_cache: the engine has a prefix cache.
        num_readers: layers behind each layer that read its KV cache.
    """

    num_layers: int = 4
    num_far: int = 3
    policy: str = "interleave"
    block_tokens: int = 2
    sure_blocks: int = 4
    spare_pages: int = 0
    unused_blocks: int = 0
    ahead: bool = False
    defer_frees: bool = False
    adaptive: bool = False
    offloads_partial_blocks: bool = False
    window_tokens: int = 0
    has_states: bool = False
    staging_buffers: int = 2
    num_drafts: int = 0
    spare_slots: int | None = None
    halves_pages: bool = False
    keeps_blocks: bool = False
    by_blocks: bool = False
    has_cache: bool = True
    num_readers: int = 0

    @property
    def codec(self) -> HalvedPages | None:
        """The codec of far pages; None if they are as near pages."""
        is_wide_enough = self.block_tokens > 1
        return HalvedPages(8 * self.block_tokens) if self.halves_pages and is_wide_enough else None

    @property
    def partial(self) -> PartialBlocks:
        """The most partial blocks of one request."""
        if not self.num_drafts:
            return PartialBlocks()
        in_doubt = self.num_drafts * (1 + self.ahead)
        return PartialBlocks.of_drafts(self.num_drafts, in_doubt, self.block_tokens)

    @property
    def num_slots(self) -> int:
        """Slots of each far region with a prefix store; 0 without one."""
        if self.spare_slots is None or self.window_tokens or self.has_states:
            return 0
        return self.usable_blocks + 1 + self.spare_slots

    @property
    def window_blocks(self) -> int:
        """The most blocks that a request holds for its window and its state."""
        if not self.window_tokens:
            return int(self.has_states)
        num_tokens = self.window_tokens - 1 + LONGEST_CHUNK * (1 + self.ahead)
        return -(-num_tokens // self.block_tokens) + 1 + self.has_states

    @property
    def sure_pages(self) -> tuple[int, int, int]:
        """Blocks, partial blocks and window blocks that one request can always have."""
        window = self.window_blocks
        return self.sure_blocks + window, self.partial.prefilling, window

    @property
    def levels(self) -> KvLevels | None:
        if not self.adaptive:
            return None
        sizes: dict[str, Any] = {
            "num_layers": self.num_layers,
            "page_bytes": 8 * self.block_tokens,
            "block_tokens": self.block_tokens,
            "max_num_far": self.num_far,
        }
        boundless = KvLevels(
            **sizes,
            near_pages=0,
            max_blocks=0,
            offloads_partial_blocks=self.offloads_partial_blocks,
            staging_buffers=self.staging_buffers,
            partial=self.partial,
        )
        if self.by_blocks:
            boundless = replace(boundless, offloads_partial_blocks=False)
        fewest = max(
            boundless.geometry(level).pages_needed(*self.sure_pages) for level in boundless.ladder
        )
        rows = 1 + -(-(fewest + self.spare_pages) // self.num_layers)
        near_pages = rows * self.num_layers
        levels = replace(boundless, near_pages=near_pages, max_blocks=near_pages)
        limits = [levels.block_limit(level, 0) for level in levels.ladder]
        levels = replace(levels, max_blocks=max(limits))
        if not self.by_blocks or not self.num_far or limits[-1] <= limits[0]:
            return levels
        return replace(levels, keeps_blocks=True, max_blocks=limits[-1])

    @property
    def order(self) -> SwapOrder:
        num_far = 0 if self.adaptive else self.num_far
        return POLICIES[self.policy](self.num_layers, num_far, self.staging_buffers)

    @property
    def geometry(self) -> KvGeometry:
        if self.levels:
            return self.levels.geometry(Level(0))
        order = self.order
        sizes: dict[str, Any] = {
            "num_layers": self.num_layers,
            "num_resident": len(order.resident),
            "num_staging_buffers": order.num_staging_buffers,
            "page_bytes": 8 * self.block_tokens,
            "block_tokens": self.block_tokens,
        }
        boundless = KvGeometry(
            **sizes,
            near_pages=0,
            partial_blocks_resident=not self.offloads_partial_blocks,
            partial=self.partial,
        )
        fewest = boundless.pages_needed(*self.sure_pages)
        return replace(boundless, near_pages=fewest + self.spare_pages)

    @property
    def usable_blocks(self) -> int:
        if self.levels:
            return self.levels.max_blocks
        return max(self.sure_pages[0], self.geometry.block_limit(0) - self.unused_blocks)


LONGEST_CHUNK = 8
"""The most tokens of a request in one step."""


class Driver:
    """Driver that adds requests, runs steps, and checks every structure after each step."""

    def __init__(self, setup: Setup, device: Device, **worker: Any) -> None:
        self.setup = setup
        levels = setup.levels
        near_pages = setup.geometry.near_pages
        if levels:
            near_pages = levels.near_pages
            worker["check_bytes"] = False
            worker["offloadable_layers"] = far_order(levels.num_layers)[: levels.max_num_far]
            worker["released"] = levels.block_limit(Level(0), 0)
            worker["orders"] = [
                interleave(levels.num_layers, num_far, setup.staging_buffers)
                for num_far in range(levels.max_num_far + 1)
            ]
        self.engine = EngineModel(
            geometry=setup.geometry,
            usable_blocks=setup.usable_blocks,
            ahead=setup.ahead,
            defer_frees=setup.defer_frees and setup.ahead,
            levels=levels,
            window_tokens=setup.window_tokens,
            window_blocks=setup.window_blocks,
            num_columns=near_pages // setup.num_layers if setup.has_states else 0,
            num_drafts=setup.num_drafts,
            num_slots=setup.num_slots,
            keeps_blocks=setup.keeps_blocks,
            has_cache=setup.has_cache,
        )
        if setup.num_drafts or setup.num_slots or setup.keeps_blocks:
            worker["check_bytes"] = False
        if setup.num_slots:
            worker["num_slots"] = setup.num_slots
        if setup.has_states:
            worker["has_states"] = True
        if setup.window_tokens:
            worker["window_tokens"] = setup.window_tokens
        self.worker = WorkerModel(
            geometry=setup.geometry,
            near_pages=near_pages,
            order=setup.order,
            num_blocks=setup.usable_blocks + 1,
            device=device,
            codec=setup.codec,
            num_readers=setup.num_readers,
            **worker,
        )
        self.pending: deque[Step] = deque()
        self.num_steps = self.num_requests = self.num_aims = 0

    @property
    def requests(self) -> list[Request]:
        return [*self.engine.running, *self.engine.holding, *self.engine.waiting]

    def free_id(self, number: int) -> str:
        """Return an id that no request has now; a request of the previous step may have had it."""
        taken = {request.request_id for request in self.requests}
        return next(
            name for at in itertools.count(number) if (name := f"request-{at}") not in taken
        )

    def add(
        self,
        request_id: str,
        *,
        family: int,
        shared: int,
        prompt: int,
        output: int,
        turns: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Add a request that shares its first ``shared`` prompt tokens with its family.

        With ``turns``, which are (prompt, output) lengths, it is a streaming session.
        """
        prompt = min(prompt, self.engine.max_tokens - 1)
        total = min(prompt + output, self.engine.max_tokens)
        self.num_requests += 1
        tokens = tuple(family if at < shared else -1000 * self.num_requests for at in range(total))
        own = -1000 * self.num_requests
        self.engine.add(
            Request(
                request_id=request_id,
                tokens=tokens,
                num_prompt=prompt,
                turns=deque(Turn(own - n, *lengths) for n, lengths in enumerate(turns, 1)),
            )
        )

    def step(self, chunk: Callable[[], int]) -> None:
        self.num_steps += 1
        step = self.engine.schedule(chunk)
        self.engine.check_integrity()
        assert self.engine.planner.num_partial <= self.engine.elastic.num_partial
        self.pending.append(step)
        if len(self.pending) > self.setup.ahead:
            self.run_oldest()

    def run_oldest(self) -> None:
        step = self.pending.popleft()
        self.worker.run(step)
        self.engine.update(step)
        self.engine.check_integrity()

    def aim(self, level_idx: int) -> None:
        """Set another target level; do nothing without ``adaptive``."""
        if self.engine.expansion:
            ladder = self.engine.expansion.levels.ladder
            self.engine.expansion.aim(ladder[level_idx % len(ladder)])
            self.num_aims += 1

    def abort(self, request: Request) -> None:
        self.engine.abort(request)
        self.engine.check_integrity()

    def run_out(self) -> None:
        """Run until every request has finished, and check that the limit's blocks are free."""
        budget = 20 + 4 * sum(len(request.tokens) for request in self.requests)
        while self.requests:
            if self.engine.holding and not self.engine.running:
                # Waiting sessions may hold all blocks. In vLLM a client must then give up.
                self.abort(self.engine.holding[-1])
            self.step(lambda: 3)
            budget -= 1
            assert budget > 0, "the engine makes no progress"
        # Let a pending change of the level end, so that the limit follows it.
        for _ in range(5 if self.setup.adaptive else 1):
            self.step(lambda: 0)
        while self.pending:
            self.run_oldest()
        elastic = self.engine.elastic
        assert not elastic.num_partial
        self.engine.admission.end_requests(())  # as the next request does when it comes
        assert elastic.released_blocks == elastic.limit == len(self.engine.pool.free)
        assert self.setup.adaptive or elastic.resident.num_cached or elastic.reserved == []

    def close(self) -> None:
        self.worker.close()
        cached = self.engine.pool.prefix_of.keys()
        kept = self.engine.kept.block_ids if self.engine.kept else ()
        self.worker.check_far(sorted(cached - self.engine.elastic.resident.block_ids - {*kept}))
        if self.engine.store:
            for slot, tag in self.engine.store.contents():
                self.worker.check_kept(slot, tag)


def run_schedule(
    driver: Driver, rng: random.Random, *, num_steps: int, turns: Sequence[int] = (0,)
) -> None:
    """Run a random schedule: requests arrive, run in chunks, skip steps, abort, and finish.

    The number of a request's further turns is drawn from ``turns``; if it is not 0, the request is
    a session.
    """
    for _ in range(num_steps):
        if rng.random() < 0.5 and len(driver.requests) < 6:
            driver.add(
                driver.free_id(rng.randrange(8)),
                family=rng.randrange(2),
                shared=rng.randrange(12),
                prompt=rng.randint(1, 12),
                output=rng.randint(1, 10),
                turns=[(rng.randint(1, 6), rng.randint(1, 6)) for _ in range(rng.choice(turns))],
            )
        if driver.setup.adaptive and rng.random() < 0.2:
            driver.aim(rng.randrange(1 << 30))
        if driver.requests and rng.random() < 0.04:
            driver.abort(rng.choice(driver.requests))
        driver.step(lambda: rng.choice((0, 1, 1, 2, 3, 5, 8, 8)))
    driver.run_out()
    driver.close()


def simulated(setup: Setup, seed: int, *, haste: float, **options: bool) -> Driver:
    """Return a driver on a :class:`SimulatedDevice`."""
    return Driver(setup, SimulatedDevice(random.Random(seed), haste=haste), **options)
