# SPDX-License-Identifier: Apache-2.0
"""Tests that few-tokens kernels prefetch all weights, with 16 bytes for each thread and load."""

import json
import os
import subprocess
import sys

import pytest

from vllm_tiered.weights.int4.layout import GROUP

# Runs in a separate process, because kernels may be interpreted in this one.
_PROBE = """
import json, re
from vllm_tiered.kernels import resources
from vllm_tiered.kernels.dequant_linear.kernel import VARIANTS as LINEAR
from vllm_tiered.kernels.neuron_ffn.few_tokens_kernel import VARIANTS as FFN

found = {}
for variant in (*FFN, *LINEAR):
    if "few_tokens" in variant.name:
        ptx = resources.compiled(variant, 90).asm["ptx"]
        constants = dict(variant.constants)
        found[variant.name] = {
            "copied": re.findall(r"cp\\.async\\.c[ag]\\.shared\\.global[^;]*?, (0x[0-9a-f]+)", ptx),
            "loaded": re.findall(r"ld\\.global([.\\w:]*)", ptx),
            "num_warps": variant.num_warps,
            "constants": {k: v for k, v in constants.items() if isinstance(v, (int, str))},
        }
print(json.dumps(found))
"""

_NARROW = {"neuron_ffn.few_tokens.int8.plain.fills": 25}
"""Variants with more than 16 narrow copies for each tile: a tile has two rows, and each row has
lists, scales, and a bias from one of two tables."""


@pytest.fixture(scope="module")
def found():
    compiles = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", _PROBE]
    done = subprocess.run(command, capture_output=True, check=True, text=True, env=compiles)
    return json.loads(done.stdout)


def weight_bytes_of_a_tile(constants):
    if "COLUMNS" in constants:
        return constants["ROWS"] * constants["GROUPS"] * GROUP // 2
    code_bits = {"bfloat16": 16, "int8": 8, "int4": 4}[constants["CODEC"]]
    activating = constants["ACTIVATES"] * (2 if constants["GATED"] else 1)
    matrices = activating + constants["MULTIPLIES"]
    return constants["NEURONS"] * matrices * constants["HIDDEN"] * code_bits // 8


@pytest.mark.slow
def test_weights_come_in_16_bytes(found):
    assert len(found) > 10
    for name, kernel in found.items():
        constants = kernel["constants"]
        wide = kernel["copied"].count("0x10")
        threads = 32 * kernel["num_warps"]
        tiles = constants["STAGES"]  # one in the loop, the others before it
        needed = tiles * weight_bytes_of_a_tile(constants) // (16 * threads)
        if "COLUMNS" in constants:  # x is loaded with the weights
            x_bytes = constants["TOKENS"] * constants["GROUPS"] * GROUP * 4
            needed += tiles * x_bytes // (16 * threads)
        assert wide == needed > 0, (name, wide, needed)
        # Scales, zeros, biases, activations, lists: a few of each for each tile.
        narrow = [size for size in kernel["copied"] if size != "0x10"]
        most = _NARROW.get(name, 16) * tiles
        assert len(narrow) <= most, (name, len(narrow))
        assert name not in _NARROW or len(narrow) == most, "as others now: take it off the list"


def test_nothing_else_is_loaded_in_pieces(found):
    for name, kernel in found.items():
        # x before the loop, counts of missing neurons, a bias; no codes.
        pieces = [kind for kind in kernel["loaded"] if ".v4.b32" not in kind]
        assert len(pieces) <= 4, (name, pieces)
