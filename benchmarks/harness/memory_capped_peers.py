# SPDX-License-Identifier: Apache-2.0
"""Peers under a memory limit: their files, and the most weights that each can keep in memory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import peers
from benchmarks.harness import memory_capped
from benchmarks.harness.cache import REPO_ROOT
from benchmarks.harness.memory_limit import drop_cached, run_limited
from benchmarks.harness.progress import Step
from benchmarks.harness.runner import MeasurementError

_TIMEOUT_S = 1800
_SHARE_STEP = 0.04
"""Step by which the share in memory falls after a peer is killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerRuns:
    """Runs of the peers on one model.

    Attributes:
        python: the interpreter that has their packages.
        folder: where their files are kept.
        largest_share: share of the weights in memory that each peer tries first.
    """

    python: str
    model: Path
    folder: Path
    load: memory_capped.Load
    largest_share: float = 0.5

    def commands(
        self, names: Sequence[str], limit_bytes: int | None, step: Step
    ) -> tuple[dict[str, list[str]], dict[str, str]]:
        """Return the command lines of the peers that run here, and why the others do not.

        A peer that cannot make its files or does not run within the limit counts as one of the
        others.
        """
        skipped = lacking(names, self.python)
        commands: dict[str, list[str]] = {}
        for name in names:
            if name not in skipped:
                try:
                    self.prepare(name)
                    commands[name] = self.fitting_command(name, limit_bytes)
                except MeasurementError as error:
                    skipped[name] = str(error)
            step(f"{name} is skipped: {skipped[name]}" if name in skipped else f"{name} runs here")
        return commands, skipped

    def prepare(self, name: str) -> None:
        """Let a peer make its files, without a memory limit.

        Raises MeasurementError, with the end of its log, if it cannot.
        """
        environment = {**os.environ, "PYTHONPATH": str(REPO_ROOT)}
        try:
            outcome = run_limited(
                self.command(name, 0.0, prepare=True),
                None,
                timeout_s=_TIMEOUT_S,
                env=environment,
                cwd=REPO_ROOT,
            )
        except subprocess.TimeoutExpired as error:
            raise MeasurementError(f"{name} took more than {_TIMEOUT_S} s to prepare") from error
        if outcome.returncode:
            raise MeasurementError(f"{name} could not prepare its files:\n{outcome.output[-3000:]}")

    def fitting_command(self, name: str, limit_bytes: int | None) -> list[str]:
        """Return a peer's command with the largest share of weights in memory that fits the limit.

        Raises MeasurementError if no share runs.
        """
        takes_share = peers.PEERS[name].uses_resident_share
        share = self.largest_share
        while True:
            drop_cached([self.folder, self.model])
            try:
                memory_capped.measure(
                    name, self.command(name, share, new_tokens=2), limit_bytes, self.load.threads
                )
                return self.command(name, share)
            except MeasurementError:
                share -= _SHARE_STEP
                if not takes_share or share < 0:
                    raise

    def command(
        self, name: str, share: float, *, new_tokens: int | None = None, prepare: bool = False
    ) -> list[str]:
        """Return a peer's command line."""
        return peers.command(
            name,
            self.python,
            model=self.model,
            work=self.folder / name,
            threads=self.load.threads,
            prompt_tokens=self.load.prompt_tokens,
            new_tokens=new_tokens or self.load.new_tokens,
            resident_share=share,
            batch=self.load.batch,
            prepare=prepare,
        )


def lacking(names: Sequence[str], python: str) -> dict[str, str]:
    """Return those of these peers that cannot run here, and why.

    Raises ValueError, naming the known peers, for an unknown name.
    """
    unknown = [name for name in names if name not in peers.PEERS]
    if unknown:
        raise ValueError(f"no peer {unknown[0]!r}; there are: {', '.join(peers.PEERS)}")
    found = peers.available(python)
    return {name: why for name in names if (why := found[name]) is not None}
