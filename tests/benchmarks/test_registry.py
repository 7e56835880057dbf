# SPDX-License-Identifier: Apache-2.0
"""The table of benchmarks, the settings overrides, and what the command line prints."""

import dataclasses
import json

import pytest

from benchmarks import __main__ as command_line
from benchmarks import registry
from benchmarks.harness.runner import MeasurementError
from benchmarks.registry import LoadedBenchmark


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Knobs:
    n: int = 3
    shares: tuple[float, ...] = (0.5, 1.0)
    on: bool = False


def fake(run):
    return LoadedBenchmark(
        profiles={"quick": Knobs(), "full": Knobs(n=9)},
        result_keys=frozenset({"score"}),
        num_steps=lambda settings: settings.n,
        run=run,
    )


@pytest.mark.parametrize("name", list(registry.BENCHMARKS))
def test_every_benchmark_has_both_profiles_and_settings_of_one_kind(name):
    loaded = registry.load(name)
    assert set(loaded.profiles) == {"quick", "full"}
    assert len({type(settings) for settings in loaded.profiles.values()}) == 1
    assert all(loaded.num_steps(settings) > 0 for settings in loaded.profiles.values())
    assert loaded.result_keys


def test_unknown_benchmark_names_the_known_ones():
    with pytest.raises(KeyError, match=r"there are: .*kv_swap"):
        registry.load("kv-swap")


def test_overrides_take_the_type_of_the_setting():
    changed = registry.with_overrides(Knobs(), ["n=7", "shares=0.25,2", "on=true"])
    assert changed == Knobs(n=7, shares=(0.25, 2.0), on=True)
    assert registry.with_overrides(Knobs(), ["shares="]).shares == ()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("m=7", "no setting 'm'; there are: n, shares, on"),
        ("n=seven", "n='seven': expected int"),
        ("shares=1,x", "shares='x': expected float"),
        ("on=yes", "on='yes': expected true or false"),
    ],
)
def test_bad_overrides_are_refused(override, message):
    with pytest.raises(ValueError, match=message):
        registry.with_overrides(Knobs(), [override])


def test_result_is_the_last_line_and_in_the_file(monkeypatch, capsys, tmp_path):
    def run(settings, step):
        for index in range(settings.n):
            step(f"step {index}")
        return {"score": settings.n * 2}

    monkeypatch.setattr(registry, "load", lambda name: fake(run))
    out = tmp_path / "deep" / "result.json"
    arguments = ["run", "kv_swap", "--profile", "full", "--out", str(out), "--set", "n=5"]
    assert command_line.main(arguments) == 0
    captured = capsys.readouterr()
    last = captured.out.splitlines()[-1]
    assert last.startswith("RESULT {")
    result = json.loads(last.removeprefix("RESULT "))
    assert result["score"] == 10
    assert result["benchmark"] == "kv_swap"
    assert result["profile"] == "full"
    assert result["settings"] == {"n": 5, "shares": [0.5, 1.0], "on": False}
    assert result["environment"]["cores"] >= 1
    assert json.loads(out.read_text(encoding="utf-8")) == result
    assert "5/5" in captured.err


def refuse(settings, step):
    raise MeasurementError("2 of 3 outputs equal")


def test_a_table_comes_before_the_result(monkeypatch, capsys):
    loaded = dataclasses.replace(
        fake(lambda settings, step: {"score": 7}), table=lambda result: f"| {result['score']} |"
    )
    monkeypatch.setattr(registry, "load", lambda name: loaded)
    assert command_line.main(["run", "kv_swap"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| 7 |"
    assert lines[-1].startswith("RESULT {")


@pytest.mark.parametrize(
    ("run", "message"),
    [(refuse, "2 of 3 outputs equal"), (lambda settings, step: {}, "kv_swap gave no score")],
    ids=["refused", "keys missing"],
)
def test_no_result_is_printed_when_it_may_not_be_reported(
    monkeypatch, capsys, tmp_path, run, message
):
    monkeypatch.setattr(registry, "load", lambda name: fake(run))
    out = tmp_path / "result.json"
    assert command_line.main(["run", "kv_swap", "--out", str(out)]) == 1
    captured = capsys.readouterr()
    assert "RESULT" not in captured.out
    assert message in captured.err
    assert not out.exists()


def test_list_names_every_benchmark(capsys):
    assert command_line.main(["list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in registry.BENCHMARKS)
