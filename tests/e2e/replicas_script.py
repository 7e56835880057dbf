# SPDX-License-Identifier: Apache-2.0
"""Two replicas behind one client, as `vllm serve --data-parallel-size 2` has them.

Usage: replicas_script.py MODEL_DIR PROMPTS_JSON ENGINE_ARGUMENTS_JSON

Prompt i goes to replica i modulo 2. Prints as JSON the tokens, the workers' states as `GET /tiered`
asks for them, and the bytes of KV in each tier of `/metrics` by engine.
"""

import asyncio
import json
import sys
from collections import defaultdict
from typing import Any

from tests.e2e.script_start import quicken


async def serve(model: str, prompts: list[list[int]], arguments: dict[str, Any]) -> dict[str, Any]:
    from prometheus_client import REGISTRY
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm_tiered.adapter.telemetry.monitor import EngineMonitor

    engine_args = AsyncEngineArgs(
        model=model,
        data_parallel_size=2,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=16,
        block_size=32,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        **arguments,
    )
    llm = AsyncLLM.from_engine_args(engine_args)
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)

    async def generate(index: int) -> list[int]:
        request = {"prompt_token_ids": prompts[index]}
        options = {"request_id": str(index), "data_parallel_rank": index % 2}
        async for output in llm.generate(request, sampling, **options):
            latest = output
        return list(latest.outputs[0].token_ids)

    try:
        tokens = await asyncio.gather(*map(generate, range(len(prompts))))
        answer = await EngineMonitor(llm).ask(60.0)
        figures: dict[str, dict[str, float]] = defaultdict(dict)
        for family in REGISTRY.collect():
            for sample in family.samples:
                if sample.name == "vllm:tiered_kv_memory_bytes":
                    figures[sample.labels["engine"]][sample.labels["tier"]] = sample.value
        return {"tokens": tokens, "workers": answer.workers, "figures": figures}
    finally:
        llm.shutdown()


def main() -> None:
    quicken()
    model, prompts, arguments = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    print(json.dumps(asyncio.run(serve(model, prompts, arguments))), flush=True)


if __name__ == "__main__":
    main()
