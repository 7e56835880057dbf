# SPDX-License-Identifier: Apache-2.0
"""Joules and grams of CO2 of an engine, measured where the machine has counters."""
