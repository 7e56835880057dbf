# SPDX-License-Identifier: Apache-2.0
"""Suppression of the line that HiGHS 1.12 prints to stdout when it repairs a solution."""

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from typing import IO

_ONE_AT_A_TIME = threading.Lock()


@contextlib.contextmanager
def suppress_solver_output() -> Iterator[None]:
    """Drop the solver's line from stdout, where it would break ``vllm-tiered plan --json``.

    No option of HiGHS turns the line off. Output of other threads appears afterwards.
    """
    with _ONE_AT_A_TIME, contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a process without stdout
            stdout = os.dup(1)
            stack.callback(os.close, stdout)
            printed = stack.enter_context(os.fdopen(os.memfd_create("solver"), "rb"))
            flush = ctypes.CDLL(None).fflush
            flush(None)
            os.dup2(printed.fileno(), 1)
            stack.callback(_print_others, printed)
            stack.callback(os.dup2, stdout, 1)
            stack.callback(flush, None)
        yield


def _print_others(printed: IO[bytes]) -> None:
    printed.seek(0)
    others = b"".join(line for line in printed if not line.startswith(b"HighsMipSolverData"))
    while others:
        others = others[os.write(1, others) :]
