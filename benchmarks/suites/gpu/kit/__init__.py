# SPDX-License-Identifier: Apache-2.0
"""vLLM's CUDA build for a GPU host without network: `python -m benchmarks.suites.gpu.kit`.

    collect   here: pip resolves and fetches wheels; they are cut into parts of a bounded size
    receive   there: takes parts over as they arrive, in any order, as often as needed
    install   there: joins, verifies and installs them into an environment of their own

Only the standard library is used, and pip: it runs before anything is installed.

    kit.json            what is in it, what was left out and why, every digest
    part-000 part-001   the wheels one after the other, cut wherever a part is full
"""
