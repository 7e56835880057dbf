# SPDX-License-Identifier: Apache-2.0
"""Scripts that tests start, with fewer processes that import vLLM anew, for ten seconds each.

On CPUs vLLM spawns its processes; where there is a GPU it forks them, which works on CPUs as long
as the script has not computed anything. And it asks a process about each model's class.
"""

import multiprocessing
import os

VARIABLE = "TIERED_TEST_START_METHOD"
FORK = {VARIABLE: "fork"}


def quicken() -> None:
    """As the environment says; without it as vLLM does."""
    from vllm.model_executor.models import registry

    if method := os.environ.get(VARIABLE):
        get_context = multiprocessing.get_context
        multiprocessing.get_context = lambda _=None: get_context(method)  # type: ignore[assignment]
        registry._run_in_subprocess = lambda inspect: inspect()
