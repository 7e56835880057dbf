# SPDX-License-Identifier: Apache-2.0
"""Published files: atomic publication, verified reads, and disk errors."""

import errno
import logging
import os
import threading
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.devices.pages import PageBuffer, Pages
from vllm_tiered.devices.throttle import Throttle
from vllm_tiered.errors import BudgetError, ConfigError, IntegrityError
from vllm_tiered.storage import immutable_file, reader
from vllm_tiered.storage.direct_file import aligned_pages
from vllm_tiered.storage.immutable_file import Draft, ImmutableFile

PAGE = 64 * 1024


def filled(folder, num_pages=40, contents=None):
    """Publish a file whose page ``i`` has random bytes with seed ``i``; return its path."""
    draft = Draft(folder, num_pages, PAGE, knob="weights.storage_path")
    for page in range(num_pages):
        draft.memory[page] = content(page)
    path = folder / "file"
    draft.publish(path, contents or {"what": "test"})
    draft.close()
    return path


def content(page):
    return torch.from_numpy(np.random.default_rng(page).integers(0, 256, PAGE, dtype=np.uint8))


def near(num_pages):
    buffer = PageBuffer(aligned_pages(num_pages, PAGE, torch.device("cpu")))
    buffer.data.fill_(0x5A)
    return buffer


def run_of(first, count):
    return Pages(np.arange(first, first + count, dtype=np.int64), ascending=True)


def read(pages, first, count, buffer, slot=0):
    pages.read(run_of(first, count).ids, buffer, run_of(slot, count))


@pytest.fixture
def file(tmp_path):
    pages = ImmutableFile(filled(tmp_path))
    yield pages
    pages.close()


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(first=st.integers(0, 39), data=st.data())
def test_pages_come_back_in_their_slots(file, first, data):
    count = data.draw(st.integers(1, 40 - first))
    slot = data.draw(st.integers(0, 3))
    buffer = near(44)
    read(file, first, count, buffer, slot)
    for page in range(count):
        assert torch.equal(buffer.data[slot + page], content(first + page))
    others = [*range(slot), *range(slot + count, 44)]
    assert (buffer.data[others] == 0x5A).all()


def test_as_the_source_of_a_devices_copies(file):
    device = CpuDevice()
    buffer = near(40)
    copy = device.prepare(Direction.READ, file.buffer(), run_of(5, 20), buffer, run_of(1, 20))
    device.submit(copy).wait()
    assert torch.equal(buffer.data[1], content(5)) and torch.equal(buffer.data[20], content(24))
    assert device.use(Direction.READ).num_bytes == 20 * PAGE
    device.close()


def test_contents_come_back(tmp_path):
    contents = {"names": ["a", "ü"], "pages": [1, 2]}
    pages = ImmutableFile(filled(tmp_path, 3, contents))
    assert (pages.contents, pages.num_pages, pages.page_bytes) == (contents, 3, PAGE)
    pages.close()


# Publishing -----------------------------------------------------------------------------


def test_a_draft_has_no_name_and_leaves_nothing(tmp_path):
    draft = Draft(tmp_path, 4, PAGE, knob="k")
    draft.memory.fill_(7)
    assert not list(tmp_path.iterdir())
    draft.close()
    draft.close()
    assert not list(tmp_path.iterdir())


def test_without_unnamed_files_a_draft_takes_its_name_with_it(tmp_path, monkeypatch):
    original = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return original(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    draft = Draft(tmp_path, 4, PAGE, knob="k")
    assert [path.suffix for path in tmp_path.iterdir()] == [".draft"]
    draft.close()
    assert not list(tmp_path.iterdir())
    filled(tmp_path, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_older_file_is_replaced_under_its_readers(tmp_path):
    old = ImmutableFile(filled(tmp_path, 8))
    draft = Draft(tmp_path, 8, PAGE, knob="k")
    draft.memory.fill_(9)
    draft.publish(tmp_path / "file", {})
    draft.close()
    new = ImmutableFile(tmp_path / "file")
    for pages, expected in ((old, content(3)), (new, torch.full((PAGE,), 9, dtype=torch.uint8))):
        buffer = near(1)
        read(pages, 3, 1, buffer)
        assert torch.equal(buffer.data[0], expected)
        pages.close()


def test_it_is_the_owners_alone(tmp_path):
    assert filled(tmp_path, 1).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_refused(tmp_path, mode):
    """Its checksums may be right and its weights somebody else's."""
    path = filled(tmp_path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"other users \(mode {mode:04o}\): .*chmod go-w"):
        ImmutableFile(path)
    path.chmod(0o640)
    ImmutableFile(path).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_refused(tmp_path):
    path = filled(tmp_path)
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match=r"belongs to user id 12345, and this process is 0: "):
        ImmutableFile(path)
    assert path.exists(), "it is not ours to remove"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_what_is_no_file_is_refused_at_once(tmp_path, make):
    make(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"file is not a regular file: remove it"):
        ImmutableFile(tmp_path / "file")


def test_a_planted_pipe_is_not_waited_for_as_an_abandoned_draft(tmp_path):
    os.mkfifo(tmp_path / "x.draft")
    (tmp_path / "y.draft").touch()
    filled(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "x.draft"]


@pytest.mark.parametrize("where", ["flush", "tail"])
def test_a_disk_that_fails_while_publishing(tmp_path, monkeypatch, where):
    draft = Draft(tmp_path, 4, PAGE, knob="weights.storage_path")

    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if where == "tail":
        monkeypatch.setattr(os, "pwrite", fail)
    else:
        monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(BudgetError, match=r"cannot be published \(No space left .*storage_path"):
        draft.publish(tmp_path / "file", {})
    draft.close()
    assert not list(tmp_path.iterdir())


# Damage ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "error", "message"),
    [
        ("tail", ConfigError, "is not a file of weights, or is cut off"),
        ("version", ConfigError, "has version 9, and this vllm-tiered reads version 1"),
        ("contents", IntegrityError, "its table of contents is damaged"),
        ("checksums", IntegrityError, "its table of contents is damaged"),
        ("sizes", IntegrityError, "which its sizes do not give"),
        ("empty", ConfigError, "is cut off"),
    ],
)
def test_a_damaged_description_is_named(tmp_path, place, error, message):
    path = filled(tmp_path, 4)
    data = bytearray(path.read_bytes())
    tail = len(data) - immutable_file._TAIL.size
    if place == "tail":
        data[tail] ^= 1
    elif place == "version":
        data[tail + 8] = 9
    elif place == "contents":
        data[tail - 3] ^= 1
    elif place == "checksums":
        data[4 * PAGE] ^= 1
    elif place == "sizes":
        data[tail + 16] ^= 1
    else:
        data = bytearray()
    path.write_bytes(data)
    with pytest.raises(error, match=message):
        ImmutableFile(path)


