# SPDX-License-Identifier: Apache-2.0
"""Limit of the blocks that the engine may use."""

import pytest

from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.block_limit import ElasticBlocks
from vllm_tiered.kv.layout import KvGeometry


@pytest.fixture
def elastic():
    """Return blocks of 1 resident and 4 offloaded layers with 2 buffers.

    The limit G for T partial blocks follows from 3 G + 2 T <= 30 and 2 G + 4 T <= 30.
    """
    geometry = KvGeometry(
        num_layers=5,
        num_resident=1,
        num_staging_buffers=2,
        page_bytes=8,
        block_tokens=1,
        near_pages=30,
    )
    assert [geometry.block_limit(partial) for partial in range(8)] == [10, 9, 8, 8, 7, 5, 3, 1]
    return ElasticBlocks(geometry=geometry, usable_blocks=10)


def admit(elastic, name, blocks, prefill_tokens=4):
    assert elastic.blocks_to_reserve("new") == len(blocks)
    elastic.reserved.extend(blocks)
    elastic.admit(name, prefill_tokens=prefill_tokens)
    elastic.check_integrity()


def test_requests_cost_blocks_and_give_them_back(elastic):
    admit(elastic, "a", [1, 2])
    assert elastic.is_admitted("a") and not elastic.is_admitted("b")
    admit(elastic, "b", [3])
    assert (elastic.released_blocks, elastic.num_partial) == (7, 4)
    assert elastic.release() == []
    elastic.end("a")
    assert elastic.release() == [3] and elastic.reserved == [1, 2]
    elastic.end("b")
    assert elastic.release() == [1, 2]
    assert elastic.released_blocks == 10
    elastic.check_integrity()


def test_a_request_that_decodes_is_charged_for_one_partial_block(elastic):
    admit(elastic, "a", [1, 2], prefill_tokens=4)
    for computed_tokens, num_partial in ((0, 2), (3, 2), (4, 1), (5, 1)):
        elastic.progress("a", computed_tokens)
        assert elastic.num_partial == num_partial
    assert elastic.release() == [2]


def test_a_request_that_begins_again_prefills_again(elastic):
    admit(elastic, "a", [1, 2], prefill_tokens=4)
    elastic.progress("a", 4)
    elastic.end("a")
    assert elastic.release() == [1, 2]
    admit(elastic, "a", [1, 2], prefill_tokens=6)
    elastic.progress("a", 5)
    assert elastic.num_partial == 2


def test_unknown_requests_are_ignored(elastic):
    elastic.end("a")
    elastic.progress("a", 100)
    assert elastic.num_partial == 0 and elastic.release() == []


def test_without_space_for_another_request_every_block_is_meant(elastic):
    for number in range(4):
        elastic.admit(f"{number}", prefill_tokens=1)
    assert elastic.blocks_to_reserve("new") == elastic.released_blocks


def test_fewer_blocks_than_the_limit_are_not_reserved():
    geometry = KvGeometry(
        num_layers=5,
        num_resident=1,
        num_staging_buffers=2,
        page_bytes=8,
        block_tokens=1,
        near_pages=30,
    )
    elastic = ElasticBlocks(geometry=geometry, usable_blocks=6)
    admit(elastic, "a", [])
    assert elastic.released_blocks == 6 and elastic.release() == []


def test_check_integrity_finds_too_many_blocks(elastic):
    elastic.admit("a", prefill_tokens=4)
    with pytest.raises(
        IntegrityError,
        match=r"10 released blocks, 2 partial blocks and 0 of .* need 34 of 30",
    ):
        elastic.check_integrity()


def test_check_integrity_finds_a_block_that_is_reserved_twice(elastic):
    elastic.reserved.extend([1, 1])
    elastic.admit("a", prefill_tokens=4)
    with pytest.raises(IntegrityError, match=r"reserved \[1, 1\]"):
        elastic.check_integrity()
