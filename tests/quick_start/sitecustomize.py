# SPDX-License-Identifier: Apache-2.0
"""Python reads this at its start, in whatever process the tests start (tests/conftest.py).

Importing vLLM makes millions of objects that stay; looking for garbage among them is a fifth of its
ten seconds.
"""

import gc

gc.set_threshold(100_000)
