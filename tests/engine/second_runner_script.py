# SPDX-License-Identifier: Apache-2.0
"""Engines with vLLM's model runner V2, on the CPU backend; a process of its own.

vLLM's CPU worker has this runner, for a Triton that compiles for CPUs; without one it takes V1. All
that V2 wants of it are its own small kernels (block tables, slots, sampling), which Triton's
interpreter runs as well: vLLM is shown a CPU backend that says it is there.

Reads model, prompts, max_tokens, and by name the arguments of engines from stdin; writes tokens,
manifest and metrics to stdout, a line for each engine.
"""

import json
import os
import sys
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}

from triton.backends import backends

from tests.engine import harness


def show_cpu_backend() -> None:
    """Before vLLM is imported."""
    driver = SimpleNamespace(is_active=lambda: True)
    backends["cpu"] = SimpleNamespace(driver=driver)


def main() -> None:
    show_cpu_backend()
    asked = json.load(sys.stdin)

    def drive(llm: Any) -> list[list[int]]:
        assert llm.llm_engine.vllm_config.use_v2_model_runner
        return harness.generate(llm, asked["prompts"], asked["max_tokens"])

    for name, arguments in asked["engines"].items():
        tiered = arguments.pop("tiered")
        found = harness.run(asked["model"], [], tiered, drive=drive, **arguments)
        print(json.dumps({"name": name, **asdict(found)}), flush=True)


if __name__ == "__main__":
    main()
