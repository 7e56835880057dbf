# SPDX-License-Identifier: Apache-2.0
"""Chooses which of the distributions that pip resolved a kit includes: pure functions.

pip's installation report lists the requirements of each distribution. Starting from the root, a
distribution is left to the host if the host has a version that everything requiring it accepts.
What only such distributions need is left to the host too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from benchmarks.suites.gpu.kit.manifest import KitError, LeftOut


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """A distribution that pip would install.

    Attributes:
        sha256: digest of its wheel.
        requires: its Requires-Dist lines.
    """

    name: str
    version: str
    url: str
    sha256: str
    requires: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolution:
    """pip's report: distributions by name, and the environment for evaluating markers."""

    distributions: Mapping[str, Distribution]
    environment: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Distributions that a kit includes, and those of the resolution that it leaves out."""

    chosen: tuple[Distribution, ...]
    left_out: tuple[LeftOut, ...]


def read_report(report: Mapping[str, Any]) -> Resolution:
    """Read the output of `pip install --dry-run --report`. Raises KitError without a sha256."""
    distributions: dict[str, Distribution] = {}
    for item in report["install"]:
        metadata, origin = item["metadata"], item["download_info"]
        hashes = origin.get("archive_info", {}).get("hashes", {})
        if "sha256" not in hashes:
            raise KitError(f"pip gives no sha256 for {metadata['name']}: {origin.get('url')}")
        name = canonicalize_name(metadata["name"])
        distributions[name] = Distribution(
            name=name,
            version=metadata["version"],
            url=origin["url"],
            sha256=hashes["sha256"],
            requires=tuple(metadata.get("requires_dist", ())),
        )
    return Resolution(distributions=distributions, environment=report["environment"])


def read_host(entries: Collection[Mapping[str, str]]) -> dict[str, str]:
    """Return versions by name, from `pip list --format json` on the host."""
    return {canonicalize_name(entry["name"]): entry["version"] for entry in entries}


def select(
    resolution: Resolution,
    requirement: str,
    *,
    host: Mapping[str, str],
    accepted: Collection[str] = (),
    dropped: Mapping[str, str],
) -> Selection:
    """Choose what a kit includes.

    Args:
        requirement: the requirement that was resolved.
        host: the host's versions by name; empty if the kit uses nothing of the host.
        accepted: names taken from the host in any version.
        dropped: names left out although the host lacks them, and why.
    Raises:
        KitError: `accepted` names something that the host does not have.
    """
    dropped = {canonicalize_name(name): why for name, why in dropped.items()}
    accepted = {canonicalize_name(name) for name in accepted}
    if lacking := accepted - host.keys():
        raise KitError(f"the host has no {', '.join(sorted(lacking))}: it cannot be taken from it")
    provided: set[str] = set()
    while True:
        asked = _reached(resolution, requirement, provided, dropped)
        found = {
            name
            for name, requirements in asked.items()
            if name in host and (name in accepted or _satisfies(host[name], requirements))
        } - dropped.keys()
        if found == provided:
            break
        provided = found
    included = [name for name in asked if name not in provided and name not in dropped]
    left_out = []
    for name, distribution in sorted(resolution.distributions.items()):
        if name in included:
            continue
        why = dropped.get(name) or _why(name, asked.get(name), host, provided)
        left_out.append(
            LeftOut(
                name=name,
                version=distribution.version,
                host_version=host.get(name) if name in provided else None,
                why=why,
            )
        )
    chosen = tuple(resolution.distributions[name] for name in sorted(included))
    return Selection(chosen=chosen, left_out=tuple(left_out))


def _why(
    name: str,
    asked: list[tuple[str, Requirement]] | None,
    host: Mapping[str, str],
    provided: Collection[str],
) -> str:
    if asked is None:
        return "only what is left out asks for it"
    assert name in provided, name
    unmet = [
        f"{by} asks for {need}" for by, need in asked if not _satisfies(host[name], [("", need)])
    ]
    return f"the host's, although {'; '.join(unmet)}" if unmet else "the host's"


def _reached(
    resolution: Resolution, requirement: str, provided: Collection[str], dropped: Collection[str]
) -> dict[str, list[tuple[str, Requirement]]]:
    """Return the requirements on each distribution with their origins, starting from the root.

    For a provided distribution only its extras are followed: the host may have it without them.
    """
    root = Requirement(requirement)
    asked: dict[str, list[tuple[str, Requirement]]] = {}
    seen: set[tuple[str, str]] = set()
    queue = [("the kit", root)]
    while queue:
        by, need = queue.pop()
        name = canonicalize_name(need.name)
        asked.setdefault(name, []).append((by, need))
        if (distribution := resolution.distributions.get(name)) is None:
            raise KitError(f"{by} asks for {need}, which pip did not resolve")
        for extra in ("", *need.extras):
            if (name, extra) in seen or name in dropped or (name in provided and not extra):
                continue
            seen.add((name, extra))
            queue += [
                (f"{distribution.name} {distribution.version}", further)
                for further in _needs(distribution, extra, resolution.environment)
            ]
    return asked


def _needs(
    distribution: Distribution, extra: str, environment: Mapping[str, str]
) -> Iterator[Requirement]:
    """Yield a distribution's requirements, or those that one extra of it adds."""
    for line in distribution.requires:
        need = Requirement(line)
        alone = need.marker is None or need.marker.evaluate({**environment, "extra": ""})
        with_extra = need.marker is None or need.marker.evaluate({**environment, "extra": extra})
        if (not extra and alone) or (extra and with_extra and not alone):
            yield need


def _satisfies(version: str, requirements: Collection[tuple[str, Requirement]]) -> bool:
    try:
        Version(version)
    except InvalidVersion:
        return False
    return all(need.specifier.contains(version, prereleases=True) for _, need in requirements)
