# SPDX-License-Identifier: Apache-2.0
"""A discrete model of vLLM with KV swapping, for machines and loads that are not at hand.

It runs the expansion controller faster than real time. The controller, the levels' arithmetic,
admission and the way from one level to another are the product's own code. Models and the roofline
are the planner's. Modelled are vLLM's scheduler (`scheduler.py`), the time of a step (`timing.py`)
and the load (`trace.py`). Machines are in `vllm_tiered/planner/profiles`, each figure with its
source and whether it was measured, published or assumed.

Not modelled: prefix caching, tensor parallelism, the write-out of filled blocks in ordinary steps
(each block is written once, in the other direction of the link), and the cost of Python.
"""
