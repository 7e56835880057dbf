# SPDX-License-Identifier: Apache-2.0
"""Energy and CO2 emissions of an engine, measured where the machine has counters."""
