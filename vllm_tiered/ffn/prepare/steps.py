# SPDX-License-Identifier: Apache-2.0
"""What `prepare` does: steps, each of which works through a model's layers, here or through Ray.

A step's work on a layer leaves a file behind, whole or not at all, so that whoever is killed finds
out which layers are done. It may run in another process, on another machine that sees the same
folder.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_tiered.errors import UnsupportedError


def _nothing() -> None:
    """There is nothing to put together."""


def _not_noted(layer: int) -> None:
    """Nobody keeps a list of layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Work on each layer.

    Attributes:
        name: for people, "neurons".
        num_layers: of the model.
        pending: layers that are not done.
        work: does a layer; for Ray it has to pickle: a :func:`functools.partial` of a module's
            function with plain values. Raises what is to stop the whole.
        note: hears, in the process that runs the steps, of a layer that is done.
        finish: puts the layers together, when all are done.
    """

    name: str
    num_layers: int
    pending: Sequence[int]
    work: Callable[[int], None]
    note: Callable[[int], None] = _not_noted
    finish: Callable[[], None] = _nothing


class Progress(Protocol):
    """Somebody who looks on."""

    def begin(self, name: str, num_layers: int, num_done: int) -> None:
        """Begin a step; some layers may be done from an earlier run."""

    def advance(self) -> None:
        """One more layer of it is done."""


class Runner(Protocol):
    """How layers are worked through."""

    def run(self, step: Step) -> Iterator[int]:
        """Do all pending layers; yield each when it is done, in any order."""


class Here:
    """One layer after the other, in this process."""

    def run(self, step: Step) -> Iterator[int]:
        for layer in step.pending:
            step.work(layer)
            yield layer


class OnRay:
    """Layers side by side, as Ray has processors for them.

    The folders have to be seen under the same names by all of its machines.

    Args:
        threads: of torch, for each layer; as many processors are asked of Ray.

    Raises:
        UnsupportedError: Ray is not installed.
    """

    def __init__(self, threads: int = 1) -> None:
        try:
            import ray
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            raise UnsupportedError(
                '--ray: Ray is not installed: pip install "vllm-tiered[ray]", or leave --ray out'
            ) from error
        self._ray: Any = ray
        self._threads = threads

    def run(self, step: Step) -> Iterator[int]:
        ray = self._ray
        is_own = not ray.is_initialized()
        if is_own:
            ray.init(log_to_driver=False, include_dashboard=False)
        try:
            remote = ray.remote(num_cpus=self._threads, max_retries=0)(_remote_work)
            # Not more at a time than run: each would hold what it was given.
            waiting = list(step.pending)
            at_most = max(1, int(ray.cluster_resources().get("CPU", 1)) // self._threads)
            running: dict[Any, int] = {}
            while waiting or running:
                while waiting and len(running) < at_most:
                    layer = waiting.pop(0)
                    running[remote.remote(step.work, layer, self._threads)] = layer
                (done, *_), _ = ray.wait(list(running), num_returns=1)
                try:
                    ray.get(done)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from error
                yield running.pop(done)
        finally:
            if is_own:
                ray.shutdown()


def _remote_work(work: Callable[[int], None], layer: int, threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    work(layer)


def run_steps(steps: Sequence[Step], runner: Runner, progress: Progress | None = None) -> None:
    """All steps in their order, each on all of its layers.

    Raises:
        What a step's work raises.
    """
    for step in steps:
        if progress:
            progress.begin(step.name, step.num_layers, step.num_layers - len(step.pending))
        for layer in runner.run(step):
            step.note(layer)
            if progress:
                progress.advance()
        step.finish()
