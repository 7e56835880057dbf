# SPDX-License-Identifier: Apache-2.0
"""`vllm-tiered doctor`: exit status, JSON, and what each check says about a fault."""

import importlib.metadata
import json
import os
import resource
import subprocess
import sys

import pytest

from tests.fixtures import neuron_stores
from vllm_tiered import __version__
from vllm_tiered.adapter import compat, distribution, extension_points
from vllm_tiered.cli import doctor
from vllm_tiered.cli.check import Status
from vllm_tiered.cli.main import main
from vllm_tiered.devices.available_memory import HostMemory
from vllm_tiered.units import GIB


def report(capsys, *flags):
    status = main(["doctor", "--json", *flags])
    return status, json.loads(capsys.readouterr().out)


def test_this_installation_is_healthy(capsys):
    status, found = report(capsys)
    assert status == 0
    assert found["ok"] is True
    assert [check["name"] for check in found["checks"] if check["status"] == "fail"] == []
    assert len(found["checks"]) == len(doctor.CHECKS)


def test_output_of_a_check_stays_out_of_the_report(capsys, monkeypatch):
    def check_loudly():
        print("hello from an import")
        return doctor.check_python()

    monkeypatch.setattr(doctor, "CHECKS", (check_loudly,))
    assert main(["doctor", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["ok"] is True
    assert "hello from an import" in printed.err


def test_lines_say_the_same_as_json(capsys):
    _, found = report(capsys)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out
    for check in found["checks"]:
        assert check["name"] in lines
    for check in found["checks"]:
        if check["status"] != "ok":
            assert check["advice"] in lines


def test_a_missing_extension_point_fails_by_name(capsys, monkeypatch):
    missing = ("vllm.v1.engine.core", ("no_such_function",), "testing")
    monkeypatch.setattr(extension_points, "POINTS", (*extension_points.POINTS, missing))
    status, found = report(capsys)
    assert status == 1
    assert found["ok"] is False
    (failed,) = [check for check in found["checks"] if check["status"] == "fail"]
    assert failed["name"] == "extension points"
    assert "vllm.v1.engine.core.no_such_function (testing)" in failed["found"]
    assert failed["advice"]


def test_every_failed_check_gives_advice(monkeypatch):
    # With no vLLM and no plugin as many checks as possible have something to say.
    monkeypatch.setattr(compat, "vllm_version", lambda: None)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [])
    monkeypatch.setenv("VLLM_PLUGINS", "")
    checks = [check() for check in doctor.CHECKS]
    silent = [c.name for c in checks if c.status is not Status.OK and not c.advice]
    assert silent == []
    failed = {check.name for check in checks if check.status is Status.FAIL}
    assert failed >= {"vllm", "extension points", "plugin"}


def test_an_unsupported_vllm_fails_with_both_versions(monkeypatch):
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.99.0")
    check = doctor.check_vllm()
    assert check.status is Status.FAIL
    assert "0.99.0" in check.found
    assert compat.supported_versions() in check.advice


@pytest.mark.parametrize(
    ("plugins", "status", "words"),
    [
        (None, "ok", "off until"),
        ("tiered", "ok", "on in every engine"),
        ("x,tiered", "ok", "on in every engine"),
        ("", "warn", "keeps the plugin from loading"),
        ("x", "warn", "keeps the plugin from loading"),
    ],
)
def test_the_state_of_vllm_plugins(monkeypatch, plugins, status, words):
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    check = doctor.check_switch()
    assert check.status == status
    assert words in check.found


def test_a_broken_config_file_fails_with_its_error(monkeypatch, tmp_path):
    path = tmp_path / "tiered.json"
    path.write_text('{"kv": {"far_gb": 1}}')
    monkeypatch.setenv("VLLM_TIERED_CONFIG", str(path))
    check = doctor.check_config_file()
    assert check.status is Status.FAIL
    assert "did you mean tiered.kv.far_gib" in check.found
    path.write_text('{"kv": {"far_gib": 1}}')
    assert doctor.check_config_file().status is Status.OK


def test_memory_suggests_half_of_the_memory_within_the_limit(monkeypatch):
    memory = HostMemory(
        total_bytes=64 * GIB,
        available_bytes=50 * GIB,
        limit_bytes=16 * GIB,
        limit_used_bytes=6 * GIB,
    )
    monkeypatch.setattr(doctor, "read_host_memory", lambda: memory)
    check = doctor.check_memory()
    assert check.status is Status.OK
    assert "cgroup limit 16.00 GiB, 6.00 GiB of it used" in check.found
    assert "kv.far_gib up to 5 is safe" in check.found


def test_too_little_memory_is_warned_about(monkeypatch):
    memory = HostMemory(
        total_bytes=2 * GIB, available_bytes=GIB, limit_bytes=None, limit_used_bytes=None
    )
    monkeypatch.setattr(doctor, "read_host_memory", lambda: memory)
    assert doctor.check_memory().status is Status.WARN


def test_a_memlock_limit_matters_on_a_device_only(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    monkeypatch.setattr(compat, "device_type", lambda: "cpu")
    assert doctor.check_memlock().status is Status.OK
    monkeypatch.setattr(compat, "device_type", lambda: "cuda")
    check = doctor.check_memlock()
    assert check.status is Status.WARN
    assert check.found == "8.00 MiB"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert doctor.check_memlock().status is Status.OK


def test_a_single_cpu_is_warned_about(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    check = doctor.check_cpus()
    assert check.status is Status.WARN
    assert "(3)" in check.found
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 8})
    check = doctor.check_cpus()
    assert check.status is Status.OK
    assert "4 of" in check.found and "(0-2,8)" in check.found


def test_cuda_builds_with_a_cpu_torch_give_a_warning(monkeypatch):
    versions = {"torch": "2.13.0+cpu", "torchaudio": "2.13.0"}
    monkeypatch.setattr(doctor, "_distribution_version", versions.get)
    check = doctor.check_torch()
    assert check.status is Status.WARN
    assert "pip uninstall torchaudio" in check.advice
    del versions["torchaudio"]
    assert doctor.check_torch().status is Status.OK


@pytest.mark.parametrize(
    ("missing", "environment", "status", "said"),
    [
        pytest.param(False, {"VLLM_PLUGINS": ""}, "ok", "starts", id="vllm-installed"),
        pytest.param(True, {}, "ok", "vllm-tiered answers", id="answered"),
        pytest.param(True, {"VLLM_PLUGINS": "other,tiered"}, "ok", "answers", id="named"),
        pytest.param(True, {"VLLM_PLUGINS": "other"}, "warn", "cannot start", id="not-named"),
        pytest.param(True, {"VLLM_TARGET_DEVICE": "cpu"}, "warn", "cannot start", id="device"),
    ],
)
def test_the_check_knows_whether_the_vllm_command_starts(
    monkeypatch, missing, environment, status, said
):
    monkeypatch.setattr(distribution, "is_vllm_missing", lambda: missing)
    for name in ("VLLM_PLUGINS", "VLLM_TARGET_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    check = doctor.check_vllm_command()
    assert check.status == status
    assert said in check.found
    assert bool(check.advice) == (status == "warn")


def test_the_installed_command_prints_only_json_on_stdout(clean_env):
    done = subprocess.run(
        [sys.executable, "-m", "vllm_tiered.cli.main", "doctor", "--json"],
        env=clean_env(VLLM_LOGGING_LEVEL="DEBUG"),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] is True


def test_version_and_usage(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"vllm-tiered {__version__}\n"
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == 2
    assert "required" in capsys.readouterr().err


def test_a_store_that_is_of_no_use_or_is_none(tmp_path, monkeypatch):
    store = neuron_stores.written(tmp_path / "store", neuron_stores.MIDDLE, has_gates=True)
    file = tmp_path / "tiered.toml"
    monkeypatch.setenv("VLLM_TIERED_CONFIG", str(file))
    file.write_text(f"[ffn]\nstore = '{store}'\n")
    check = doctor.check_config_file()
    assert check.status is Status.WARN and "the sparse FFN will step aside: the ne" in check.found
    file.write_text(f"[ffn]\nstore = '{store}'\nnear_gib = 1\n")
    assert doctor.check_config_file().status is Status.OK
    file.write_text(f"[ffn]\nstore = '{tmp_path}'\n")
    check = doctor.check_config_file()
    assert check.status is Status.FAIL and "is no neuron store" in check.found
