# SPDX-License-Identifier: Apache-2.0
"""Batched copies of KV pages between near and pinned far memory, and block table translation."""
