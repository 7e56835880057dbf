# SPDX-License-Identifier: Apache-2.0
"""The page: complete, self-contained, safe to open, and drawn from any timeline."""

import base64
import html
import struct
import sys
from functools import partial
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.timelines import adaptive_run, expert_use, header, pipeline_step, step
from vllm_tiered.cli import report as report_command
from vllm_tiered.cli.main import main
from vllm_tiered.errors import ConfigError
from vllm_tiered.report import expert_figure, figures, layer_figure
from vllm_tiered.report.drawing import TimeAxis, render
from vllm_tiered.report.page import write_report
from vllm_tiered.report.reader import Timeline
from vllm_tiered.report.records import (
    Event,
    ExpertUse,
    LayerExperts,
    LayerTimeline,
    StepSample,
    Window,
)
from vllm_tiered.report.writer import TimelineWriter

NAMES = ["expansion", "throughput", "stall", "links", "blocks", "experts", "layers"]


def timeline_of(steps, *, events=(), layers=(), experts=(), is_closed=True, **changes):
    windows = [Window.from_step(each, level_changed=False) for each in steps]
    return Timeline(
        header=header(**changes),
        windows=tuple(windows),
        layers=tuple(layers),
        experts=tuple(experts),
        events=tuple(events),
        is_closed=is_closed,
    )


@pytest.fixture(scope="module")
def run():
    """Two minutes of an adaptive engine, with a step in detail."""
    records = list(adaptive_run(120.0))
    return timeline_of(
        [each for each in records if isinstance(each, StepSample)],
        events=[each for each in records if isinstance(each, Event)],
        layers=[pipeline_step()],
        experts=[expert_use(float(second)) for second in range(3, 121)],
        model="<b>Llama & friends</b>",
    )


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory):
    return write_report(run, tmp_path_factory.mktemp("report") / "new" / "folder").parent


