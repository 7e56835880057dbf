# SPDX-License-Identifier: Apache-2.0
"""Serves until it is killed, with far pages in a file and a level that changes all the time.

Usage: endless_script.py MODEL_DIR FOLDER EXPANSION LLM_ARGUMENTS_JSON
"""

import itertools
import json
import sys

from tests.e2e import script_start
from tests.e2e.harness import random_prompts
from vllm_tiered.adapter.kv import adaptive
from vllm_tiered.kv.controller import Decision


def up_and_down() -> None:
    counter = itertools.count()

    def step(signals, state, levels, tuning):
        # The levels are far apart, so that most steps fall between them.
        target = (len(levels.ladder) - 1) * (next(counter) // 6 % 2)
        print(f"level {signals.level_idx} aims at {target}", flush=True)
        return Decision(level_idx=target, reason="up and down"), state

    adaptive.controller.step = step  # type: ignore[assignment]


def main() -> None:
    from vllm import LLM, SamplingParams

    model, folder, expansion, arguments = sys.argv[1:5]
    kv = {"expansion": expansion, "tier": "storage", "path": folder, "far_gib": 0.02}
    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=16,
        block_size=32,
        kv_cache_memory_bytes=48 << 20,
        additional_config={"tiered": {"kv": kv}},
        **json.loads(arguments),
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts(12)]
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    while True:
        llm.generate(prompts, sampling, use_tqdm=False)
        print("generated", flush=True)


if sys.argv[3] == "auto":  # also in the engine's process, which imports this module again
    up_and_down()

if __name__ == "__main__":
    script_start.quicken()
    main()
