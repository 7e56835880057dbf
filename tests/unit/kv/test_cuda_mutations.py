# SPDX-License-Identifier: Apache-2.0
"""Mutations of the swapper on ``CudaDevice``, over a fake CUDA runtime.

The unbroken code passes, and fails without any of the waits that keep the order.
"""

import random

import pytest

from tests.fakes.cuda import SimulatedCudaDevice
from tests.fakes.kv.deferred_setups import SETUPS as DEFERRED_SETUPS
from tests.fakes.kv.driver import Driver, Setup, run_schedule
from tests.fakes.kv.mutations import Mutation, mutation_id
from tests.fakes.kv.worker_model import WorkerModel, WrongKv
from vllm_tiered.devices.cuda import bounce_copy
from vllm_tiered.devices.cuda.bounce_copy import BounceCopyWorker
from vllm_tiered.devices.cuda.device import CudaDevice
from vllm_tiered.devices.cuda.event import CudaEvent
from vllm_tiered.devices.cuda.page_id_buffer import PageIdBuffer
from vllm_tiered.devices.cuda.queue import CopyQueue
from vllm_tiered.devices.pages import PageBuffer, PageCodec
from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.page_pool import Owner, PagePool

SETUPS = (
    *DEFERRED_SETUPS,
    Setup(num_layers=9, num_far=8, block_tokens=4, sure_blocks=3, spare_pages=8),
    Setup(num_layers=7, num_far=6, block_tokens=3, sure_blocks=3, ahead=True, adaptive=True),
)
HASTES = (0.0, 0.3, 0.7, 1.0)
ENGINE_RUN_BYTES = (1 << 60, 1, 64)  # all copies by the kernel, all by copy engines, some by each


def run_all() -> dict[str, int]:
    """Run a schedule for each setup and haste; return the number of launches by kind."""
    launches = {"kernel": 0, "engine": 0}
    for number, setup in enumerate(SETUPS):
        for seed, haste in enumerate(HASTES, number):
            device = SimulatedCudaDevice(
                random.Random(seed), haste=haste, engine_run_bytes=ENGINE_RUN_BYTES[seed % 3]
            )
            driver = Driver(setup, device, poison_freed=False)
            run_schedule(driver, random.Random(seed), num_steps=30)
            assert not device.cuda.pinned, "memory stays pinned"
            assert not device.cuda.num_rerecorded, "an event meant two things"
            for kind, count in device.cuda.num_launches.items():
                launches[kind] += count
    return launches


def launch_what_waits_for_deferred_events(original):
    """Launch jobs whose events are not recorded yet; a stream does not wait for such an event."""
    return lambda self, job: True


def launch_without_waiting(original):
    def submit(self, job):
        job.after = ()
        original(self, job)

    return submit


def look_at_each_direction_once(original):
    def launch_ready(self):
        for queue in self._queues.values():
            queue.launch_ready()

    return launch_ready


def record_deferred_events_when_they_are_made(original):
    def deferred_events(self, count):
        made = original(self, count)
        for deferred_event in made:
            self._runtime.record(deferred_event.raw_event, self._runtime.compute_stream())
            deferred_event.is_recorded = True
        return made

    return deferred_events


def signal_without_recording(original):
    def signal(self, deferred_event):
        with self._changed:
            self._launch_ready()

    return signal


def compute_does_not_wait(original):
    return lambda self, event: 0.0


def compute_events_are_not_recorded(original):
    def compute_event(self):
        event = self._new_event()
        event.is_recorded = True
        return event

    return compute_event


def ids_where_the_last_ones_are(original):
    def reserve(self, length, copy):
        self._entries.clear()
        return original(self, length, copy)

    return reserve


def take_places_that_are_not_free(original):
    def find_free(self, length):
        return self._next if length <= self.num_ids - self._next else 0

    return find_free


def bounce_without_waiting(original):
    def run(self, job):
        job.after = ()
        original(self, job)

    return run


