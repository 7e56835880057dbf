# SPDX-License-Identifier: Apache-2.0
"""PRESERVE's model of an accelerator, and the exploration of its design space (section 5).

chip      what a die has: arithmetic, memory, L2, link; and its area
decoders  the twelve models: what of them a device holds
step      one decode step and one request, with and without L2 prefetch (algorithm 1)
density   tokens/s/mm2 over the L2 size (figures 5 and 6)
figures   figures 2, 7, 8 and 9
npu       table 1 on an Ascend 910B
claims    the paper's figures beside ours, and what was assumed
"""
