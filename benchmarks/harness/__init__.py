# SPDX-License-Identifier: Apache-2.0
"""Harness that runs and times engines, and reports the measurements."""
