# SPDX-License-Identifier: Apache-2.0
"""Steps of `prepare`, which process a model's layers in this process or through Ray.

A step's work writes one file for each layer atomically, so that after a kill the next call knows
which layers are done. The work may run in another process, or on another machine that has the same
folder.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_tiered.errors import UnsupportedError


def _nothing() -> None:
    """Do nothing when all layers are done."""


def _not_noted(layer: int) -> None:
    """Do nothing when a layer is done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Work to do on each layer.

    Attributes:
        name: name for progress messages, such as "neurons".
        num_layers: layers of the model.
        pending: layers that are not done.
        work: processes one layer. For Ray it must be picklable: a :func:`functools.partial` of a
            module's function with plain values. An exception stops all steps.
        note: called with each finished layer, in the process that runs the steps.
        finish: called when all layers are done.
    """

    name: str
    num_layers: int
    pending: Sequence[int]
    work: Callable[[int], None]
    note: Callable[[int], None] = _not_noted
    finish: Callable[[], None] = _nothing


class Progress(Protocol):
    """Observer of the steps' progress."""

    def begin(self, name: str, num_layers: int, num_done: int) -> None:
        """Begin a step; some layers may be done from an earlier run."""

    def advance(self) -> None:
        """Count one more finished layer of the step."""


class Runner(Protocol):
    """Strategy that processes the layers of a step."""

    def run(self, step: Step) -> Iterator[int]:
        """Process all pending layers; yield each when it is done, in any order."""


class Here:
    """Runner that processes one layer after the other in this process."""

    def run(self, step: Step) -> Iterator[int]:
        for layer in step.pending:
            step.work(layer)
            yield layer


class OnRay:
    """Runner that processes layers in parallel on Ray, as many as its processors allow.

    All of Ray's machines must have the folders under the same paths. A layer runs on one thread.

    Raises:
        UnsupportedError: Ray is not installed.
    """

    def __init__(self) -> None:
        try:
            import ray
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            raise UnsupportedError(
                '--ray: Ray is not installed: pip install "vllm-tiered[ray]", or leave --ray out'
            ) from error
        self._ray: Any = ray

    def run(self, step: Step) -> Iterator[int]:
        ray = self._ray
        is_own = not ray.is_initialized()
        if is_own:
            ray.init(log_to_driver=False, include_dashboard=False)
        try:
            remote = ray.remote(num_cpus=1, max_retries=0)(_remote_work)
            # Submit no more tasks than can run: each submitted task holds its arguments.
            waiting = list(step.pending)
            at_most = max(1, int(ray.cluster_resources().get("CPU", 1)))
            running: dict[Any, int] = {}
            while waiting or running:
                while waiting and len(running) < at_most:
                    layer = waiting.pop(0)
                    running[remote.remote(step.work, layer)] = layer
                (done, *_), _ = ray.wait(list(running), num_returns=1)
                try:
                    ray.get(done)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from error
                yield running.pop(done)
        finally:
            if is_own:
                ray.shutdown()


def _remote_work(work: Callable[[int], None], layer: int) -> None:
    import torch

    torch.set_num_threads(1)
    work(layer)


def run_steps(steps: Sequence[Step], runner: Runner, progress: Progress | None = None) -> None:
    """Run all steps in order, each on all of its pending layers.

    Raises:
        Exception: a step's work raised it.
    """
    for step in steps:
        if progress:
            progress.begin(step.name, step.num_layers, step.num_layers - len(step.pending))
        for layer in runner.run(step):
            step.note(layer)
            if progress:
                progress.advance()
        step.finish()
