# SPDX-License-Identifier: Apache-2.0
"""A folder as Linux's powercap class has it, with counters that a test moves.

As on a two-socket Xeon (kernel 6.8): zones are listed flat, a package's parts beside it.
"""

from pathlib import Path

RANGE_UJ = 262_143_328_850
"""Of packages; 2^32 units of 61 uJ."""

DRAM_RANGE_UJ = 65_712_999_613

SERVER = {
    "intel-rapl:0": "package-0",
    "intel-rapl:0:0": "dram",
    "intel-rapl:1": "package-1",
    "intel-rapl:1:0": "dram",
}
DESKTOP = {"intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:0:1": "uncore",
           "intel-rapl:1": "psys", "intel-rapl-mmio:0": "package-0"}  # fmt: skip


class Powercap:
    """Args: root: an empty folder; zones: folder names with what each file `name` holds."""

    def __init__(self, root: Path, zones: dict[str, str]) -> None:
        self.root = root
        (root / "intel-rapl").mkdir()  # the control type, which holds no counter
        for k, (folder, name) in enumerate(zones.items()):
            (root / folder).mkdir()
            (root / folder / "name").write_text(f"{name}\n")
            limit = DRAM_RANGE_UJ if name == "dram" else RANGE_UJ
            (root / folder / "max_energy_range_uj").write_text(f"{limit}\n")
            self.set(folder, 1_000_000_000 * (k + 1))

    def set(self, folder: str, energy_uj: int) -> None:
        (self.root / folder / "energy_uj").write_text(f"{energy_uj}\n")

    def get(self, folder: str) -> int:
        return int((self.root / folder / "energy_uj").read_text())

    def draw(self, folder: str, joules: float) -> None:
        """The counter goes on by so much, around its end if need be."""
        limit = int((self.root / folder / "max_energy_range_uj").read_text())
        self.set(folder, (self.get(folder) + int(joules * 1e6)) % limit)
