# SPDX-License-Identifier: Apache-2.0
"""Table of each kernel's resources, made without a GPU.

``python -m vllm_tiered.kernels.resources`` compiles every variant for sm_80, sm_90 and sm_100 and
writes registers, spills and shared memory to ``resources.json``. A test compares this file with a
new compilation.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_tiered.errors import UnsupportedError
from vllm_tiered.kernels.dequant_linear.kernel import VARIANTS as DEQUANT_LINEAR
from vllm_tiered.kernels.expert_slots.kernel import VARIANTS as EXPERT_SLOTS
from vllm_tiered.kernels.kv_pages.kernel import VARIANTS as KV_PAGES
from vllm_tiered.kernels.kv_pages.narrow_kernel import VARIANTS as NARROW_PAGES
from vllm_tiered.kernels.l2_prefetch.kernel import VARIANTS as L2_PREFETCH
from vllm_tiered.kernels.neuron_cache.kernel import VARIANTS as NEURON_CACHE
from vllm_tiered.kernels.neuron_ffn.batch_kernel import VARIANTS as NEURON_FFN_BATCH
from vllm_tiered.kernels.neuron_ffn.few_tokens_kernel import VARIANTS as NEURON_FFN
from vllm_tiered.kernels.select_neurons.kernel import VARIANTS as SELECT_NEURONS
from vllm_tiered.kernels.variants import Variant

VARIANTS: tuple[Variant, ...] = (
    *DEQUANT_LINEAR,
    *EXPERT_SLOTS,
    *KV_PAGES,
    *NARROW_PAGES,
    *L2_PREFETCH,
    *NEURON_CACHE,
    *NEURON_FFN,
    *NEURON_FFN_BATCH,
    *SELECT_NEURONS,
)

ARCHITECTURES = (80, 90, 100)
"""Compute capabilities times 10: A100; H100, H200 and GH200; B200."""

TABLE = Path(__file__).with_name("resources.json")

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """Registers and spilled bytes of a thread, and shared memory of a program."""

    registers: int
    spilled_bytes: int
    shared_bytes: int


def compiled(variant: Variant, architecture: int) -> Any:
    """Compile a variant and return Triton's kernel; its ``asm`` has "ptx" and "cubin".

    Args:
        architecture: compute capability times 10.

    Raises:
        UnsupportedError: it does not compile.
    """
    names = tuple(variant.kernel.arg_names)
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in variant.aligned}
    source = ASTSource(
        variant.kernel, signature=signature, constexprs=dict(variant.constants), attrs=aligned
    )
    options = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        "enable_fp_fusion": True,
    }
    try:
        return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    except Exception as error:  # Triton's exceptions have no common base class
        raise UnsupportedError(f"{variant.name} does not compile for sm_{architecture}") from error


def resources(kernel: Any) -> Resources:
    """Read a compiled kernel's resources from its cubin.

    Raises:
        UnsupportedError: the cubin cannot be read.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = _USAGE.search(done.stdout)
    if found is None:
        raise UnsupportedError(f"cuobjdump says nothing of registers: {done.stdout}{done.stderr}")
    registers, stack_bytes, static_shared_bytes, local_bytes = map(int, found.groups())
    return Resources(
        registers=registers,
        # ptxas puts spills on a stack in local memory; LOCAL is local memory that is declared.
        spilled_bytes=stack_bytes + local_bytes,
        # Triton requests shared memory at the launch, so the cubin does not have its size.
        shared_bytes=max(static_shared_bytes, int(kernel.metadata.shared)),
    )


def table() -> dict[str, Any]:
    """Return all resources by variant and architecture, with the version of Triton.

    Raises:
        UnsupportedError: a variant does not compile.
    """
    return {"triton": triton.__version__, "variants": dict(_rows())}


def _rows() -> Iterator[tuple[str, dict[str, dict[str, int]]]]:
    for variant in VARIANTS:
        yield (
            variant.name,
            {
                f"sm_{architecture}": asdict(resources(compiled(variant, architecture)))
                for architecture in ARCHITECTURES
                if architecture >= variant.min_architecture
            },
        )


def main(arguments: list[str]) -> None:
    """Write the table, or print it with ``--print``."""
    text = json.dumps(table(), indent=1) + "\n"
    if arguments == ["--print"]:
        sys.stdout.write(text)
    else:
        TABLE.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
