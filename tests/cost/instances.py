# SPDX-License-Identifier: Apache-2.0
"""Small models, and every placement of them: what programs and plans are compared with."""

import itertools

from vllm_tiered.planner.pipeline import Link, StepTimes
from vllm_tiered.weights.placement import (
    SLOT_ALIGNMENT,
    Kind,
    Parameter,
    Placement,
    Role,
    Sublayer,
)

PAGE = SLOT_ALIGNMENT
LINK = Link(bytes_per_s=PAGE * 1e3)  # a page a millisecond
STORAGE = Link(bytes_per_s=PAGE * 300)


def sublayer(layer, kind, *pages):
    return Sublayer(
        layer=layer,
        kind=kind,
        parameters=tuple(
            Parameter(name=f"m{i}.weight", num_bytes=count * PAGE, role=Role.MATRIX)
            for i, count in enumerate(pages)
        ),
    )


def small_model(num_layers, attention, ffn):
    return [
        part
        for layer in range(num_layers)
        for part in (
            sublayer(layer, Kind.ATTENTION, *attention),
            sublayer(layer, Kind.FFN, *ffn),
        )
    ]


def by_kind(sublayers, attention, ffn):
    seconds = {Kind.ATTENTION: attention, Kind.FFN: ffn}
    return StepTimes(compute=tuple(seconds[part.kind] for part in sublayers))


def every_placement(sublayers, tiers):
    homes = [itertools.product(tiers, repeat=len(part.parameters)) for part in sublayers]
    for chosen in itertools.product(*map(list, homes)):
        far, stored = (
            tuple(
                tuple(p for p, home in zip(part.parameters, of_part, strict=True) if home == tier)
                for part, of_part in zip(sublayers, chosen, strict=True)
            )
            for tier in ("far", "stored")
        )
        yield Placement(policy="brute", sublayers=tuple(sublayers), far=far, stored=stored)
