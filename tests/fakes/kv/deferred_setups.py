# SPDX-License-Identifier: Apache-2.0
"""Setups for tests with deferred compute."""

from tests.fakes.kv.driver import Setup

SETUPS = (
    Setup(num_layers=5, num_far=4, sure_blocks=5, spare_pages=2),
    Setup(num_layers=4, num_far=3, sure_blocks=4, spare_pages=6, ahead=True),
    Setup(num_layers=6, num_far=4, block_tokens=1, spare_pages=9, ahead=True),
    Setup(num_layers=6, num_far=5, block_tokens=3, spare_pages=4, offloads_partial_blocks=True),
    Setup(num_layers=6, num_far=5, block_tokens=3, spare_pages=4, adaptive=True),
    Setup(num_layers=6, num_far=5, spare_pages=4, adaptive=True, offloads_partial_blocks=True),
    Setup(num_layers=6, num_far=5, policy="on_demand", spare_pages=2),
    Setup(num_layers=6, num_far=5, block_tokens=3, adaptive=True, halves_pages=True),
    Setup(num_layers=5, num_far=4, spare_pages=4, adaptive=True, num_readers=2),
)
