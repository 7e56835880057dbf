# SPDX-License-Identifier: Apache-2.0
"""Discrete simulation of vLLM with KV swapping, for machines and loads that are not available.

It runs the expansion controller faster than real time. The controller, the levels' sizes, admission
and the transition between levels are the product's own code. Models and the roofline are the
planner's. The simulator models vLLM's scheduler (`scheduler.py`), the time of a step (`timing.py`)
and the load (`trace.py`). Machines are in `vllm_tiered/planner/profiles`. Each figure there has its
source, and states whether it was measured, published or assumed.

The simulator does not model prefix caching, tensor parallelism, the cost of Python, or the
write-out of filled blocks in ordinary steps (each block is written once, in the other direction of
the link).
"""
