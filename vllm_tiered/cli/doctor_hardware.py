# SPDX-License-Identifier: Apache-2.0
"""Checks of `vllm-tiered doctor` on memory nodes, GPUs with their links, and disks."""

from typing import Any

from vllm_tiered.adapter import compat
from vllm_tiered.cli.check import Check, Status, format_ranges
from vllm_tiered.devices import hardware, numa
from vllm_tiered.devices.hardware import Disk, Gpu, PcieLink
from vllm_tiered.units import format_bytes


def check_numa_nodes() -> Check:
    """List the nodes whose memory this process may use, each with its CPUs and distance."""
    nodes = numa.nodes()
    if not nodes:
        return Check(name="memory nodes", status=Status.OK, found="not reported by this system")
    found = "; ".join(_describe_node(node, nodes) for node in nodes)
    return Check(name="memory nodes", status=Status.OK, found=found)


def check_gpu_links() -> Check:
    """List the GPUs with their memory and PCIe links; warn of a link with lanes missing."""
    gpus, memory = hardware.find_gpus(), _video_memory()
    if not gpus and not memory:
        return Check(name="gpus", status=Status.OK, found="none on the PCIe bus")
    if not gpus:
        sizes = ", ".join(format_bytes(size) for size in memory.values())
        return Check(name="gpus", status=Status.OK, found=f"{sizes}; links not reported")
    narrow = [gpu.address for gpu in gpus if _is_narrow(gpu)]
    return Check(
        name="gpus",
        status=Status.WARN if narrow else Status.OK,
        found="; ".join(_describe_gpu(gpu, memory.get(gpu.address)) for gpu in gpus),
        advice=f"{', '.join(narrow)}: fewer lanes than card and slot have, and far memory is as "
        "fast as the link: seat the card again, or look for a slot that shares its lanes"
        if narrow
        else "",
    )


def check_disks() -> Check:
    """List the disks; which of them holds a folder, and how fast it is, `probe --path` tells."""
    disks = hardware.find_disks()
    found = "; ".join(map(_describe_disk, disks)) or "none reported by this system"
    return Check(name="disks", status=Status.OK, found=found)


def _describe_node(node: numa.Node, nodes: list[numa.Node]) -> str:
    cpus = "no CPUs (CXL, NVM or a GPU's memory)"
    if node.cpus:
        cpus = f"CPUs {format_ranges(sorted(node.cpus))}"
    words = [
        f"node {node.number}: {format_bytes(node.total_bytes)}",
        f"{format_bytes(node.free_bytes)} free",
        cpus,
    ]
    others = [
        f"{node.distances[other.number]} to node {other.number}"
        for other in nodes
        if other is not node and other.number in node.distances
    ]
    if others:
        words.append(f"distance {', '.join(others)}")
    return ", ".join(words)


def _describe_gpu(gpu: Gpu, memory_bytes: int | None) -> str:
    words = [gpu.address]
    if memory_bytes is not None:
        words.append(format_bytes(memory_bytes))
    if gpu.at_most is None:
        words.append("PCIe link not reported")
    else:
        words.append(f"PCIe up to {_describe_link(gpu.at_most)}")
        if gpu.now is not None and gpu.now != gpu.at_most:
            words.append(f"{_describe_link(gpu.now)} now (idle GPUs lower it)")
    if gpu.node is not None:
        words.append(f"at node {gpu.node}")
    return ", ".join(words)


def _describe_disk(disk: Disk) -> str:
    link = f", PCIe {_describe_link(disk.link)}" if disk.link else ""
    spins = ", spins (or is virtual)" if disk.spins else ""
    return f"{disk.name} {format_bytes(disk.num_bytes)}{link}{spins}"


def _describe_link(link: PcieLink) -> str:
    generation = f"{link.generation}.0" if link.generation else f"{link.gt_per_s:g} GT/s"
    return f"{generation} x{link.lanes} ({link.gb_per_s:.1f} GB/s)"


def _is_narrow(gpu: Gpu) -> bool:
    """Return whether lanes are missing; a low speed is what an idle GPU chooses."""
    return gpu.now is not None and gpu.at_most is not None and gpu.now.lanes < gpu.at_most.lanes


def _video_memory() -> dict[str, int]:
    """Return the bytes of each GPU's memory by PCI address; empty if torch can use none."""
    if compat.vllm_version() is None:
        return {}
    import torch

    if not torch.cuda.is_available():
        return {}
    found = {}
    for index in range(torch.cuda.device_count()):
        gpu: Any = torch.cuda.get_device_properties(index)
        domain = getattr(gpu, "pci_domain_id", 0)
        address = f"{domain:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        found[address] = gpu.total_memory
    return found
