# SPDX-License-Identifier: Apache-2.0
"""Start-up options for the tests' scripts, so that fewer processes import vLLM (ten seconds each).

On CPUs vLLM spawns its processes; with a GPU it forks them, which also works on CPUs as long as the
script has not computed anything. vLLM also inspects each model's class in a process.
"""

import multiprocessing
import os

VARIABLE = "TIERED_TEST_START_METHOD"
FORK = {VARIABLE: "fork"}


def quicken() -> None:
    """Apply the start method from the environment; without one keep vLLM's."""
    from vllm.model_executor.models import registry

    if method := os.environ.get(VARIABLE):
        get_context = multiprocessing.get_context
        multiprocessing.get_context = lambda _=None: get_context(method)  # type: ignore[assignment]
        registry._run_in_subprocess = lambda inspect: inspect()
