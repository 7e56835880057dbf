# SPDX-License-Identifier: Apache-2.0
"""Copies and conversions of KV pages to and from pinned far memory; block table translation."""
