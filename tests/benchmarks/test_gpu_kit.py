# SPDX-License-Identifier: Apache-2.0
"""The kit for a host without network, with small wheels: cut, joined, damaged, installed."""

import base64
import csv
import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.suites.gpu.kit import __main__ as command
from benchmarks.suites.gpu.kit import collect as collecting
from benchmarks.suites.gpu.kit import install as installing
from benchmarks.suites.gpu.kit import lean, parts
from benchmarks.suites.gpu.kit.collect import Order, collect
from benchmarks.suites.gpu.kit.manifest import (
    MANIFEST,
    Kit,
    KitError,
    LeftOut,
    is_there,
    piece_of,
    read_kit,
)
from benchmarks.suites.gpu.kit.repack import lean_name, repack

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def make_wheel(folder: Path, name: str, files: dict[str, bytes], requires=()) -> Path:
    metadata = f"{name}-1.0.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"]
    lines += [f"Requires-Dist: {need}" for need in requires]
    contents = {
        **files,
        f"{metadata}/METADATA": "\n".join([*lines, ""]).encode(),
        f"{metadata}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n\n",
    }
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, data in contents.items():
            wheel.writestr(file, data)
        rows = [f"{file},{digest(data)},{len(data)}" for file, data in contents.items()]
        wheel.writestr(f"{metadata}/RECORD", "\n".join([*rows, f"{metadata}/RECORD,,", ""]))
    return path


@pytest.fixture
def wheels(tmp_path):
    folder = tmp_path / "made"
    folder.mkdir()
    return [
        make_wheel(folder, "one", {"one.py": b"VALUE = 1\n" * 300}, ["two"]),
        make_wheel(folder, "two", {"two.py": b"VALUE = 2\n", "two_more.py": b""}),
    ]


def make_kit(wheels, folder: Path, part_bytes: int = 1000) -> Kit:
    made = Kit(
        requirement="one==1.*",
        python=PYTHON,
        is_lean=False,
        reuses_host=False,
        wheels=tuple(piece_of(path) for path in wheels),
        parts=tuple(parts.cut(wheels, folder, part_bytes)),
    )
    made.write(folder)
    return made


@pytest.fixture
def kit(wheels, tmp_path):
    """Return a complete kit in its own folder."""
    folder = tmp_path / "kit"
    folder.mkdir()
    make_kit(wheels, folder)
    return folder


@pytest.mark.parametrize("part_bytes", [1, 999, 10**6])
def test_parts_join_to_the_same_wheels(wheels, tmp_path, part_bytes):
    if part_bytes == 1:
        wheels = wheels[1:]  # one part for each byte
    folder, joined = tmp_path / "kit", tmp_path / "joined"
    folder.mkdir()
    joined.mkdir()
    kit = make_kit(wheels, folder, part_bytes)
    total = sum(path.stat().st_size for path in wheels)
    assert len(kit.parts) == -(-total // part_bytes)
    assert all(part.num_bytes == part_bytes for part in kit.parts[:-1])
    paths = parts.join(kit, folder, joined)
    assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in wheels]
    for part in folder.glob("part-*"):
        part.unlink()
    assert parts.join(kit, folder, joined) == paths, "joined wheels need no parts"


def test_a_manifest_is_read_back(kit):
    made = read_kit(kit)
    made.write(kit)
    assert read_kit(kit) == made
    (kit / MANIFEST).write_text(json.dumps({"format": 7}))
    with pytest.raises(KitError, match="of format 7, this reads 1"):
        read_kit(kit)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_damaged_and_missing_parts_are_named(kit, tmp_path):
    damage(kit / "part-001")
    (kit / "part-003").unlink()
    with pytest.raises(KitError, match=r"2 of \d+ parts .*: copy part-001, part-003$"):
        parts.join(read_kit(kit), kit, tmp_path)
    assert not list(tmp_path.glob("*.whl"))