MUTATIONS = (
    (Mutation(CopyQueue, "_is_ready", launch_what_waits_for_deferred_events, WrongKv),),
    (Mutation(CopyQueue, "_submit", launch_without_waiting, AssertionError),),
    (Mutation(CudaDevice, "_launch_ready", look_at_each_direction_once, IntegrityError),),
    (
        Mutation(CudaDevice, "deferred_events", record_deferred_events_when_they_are_made, WrongKv),
        Mutation(CudaDevice, "signal", signal_without_recording, WrongKv),
    ),
    (Mutation(CudaDevice, "wait", compute_does_not_wait, WrongKv),),
    (Mutation(CudaDevice, "compute_event", compute_events_are_not_recorded, WrongKv),),
    (Mutation(PageIdBuffer, "_reserve", ids_where_the_last_ones_are, AssertionError),),
    (Mutation(PageIdBuffer, "_find_free", take_places_that_are_not_free, AssertionError),),
)


def test_unbroken_passes():
    launches = run_all()
    assert launches["kernel"] > 1000 and launches["engine"] > 1000


@pytest.mark.parametrize("mutations", MUTATIONS, ids=lambda some: mutation_id(some[0]))
def test_broken_fails(mutations, monkeypatch):
    for mutation in mutations:
        mutation.apply(monkeypatch)
    with pytest.raises(mutations[0].kind):
        run_all()


def test_the_host_never_waits_for_the_gpu(monkeypatch):
    """The host waits only at the end; all owners get draining pages, ordered after the writes."""
    handed_over = dict.fromkeys(Owner, 0)
    allocate, wait, close = PagePool.allocate, CudaEvent.wait, WorkerModel.close

    def counted(self, num_pages, owner):
        pages, after = allocate(self, num_pages, owner)
        handed_over[owner] += bool(after)
        return pages, after

    def never(self):
        raise AssertionError("the host waits")

    def closed(self):
        with monkeypatch.context() as at_the_end:
            at_the_end.setattr(CudaEvent, "wait", wait)
            close(self)

    monkeypatch.setattr(PagePool, "allocate", counted)
    monkeypatch.setattr(CudaEvent, "wait", never)
    monkeypatch.setattr(WorkerModel, "close", closed)
    run_all()
    # test_drains.py covers each of the rare cases.
    assert handed_over[Owner.STAGING] > 100 and handed_over[Owner.PARTIAL] > 10, handed_over
    assert handed_over[Owner.RESIDENT] > 0, handed_over


class CheckedDevice(SimulatedCudaDevice):
    """Device whose far pages all have checksums, so that copy threads move them."""

    def far_buffer(
        self,
        num_pages: int,
        page_bytes: int,
        verify: str = "off",
        codec: PageCodec | None = None,
    ) -> PageBuffer:
        return super().far_buffer(num_pages, page_bytes, "full", codec)


def run_bounced(num_seeds: int) -> None:
    for seed in range(num_seeds):
        device = CheckedDevice(random.Random(seed), haste=HASTES[seed % len(HASTES)])
        driver = Driver(SETUPS[seed % len(SETUPS)], device, poison_freed=False)
        try:
            run_schedule(driver, random.Random(seed), num_steps=15)
            assert not any(device.page_errors().values())
        finally:
            device.close()


def test_unbroken_passes_when_threads_copy_pages(monkeypatch):
    monkeypatch.setattr(bounce_copy, "BOUNCE_BYTES", 64)
    run_bounced(2 * len(SETUPS))


@pytest.mark.parametrize(
    "mutation",
    [Mutation(BounceCopyWorker, "_run", bounce_without_waiting, AssertionError)],
    ids=mutation_id,
)
def test_broken_fails_when_threads_copy_pages(mutation, monkeypatch):
    mutation.apply(monkeypatch)
    with pytest.raises(mutation.kind):
        run_bounced(20)
