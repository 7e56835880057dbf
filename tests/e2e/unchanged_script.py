# SPDX-License-Identifier: Apache-2.0
"""A user's script without any mention of the plugin: prints its outputs as JSON.

Usage: unchanged_script.py MODEL_DIR PROMPTS_JSON [LLM_ARGUMENTS_JSON]
"""

import json
import sys
from typing import Any

from vllm import LLM, SamplingParams


def name_of(metric: Any) -> str:
    """Return a metric's name, with its own label's value: ``vllm:tiered_kv_bytes{read}``."""
    own = [v for k, v in metric.labels.items() if k not in ("model_name", "engine")]
    return f"{metric.name}{{{own[0]}}}" if own else str(metric.name)


def main() -> None:
    arguments = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    llm = LLM(
        model=sys.argv[1],
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=16,
        block_size=32,
        enable_prefix_caching=False,
        disable_log_stats=False,
        **arguments,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in json.loads(sys.argv[2])]
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    print(
        json.dumps(
            {
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "logprobs": [output.outputs[0].cumulative_logprob for output in outputs],
                "metrics": {name_of(m): getattr(m, "value", None) for m in llm.get_metrics()},
            }
        )
    )


if __name__ == "__main__":
    main()