def test_parts_are_received_as_they_arrive_and_not_twice(kit, tmp_path, capsys):
    here, batch = tmp_path / "here", tmp_path / "batch"
    batch.mkdir()
    names = [part.name for part in read_kit(kit).parts]
    assert len(names) > 2

    def receive(*part_names):
        for old in batch.iterdir():
            old.unlink()
        for name in part_names:
            (batch / name).write_bytes((kit / name).read_bytes())
        status = command.main(["receive", str(batch), "--into", str(here)])
        return status, capsys.readouterr()

    status, printed = receive(MANIFEST, names[1])
    assert status == 0
    assert f"taken: {names[1]}; missing: {names[0]}, {names[2]}" in printed.out
    written = (here / names[1]).stat().st_mtime_ns
    (kit / names[0]).write_bytes((kit / names[0]).read_bytes()[:-1])
    status, printed = receive(names[0], names[1])
    assert status == 1 and f"{names[0]} is damaged: copy {names[0]} again" in printed.err
    assert not (here / names[0]).exists()
    assert (here / names[1]).stat().st_mtime_ns == written


def test_an_interrupted_cut_leaves_no_half_part(wheels, tmp_path, monkeypatch):
    class Full(Exception):
        pass

    read = parts._Stream.read

    def fails(stream, num_bytes):
        if (tmp_path / "part-001").exists():
            raise Full
        return read(stream, num_bytes)

    monkeypatch.setattr(parts._Stream, "read", fails)
    with pytest.raises(Full):
        parts.cut(wheels, tmp_path, 1000)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "part-000",
        "part-001",
    ]
    assert (tmp_path / "part-001").stat().st_size == 1000


def record_of(wheel: Path) -> dict[str, list[str]]:
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith("/RECORD")]
        return {row[0]: row[1:] for row in csv.reader(opened.read(name).decode().splitlines())}


def test_a_repacked_wheel_lacks_the_dropped_files(tmp_path):
    files = {"vllm/__init__.py": b"", "vllm/_C.so": b"kept", "vllm/_flashmla_C.so": b"big" * 99}
    wheel = make_wheel(tmp_path, "vllm", files)
    out = tmp_path / "out"
    out.mkdir()
    repacked, dropped = repack(wheel, out, lean.is_dropped)
    assert repacked.name == "vllm-1.0-1lean-py3-none-any.whl"
    assert dropped == ["vllm/_flashmla_C.so"]
    record = record_of(repacked)
    with zipfile.ZipFile(repacked) as opened:
        assert opened.testzip() is None
        assert set(opened.namelist()) == record.keys()
        for name, (stated, size) in record.items():
            if name.endswith("/RECORD"):
                assert (stated, size) == ("", "")
                continue
            data = opened.read(name)
            assert (stated, size) == (digest(data), str(len(data))), name
        assert b"\nBuild: 1lean\nTag: py3-none-any" in opened.read("vllm-1.0.dist-info/WHEEL")


@pytest.mark.parametrize("name", ["vllm-1.0-2-py3-none-any.whl", "vllm.whl"])
def test_only_a_published_wheel_is_repacked(name):
    with pytest.raises(KitError, match="cannot be repacked"):
        lean_name(name)


