# SPDX-License-Identifier: Apache-2.0
"""`vllm-tiered probe`: what it prints and writes, and `plan` on what it wrote."""

import json
from functools import partial

import pytest

from tests.fixtures.model_configs import LLAMA_3_8B
from tests.fixtures.probes import TINY, sample_probe
from vllm_tiered.cli import probe
from vllm_tiered.cli.main import main

SMALL = {
    **LLAMA_3_8B,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(probe, "run", partial(probe.run, scope=TINY))


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    return str(folder)


def test_tables_have_every_tier_and_where_each_figure_is_from(model, tmp_path, capsys):
    assert main(["probe", "--model", model, "--path", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for text in ("far to near GB/s", "near, 1", "random 4.00 KiB", "attention", "times as long"):
        assert text in out
    assert "assumed" in out and "measured" in out


def test_without_a_folder_it_says_so(capsys):
    assert main(["probe"]) == 0
    assert "Storage was not measured: name a folder with --path." in capsys.readouterr().out


def test_what_is_printed_as_json_is_what_is_written_and_plan_takes_it(model, tmp_path, capsys):
    file = tmp_path / "probe.json"
    assert main(["probe", "--json", "--out", str(file)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(file.read_text())
    budgets = ["--near-gib", "1", "--far-gib", "1"]
    assert main(["plan", model, *budgets, "--machine", str(file), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["machine"]["figures"]
    assert figures["read_gb_per_s"]["kind"] == "measured"
    assert figures["step_overhead_ms"]["kind"] == "assumed"


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_what_others_took_is_said(monkeypatch, capsys, share):
    from vllm_tiered.probe import run

    monkeypatch.setattr(run, "_foreign_share", lambda *_: share)
    assert main(["probe"]) == 0
    is_said = "Other processes took 30% of the CPU" in capsys.readouterr().out
    assert is_said == (share == 0.3)


def test_the_picture_is_one(tmp_path):
    file = tmp_path / "probe.png"
    assert main(["probe", "--plot", str(file), "--path", str(tmp_path)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--threads", "0"], "--threads 0: give at least 1"),
        (["--model", "/nowhere"], "there is no such folder"),
        (["--path", "/nowhere"], "no file can be made in /nowhere"),
        (["--out", "/nowhere/probe.json"], "/nowhere/probe.json: cannot be written"),
    ],
)
def test_what_cannot_be_used_is_named(args, message, capsys):
    assert main(["probe", *args]) == 1
    assert message in capsys.readouterr().err


def test_plan_refuses_an_old_file(model, tmp_path, capsys):
    file = tmp_path / "probe.json"
    file.write_text(json.dumps({**sample_probe(), "version": 0}))
    assert main(["plan", model, "--near-gib", "1", "--far-gib", "1", "--machine", str(file)]) == 1
    assert "has version 0, and this reads 2" in capsys.readouterr().err
