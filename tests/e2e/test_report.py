# SPDX-License-Identifier: Apache-2.0
"""The report of a real engine: the timeline matches what the engine did."""

from pathlib import Path

import pytest

from tests.e2e.harness import engine, generate, metric, model_path, random_prompts
from vllm_tiered.adapter.telemetry import expert_use
from vllm_tiered.cli import main as cli
from vllm_tiered.report.reader import read_timeline
from vllm_tiered.report.records import merge_expert_use

PROMPTS = random_prompts(10, longest=100)


def test_a_report_of_an_engine_that_grows(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    with engine(
        "deep",
        additional_config={"tiered": {"report": {"path": str(path), "carbon_intensity": 400}}},
        kv_cache_memory_bytes=28 << 20,
        max_model_len=256,
    ) as llm:
        generate(llm, PROMPTS)
        expansion = metric("tiered_kv_expansion")
        read_bytes = metric("tiered_kv_read_bytes")
        joules, assumed = metric("tiered_energy_joules"), metric("tiered_energy_assumed_joules")
        grams = metric("tiered_co2e_grams")
        seconds = metric("tiered_kv_step_seconds")
    timeline = read_timeline(path)
    assert timeline.header.model == model_path("deep")
    last = timeline.windows[-1]
    assert last.expansion == pytest.approx(expansion, rel=1e-6)  # rounded
    reported = sum(window.read_bytes for window in timeline.windows)
    assert 0.9 * read_bytes < reported <= read_bytes  # no later step reports the last one
    assert any(event.kind == "grow" for event in timeline.events)
    # This process's memory, at 26 W for 256 GB; more where the host has power counters.
    assert joules > 0.5 * seconds * 26 / 256 * 0.3 and 0 < assumed <= joules
    assert grams == pytest.approx(joules / 3.6e6 * 400)
    reported_joules = sum(window.joules for window in timeline.windows)
    assert 0.5 * joules < reported_joules <= joules + 1e-6 * len(timeline.windows)  # rounded
    assert set(timeline.header.manifest["energy"]) == {"cpu", "dram", "gpu", "ssd"}
    assert 0 < timeline.layers[-1].time < timeline.windows[-1].end
    spans = timeline.layers[-1].layers
    assert len(spans) == 30 and any(span.read_end for span in spans)
    ends = [span.compute_end or 0.0 for span in spans]
    assert ends == sorted(ends)

    out = tmp_path / "report"
    assert cli.main(["report", str(path), "--out", str(out)]) == 0
    assert (out / "index.html").stat().st_size > 10_000


def test_a_report_of_a_mixture_shows_the_hits_of_each_layer(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(expert_use, "INTERVAL_S", 0.0)
    path = tmp_path / "timeline.jsonl"
    slots = 16 * 4 * 3 * 256 * 128 * 4  # bytes of 16 of 64 experts in each of 4 layers
    tiered = {"report": {"path": str(path)}, "experts": {"near_gib": 1.02 * slots / 2**30}}
    with engine("olmoe", additional_config={"tiered": tiered}) as llm:
        generate(llm, PROMPTS)
        counted = {name: metric(f"tiered_experts_{name}") for name in ("hits", "misses")}
    use = merge_expert_use(read_timeline(path).experts)
    assert [one.layer for one in use.layers] == [0, 1, 2, 3]
    for name, total in counted.items():
        reported = [getattr(one, name) for one in use.layers]
        # No later step reports the last one.
        assert 0.9 * total < sum(reported) <= total and min(reported) > 0, name