def test_a_damaged_page_is_read_again_and_then_named(tmp_path, caplog):
    path = filled(tmp_path)
    with path.open("r+b") as damaged:
        damaged.seek(17 * PAGE + 100)
        damaged.write(b"\0\1\2\3")
    pages = ImmutableFile(path, lambda page: f"page {page} of my weights")
    with pytest.raises(IntegrityError, match="page 17 of my weights is damaged"):
        read(pages, 0, 40, near(40))
    assert caplog.text.count("reading it again") == 1
    read(pages, 18, 20, near(20))  # the other pages are intact
    pages.close()


class Disk:
    """Replacement of ``os.preadv`` that counts calls and fails where the test says so."""

    def __init__(self, monkeypatch, fail):
        self.calls = 0
        self._original = os.preadv
        self._fail = fail
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, fd, buffers, offset):
        self.calls += 1
        result = self._fail(self.calls)
        return self._original(fd, buffers, offset) if result is None else result


def test_an_error_that_goes_away_costs_nothing(file, monkeypatch, caplog):
    def once(call):
        if call == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    disk = Disk(monkeypatch, once)
    buffer = near(40)
    read(file, 0, 40, buffer)
    assert all(torch.equal(buffer.data[page], content(page)) for page in range(40))
    assert disk.calls == 3 + 16, "the pages of a request of 1 MiB once more, one by one"
    assert "cannot be read (Input/output error)" in caplog.text


def test_an_error_that_stays_is_raised_where_the_model_waits(file, monkeypatch):
    def always(call):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    Disk(monkeypatch, always)
    device = CpuDevice()
    event = device.copy(Direction.READ, file.buffer(), run_of(0, 4), near(4), run_of(0, 4))
    with pytest.raises(IntegrityError, match=r"page 0 cannot be read \(Input/output error\)"):
        device.wait(event)
    device.close()


def test_a_file_cut_off_after_it_was_opened(file, monkeypatch):
    os.truncate(file.path, 10 * PAGE)
    with pytest.raises(IntegrityError, match="is cut off"):
        read(file, 0, 40, near(40))


def test_a_silent_disk_is_waited_for_and_said(file, monkeypatch, caplog):
    monkeypatch.setattr(reader, "SILENCE_SECONDS", 0.02)
    awake = threading.Event()
    Disk(monkeypatch, lambda call: awake.wait(timeout=60) and None)
    said = reader.logger.warning

    def warning(*args):
        said(*args)
        awake.set()

    monkeypatch.setattr(reader.logger, "warning", warning)
    buffer = near(4)
    with caplog.at_level(logging.WARNING):
        read(file, 2, 4, buffer)
    assert torch.equal(buffer.data[3], content(5))
    assert awake.is_set() and "silent for" in caplog.text


def test_reads_overlap(file, monkeypatch):
    """All three requests, of at most 1 MiB each, are in flight before the first is answered."""
    gate = threading.Barrier(3)

    def meet(call):
        gate.wait(timeout=60)

    Disk(monkeypatch, meet)
    read(file, 0, 40, near(40))


def together(device, file, buffer, *parts):
    """Queue a read of each part, (first page, number), to the same places; return their events."""
    copies = [
        device.prepare(Direction.READ, file.buffer(), run_of(*part), buffer, run_of(*part))
        for part in parts
    ]
    return device.submit_together([(one, ()) for one in copies])


