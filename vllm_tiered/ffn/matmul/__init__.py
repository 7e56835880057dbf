# SPDX-License-Identifier: Apache-2.0
"""Products over cached neurons, in C++ and in torch."""
