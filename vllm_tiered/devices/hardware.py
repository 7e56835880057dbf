# SPDX-License-Identifier: Apache-2.0
"""GPUs with their PCIe links, and disks, as the system's files under /sys describe them.

A file that is missing or unreadable means that a figure is unknown. In a container or a virtual
machine much of it is.
"""

from dataclasses import dataclass
from pathlib import Path

_SYS = Path("/sys")
_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"
_SECTOR_BYTES = 512
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""PCIe generation by the transfers of a lane, in 10^9 per second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PcieLink:
    """Speed of a PCIe link in one direction.

    Attributes:
        gt_per_s: transfers of a lane, in 10^9 per second.
        lanes: number of lanes.
    """

    gt_per_s: float
    lanes: int

    @property
    def generation(self) -> int | None:
        """Generation of PCIe; None for a speed that no generation has."""
        return _GENERATIONS.get(self.gt_per_s)

    @property
    def gb_per_s(self) -> float:
        """Bandwidth after line encoding (10^9 bytes); packet headers take some more of it."""
        if self.gt_per_s < 8:
            encoding = 8 / 10
        elif self.gt_per_s < 64:
            encoding = 128 / 130
        else:
            encoding = 242 / 256  # flits
        return self.gt_per_s * self.lanes * encoding / 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """NVIDIA GPU on the PCIe bus.

    Attributes:
        address: PCI address, as `0000:01:00.0`.
        node: NUMA node that it is attached to; None if unknown.
        now: its link as it runs; an idle GPU lowers the speed to save power. None if unknown.
        at_most: the link that both the GPU and its port can have; None if unknown.
    """

    address: str
    node: int | None
    now: PcieLink | None
    at_most: PcieLink | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """Disk of the machine.

    Attributes:
        spins: whether the system reports a disk that spins; virtual disks often claim to.
        link: PCIe link of an NVMe disk; None for others, or if unknown.
    """

    name: str
    num_bytes: int
    spins: bool
    link: PcieLink | None


def find_gpus(sys: Path = _SYS) -> list[Gpu]:
    """List the NVIDIA GPUs by address; empty if the system shows none."""
    found = []
    for folder in _entries(sys / "bus/pci/devices"):
        is_display = _read(folder / "class").startswith(_DISPLAY_CLASS)
        if not is_display or _read(folder / "vendor") != _NVIDIA:
            continue
        node = _read(folder / "numa_node")
        # The folder of a PCI device is in that of its port.
        ends = [_pcie_link(folder, "max"), _pcie_link(folder.resolve().parent, "max")]
        known = [link for link in ends if link is not None]
        at_most = None
        if known:
            at_most = PcieLink(
                gt_per_s=min(link.gt_per_s for link in known),
                lanes=min(link.lanes for link in known),
            )
        found.append(
            Gpu(
                address=folder.name,
                node=int(node) if node.isdigit() else None,
                now=_pcie_link(folder, "current"),
                at_most=at_most,
            )
        )
    return found


def find_disks(sys: Path = _SYS) -> list[Disk]:
    """List the disks by name, without partitions, loop devices and compressed memory."""
    found = []
    for folder in _entries(sys / "class/block"):
        # Only hardware has a device; a partition's is its disk.
        if (folder / "partition").exists() or not (folder / "device").exists():
            continue
        sectors = _read(folder / "size")
        if not sectors.isdigit() or sectors == "0":
            continue  # a drive without a disk in it
        found.append(
            Disk(
                name=folder.name,
                num_bytes=int(sectors) * _SECTOR_BYTES,
                spins=_read(folder / "queue/rotational") == "1",
                link=_pcie_link(folder / "device/device", "current"),
            )
        )
    return found


def _pcie_link(folder: Path, which: str) -> PcieLink | None:
    """Return a device's current or maximum link; None if the system does not tell."""
    speed = _read(folder / f"{which}_link_speed").split()  # such as "16.0 GT/s PCIe"
    lanes = _read(folder / f"{which}_link_width")
    try:
        link = PcieLink(gt_per_s=float(speed[0]), lanes=int(lanes))
    except (IndexError, ValueError):
        return None
    # Links that are down, and virtual functions, have 0 lanes, or 63 or 255 for "unknown".
    return link if link.gt_per_s > 0 and 0 < link.lanes <= 32 else None


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
