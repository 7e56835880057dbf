# SPDX-License-Identifier: Apache-2.0
"""What happened over time: a bounded timeline file, and the page that `vllm-tiered report` makes.

records   what is told, and what a line of the file holds
writer    the engine's side: costs a step next to nothing, never fails it
reader    the file back, a cut-off end included
summary   the figures of the page's tables
figures   its pictures (matplotlib)
page      the page itself (jinja2)

Beside it the pictures of `vllm-tiered probe` (probe_figure) and the page of `vllm-tiered dse`
(accelerator_tables, accelerator_figure, accelerator_page).
"""
