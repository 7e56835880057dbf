# SPDX-License-Identifier: Apache-2.0
"""HumanEval's problems, and what counts as solving one."""

import pytest

from benchmarks.inputs import human_eval
from benchmarks.inputs.human_eval import STOPS, Problem, problems, solved

ADD = Problem(
    "def add(a, b):\n", "add", "def check(f):\n    assert f(1, 2) == 3\n", "    return a + b\n"
)


def test_solutions_solve_their_problems():
    asked = problems()
    assert len(asked) == 164
    few = asked[::40]
    assert solved(few, [problem.solution for problem in few]) == [True] * len(few)
    assert not any(stop in problem.solution for stop in STOPS[:2] for problem in few)


def test_what_does_not_solve(monkeypatch):
    monkeypatch.setattr(human_eval, "_SECONDS", 1)
    completions = [
        "    return a - b\n",
        "    return a +\n",
        "    while True: pass\n",
        "    return [0] * (1 << 40)\n",
        "    raise SystemExit(1)\n",
        ADD.solution,
    ]
    assert solved([ADD] * 6, completions) == [False] * 5 + [True]


def test_a_program_that_ends_early_solves_nothing():
    """It would otherwise end with success before its tests ran."""
    assert solved([ADD], ["    raise SystemExit(0)\n"]) == [False]


@pytest.mark.parametrize("given", ["", "    pass\n"])
def test_nothing_solves_nothing(given):
    assert solved([ADD], [given]) == [False]
