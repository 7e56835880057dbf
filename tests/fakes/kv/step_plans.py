# SPDX-License-Identifier: Apache-2.0
"""Step plans made by hand."""

import dataclasses
from typing import Any

import numpy as np

from vllm_tiered.kv.step_plan import StepPlan


def plan_of(**classes):
    arrays: dict[str, Any] = {name: np.array(ids, dtype=np.int64) for name, ids in classes.items()}
    return dataclasses.replace(StepPlan(), **arrays)
