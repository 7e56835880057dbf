# SPDX-License-Identifier: Apache-2.0
"""`vllm-tiered plan`: what it prints, and how it exits."""

import json

import pytest

from tests.cost.test_model import LLAMA_3_8B
from vllm_tiered.cli.main import main


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    return str(tmp_path)


def plan(model, *args, near="8", far="64"):
    budgets = ["--near-gib", near, "--far-gib", far]
    return main(["plan", model, *budgets, "--machine", "rtx4090-pcie4", *args])


def test_it_prints_a_line_per_placement(model, capsys):
    assert plan(model) == 0
    out = capsys.readouterr().out
    assert "32 layers of 13.00 GiB" in out
    for placement in ("flexgen", "helm", "all_far", "latency"):
        assert f"\n{placement}" in out
    assert "all near does not fit: 13.00 GiB of layers" in out
    assert "Predicted for rtx4090-pcie4, of whose figures are" in out


def test_json_has_every_figure_with_its_kind(model, capsys):
    assert plan(model, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"] is True
    assert answer["machine"]["figures"]["read_gb_per_s"]["kind"] == "assumed"
    by_name = {entry["placement"]: entry for entry in answer["placements"]}
    assert by_name["latency"]["tokens_per_s"] > 0
    assert "reason" in by_name["all near"]


def test_with_matrices_in_4_bit(model, capsys):
    assert plan(model, "--compress", "int4") == 0
    out = capsys.readouterr().out
    assert "32 layers of 3.66 GiB" in out  # 0.5625 of 6.5 GiB of 8-bit weights
    assert "\nall near " in out and "all near does not fit" not in out


def test_what_does_not_fit_exits_3(model, capsys):
    assert plan(model, near="2") == 3
    assert "does not fit" in capsys.readouterr().out


def test_an_unknown_architecture_is_said(model, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_3_8B, "model_type": "new"}))
    assert plan(model) == 0
    assert "This architecture is not known here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json: cannot be read: No such file"),
        ("{", "is not valid JSON"),
        ("[]", "is not a model's configuration"),
        ("{}", "hidden_size=None: it must be a number above 0"),
    ],
)
def test_bad_models_are_named(tmp_path, capsys, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert plan(str(tmp_path)) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "args", [("--prompt-tokens", "0"), ("--tensor-parallel-size", "x"), ("--near-gib", "-1")]
)
def test_numbers_out_of_range_are_refused(model, capsys, args):
    with pytest.raises(SystemExit) as stopped:
        plan(model, *args)
    assert stopped.value.code == 2
    assert f"argument {args[0]}: {args[1]!r}: give" in capsys.readouterr().err


def test_an_unknown_machine_names_the_known_ones(model, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", model, "--near-gib", "8", "--far-gib", "8", "--machine", "abacus"])
    assert stopped.value.code == 2
    assert "rtx4090-pcie4" in capsys.readouterr().err