class Page(HTMLParser):
    """Tags with attributes, and the text between them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words += data.split()

    @property
    def text(self):
        return " ".join(self.words)


@pytest.fixture(scope="module")
def page(folder):
    return Page((folder / "index.html").read_text(encoding="utf-8"))


def png_size(content):
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", content[16:24])


# The page -----------------------------------------------------------------------------------


def test_every_picture_is_a_file_and_in_the_page(folder, page):
    assert sorted(path.stem for path in folder.glob("*.png")) == sorted(NAMES)
    images = [attrs for tag, attrs in page.tags if tag == "img"]
    for name, image in zip(NAMES, images, strict=True):
        content = (folder / f"{name}.png").read_bytes()
        assert png_size(content) > (1000, 250)
        assert image["src"] == "data:image/png;base64," + base64.b64encode(content).decode()
        assert len(image["alt"]) > 40


def test_the_page_needs_neither_scripts_nor_the_network(page):
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "iframe", "object", "embed"}
    for _, attrs in page.tags:
        assert not any(name.startswith("on") for name in attrs)
        for name in ("src", "href"):
            assert attrs.get(name, "data:").startswith("data:")


def test_names_from_outside_are_escaped(folder, page):
    source = (folder / "index.html").read_text(encoding="utf-8")
    assert "<b>Llama" not in source
    assert html.escape("<b>Llama & friends</b>") in source
    assert "<b>Llama & friends</b>" in page.text


def test_the_page_has_the_configuration(page):
    for words in (
        "vllm-tiered 0.1.0, vLLM 0.32.0",
        "A processor, 2 CPUs, 24.00 GiB",
        "near KV memory 63.98 MiB",
        "up to 272 blocks of 32 tokens",
        "policy interleave",
        "max_expansion 4",
    ):
        assert words in page.text


def test_nested_settings_and_sizes_read_well(tmp_path):
    manifest = {"kv": {"near_bytes": 1 << 30, "offloaded_layers": [1, 4], "notes": []}, "x": None}
    index = write_report(timeline_of([step(1.0)], manifest=manifest), tmp_path)
    text = Page(index.read_text(encoding="utf-8")).text
    for words in ("kv.near_bytes 1.00 GiB", "kv.offloaded_layers 1, 4", "kv.notes none", "x None"):
        assert words in text


def test_the_summary_states_the_runs_figures(tmp_path):
    steps = [
        step(1.0, seconds=1.0, tokens=1500, stall_seconds=0.001),
        step(
            3.0,
            seconds=1.0,
            tokens=1500,
            stall_seconds=0.02,
            read_seconds=0.25,
            read_bytes=3 << 30,
            expansion=2.5,
            num_preempted=7,
        ),
    ]
    text = Page(write_report(timeline_of(steps), tmp_path).read_text(encoding="utf-8")).text
    for words in (
        "time 3.0 s, 2 steps idle 1.0 s; longest step 1,000 ms",
        "throughput 1,500 tokens/s median over step time; 3,000 output tokens in all",
        "stall 1.05 % of step time below 1 % in 50 % of step time",
        "swapped in 3.00 GiB 12.88 GB/s while busy, busy for 12.5 % of step time",
        "swapped out 0 B",
        "expansion 1.75 on average at most 2.50",
        "preemptions 7",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("assumed", "says"),
    [(0.0, "measured"), (900.0, "assumed: constants"),
     (90.0, "10.0 % of it assumed: constants, the rest measured")],
)  # fmt: skip
def test_joules_and_grams_say_how_they_are_known(tmp_path, assumed, says):
    steps = [step(1.0, tokens=400, joules=900.0, assumed_joules=assumed)]
    page = write_report(timeline_of(steps, carbon_intensity=400.0), tmp_path)
    text = Page(page.read_text(encoding="utf-8")).text
    for words in (
        "grid 400 gCO2e per kWh",
        f"energy 2.25 J/token 900 J in steps, {says} emissions",
        "emissions 0.25 mgCO2e/token operational; 0.1 gCO2e in all",
    ):
        assert words in text


def test_embodied_emissions_fall_on_the_time_of_steps(tmp_path):
    steps = [step(1.0, tokens=400, seconds=0.5)]
    page = write_report(timeline_of(steps, embodied_grams_per_second=0.008), tmp_path)
    text = Page(page.read_text(encoding="utf-8")).text
    assert "embodied 0.01 mgCO2e/token of making the machine, over its lifetime; " in text
    plain = Page(write_report(timeline_of(steps), tmp_path).read_text(encoding="utf-8")).text
    assert "embodied" not in plain


def test_without_joules_there_is_no_row_for_them(tmp_path):
    text = Page(write_report(timeline_of([step(1.0)]), tmp_path).read_text(encoding="utf-8")).text
    assert "J/token" not in text


def test_events_are_listed_with_their_reasons(run, page):
    assert f"{len(run.events)} events" in page.text
    assert "0 -> 2: requests wait for blocks" in page.text


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_timeline_without_an_end_says_so(tmp_path, is_closed):
    index = write_report(timeline_of([step(1.0)], is_closed=is_closed), tmp_path)
    assert ("The timeline has no end" in index.read_text(encoding="utf-8")) is not is_closed


def test_the_error_for_a_timeline_without_steps_has_advice(tmp_path):
    with pytest.raises(ConfigError, match="no steps yet: send the engine a request"):
        write_report(timeline_of([]), tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file: the report cannot be written: .*--out"):
        write_report(timeline_of([step(1.0)]), tmp_path / "file")


# The pictures -------------------------------------------------------------------------------

MANY_KINDS = [Event(time=0.5, kind=f"a rather long kind of event {k}", text="") for k in range(9)]
AWKWARD = {
    "one_step": timeline_of([step(0.03)]),
    "no_time": timeline_of([step(0.0, seconds=0.0)]),
    "all_zero": timeline_of([step(1.0, tokens=0, used_blocks=0, released_blocks=0, num_running=0)]),
    "no_pool": timeline_of([step(1.0)], num_blocks=0),
    "all_stall": timeline_of([step(1.0, stall_seconds=0.03), step(9.0)]),
    "link_over_100": timeline_of([step(1.0, read_seconds=0.05)]),
    "days": timeline_of([step(3600.0 * hour) for hour in range(1, 72)]),
    "kinds": timeline_of([step(1.0)], events=MANY_KINDS),
    "crowded": timeline_of(
        [step(1.0)], layers=[pipeline_step(num_layers=126, far_layers=60, slow_read=True)]
    ),
    "one_expert_layer": timeline_of([step(1.0)], experts=[expert_use(1.0, num_layers=1)]),
    "no_hits": timeline_of(
        [step(9.0)],
        experts=[ExpertUse(time=9.0, layers=(LayerExperts(layer=2, hits=0, misses=5),))],
    ),
    "days_of_experts": timeline_of(
        [step(600.0 * k) for k in range(1, 900)],
        experts=[expert_use(600.0 * k, num_layers=94) for k in range(1, 900)],
    ),
    "a_layer_that_rests": timeline_of(
        [step(2.0)], experts=[expert_use(1.0, num_layers=4), expert_use(2.0, num_layers=2)]
    ),
    "no_layers": timeline_of([step(1.0)], layers=[LayerTimeline(step=1, time=0.0, layers=())]),
}


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_timelines_are_drawn_without_a_warning(name):
    for picture in figures.pictures(AWKWARD[name]):
        assert png_size(render(partial(picture.draw, AWKWARD[name]))) > (1000, 250)


def test_every_panel_names_its_quantity_and_unit(run):
    for picture in figures.PICTURES:
        axes = picture.draw(run).axes
        assert "(" in axes[-1].get_xlabel(), picture.name
        for axis in axes:
            rows = [label.get_text() for label in axis.get_yticklabels()]
            assert axis.get_ylabel() or "compute" in rows or "grow" in rows, picture.name


def test_pictures_without_data_are_left_out():
    names = [picture.name for picture in figures.pictures(timeline_of([step(1.0)]))]
    assert names == NAMES[:-2]


def test_the_stall_picture_shows_the_limit_however_bad_the_stall():
    for stall_seconds in (0.0, 0.0005, 0.02):
        axis = figures.draw_stall(timeline_of([step(1.0, stall_seconds=stall_seconds)])).axes[0]
        bottom, top = axis.get_ylim()
        low, limit, high = axis.transData.transform([(0, bottom), (0, 1.0), (0, top)])[:, 1]
        assert 0.1 < (limit - low) / (high - low) < 0.9


def test_the_map_of_experts_has_each_layers_hits():
    uses = [expert_use(1.0, num_layers=3, wanted=10), expert_use(31.0, num_layers=3, wanted=10)]
    figure = expert_figure.draw_experts(timeline_of([step(31.0)], experts=uses))
    cells = np.asarray(figure.axes[1].collections[0].get_array())
    assert cells.shape == (3, 2)
    assert cells.tolist() == [[0, 30], [0, 50], [0, 70]]


def test_an_idle_engine_breaks_the_line():
    steps = [step(1.0), step(1.03), step(50.0), step(99.0)]
    axis = figures.draw_throughput(timeline_of(steps)).axes[0]
    y = axis.lines[0].get_ydata()
    assert np.isnan(y).sum() == 2
    assert np.nanmin(y) == np.nanmax(y) == pytest.approx(16 / 0.03)


@pytest.mark.parametrize(
    ("end", "unit", "shown"), [(100.0, "s", 100), (600.0, "min", 10), (36000.0, "h", 10)]
)
def test_the_unit_of_time_follows_the_runs_length(end, unit, shown):
    time = TimeAxis.of(timeline_of([step(1.0), step(end)]).windows)
    assert (time.unit, time.at(end)) == (unit, shown)


def test_blocks_stack_up_to_the_pool(run):
    axis = figures.draw_blocks(run).axes[0]
    labels = axis.get_legend_handles_labels()[1]
    assert labels == ["used", "released, free", "reserved", "beyond this level", "pool"]
    tops = [area.get_datalim(axis.transData).ymax for area in axis.collections]
    assert tops == sorted(tops)
    assert tops[-1] == run.header.num_blocks


def test_a_step_is_drawn_as_in_pies_figure_4():
    """Nine layers, two far: each row holds its layers' boxes, in their role's color."""
    step_in_detail: Any = pipeline_step(num_layers=9, far_layers=2, slow_read=True)
    axis = layer_figure.draw_layers(timeline_of([step(1.0)], layers=[step_in_detail])).axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == [
        "compute",
        "swap in",
        "swap out",
    ]
    rows: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    box: Any
    for box in axis.patches:
        rows[round(box.get_y() + box.get_height() / 2)].append(box)
    offloaded = [span for span in step_in_detail.layers if span.role == "offloaded"]
    waits = [span for span in step_in_detail.layers if span.wait_start is not None]
    assert len(offloaded) == 2 and waits
    assert len(rows[0]) == 9 + len(waits)
    assert len(rows[1]) == 2
    for span, box in zip(offloaded, rows[1], strict=True):
        assert box.get_x() == pytest.approx(1e3 * span.read_start)
        assert box.get_width() == pytest.approx(1e3 * (span.read_end - span.read_start))
    assert len({box.get_facecolor() for box in rows[0]}) == 3  # resident, offloaded, waits
    assert [text.get_text() for text in axis.texts[:9]] == [str(layer) for layer in range(9)]


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 3)), max_size=30))
def test_boxes_that_overlap_in_time_lie_in_lanes(spans):
    boxes = [
        layer_figure._Box(layer=0, role="resident", start=start, end=start + length)
        for start, length in sorted(spans)
    ]
    lanes = layer_figure._lanes(boxes)
    ends: dict[int, float] = {}
    for box, lane in zip(boxes, lanes, strict=True):
        assert ends.get(lane, 0.0) <= box.start
        ends[lane] = box.end
    most_at_once = max((sum(b.start <= a.start < b.end for b in boxes) for a in boxes), default=0)
    assert len(ends) == most_at_once


# The command --------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path):
    """A timeline file of three steps."""
    timeline = TimelineWriter(tmp_path / "run.jsonl", header())
    for end in (0.1, 0.2, 0.5):
        timeline.add_step(step(end))
    timeline.close()
    return tmp_path / "run.jsonl"


@pytest.mark.parametrize("out", [None, "elsewhere"])
def test_the_command_prints_where_the_page_is(path, out, capsys):
    folder = path.parent / (out or "run-report")
    assert main(["report", str(path), *(["--out", str(folder)] if out else [])]) == 0
    assert capsys.readouterr().out == f"{folder / 'index.html'}\n"
    assert "3 steps" in (folder / "index.html").read_text(encoding="utf-8")


def test_the_command_names_the_problem_of_a_file(path, capsys):
    path.write_text("not a timeline\n")
    assert main(["report", str(path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"vllm-tiered: {path}, line 1: no JSON")


@pytest.mark.parametrize("missing", report_command.EXTRA_MODULES)
def test_without_the_extra_the_command_names_the_package_to_install(
    path, capsys, monkeypatch, missing
):
    for name in ("page", "figures", "layer_figure", "drawing"):
        monkeypatch.delitem(sys.modules, f"vllm_tiered.report.{name}", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["report", str(path)]) == 1
    error = capsys.readouterr().err
    assert f'{missing} is not installed: pip install "vllm-tiered[report]"' in error
