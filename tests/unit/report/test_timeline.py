# SPDX-License-Identifier: Apache-2.0
"""The timeline file: added records are read back; it stays small and survives its engine."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.timelines import adaptive_run, expert_use, header, pipeline_step, step
from vllm_tiered.errors import ConfigError
from vllm_tiered.report import writer
from vllm_tiered.report.codec import encode
from vllm_tiered.report.reader import read_timeline
from vllm_tiered.report.records import (
    Event,
    LayerTimeline,
    Machine,
    StepSample,
    Window,
    coarsen,
    merge_expert_use,
    merge_windows,
)
from vllm_tiered.report.writer import TimelineWriter

ROOT = Path(__file__).resolve().parents[3]
COUNTS = ("num_steps", "tokens", "read_bytes", "write_bytes", "num_preempted", "level_changes")
SECONDS = ("seconds", "stall_seconds", "read_seconds", "write_seconds")

STEPS = st.builds(
    step,
    seconds=st.floats(0.001, 2),
    tokens=st.integers(0, 64),
    stall_seconds=st.floats(0, 1),
    read_bytes=st.integers(0, 1 << 40),
    far_layers=st.integers(0, 3),
    used_blocks=st.integers(0, 1000),
    num_preempted=st.integers(0, 3),
)


@pytest.fixture(autouse=True)
def _writes_at_once(monkeypatch):
    monkeypatch.setattr(writer, "FLUSH_SECONDS", 0.002)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "timeline.jsonl"


def wait_for(condition, *, seconds=120.0):
    """The writer's thread takes a moment; a condition that never holds fails the test."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def one_after_another(steps, *, pause=0.0):
    """The steps with end times that follow from their lengths."""
    end = 0.0
    for each in steps:
        end += each.seconds + pause
        yield each._replace(time=end)


# What is written is what is read --------------------------------------------------------------


