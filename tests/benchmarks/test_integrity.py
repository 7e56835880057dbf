# SPDX-License-Identifier: Apache-2.0
"""A soak's checks run after the step they check, are counted, and propagate errors."""

from types import SimpleNamespace

import pytest

from benchmarks.harness import integrity


class Owner:
    def __init__(self, part):
        self.part = part
        self.calls = []

    def step(self, number, *, twice=False):
        self.calls.append(number)
        self.part.value = number * (2 if twice else 1)
        return self.part.value


@pytest.fixture
def owner():
    """Return a class whose `step` is checked; its part refuses values above 9."""

    class Checked(Owner):
        step = Owner.step

    part = SimpleNamespace(value=0, seen=[])

    def check_integrity():
        part.seen.append(part.value)
        if part.value > 9:
            raise ValueError(f"value {part.value}")

    part.check_integrity = check_integrity
    integrity.check_after(Checked, "step", lambda checked: checked.part)
    return Checked(part)


def test_a_check_follows_each_call_and_is_counted(owner):
    before = integrity.num_checks()
    assert owner.step(3) == 3
    assert owner.step(4, twice=True) == 8
    assert owner.part.seen == [3, 8]
    assert integrity.num_checks() == before + 2


def test_a_failed_check_ends_the_step_and_is_not_counted(owner):
    before = integrity.num_checks()
    with pytest.raises(ValueError, match="value 10"):
        owner.step(10)
    assert integrity.num_checks() == before


def test_the_checked_methods_exist(monkeypatch):
    targets = []
    monkeypatch.setattr(integrity, "check_after", lambda *target: targets.append(target))
    integrity.install()
    assert [(owner.__name__, method) for owner, method, _ in targets] == [
        ("TieredScheduler", "build_metadata"),
        ("TieredWorker", "end_step"),
    ]
    assert all(callable(getattr(owner, method)) for owner, method, _ in targets)
