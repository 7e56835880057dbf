# SPDX-License-Identifier: Apache-2.0
"""Timeline file of an engine, of bounded size, and the page that `vllm-tiered report` makes of it.

records   the records of a timeline, one for each line of the file
writer    the engine's side; it costs a step almost nothing and never fails it
reader    reads the file, also if its end is cut off
summary   the figures of the page's tables
figures   the page's pictures (matplotlib)
page      the page itself (jinja2)

The package also has the picture of `vllm-tiered probe` (probe_figure) and the page of
`vllm-tiered dse` (accelerator_tables, accelerator_figure, accelerator_page).
"""
