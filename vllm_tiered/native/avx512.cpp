// SPDX-License-Identifier: Apache-2.0
// Compiled for this instruction set (setup.py).
#include "ffn.h"
#include "grouped_gemm.h"
#include "narrow.h"
