# SPDX-License-Identifier: Apache-2.0
"""Arguments of `vllm-tiered plan`."""

import argparse
import math
from pathlib import Path

from vllm_tiered.energy.carbon import CARBON_INTENSITY
from vllm_tiered.planner.machine import profile_names
from vllm_tiered.planner.memory_split import TARGETS
from vllm_tiered.planner.model_shape import DTYPE_BYTES
from vllm_tiered.units import gib_to_bytes
from vllm_tiered.weights.int4.layout import COMPRESS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to the parser of the subcommand."""
    parser.add_argument(
        "model", help="folder of the model, its config.json, or its name on the Hugging Face Hub"
    )
    near = parser.add_mutually_exclusive_group(required=True)
    near.add_argument(
        "--near-gib", type=_gib, help="GiB of near memory per rank, for weights and KV cache"
    )
    near.add_argument(
        "--card-gib",
        type=_gib,
        help="GiB of memory of each card, of which vLLM leaves some to CUDA and activations",
    )
    parser.add_argument("--far-gib", type=_gib, required=True, help="GiB of far memory per rank")
    parser.add_argument(
        "--storage",
        action="store_true",
        help="let weights that exceed far memory be stored on an SSD (weights.storage_path)",
    )
    parser.add_argument(
        "--machine",
        required=True,
        type=_machine,
        help="machine to predict for: a file that `vllm-tiered probe --out` wrote, a FILE.toml in "
        f"the form of the profiles, or one of {', '.join(profile_names())}",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=_count,
        default=512,
        help="prompt tokens of a request (default: 512)",
    )
    parser.add_argument(
        "--output-tokens",
        type=_count,
        default=128,
        help="output tokens of a request (default: 128)",
    )
    parser.add_argument(
        "--max-num-seqs",
        type=_count,
        default=256,
        help="largest number of requests at a time (default: 256)",
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=_count,
        default=2048,
        help="most tokens of a step (default: 2048; vLLM's own is 8192 on cards of 70 GiB and "
        "more). A longer prompt is computed in chunks, each of which reads all far weights",
    )
    parser.add_argument(
        "--tensor-parallel-size", type=_count, default=1, help="number of ranks (default: 1)"
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", *DTYPE_BYTES],
        default="auto",
        help="data type of weights that are not quantised, as in vLLM (default: auto)",
    )
    parser.add_argument(
        "--target",
        choices=TARGETS,
        help="what to optimise (default: throughput; latency with --max-num-seqs 1)",
    )
    parser.add_argument(
        "--max-tbt",
        type=_above_zero,
        metavar="MS",
        help="longest time between tokens, in milliseconds; fewer requests are then served at once",
    )
    parser.add_argument(
        "--max-ttft",
        type=_above_zero,
        metavar="S",
        help="longest time to first token of a request that waits for no other, in seconds",
    )
    parser.add_argument(
        "--pareto",
        action="store_true",
        help="add a table of all placements and numbers of requests that no other one beats in "
        "time to first token, time between tokens and tokens/s at once",
    )
    parser.add_argument(
        "--suggest",
        action="store_true",
        help="add what would be faster: a quantised variant, more memory (what would make a model "
        "fit that does not is always said)",
    )
    parser.add_argument(
        "--why",
        action="store_true",
        help="add a bottleneck analysis: what bounds each sublayer, and what would help",
    )
    parser.add_argument(
        "--carbon-intensity",
        type=_positive,
        default=CARBON_INTENSITY,
        help="carbon intensity of the grid, in gCO2e per kWh (default: "
        f"{CARBON_INTENSITY:g}, coal, M2Cache's figure; the world's mean was 481 in 2023, Ember)",
    )
    parser.add_argument(
        "--compress",
        choices=COMPRESS,
        default="none",
        help="compression of the layers' matrices (default: none)",
    )
    parser.add_argument(
        "--ffn-store",
        metavar="DIR",
        help="add what computing the FFN from this neuron store (tiered.ffn, written by "
        "`vllm-tiered prepare`) is predicted to bring, and whether something else is better",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _machine(text: str) -> str:
    if text not in profile_names() and not Path(text).exists():
        raise argparse.ArgumentTypeError(
            f"{text!r}: give a file that `vllm-tiered probe --out` wrote, a FILE.toml in the form "
            f"of the profiles, or one of {', '.join(profile_names())}"
        )
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, at least 1")
    return int(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number, at least 0")
    return number


def _above_zero(text: str) -> float:
    if not _positive(text):
        raise argparse.ArgumentTypeError(f"{text!r}: give a number above 0")
    return float(text)


def _gib(text: str) -> float:
    try:
        gib_to_bytes(float(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give GiB, a number at least 0") from None
    return float(text)
