# SPDX-License-Identifier: Apache-2.0
"""Runs two ranks with compiled graphs; prints tokens, ranks' states and metrics as JSON.

Usage: l2_script.py MODEL_DIR PROMPTS_JSON MAX_TOKENS TIERED_JSON [LLM_ARGUMENTS_JSON]
"""

import json
import sys
from typing import Any

from vllm import LLM, SamplingParams

from tests.e2e import script_start
from vllm_tiered.adapter.telemetry.monitor import WORKER_METHOD


def name_of(metric: Any) -> str:
    """Return a metric's name, with its own label's value: ``vllm:tiered_kv_bytes{read}``."""
    own = [v for k, v in metric.labels.items() if k not in ("model_name", "engine")]
    return f"{metric.name}{{{own[0]}}}" if own else str(metric.name)


def main() -> None:
    model, prompts, max_tokens, tiered = sys.argv[1:5]
    arguments = {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 16,
        "block_size": 32,
        "kv_cache_memory_bytes": 4 << 20,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "skip_tokenizer_init": True,
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        **(json.loads(sys.argv[5]) if len(sys.argv) > 5 else {}),
    }
    llm = LLM(model=model, additional_config={"tiered": json.loads(tiered)}, **arguments)
    sampling = SamplingParams(temperature=0.0, max_tokens=int(max_tokens), ignore_eos=True)
    requests = [{"prompt_token_ids": prompt} for prompt in json.loads(prompts)]
    outputs = llm.generate(requests, sampling, use_tqdm=False)
    result = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "states": llm.collective_rpc(WORKER_METHOD),
        "metrics": {name_of(m): getattr(m, "value", None) for m in llm.get_metrics()},
    }
    print("L2_RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    script_start.quicken()
    main()
