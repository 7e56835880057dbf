# SPDX-License-Identifier: Apache-2.0
"""PRESERVE's model of an accelerator, and the exploration of its design space (section 5).

chip      one accelerator: rates of arithmetic, memory, L2 and link; die area
decoders  the twelve models, and the share of each on one device
step      times of a decode step and a request, with and without L2 prefetch (algorithm 1)
density   tokens/s/mm2 by L2 size (figures 5 and 6)
figures   figures 2, 7, 8 and 9
npu       table 1 on an Ascend 910B
claims    comparison with the paper's figures, and the assumptions
"""