def test_reads_that_are_queued_together_overlap(file, monkeypatch):
    gate = threading.Barrier(2)

    def meet(call):
        gate.wait(timeout=60)

    Disk(monkeypatch, meet)
    device, buffer = CpuDevice(), near(40)
    for event in together(device, file, buffer, (0, 4), (10, 4)):
        device.wait(event)
    assert all(torch.equal(buffer.data[page], content(page)) for page in (0, 3, 10, 13))
    assert device.use(Direction.READ).num_bytes == 8 * PAGE
    device.close()


def test_with_a_throttle_they_do_not(file, monkeypatch):
    reads: list[int] = []
    Disk(monkeypatch, reads.append)
    device = CpuDevice(throttles={Direction.READ: Throttle(1e9)})
    begun: list[int] = []
    begin = device.thread_class.begin

    def counting(thread, job):
        begun.append(len(reads))
        begin(thread, job)

    monkeypatch.setattr(device.thread_class, "begin", counting)
    for event in together(device, file, near(40), (0, 4), (10, 4)):
        device.wait(event)
    assert begun == [0, 1]
    device.close()


def test_when_one_of_them_cannot_begin_none_completes(file, monkeypatch):
    def fail(*args):
        raise RuntimeError("no thread")

    monkeypatch.setattr(file, "begin_read", fail)
    device = CpuDevice()
    for event in together(device, file, near(40), (0, 4), (10, 4)):
        with pytest.raises(RuntimeError, match="no thread"):
            device.wait(event)
    device.close()


def test_a_read_that_fails_is_said_when_all_have_ended(file, monkeypatch):
    """Otherwise the others would still write to memory that may be freed."""
    awake = threading.Event()

    def first_fails(call):
        if call in (1, 2):  # the first read, and its first page again
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        awake.wait(timeout=60)

    monkeypatch.setattr(file._reader._pool, "size", 1)  # one after the other
    Disk(monkeypatch, first_fails)
    device, buffer = CpuDevice(), near(40)
    failed, other = together(device, file, buffer, (0, 4), (10, 4))
    for event in (failed, other):
        with pytest.raises(IntegrityError, match="cannot be read"):
            device.wait(event)
    assert not torch.equal(buffer.data[10], content(10))
    awake.set()
    device.close()  # it waits for the thread
    assert torch.equal(buffer.data[10], content(10))
    assert not device._threads[Direction.READ]._begun


def test_a_store_that_does_not_begin_reads_reads_nothing_after_a_failure(file, monkeypatch):
    """Its event is over then, and its target may have another owner."""

    def always(call):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(type(file), "begins_reads", False)
    disk = Disk(monkeypatch, always)
    device, buffer = CpuDevice(), near(40)
    for event in together(device, file, buffer, (0, 4), (10, 4)):
        with pytest.raises(IntegrityError, match="page 0 cannot be read"):
            device.wait(event)
    device.close()
    assert disk.calls == 2  # the first read, and its first page again


def test_a_read_that_has_to_wait_begins_later(file):
    device, buffer = CpuDevice(), near(40)
    (gate,) = device.deferred_events(1)
    parts = [
        device.prepare(Direction.READ, file.buffer(), run_of(*part), buffer, run_of(*part))
        for part in ((0, 4), (10, 4), (20, 4))
    ]
    events = device.submit_together([(parts[0], ()), (parts[1], (gate,)), (parts[2], ())])
    device.wait(events[0])
    assert not events[1].done() and torch.equal(buffer.data[3], content(3))
    assert not torch.equal(buffer.data[10], content(10))
    device.signal(gate)
    for event in events[1:]:
        device.wait(event)
    assert all(torch.equal(buffer.data[page], content(page)) for page in (10, 13, 20, 23))
    device.close()


def test_a_draft_gives_its_memory_back_and_keeps_its_contents(tmp_path):
    draft = Draft(tmp_path, 40, PAGE, knob="weights.storage_path")
    for page in range(40):
        draft.memory[page] = content(page)
    draft.expect_reads(scattered=True)
    resident = resident_bytes(draft.memory)
    draft.write_back(0, 30 * PAGE)
    assert resident_bytes(draft.memory) == resident - 30 * PAGE
    assert all(torch.equal(draft.memory[page], content(page)) for page in range(40))
    draft.close()


def resident_bytes(memory):
    """Return the bytes of a mapping that this process has in its page tables."""
    address = memory.data_ptr()
    lines = iter(Path("/proc/self/smaps").read_text(encoding="ascii").splitlines())
    for line in lines:
        begin, _, rest = line.partition("-")
        if rest and int(begin, 16) <= address < int(rest.split()[0], 16):
            return next(int(of.split()[1]) << 10 for of in lines if of.startswith("Rss:"))
    raise AssertionError("no such mapping")


def test_it_is_not_written_to(file):
    with pytest.raises(IntegrityError, match="is published"):
        file.write(near(1), np.array([0]), np.array([0]))
    with pytest.raises(IntegrityError, match="is published"):
        file.buffer().discard(0, 1)