@pytest.fixture
def index(wheels, monkeypatch):
    """Make a folder pip's only index, and record the calls of pip."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels[0].parent))
    asked = []
    run = collecting._pip

    def noted(python, arguments):
        asked.append(arguments[0])
        run(python, arguments)

    monkeypatch.setattr(collecting, "_pip", noted)
    return asked


def order(tmp_path, **options) -> Order:
    arguments = {
        "folder": tmp_path / "collected",
        "python": sys.executable,
        "host_packages": None,
        "accepted": (),
        "is_lean": False,
        "part_bytes": 1000,
        "requirement": "one==1.*",
    }
    return Order(**{**arguments, **options})


def test_collecting_again_fetches_and_cuts_only_missing_parts(index, tmp_path):
    first = collect(order(tmp_path), print)
    assert [wheel.name[:3] for wheel in first.wheels] == ["one", "two"]
    assert index == ["install", "download"]
    folder = tmp_path / "collected"
    written = {path: path.stat().st_mtime_ns for path in (folder / "kit").glob("part-*")}
    assert collect(order(tmp_path), print) == first
    assert index == ["install", "download"], "pip is not asked again"
    assert {path: path.stat().st_mtime_ns for path in written} == written
    (folder / "wheels" / "two-1.0-py3-none-any.whl").unlink()
    damage(folder / "kit" / "part-000")
    assert collect(order(tmp_path), print) == first
    assert index == ["install", "download", "download"]
    assert all(is_there(part, folder / "kit") for part in first.parts)


def test_accept_host_without_host_packages_is_refused(tmp_path):
    with pytest.raises(KitError, match="give --host-packages too"):
        collect(order(tmp_path, accepted=("two",)), print)


def test_a_kit_installs_without_network(wheels, tmp_path, capsys):
    """One of the two wheels has been repacked."""
    folder = tmp_path / "kit"
    folder.mkdir()
    lean_wheel, _ = repack(wheels[1], tmp_path, lambda name: name == "two_more.py")
    make_kit([wheels[0], lean_wheel], folder)
    environment = tmp_path / "environment"
    assert command.main(["install", str(folder), str(environment), "--dry-run"]) == 0
    code = "import one, two; print(one.VALUE + two.VALUE)"
    python = [str(environment / "bin" / "python"), "-c"]
    assert subprocess.run([*python, code], capture_output=True, check=False).returncode != 0
    assert command.main(["install", str(folder), str(environment)]) == 0
    done = subprocess.run([*python, code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "3"
    assert "pip check" not in capsys.readouterr().out
    damage(folder / "part-000")
    (folder / "wheels" / "one-1.0-py3-none-any.whl").unlink()
    assert command.main(["install", str(folder), str(environment)]) == 1
    assert "copy part-000" in capsys.readouterr().err


def test_the_hosts_own_packages_are_behind_the_environment(index, tmp_path, capsys):
    """psutil stands for the host's package; `two` is neither included nor installed."""
    host = tmp_path / "host.json"
    host.write_text(json.dumps([{"name": "two", "version": "1.5"}]))
    made = collect(order(tmp_path, host_packages=host), print)
    assert made.left_out == (
        LeftOut(name="two", version="1.0", host_version="1.5", why="the host's"),
    )
    folder, environment = tmp_path / "collected" / "kit", tmp_path / "environment"
    assert command.main(["install", str(folder), str(environment)]) == 0
    printed = capsys.readouterr().out
    assert "pip check: one" not in printed, "that two is missing is what the kit says"
    code = "import one, psutil; print(one.VALUE)"
    python = str(environment / "bin" / "python")
    done = subprocess.run([python, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "1"


def test_failed_imports_are_named():
    found = installing.probe(Path(sys.executable), ["json", "no.such.module", "os"])
    assert found == {"no.such.module": "ModuleNotFoundError: No module named 'no'"}


def test_a_kit_of_another_python_is_refused(kit, tmp_path):
    data = json.loads((kit / MANIFEST).read_text())
    (kit / MANIFEST).write_text(json.dumps({**data, "python": "3.9"}))
    target = installing.Target(kit=kit, environment=tmp_path / "e", project=None, is_dry=True)
    with pytest.raises(KitError, match=rf"for Python 3\.9, this is {PYTHON}"):
        installing.install(target, print)


def test_complaints_about_left_out_packages_are_expected(kit):
    made = read_kit(kit)
    data = [LeftOut(name="torch", version="2", host_version="1", why="the host's")]
    short = Kit(**{**{f: getattr(made, f) for f in made.__slots__}, "left_out": tuple(data)})
    complaints = [
        "vllm 1 has requirement torch==2, but you have torch 1.",
        "vllm 1 requires six, which is not installed.",
    ]
    assert installing.unexpected(short, complaints) == complaints[1:]
