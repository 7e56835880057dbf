# SPDX-License-Identifier: Apache-2.0
"""Progress of a long run on stderr: a bar on a terminal, one line per step elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Step = Callable[[str], None]
"""Called with a line of text when a step is done."""


@contextmanager
def progress(total_steps: int, title: str) -> Iterator[Step]:
    """Yield a function to call after each of `total_steps` steps with what was done."""
    start = time.perf_counter()
    done = 0

    def line(text: str) -> str:
        return f"[{done:>3}/{total_steps} {time.perf_counter() - start:4.0f} s] {text}"

    if not sys.stderr.isatty():
        print(f"{title}: {total_steps} steps", file=sys.stderr, flush=True)

        def step(text: str) -> None:
            nonlocal done
            done += 1
            print(line(text), file=sys.stderr, flush=True)

        yield step
        return

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total_steps)

        def step_on_bar(text: str) -> None:
            nonlocal done
            done += 1
            bar.advance(task)
            bar.console.print(line(text), highlight=False, markup=False)

        yield step_on_bar
