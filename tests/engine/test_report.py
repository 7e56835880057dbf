# SPDX-License-Identifier: Apache-2.0
"""A report of a real engine: what the timeline says is what the engine did."""

from pathlib import Path

from benchmarks.model import demo_model_dir
from tests.engine.harness import engine, generate, metric, random_prompts
from vllm_tiered.cli import main as cli
from vllm_tiered.report.reader import read_timeline

PROMPTS = random_prompts(10, longest=100)


def test_a_report_of_an_engine_that_grows(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    with engine(
        "demo",
        additional_config={"tiered": {"report": {"path": str(path)}}},
        kv_cache_memory_bytes=28 << 20,
        max_model_len=256,
    ) as llm:
        generate(llm, PROMPTS)
        expansion = metric("tiered_kv_expansion")
        read_bytes = metric("tiered_kv_read_bytes")
    timeline = read_timeline(path)
    assert timeline.header.model == str(demo_model_dir())
    last = timeline.windows[-1]
    assert last.expansion == expansion
    told = sum(window.read_bytes for window in timeline.windows)
    assert 0.9 * read_bytes < told <= read_bytes  # the last step is told by none after it
    assert any(event.kind == "grow" for event in timeline.events)
    assert 0 < timeline.layers[-1].time < timeline.windows[-1].end
    spans = timeline.layers[-1].layers
    assert len(spans) == 30 and any(span.read_end for span in spans)
    ends = [span.compute_end or 0.0 for span in spans]
    assert ends == sorted(ends)

    out = tmp_path / "report"
    assert cli.main(["report", str(path), "--out", str(out)]) == 0
    assert (out / "index.html").stat().st_size > 10_000
