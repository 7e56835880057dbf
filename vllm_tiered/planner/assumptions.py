# SPDX-License-Identifier: Apache-2.0
"""What a plan takes GEMMs with few bits to cost, in words."""

from __future__ import annotations

from vllm_tiered.planner.machine import Machine
from vllm_tiered.planner.model_shape import ModelShape


def describe_gemms(shape: ModelShape, machine: Machine) -> str | None:
    """Return a sentence on the GEMMs of quantised weights; None if the model has none."""
    if shape.quantization:
        parameters = [p for sublayer in shape.sublayers for p in sublayer.parameters]
        quantised = filter(shape.is_compressed, parameters)
        if machine.curves and machine.curves.w4a16 and all(map(shape.is_w4a16, quantised)):
            return (
                f"Matmuls with weights in {shape.quantization} take as long as the probe measured."
            )
        cost = (
            "take as long as without quantisation, as the probe measured no such kernel"
            if machine.curves
            else "read the bytes of their format and multiply as fast as in 16 bit"
        )
        placed = "" if shape.may_be_far else " The engine places no weights in this format."
        return (
            f"Assumed: matmuls with weights in {shape.quantization} {cost}. A kernel that unpacks "
            f"them slowly takes longer.{placed}"
        )
    if not any(shape.is_int4(p) for sublayer in shape.sublayers for p in sublayer.parameters):
        return None
    if machine.curves:
        if machine.curves.compressed:
            return "Matmuls with weights in 4 bit take as long as the probe measured."
        return (
            "Assumed: matmuls with weights in 4 bit take as long as without compression, as the "
            "probe measured none."
        )
    if machine.int4_compute_factor is not None:
        return (
            f"Assumed: matmuls with weights in 4 bit take {machine.int4_compute_factor:g} times as "
            "long as in 16 bit (--json names the source of int4_compute_factor)."
        )
    return (
        "Assumed: matmuls with weights in 4 bit read their bytes and multiply as fast as in 16 bit."
    )
