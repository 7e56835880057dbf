# SPDX-License-Identifier: Apache-2.0
"""transformers with accelerate's device map: the first layers in memory, the rest on disk.

This is the usual way to run a model that does not fit. Embeddings, positions and the last norm stay
in memory. A layer on disk is read as a whole when needed, and dropped afterwards.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.peers.checkpoint import Checkpoint
from benchmarks.peers.contender import (
    Arguments,
    parse_arguments,
    prepare_torch,
    report,
    stdout_to_stderr,
    timed_generate,
)

_PREFIX = "model.decoder."


def resident_plan(checkpoint: Checkpoint, share: float) -> tuple[int, int]:
    """Return how many layers stay in memory within `share` of the weights, and all bytes there.

    What is not a layer always stays in memory, so the bytes can exceed a very small share.
    """
    num_layers = checkpoint.config["num_hidden_layers"]
    layer = f"{_PREFIX}layers.0."
    layer_bytes = sum(checkpoint[name].nbytes for name in checkpoint if name.startswith(layer))
    others_bytes = checkpoint.num_bytes - num_layers * layer_bytes
    fitting = int((share * checkpoint.num_bytes - others_bytes) // layer_bytes)
    resident = min(max(fitting, 0), num_layers)
    return resident, others_bytes + resident * layer_bytes


def device_map(num_layers: int, resident_layers: int) -> dict[str, str]:
    """Return accelerate's map of an OPT: the first layers on "cpu", the rest on "disk"."""
    places = {
        f"{_PREFIX}{part}": "cpu"
        for part in ("embed_tokens", "embed_positions", "final_layer_norm")
    }
    places["lm_head"] = "cpu"
    for layer_idx in range(num_layers):
        place = "cpu" if layer_idx < resident_layers else "disk"
        places[f"{_PREFIX}layers.{layer_idx}"] = place
    return places


def _load(arguments: Arguments, places: dict[str, str], offload: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        arguments.model,
        device_map=places,
        offload_folder=str(offload),
        dtype=torch.bfloat16,
        low_cpu_mem_usage=True,
    )
    return model.eval()


def main() -> None:
    """Generate and report; there is nothing to convert: layers come from the model's own files."""
    arguments = parse_arguments(__doc__)
    if arguments.prepare:
        return
    checkpoint = Checkpoint(arguments.model)
    num_layers = checkpoint.config["num_hidden_layers"]
    resident_layers, resident_bytes = resident_plan(checkpoint, arguments.resident_share)
    model_bytes = checkpoint.num_bytes
    prepare_torch(arguments.threads)
    with stdout_to_stderr():
        start = time.perf_counter()
        places = device_map(num_layers, resident_layers)
        model = _load(arguments, places, arguments.work / "offload")
        load_seconds = time.perf_counter() - start
        seconds = timed_generate(model, arguments.prompt_tokens, arguments.new_tokens)
    report(
        "accelerate_disk",
        "accelerate",
        load_seconds=load_seconds,
        seconds=seconds,
        new_tokens=arguments.new_tokens,
        model_bytes=model_bytes,
        resident_bytes=resident_bytes,
    )


if __name__ == "__main__":
    main()
