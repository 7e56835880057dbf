# SPDX-License-Identifier: Apache-2.0
"""The distributions that a kit includes of those pip resolved, and those left to the host."""

import pytest

from benchmarks.suites.gpu.kit.manifest import KitError
from benchmarks.suites.gpu.kit.selection import Distribution, Resolution, read_report, select


def resolution(**requires: list[str]) -> Resolution:
    versions = {"root": "1.0", "torch": "2.13.0", "numpy": "2.3.5", "six": "1.17.0"}
    return Resolution(
        distributions={
            name: Distribution(
                name=name,
                version=versions.get(name, "1.0"),
                url="",
                sha256=name,
                requires=tuple(needs),
            )
            for name, needs in requires.items()
        },
        environment={"python_version": "3.12", "extra": ""},
    )


RESOLUTION = resolution(
    root=["torch==2.13.0", "numpy", "six>=1; python_version > '3.11'", "kernels[fast]"],
    torch=["numpy<2.4", "cuda-libs==1.*"],
    numpy=[],
    six=["never; python_version < '3'"],
    kernels=["dsl", "quick; extra == 'fast'"],
    dsl=[],
    quick=[],
    **{"cuda-libs": []},
)


def names(selection) -> list[str]:
    return [distribution.name for distribution in selection.chosen]


def test_without_a_host_everything_is_included():
    found = select(RESOLUTION, "root", host={}, dropped={})
    assert names(found) == sorted(RESOLUTION.distributions)
    assert not found.left_out


def test_packages_of_the_host_with_a_fitting_version_are_left_out():
    host = {"numpy": "2.3.9", "torch": "2.11.0", "six": "1.16.0", "kernels": "1.0"}
    found = select(RESOLUTION, "root", host=host, dropped={})
    # numpy fits, torch does not; the host may lack the extra of kernels.
    assert names(found) == ["cuda-libs", "quick", "root", "torch"]
    assert {entry.name: entry.host_version for entry in found.left_out} == {
        "numpy": "2.3.9",
        "six": "1.16.0",
        "kernels": "1.0",
        "dsl": None,
    }


def test_a_package_is_included_if_one_dependent_refuses_the_hosts_version():
    found = select(RESOLUTION, "root", host={"numpy": "2.5.2"}, dropped={})
    assert "numpy" in names(found), "torch wants one below 2.4"
    accepted = select(
        RESOLUTION,
        "root",
        host={"numpy": "2.5.2", "torch": "2.11.0"},
        accepted=["torch"],
        dropped={},
    )
    assert "numpy" not in names(accepted), "nobody refuses it when that torch is not included"
    (torch,) = [entry for entry in accepted.left_out if entry.name == "torch"]
    assert torch.why == "the host's, although root 1.0 asks for torch==2.13.0"
    with pytest.raises(KitError, match="the host has no torch"):
        select(RESOLUTION, "root", host={}, accepted=["torch"], dropped={})


def test_a_dropped_package_takes_its_own_dependencies_along():
    found = select(RESOLUTION, "root", host={}, dropped={"Kernels": "not needed"})
    assert names(found) == ["cuda-libs", "numpy", "root", "six", "torch"]
    assert {entry.name: entry.why for entry in found.left_out} == {
        "kernels": "not needed",
        "dsl": "only what is left out asks for it",
        "quick": "only what is left out asks for it",
    }


def test_a_report_without_digests_is_refused():
    item = {"metadata": {"name": "a", "version": "1"}, "download_info": {"url": "file:///a"}}
    with pytest.raises(KitError, match="no sha256 for a"):
        read_report({"install": [item], "environment": {}})
