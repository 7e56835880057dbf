# SPDX-License-Identifier: Apache-2.0
"""OPT models whose ReLU sparsity is synthetic: planted, not trained."""
