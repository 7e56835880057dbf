# SPDX-License-Identifier: Apache-2.0
"""Every plot is drawn from a result of its benchmark; without matplotlib there is an error."""

import json
import struct
from typing import Any

import pytest

from benchmarks import __main__ as command_line
from benchmarks import registry
from benchmarks.harness import plots
from benchmarks.suites.papers import helm_paper

ENVIRONMENT = {"cores": 2, "cpu": "Xeon", "date": "2026-11-21T12:00:00+00:00"}


def rate(tokens_per_s, **more):
    return {"tokens_per_s": tokens_per_s, **more}


def system(value):
    return rate(value, mean_token_latency_ms=1e4 / value, p99_token_latency_ms=3e4 / value)


BUDGET: dict[str, Any] = {
    "near_bytes": 32 << 20,
    "vllm": rate(100.0),
    "ceiling": rate(300.0),
    "plugin": {"1": rate(99.0), "2": rate(180.0), "auto": rate(178.0, expansion=2.1)},
    "host": {"2": rate(180.0)},
    "storage": {"2": rate(150.0)},
}
LOAD = {"vllm": system(100.0), "2": system(150.0), "auto": system(152.0)}
CASE = {"sweep": {"1": 100.0, "2": 180.0}, "fraction_of_best_fixed": 0.97}
QUALITY = {"kl": 0.01, "kl_error": 0.001, "pass_at_1": 0.5, "pass_error": 0.04}
RESULTS: dict[str, dict[str, Any]] = {
    "kv_swap": {"by_budget": {"0.25": BUDGET, "0.5": {**BUDGET, "near_bytes": 64 << 20}}},
    "kv_storage": {"by_budget": {"0.25": BUDGET, "0.5": BUDGET}},
    "kv_rate": {
        "by_load": {
            "1": {"requests_per_s": 2.0, "systems": LOAD},
            "2": {"requests_per_s": 4.0, "systems": LOAD},
        }
    },
    "kv_adaptive": {"by_workload": {"sharegpt": {"by_budget": {"0.25": CASE, "0.5": CASE}}}},
    "ffn_trained": {
        "frontier": [
            {"name": name, "near_bytes": size << 20, "tokens_per_s": speed, **QUALITY}
            for name, size, speed in (("16bit", 3000, 20.0), ("nested 5%", 1200, None))
        ]
    },
    "kv_soak": {"rss_mib": [[1.0, 900.0], [2.0, 905.0]]},
    "helm_paper": helm_paper.run(helm_paper.Settings(), lambda _: None),
    "weights_placement": {
        "batches": {"flexgen": 7, "all_far": 37},
        "by_link": {
            link: {
                "tbt_ms": {"flexgen": 260.0, "helm": 190.0},
                "expected_ms": {"flexgen": 258.0, "helm": 186.0},
                "tokens_per_s": {"flexgen": 27.0, "all_far": 140.0},
            }
            for link in ("nvdram", "dram")
        },
    },
}


def result(name):
    return {"benchmark": name, "profile": "quick", "environment": ENVIRONMENT, **RESULTS[name]}


def test_every_benchmark_with_plots_is_registered_and_tried_here():
    assert plots.PLOTS.keys() <= registry.BENCHMARKS.keys()
    assert plots.PLOTS.keys() == RESULTS.keys()


@pytest.mark.parametrize("name", list(plots.PLOTS))
def test_plots_are_pictures_of_the_stated_size(name, tmp_path):
    pytest.importorskip("matplotlib")
    paths = plots.draw(result(name), tmp_path / "plots")
    assert len(paths) == len(plots.PLOTS[name])
    for path in paths:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert struct.unpack(">II", data[16:24]) == (960, 600)


def test_curves_show_the_figures_of_the_result(tmp_path):
    figure = pytest.importorskip("matplotlib.figure")
    axes = figure.Figure().add_subplot()
    plots.PLOTS["kv_rate"]["throughput"](axes, result("kv_rate"))
    curves = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert curves == {
        "vLLM alone": [100.0, 100.0],
        "expansion 2": [150.0, 150.0],
        "auto": [152.0, 152.0],
    }


def test_bars_show_the_figures_of_the_result():
    figure = pytest.importorskip("matplotlib.figure")
    axes = figure.Figure().add_subplot()
    plots.PLOTS["weights_placement"]["throughput"](axes, result("weights_placement"))
    assert [bar.get_height() for bar in axes.patches] == [27.0, 27.0, 140.0, 140.0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["NVDRAM", "DRAM"]


def test_unmeasured_cases_are_marked(tmp_path):
    assert plots._subtitle(result("helm_paper")).endswith("cost model, nothing is measured")


def test_a_written_result_can_be_plotted_later(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result("kv_soak")), encoding="utf-8")
    assert command_line.main(["plot", str(path), str(tmp_path)]) == 0
    assert capsys.readouterr().err.strip() == f"plot: {tmp_path / 'kv_soak-memory.png'}"


def test_a_benchmark_without_plots_names_the_benchmarks_with_plots(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "require_matplotlib", lambda: None)
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=r"demo has no plots; these have: kv_swap, kv_rate"):
        plots.draw({"benchmark": "demo"}, tmp_path)


def test_without_matplotlib_nothing_is_measured_in_vain(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(plots, "find_spec", lambda name: None)

    def run(settings, step):
        raise AssertionError("was measured")

    monkeypatch.setattr(
        registry,
        "load",
        lambda name: registry.LoadedBenchmark(
            profiles={"quick": None}, result_keys=frozenset(), num_steps=len, run=run
        ),
    )
    monkeypatch.setattr(registry, "with_overrides", lambda settings, overrides: settings)
    assert command_line.main(["run", "kv_swap", "--plots", str(tmp_path)]) == 1
    assert "pip install '.[report]'" in capsys.readouterr().err