def test_a_run_is_read_back(path):
    timeline = TimelineWriter(path, header())
    for k in range(5):
        timeline.add_step(step(0.1 * k + 0.05, used_blocks=10 * k, far_layers=k // 4))
    timeline.add_event(0.3, "grow", "0 -> 1: requests wait")
    timeline.add_layer_timeline(pipeline_step())
    timeline.add_expert_use(expert_use(0.4))
    timeline.close()
    found = read_timeline(path)
    assert found.header == header()
    assert found.experts == (expert_use(0.4),)
    assert found.is_closed
    assert found.events == (Event(time=0.3, kind="grow", text="0 -> 1: requests wait"),)
    (layers,) = found.layers
    assert layers.step == 4711
    assert [span.layer for span in layers.layers] == list(range(30))
    assert layers.layers[2].read_end == pytest.approx(pipeline_step().layers[2].read_end, abs=1e-6)
    assert layers.layers[0].read_start is None
    first, second = found.windows  # a new one begins at 0.25 s
    assert (first.num_steps, second.num_steps) == (2, 3)
    assert (first.tokens, second.tokens) == (32, 48)
    assert (first.start, first.end, second.end) == (0.02, 0.15, 0.45)
    assert (first.used_blocks, second.used_blocks) == (5, 30)  # means
    assert (first.far_layers, second.far_layers) == (0, 1)  # the last one
    assert (first.level_changes, second.level_changes) == (0, 1)


def test_every_line_is_json_with_a_type(path):
    timeline = TimelineWriter(path, header())
    timeline.add_step(step(0.1))
    timeline.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["type"] for line in lines] == ["header", "window", "end"]
    assert lines[0]["version"] == 5
    assert lines[0]["machine"]["cores"] == 2


def test_numbers_of_numpy_are_numbers(path):
    timeline = TimelineWriter(path, header(num_blocks=np.int64(7)))
    timeline.add_step(step(np.float64(0.1), tokens=np.int64(5), used_blocks=np.int32(3)))
    timeline.close()
    found = read_timeline(path)
    assert found.header.num_blocks == 7
    assert (found.windows[0].tokens, found.windows[0].used_blocks) == (5, 3)


def test_this_machine_is_described():
    machine = Machine.here()
    assert machine.cpu
    assert machine.cores == os.cpu_count()
    assert machine.memory_bytes > 1 << 28


@given(st.lists(STEPS, min_size=1, max_size=60), st.floats(0.01, 100), st.floats(0.01, 100))
def test_windows_merge_to_the_same_whole_however_they_are_cut(steps, slot, coarser):
    single = [Window.from_step(each, level_changed=False) for each in one_after_another(steps)]
    whole = merge_windows(single)
    twice = merge_windows(coarsen(coarsen(single, slot), coarser))
    assert [getattr(twice, name) for name in COUNTS] == [getattr(whole, name) for name in COUNTS]
    for name in (*SECONDS, "used_blocks", "longest_seconds", "start", "end"):
        assert getattr(twice, name) == pytest.approx(getattr(whole, name))
    assert twice.far_layers == steps[-1].far_layers
    assert whole.tokens == sum(each.tokens for each in steps)


# Bounded ------------------------------------------------------------------------------------


@pytest.mark.parametrize("pause", [0.0, 5.0], ids=["busy", "sparse"])
def test_the_file_stays_small_and_still_tells_the_whole_run(path, pause):
    steps = list(one_after_another([step(far_layers=k // 500) for k in range(3000)], pause=pause))
    timeline = TimelineWriter(path, header(), window_seconds=0.05, max_windows=64)
    for k, each in enumerate(steps):
        timeline.add_step(each)
        if k % 100 == 99:  # as if half a second had passed
            wait_for(lambda: not timeline._queue)
    timeline.close()
    found = read_timeline(path)
    assert len(found.windows) <= 64 + 100  # what one look at the queue may add
    assert not list(path.parent.glob("*.tmp"))
    whole = merge_windows(found.windows)
    assert (whole.num_steps, whole.tokens, whole.level_changes) == (3000, 48000, 5)
    assert whole.start == pytest.approx(steps[0].time - 0.03)
    assert whole.end == pytest.approx(steps[-1].time)
    ends = [window.end for window in found.windows]
    assert ends == sorted(ends)


def test_events_and_steps_in_detail_are_thinned_where_they_are_old(path, monkeypatch):
    monkeypatch.setattr(writer, "MAX_EVENTS", 64)
    timeline = TimelineWriter(path, header())
    for k in range(1000):
        timeline.add_event(float(k), "grow", "more")
        timeline.add_layer_timeline(pipeline_step(num_layers=4, far_layers=2))
        if k % 10 == 9:
            wait_for(lambda: not timeline._queue)
    timeline.close()
    found = read_timeline(path)
    assert len(found.events) <= 64 + 10
    assert len(found.layers) <= writer.MAX_LAYER_TIMELINES + 10
    times = [event.time for event in found.events]
    assert times[0] == 0.0 and times[-1] == 999.0
    newest = times[-1] - times[-10]
    assert newest == 9.0


def test_the_use_of_experts_of_long_ago_is_merged_and_stays_whole(path, monkeypatch):
    monkeypatch.setattr(writer, "MAX_EXPERT_USES", 16)
    timeline = TimelineWriter(path, header())
    uses = [expert_use(float(k + 1), num_layers=3) for k in range(200)]
    for k, use in enumerate(uses):
        timeline.add_expert_use(use)
        if k % 5 == 4:
            wait_for(lambda: not timeline._queue)
    timeline.close()
    found = read_timeline(path).experts
    assert len(found) <= 16 + 5
    assert merge_expert_use(found) == merge_expert_use(uses)
    times = [use.time for use in found]
    assert times == sorted(times) and times[-1] == 200.0 and len(times) >= 8


@pytest.mark.slow
def test_a_day_fits_in_a_few_megabytes():
    """An engine that is never idle: a window a second, steps in detail and events all day.

    The file is largest right before its old part is merged, so its size is followed throughout.
    """
    contents = writer._Contents(window_seconds=1.0, max_windows=writer.MAX_WINDOWS)
    detail = pipeline_step()
    file_bytes = largest_bytes = all_bytes = 0
    for k in range(86_400):
        end = float(k + 1)
        added: list[writer.Added] = [step(end, seconds=1.0)]
        if k % 64 == 0:
            added.append(detail)
        added.append(expert_use(end, num_layers=48))
        if k % 20 == 0:
            added.append(Event(time=end, kind="grow", text="12 -> 13 far layers: requests wait"))
        new = contents.add(added, closing=False)
        new_bytes = sum(len(encode(record)) for record in new)
        file_bytes += new_bytes
        all_bytes += new_bytes
        largest_bytes = max(largest_bytes, file_bytes)
        if contents.is_full:
            contents.thin()
            file_bytes = sum(len(encode(record)) for record in contents.records())
    assert largest_bytes < 3.5e6 < 10e6 < all_bytes
    records = contents.records()
    windows = [record for record in records if isinstance(record, Window)]
    layers = [record for record in records if isinstance(record, LayerTimeline)]
    events = [record for record in records if isinstance(record, Event)]
    whole = merge_windows(windows)
    assert (whole.num_steps, whole.start) == (86_400 - 1, 0.0)  # the last window is still open
    assert len(windows) < writer.MAX_WINDOWS and len(layers) < writer.MAX_LAYER_TIMELINES
    assert writer.MAX_EVENTS // 2 <= len(events) < writer.MAX_EVENTS
    assert events[0].time == 1.0 and events[-1].time > 86_400 - 21


# Cut off ------------------------------------------------------------------------------------

DYING_ENGINE = """
import sys, time
from tests.fixtures.timelines import header, step
from vllm_tiered.report.writer import TimelineWriter
timeline = TimelineWriter(sys.argv[1], header())
for k in range(10):
    timeline.add_step(step(0.03 * (k + 1)))
time.sleep(60)
"""


def test_a_killed_engine_leaves_its_records(path):
    with subprocess.Popen([sys.executable, "-c", DYING_ENGINE, path], cwd=ROOT) as engine:
        try:
            # It is idle: only the writer's own clock writes its last steps to the file.
            wait_for(lambda: path.exists() and path.read_text().count('"window"') == 2)
        finally:
            engine.send_signal(signal.SIGKILL)
    found = read_timeline(path)
    assert merge_windows(found.windows).num_steps == 10
    assert not found.is_closed


def test_a_last_line_cut_anywhere_is_the_end(path):
    timeline = TimelineWriter(path, header())
    for end in (0.1, 0.4):
        timeline.add_step(step(end))
    timeline.close()
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, whole.rindex(b'{"type":"end"')) + 1
    before = whole.rindex(b"\n", 0, last - 1) + 1
    for cut in range(before, last):
        path.write_bytes(whole[:cut])
        found = read_timeline(path)
        assert len(found.windows) == 1
        assert not found.is_closed


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param(b"", "is empty", id="empty"),
        pytest.param(b'{"type":"header","format":"vllm-ti', "cut off in its first", id="cut"),
        pytest.param(b"hello\nworld\n", "line 1: no JSON", id="text"),
        pytest.param(b"\x89PNG\r\n\x1a\n\0\0\n", "line 1: no JSON", id="binary"),
        pytest.param(b'{"a": 1}\n', "line 1: not a record of a timeline", id="other_json"),
        pytest.param(b"[1, 2]\n", "line 1: not a record of a timeline", id="json_list"),
        pytest.param(b'{"type":"end","time":1}\n', "line 1: not the header", id="no_header"),
        pytest.param(b'{"type":"header","cwd":"/"}\n', "line 1: not the header", id="other_log"),
    ],
)
def test_a_file_that_is_not_a_timeline_is_named(path, content, says):
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        read_timeline(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_named(path):
    with pytest.raises(ConfigError, match=r"cannot be read: No such file"):
        read_timeline(path)


def test_another_version_is_refused_with_both_versions(path):
    path.write_text(encode(header(vllm_tiered="9.9")).replace('"version":5', '"version":1'))
    with pytest.raises(ConfigError, match=r"format version 1, this .* reads 5: .*\(9\.9\)"):
        read_timeline(path)


WINDOW = encode(Window.from_step(step(0.1), level_changed=False))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        pytest.param(WINDOW[: len(WINDOW) // 2] + "\n", "no JSON", id="torn"),
        pytest.param('{"type":"windows"}\n', "not a record", id="unknown_type"),
        pytest.param(WINDOW.replace('"tokens":16,', ""), "Window without tokens", id="missing"),
        pytest.param(WINDOW.replace('"end"', '"x":1,"end"'), "unknown x", id="unknown_field"),
        pytest.param(WINDOW.replace(":16,", ':"16",', 1), "tokens is '16'", id="text"),
        pytest.param(WINDOW.replace(":16,", ":1.5,", 1), "tokens is 1.5", id="fraction"),
        pytest.param(WINDOW.replace(":16,", ":NaN,", 1), "NaN is not a finite number", id="nan"),
        pytest.param('{"type":"layers","step":1,"time":0,"layers":3}\n', "layers is 3", id="spans"),
    ],
)
def test_a_damaged_line_before_the_last_is_named(path, line, says):
    assert line != WINDOW
    path.write_text(encode(header()) + WINDOW + line + WINDOW)
    with pytest.raises(ConfigError, match=rf"line 3: .*{says}"):
        read_timeline(path)


# Where it is written ------------------------------------------------------------------------


def refused(path):
    with pytest.raises(ConfigError) as caught:
        TimelineWriter(path, header())
    assert "tiered.report.path is" in str(caught.value)
    return str(caught.value)


def test_a_path_that_cannot_be_written_is_refused_with_the_reason(tmp_path):
    assert "No such file or directory" in refused(tmp_path / "absent" / "t.jsonl")
    assert "not a regular file" in refused(tmp_path)
    assert "not a regular file" in refused("/dev/null")
    (tmp_path / "file").write_text("")
    assert "Not a directory" in refused(tmp_path / "file" / "t.jsonl")


def test_a_file_that_is_no_timeline_is_not_touched(path):
    path.write_text("my thesis\n")
    assert "would be lost" in refused(path)
    assert path.read_text() == "my thesis\n"


def test_the_timeline_of_the_previous_run_is_kept(path):
    for model in ("first", "second"):
        timeline = TimelineWriter(path, header(model=model))
        timeline.add_step(step(0.1))
        timeline.close()
    assert read_timeline(path).header.model == "second"
    assert read_timeline(f"{path}.1").header.model == "first"


def test_a_second_engine_is_refused_while_the_first_writes(path):
    timeline = TimelineWriter(path, header(), max_windows=2)
    assert "another engine writes it" in refused(path)
    for end in (1.0, 2.0, 3.0):
        timeline.add_step(step(end))
    wait_for(lambda: path.read_text().count('"window"') == 1)  # the file was written again
    assert "another engine writes it" in refused(path)
    timeline.close()
    assert merge_windows(read_timeline(path).windows).num_steps == 3
    TimelineWriter(path, header()).close()


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    timeline = TimelineWriter(tmp_path / "link", header(), max_windows=2)
    for k in range(20):
        timeline.add_step(step(float(k + 1)))
    timeline.close()
    assert (tmp_path / "link").is_symlink()
    assert merge_windows(read_timeline(tmp_path / "target").windows).num_steps == 20


# Never in the way ---------------------------------------------------------------------------

FULL_DISK = """
import resource, sys, time
from tests.fixtures.timelines import header, step
from vllm_tiered.report.reader import read_timeline
from vllm_tiered.report.writer import TimelineWriter
timeline = TimelineWriter(sys.argv[1], header())
timeline.add_step(step(0.1))
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
while timeline._thread.is_alive():
    timeline.add_event(0.5, "grow", "x" * 500)
    time.sleep(0.01)
for k in range(100):
    timeline.add_step(step(0.03 * k))
timeline.close()
assert not timeline._queue
assert not read_timeline(sys.argv[1]).is_closed
"""


def test_a_disk_that_refuses_ends_the_timeline_and_nothing_else(path):
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, path], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the timeline ends here, serving goes on") == 1
    assert "File too large" in done.stderr


def test_a_failing_rename_leaves_the_file_as_it_was(path, monkeypatch):
    def refuse(*_):
        raise OSError(30, "Read-only file system")

    warnings = []
    monkeypatch.setattr(writer.logger, "warning", lambda text, *args: warnings.append(text % args))
    timeline = TimelineWriter(path, header(), max_windows=2)
    timeline.add_step(step(1.0))
    wait_for(lambda: '"window"' in path.read_text())
    monkeypatch.setattr(os, "replace", refuse)
    timeline.add_step(step(2.0))
    wait_for(lambda: not timeline._thread.is_alive())
    timeline.close()
    assert merge_windows(read_timeline(path).windows).num_steps == 1
    assert not list(path.parent.glob("*.tmp"))
    (warning,) = warnings
    assert "Read-only file system" in warning


def test_a_disk_that_hangs_holds_up_neither_steps_nor_memory(path, monkeypatch):
    write_lines, disk_is_back = writer._write_lines, threading.Event()

    def hang(*args):
        assert disk_is_back.wait(30)
        write_lines(*args)

    monkeypatch.setattr(writer, "_MAX_QUEUED", 100)
    timeline = TimelineWriter(path, header())
    monkeypatch.setattr(writer, "_write_lines", hang)
    timeline.add_event(0.0, "grow", "the thread is busy with this one")
    wait_for(lambda: not timeline._queue)
    for k in range(1000):
        timeline.add_step(step(0.03 * (k + 1)))
    assert len(timeline._queue) == 100
    disk_is_back.set()
    timeline.close()
    whole = merge_windows(read_timeline(path).windows)
    assert whole.num_steps == 100
    assert whole.end == pytest.approx(30.0)  # the newest


def test_closing_twice_and_adding_more_does_nothing(path):
    timeline = TimelineWriter(path, header())
    timeline.add_step(step(0.1))
    timeline.close()
    timeline.close()
    content = path.read_bytes()
    timeline.add_step(step(0.2))
    timeline.add_event(0.3, "grow", "late")
    timeline.add_layer_timeline(pipeline_step())
    assert not timeline._queue
    assert path.read_bytes() == content


def test_a_step_costs_the_engine_little(path):
    """10 us are 0.03 % of a step of 30 ms; measured 1.2. The best of many rounds counts."""
    timeline = TimelineWriter(path, header())
    rounds = []
    for _ in range(30):
        begin = time.perf_counter()
        for k in range(100):
            timeline.add_step(step_as_an_engine_makes_it(0.03 * k))
        rounds.append((time.perf_counter() - begin) / 100)
    timeline.close()
    assert min(rounds) < 10e-6


def step_as_an_engine_makes_it(end):
    return StepSample(
        time=end,
        seconds=0.03,
        tokens=16,
        stall_seconds=0.0,
        read_seconds=0.01,
        read_bytes=1 << 24,
        write_seconds=0.001,
        write_bytes=1 << 20,
        joules=1.5,
        assumed_joules=0.5,
        far_layers=8,
        expansion=1.25,
        released_blocks=90,
        reserved_blocks=5,
        used_blocks=80,
        partial_blocks=16,
        num_running=16,
        num_waiting=3,
        num_preempted=0,
    )


def test_made_up_runs_hold_steps_and_events():
    added = list(adaptive_run(60.0))
    assert {type(each) for each in added} == {StepSample, Event}


# Planted files ------------------------------------------------------------------------------


def ended_by(path, monkeypatch):
    """Write until the file is rewritten through PATH.tmp; return the warnings."""
    warnings = []
    monkeypatch.setattr(writer.logger, "warning", lambda text, *args: warnings.append(text % args))
    timeline = TimelineWriter(path, header(), max_windows=2)
    for end in (1.0, 2.0, 3.0):
        timeline.add_step(step(end))
        wait_for(lambda: not timeline._queue)
    timeline.close()
    return warnings


def test_a_planted_link_is_not_written_through(path, tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("my thesis\n")
    (tmp_path / "timeline.jsonl.tmp").symlink_to(victim)
    (warning,) = ended_by(path, monkeypatch)
    assert "timeline.jsonl.tmp is there, and is no timeline: remove it" in warning
    assert victim.read_text() == "my thesis\n"
    assert read_timeline(path).windows  # what was written before is still there


def test_a_link_planted_at_the_last_moment_is_not_written_through(path, tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("my thesis\n")
    monkeypatch.setattr(writer, "_remove_abandoned", lambda draft: draft.symlink_to(victim))
    (warning,) = ended_by(path, monkeypatch)
    assert "File exists" in warning
    assert victim.read_text() == "my thesis\n"


def test_a_foreign_draft_is_left_alone(path, tmp_path, monkeypatch):
    (tmp_path / "timeline.jsonl.tmp").write_text("my thesis\n")
    (warning,) = ended_by(path, monkeypatch)
    assert "is no timeline" in warning
    assert (tmp_path / "timeline.jsonl.tmp").read_text() == "my thesis\n"


@pytest.mark.parametrize("content", ["", encode(header())], ids=["empty", "header"])
def test_the_draft_of_a_killed_engine_does_not_end_the_next_timeline(
    path, tmp_path, monkeypatch, content
):
    (tmp_path / "timeline.jsonl.tmp").write_text(content)
    assert ended_by(path, monkeypatch) == []
    assert merge_windows(read_timeline(path).windows).num_steps == 3
    assert not (tmp_path / "timeline.jsonl.tmp").exists()


def plant_text(path):
    path.write_text("my thesis\n")


def plant_link(path):
    path.symlink_to("somewhere")


@pytest.mark.parametrize("plant", [plant_text, plant_link, Path.mkdir, os.mkfifo])
def test_what_lies_where_the_previous_timeline_goes_is_kept(path, plant):
    TimelineWriter(path, header(model="first")).close()
    previous = path.with_name("timeline.jsonl.1")
    plant(previous)
    before = os.lstat(previous)
    assert "timeline.jsonl.1 there is no timeline and would be lost" in refused(path)
    assert os.lstat(previous).st_ino == before.st_ino
    assert read_timeline(path).header.model == "first"


def test_a_huge_file_without_a_newline_is_not_read(path):
    path.touch()
    os.truncate(path, 3 << 30)  # a hole, which takes no disk
    begin = time.monotonic()
    assert "would be lost" in refused(path)
    with pytest.raises(ConfigError, match=r"has 3\.00 GiB, more than 64\.00 MiB: not a timeline"):
        read_timeline(path)
    assert time.monotonic() - begin < 2


def test_a_pipe_is_not_waited_for(path):
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="is not a regular file"):
        read_timeline(path)
    assert "not a regular file" in refused(path)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        pytest.param("[" * 10**5 + "\n", "64 tables and lists", id="nested"),
        pytest.param('{"a":' * 10**5 + "\n", "64 tables and lists", id="nested_tables"),
        pytest.param(WINDOW.replace(":16,", ":1e999,", 1), "1e999 is not a finite", id="inf"),
        pytest.param(WINDOW.replace(":16,", f":{'9' * 400},", 1), "400 digits", id="digits"),
        pytest.param(WINDOW.replace('"end"', '"end":1,"end"'), "'end' occurs 2", id="twice"),
        pytest.param(
            '{"type":"event","text":"' + "x" * (1 << 20) + '"}\n', "bytes, more", id="long"
        ),
    ],
)
def test_a_line_that_plays_tricks_is_named(path, line, says):
    assert line != WINDOW
    path.write_text(encode(header()) + WINDOW + line + WINDOW)
    with pytest.raises(ConfigError, match=rf"line 3: .*{says}") as caught:
        read_timeline(path)
    assert len(str(caught.value)) < 300
