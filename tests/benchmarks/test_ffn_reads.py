# SPDX-License-Identifier: Apache-2.0
"""The benchmark of scattered reads, with a file small enough for a test."""

import json

from benchmarks.suites.ffn import reads


def test_longer_holes_are_fewer_requests_and_more_bytes(tmp_path):
    settings = reads.Settings(
        bundle_bytes=(512, 4096),
        shares=(0.25,),
        holes_kib=(4, 64),
        rounds=2,
        layers=2,
        neurons=256,
        folder=str(tmp_path),
    )
    steps: list[str] = []
    result = reads.run(settings, steps.append)
    assert len(steps) == reads.num_steps(settings) == 2
    assert set(reads.RESULT_KEYS) <= result.keys()
    assert not list(tmp_path.iterdir()), "the file is gone"
    for by_share in result["cases"].values():
        none, short, long = by_share["0.25"].values()
        assert none["num_reads"] > short["num_reads"] > long["num_reads"]
        assert none["num_bytes"] < short["num_bytes"] < long["num_bytes"]
        assert none["over_none"] == 1
    assert len(reads.table(result).splitlines()) == 4
    json.dumps(result)
