# SPDX-License-Identifier: Apache-2.0
"""Serves a few tokens and prints them with the process's peak of resident memory, as JSON.

Usage: memory_script.py MODEL_DIR PROMPTS_JSON LLM_ARGUMENTS_JSON
"""

import json
import re
import sys
from pathlib import Path

from vllm import LLM, SamplingParams


def main() -> None:
    llm = LLM(
        model=sys.argv[1],
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        kv_cache_memory_bytes=16 << 20,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        **json.loads(sys.argv[3]),
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in json.loads(sys.argv[2])]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    print(json.dumps({"tokens": tokens, "peak_bytes": int(peak[1]) * 1024}))


if __name__ == "__main__":
    main()
