# SPDX-License-Identifier: Apache-2.0
"""Serve a few tokens with each of some configurations, one engine after the other.

Prints the tokens, and the largest increase of resident memory, as JSON.

Usage: python -m tests.e2e.memory_script MODEL_DIR PROMPTS_JSON CONFIGURATIONS_JSON

Freed memory may stay with the process, and a later engine reuses it without an increase. So the
configuration that should need less comes first. A small engine runs before, so that imports do not
count.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from tests.e2e.harness import PATHS, Tokens, engine, generate

STATUS = Path("/proc/self/status")


def kib(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", STATUS.read_text())
    assert found is not None
    return int(found[1])


def served(model: str, prompts: Tokens, sections: dict[str, Any]) -> dict[str, Any]:
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = kib("VmRSS")
    arguments: dict[str, Any] = {
        "max_model_len": 128,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 16 << 20,
    }
    with engine(model, additional_config={"tiered": sections}, **arguments) as llm:
        tokens = generate(llm, prompts, 8)
    return {"tokens": tokens, "rise_bytes": (kib("VmHWM") - before) * 1024}


def main() -> None:
    PATHS["given"] = sys.argv[1]
    prompts, configurations = map(json.loads, sys.argv[2:4])
    served("llama1", prompts, {})
    print(json.dumps([served("given", prompts, each) for each in configurations]))


if __name__ == "__main__":
    main()
