# SPDX-License-Identifier: Apache-2.0
"""The energy counters of processors and their memory (RAPL), as Linux's powercap files give them.

    /sys/class/powercap/intel-rapl:0      name "package-0"   energy_uj, max_energy_range_uj
    /sys/class/powercap/intel-rapl:0:0    name "core"        part of the package
    /sys/class/powercap/intel-rapl:0:2    name "dram"        beside the package; servers only
    /sys/class/powercap/intel-rapl:1      name "psys"        the whole board, where there is one

Packages and dram are counted. "core" and "uncore" are parts of their package, "psys" includes it,
and zones of `intel-rapl-mmio` are the same counters once more. AMD's processors have the same files
(without dram). They say what the host draws, whoever makes it draw, and since CVE-2020-8694 only
root may read them.
"""

from collections.abc import Sequence
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")

_SAME_JOULES = 1.0


class RaplZone:
    """One counter, made to run on where it wraps around.

    A counter wraps after 2^32 units: 262 kJ, which are 20 minutes at 200 W. It has to be read more
    often than that; a second wrap in between is not seen.

    Raises:
        OSError: a file is missing, cannot be read, or holds no number.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range_uj = _number(folder / "max_energy_range_uj")
        self._last_uj = _number(self._file)

    @property
    def joules(self) -> float:
        """Where the counter stood when it was last read."""
        return self._last_uj / 1e6

    def take(self) -> float:
        """Joules since the last call, or since it was made. Raises OSError."""
        now = _number(self._file)
        step = now - self._last_uj
        self._last_uj = now
        return (step if step >= 0 else step + self._range_uj) / 1e6


def open_rapl(powercap: Path = POWERCAP) -> tuple[dict[str, list[RaplZone]], str | None]:
    """Readable counters by part ("cpu", "dram"), and why there is none for the processor.

    A part of which one counter cannot be read is left out: a sum without a socket is no sum.
    """
    folders: dict[str, list[Path]] = {}
    for folder in sorted(powercap.glob("intel-rapl:*")):
        try:
            name = (folder / "name").read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if name.startswith("package-"):
            folders.setdefault("cpu", []).append(folder)
        elif name == "dram":
            folders.setdefault("dram", []).append(folder)
    parts, reason = {}, None
    if "cpu" not in folders:
        reason = f"no RAPL in {powercap}"
    for part, found in folders.items():
        try:
            parts[part] = _distinct([RaplZone(folder) for folder in found])
        except OSError as error:
            if part == "cpu":
                where = error.filename or found[0]
                reason = f"{where}: {error.strerror or error} (readable by root, or after chmod)"
    return parts, reason


def _distinct(zones: Sequence[RaplZone]) -> list[RaplZone]:
    """Without counters that are others under another name.

    Processors of several dies may give each die a zone with the counter of the whole socket, so
    that a sum is several times what is drawn (seen on AMD's; codecarbon's issue 1274). Counters of
    different sockets do not stand within a joule of each other, of 262 kJ.
    """
    kept: list[RaplZone] = []
    for zone in zones:
        is_same = any(abs(zone.joules - other.joules) < _SAME_JOULES for other in kept)
        if not (is_same and zone.joules):  # at 0 a counter says nothing yet
            kept.append(zone)
    return kept


def _number(path: Path) -> int:
    text = path.read_text(encoding="ascii")
    try:
        return int(text)
    except ValueError:
        raise OSError(0, f"holds {text.strip()[:20]!r}, no number", str(path)) from None
