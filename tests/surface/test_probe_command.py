# SPDX-License-Identifier: Apache-2.0
"""`vllm-tiered probe`: what it prints and writes, and `plan` on what it wrote."""

import importlib.util
import json
from functools import partial

import pytest
import torch

from tests.fixtures.model_configs import LLAMA_3_8B
from tests.fixtures.probes import TINY, sample_probe
from vllm_tiered.adapter import compat, device, step_probe
from vllm_tiered.adapter.weights import engine_gemm
from vllm_tiered.cli import probe
from vllm_tiered.cli.main import main
from vllm_tiered.errors import UnsupportedError
from vllm_tiered.planner.from_probe import VERSION
from vllm_tiered.probe.gemm import TORCH

SMALL = {
    **LLAMA_3_8B,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


COSTS = {
    "step_seconds": 3e-3,
    "request_seconds": 2e-4,
    "layer_seconds": 5e-4,
    "row_seconds_per_feature": 1e-9,
    "attention_request_seconds": 1e-6,
    "decode_kv_bytes_per_s": 20e9,
    "decode_operations_per_s": 7e9,
    "prompt_operations_per_s": 14e9,
}


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    """Make the probe small; return what the engine is asked. A real one is in tests/e2e."""
    asked: list[tuple[str, int]] = []

    def ask(dtype: str, threads: int) -> dict[str, float]:
        asked.append((dtype, threads))
        return COSTS

    monkeypatch.setattr(probe, "run", partial(probe.run, scope=TINY))
    monkeypatch.setattr(step_probe, "ask_engine", ask)
    return asked


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
    assert "assumed" not in out and "measured" in out
    assert "ms of a matmul by vLLM 0." in out
    assert "ms of a matmul with our weights in 4 bit" in out and "without compression" in out


def test_the_engine_is_asked_in_the_dtype_and_with_the_threads(engine, capsys):
    before = torch.get_num_threads()
    try:
        assert main(["probe", "--threads", "1"]) == 0
    finally:
        torch.set_num_threads(before)
    assert engine == [("float32", 1)]  # TINY's


def test_without_an_engine_its_costs_are_estimated(engine, capsys):
    assert main(["probe", "--no-engine"]) == 0
    assert "assumed" in capsys.readouterr().out
    assert engine == []


def test_an_engine_that_does_not_run_is_said_and_its_costs_are_estimated(monkeypatch, capsys):
    def fail(*_):
        raise UnsupportedError("a small engine does not run: no memory")

    monkeypatch.setattr(step_probe, "ask_engine", fail)
    assert main(["probe"]) == 0
    captured = capsys.readouterr()
    assert "are estimated: a small engine does not run: no memory" in captured.err
    assert "assumed" in captured.out


@pytest.mark.parametrize("has_vllm", [False, True], ids=["without", "on-cuda"])
def test_where_vllm_does_not_compute_torchs_gemms_are_timed_and_that_is_said(
    has_vllm, engine, monkeypatch, tmp_path, capsys
):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: find(name) if has_vllm or name != "vllm" else None
    )
    monkeypatch.setattr(compat, "device_type", lambda: "cuda")
    file = tmp_path / "probe.json"
    assert main(["probe", "--out", str(file)]) == 0
    written = json.loads(file.read_text())
    assert written["gemms_of"] == "torch, as vLLM does not compute here"
    assert written["step_costs"] is None and engine == []
    assert "vLLM does not compute on this machine's cpu" in capsys.readouterr().err
    assert engine_gemm.engine_products(torch.device("cpu")).near is TORCH.near


def test_near_memory_is_the_gpus_where_vllm_computes_on_one(engine, monkeypatch, capsys):
    card, seen = torch.device("cuda", 1), []

    def run_probe(device, near_device, scope, *, step_costs, **_):
        seen.append(near_device)
        written = {**sample_probe(), "step_costs": step_costs()}
        written["machine"]["device"] = near_device.type
        return written

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: card.index)
    monkeypatch.setattr(device, "cuda_device", lambda: device.CpuDevice())
    monkeypatch.setattr("vllm.platforms.current_platform.is_cuda", lambda: True)
    monkeypatch.setattr(compat, "device_type", lambda: "cuda")
    monkeypatch.setattr("vllm_tiered.probe.run.run_probe", run_probe)
    assert main(["probe"]) == 0
    assert seen == [card] and engine == []
    captured = capsys.readouterr()
    assert "steps are timed on a CPU alone" in captured.err
    assert "as in the profiles of GPUs" in captured.out


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
    assert figures["step_overhead_ms"]["kind"] == "measured"
    assert figures["step_overhead_ms"]["value"] == pytest.approx(3)


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
    assert f"has version 0, and this reads {VERSION}" in capsys.readouterr().err
