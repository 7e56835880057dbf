# SPDX-License-Identifier: Apache-2.0
"""Discrete simulation of vLLM with KV swapping, for machines and loads that are not available.

It runs the expansion controller faster than real time. The controller, the levels' sizes, admission
and the transition between levels are the product's own code. Models and the roofline are the
planner's. The simulator models vLLM's scheduler (`scheduler.py`), the time of a step (`timing.py`)
and the load (`trace.py`). Machines are in `vllm_tiered/planner/profiles`. Each figure there has its
source, and states whether it was measured, published or assumed.

The far layers are read by one of several policies (`policies/`). The product's are `interleave`,
`blocks` and `on_demand`; the controller runs with `interleave` only.

The simulator does not model prefix caching, tensor parallelism, the cost of Python, or how long the
write-out of filled blocks takes (each block is written once, in the other direction of the link).
The bandwidth of near memory that this write-out takes is modelled.
"""
