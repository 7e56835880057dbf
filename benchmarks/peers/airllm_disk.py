# SPDX-License-Identifier: Apache-2.0
"""AirLLM: one layer in memory at a time, the next one read ahead.

AirLLM has no class for OPT, so a subclass gives it OPT's module names. AirLLM keeps no layer
between tokens: `--resident-share` changes nothing, and what the limit leaves is page cache.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.checkpoint import Checkpoint
from benchmarks.peers.contender import (
    parse_arguments,
    prepare_torch,
    report,
    stdout_to_stderr,
    timed_generate,
)


def _load(model: Path, shards: Path) -> Any:
    """Load AirLLM's model; the first time it writes one file per layer into `shards`."""
    import torch
    from airllm.airllm_base import AirLLMBaseModel

    class AirLLMOPT(AirLLMBaseModel):  # type: ignore[misc, unused-ignore]
        def set_layer_names_dict(self) -> None:
            decoder = "model.decoder."
            self.layer_names_dict = {
                "embed": f"{decoder}embed_tokens",
                "layer_prefix": f"{decoder}layers",
                "norm": f"{decoder}final_layer_norm",
                "lm_head": "lm_head",
                "resident": [f"{decoder}embed_positions"],
            }

    return AirLLMOPT(
        str(model.absolute()),
        device="cpu",
        dtype=torch.bfloat16,
        prefetching=True,
        layer_shards_saving_path=str(shards.absolute()),
    )


def main() -> None:
    """Split the model into AirLLM's files, or generate and report."""
    arguments = parse_arguments(__doc__)
    shards = arguments.work / "shards"
    if not arguments.prepare and not shards.is_dir():
        sys.exit(f"{shards} is absent: run this with --prepare first")
    model_bytes = Checkpoint(arguments.model).num_bytes
    prepare_torch(arguments.threads)
    with stdout_to_stderr():
        start = time.perf_counter()
        model = _load(arguments.model, shards)
        load_seconds = time.perf_counter() - start
        if arguments.prepare:
            return
        seconds = timed_generate(model, arguments.prompt_tokens, arguments.new_tokens)
    report(
        "airllm_disk",
        "airllm",
        load_seconds=load_seconds,
        seconds=seconds,
        new_tokens=arguments.new_tokens,
        model_bytes=model_bytes,
        resident_bytes=None,
    )


if __name__ == "__main__":
    main()
