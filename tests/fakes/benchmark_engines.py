# SPDX-License-Identifier: Apache-2.0
"""Fake engines for benchmarks: they run without vLLM and record specifications and steps."""

from contextlib import contextmanager
from pathlib import Path

from tests.fixtures.rounds import make_round

TOKENS = ((1, 2, 3), (4,))


class FakeEngine:
    """Fake engine that answers a round at once with `answer(spec, requests)`."""

    def __init__(self, spec, answer, log_path):
        self.spec = spec
        self.log_path = log_path
        self.rounds = []
        self._answer = answer

    def run(self, requests):
        self.rounds.append(list(requests))
        return self._answer(self.spec, requests)

    def reset_prefix_cache(self):
        self.rounds.append([])


class FakeEngines:
    """Replacement for `runner.engines`; `started` lists all engines that it has started."""

    def __init__(self, answer, log_path=Path("unused")):
        self.started = []
        self._answer = answer
        self._log_path = log_path

    @contextmanager
    def __call__(self, specs, warmup, step):
        group = [FakeEngine(spec, self._answer, self._log_path) for spec in specs]
        self.started += group
        for spec in specs:
            step(f"engine up: {spec.label}")
        yield group

    @property
    def specs(self):
        return [engine.spec for engine in self.started]


def answer_in(seconds_of, tokens_of=lambda spec: TOKENS):
    """Return an answer function: rounds take `seconds_of(spec)` and give `tokens_of(spec)`."""

    def answer(spec, requests):
        return make_round(
            spec.label,
            seconds=seconds_of(spec),
            tiered=spec.tiered is not None,
            output_token_ids=tokens_of(spec),
            levels=[(1, 2.0)] if spec.tiered else (),
            copied_gb=2.0 if spec.copies_gb_per_s else None,
        )

    return answer
