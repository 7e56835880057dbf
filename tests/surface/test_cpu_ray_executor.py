# SPDX-License-Identifier: Apache-2.0
"""Ranks in Ray's actors compute on cores of their own."""

import pytest

from vllm_tiered.adapter.cpu_ray_executor import cores_of_rank
from vllm_tiered.errors import ConfigError


@pytest.mark.parametrize(
    ("bind", "expected"),
    [
        ("0|1", [[0], [1]]),
        ("0-2,5|3", [[0, 1, 2, 5], [3]]),
        ("auto", [[2, 3], [5, 7]]),
        ("nobind", [None, None]),
    ],
)
def test_each_rank_has_its_cores(bind, expected):
    available = {7, 2, 3, 5, 9}
    assert [cores_of_rank(rank, 2, bind, available) for rank in range(2)] == expected


def test_too_few_or_too_many_core_lists_are_refused():
    with pytest.raises(ConfigError, match="cores of 2 ranks, and 3 are on this machine"):
        cores_of_rank(0, 3, "0|1", {0, 1, 2})


def test_more_ranks_than_cores_are_refused():
    with pytest.raises(ConfigError, match="3 ranks on a machine of which Ray may use 2 cores"):
        cores_of_rank(0, 3, "auto", {0, 1})
