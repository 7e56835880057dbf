# SPDX-License-Identifier: Apache-2.0
"""A discrete model of vLLM with KV swapping, to run the expansion controller on machines and loads
that are not at hand, faster than real time.

What is the engine's own code: the controller, the levels' arithmetic, the block limit, and the way
from one level to another. What is modelled: vLLM's scheduler (`scheduler.py`), the time of a step
(`timing.py`) and the load (`trace.py`). Machines are in `vllm_tiered/planner/profiles`, each figure
with its source and whether it was measured, published or assumed.

Not modelled: prefix caching, tensor parallelism, the write-out of filled blocks in ordinary steps
(each block is written once, in the other direction of the link), and the price of Python.
"""
