# SPDX-License-Identifier: Apache-2.0
"""Policies of reading far KV, as the simulator times them: one module each, one interface.

`base.py` is the interface, `table.py` the policies by name.
"""
