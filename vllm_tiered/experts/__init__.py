# SPDX-License-Identifier: Apache-2.0
"""Experts of a mixture: slots near, all experts far or on storage, exactly as the router asks."""
