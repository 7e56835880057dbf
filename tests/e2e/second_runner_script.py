# SPDX-License-Identifier: Apache-2.0
"""Engines with vLLM's model runner V2 on the CPU backend, in a process of its own.

vLLM's CPU worker uses this runner with a Triton that compiles for CPUs, and V1 without one. V2
needs it only for its own small kernels (block tables, slots, sampling), which Triton's interpreter
can run as well. So vLLM is shown a Triton CPU backend that claims to be active.

The script reads model, prompts, max_tokens and the engines' arguments by name from stdin; an engine
may override model and max_tokens. For each engine it writes a line to stdout: tokens, manifest and
metrics, and the steps of the one that replays full graphs (`whole_steps.py`).
"""

import itertools
import json
import os
import sys
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}

from triton.backends import backends


def main() -> None:
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    import pytest

    from tests.e2e import harness
    from tests.e2e.deferred_ffn import defer_compute
    from tests.e2e.whole_steps import WholeSteps
    from vllm_tiered.adapter.kv import worker

    asked = json.load(sys.stdin)

    def drive(llm: Any) -> list[list[int]]:
        assert llm.llm_engine.vllm_config.use_v2_model_runner
        compute_nothing(llm)
        return harness.generate(llm, asked["prompts"], max_tokens)

    on_host = worker.make_translator
    for name, arguments in asked["engines"].items():
        tiered = arguments.pop("tiered")
        model = arguments.pop("model", asked["model"])
        max_tokens = arguments.pop("max_tokens", asked["max_tokens"])
        translator: Any = as_on_a_gpu if name == "swapping" else on_host
        worker.make_translator = translator
        with pytest.MonkeyPatch.context() as patched:
            deferred = defer_compute(patched, haste=0.6) if name == "ffn on a fake" else None
            whole = WholeSteps(patched) if name == "whole steps" else None
            if whole:
                rise_after(patched, num_steps=6)
            found = harness.run(model, [], tiered, drive=drive, **arguments)
        assert deferred is None or deferred.num_deferred > 50
        steps = whole.steps if whole else []
        print(json.dumps({"name": name, "steps": steps, **asdict(found)}), flush=True)


def rise_after(patched: Any, *, num_steps: int) -> None:
    """Set the controller to no far layer for `num_steps`, then to as many as possible."""
    from vllm_tiered.adapter.kv import adaptive
    from vllm_tiered.kv.controller import Decision

    counter = itertools.count()

    def step(signals: Any, state: Any, levels: Any, tuning: Any) -> Any:
        level = 0 if next(counter) < num_steps else len(levels.ladder) - 1
        return Decision(level_idx=level, reason="as far as can be"), state

    patched.setattr(adaptive.controller, "step", step)


def compute_nothing(llm: Any) -> None:
    """Run a step that only reports an abort, for which V2 has no forward context."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    engine.add_request("aborted", {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=9))
    engine.step()
    engine.abort_request(["aborted"], internal=False)
    engine.engine_core.get_output()


def as_on_a_gpu(pages: Any, names: list[str], block_tokens: int, device: Any) -> Any:
    """Return a translator that translates block tables with the kernel."""
    from vllm_tiered.adapter.kv.device_translation import DeviceTranslator
    from vllm_tiered.kernels.kv_pages import api

    return DeviceTranslator(pages, names, block_tokens, device, api.translate)


if __name__ == "__main__":
    main()
