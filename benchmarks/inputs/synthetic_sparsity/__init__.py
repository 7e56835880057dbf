# SPDX-License-Identifier: Apache-2.0
"""OPT models with synthetic ReLU sparsity: constructed, not trained."""
