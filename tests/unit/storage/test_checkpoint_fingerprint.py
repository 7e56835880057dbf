# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of checkpoints: what they cover, and files that are damaged."""

import json

import pytest

from vllm_tiered.storage.checkpoint_fingerprint import fingerprint_of_folder

HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2048], "data_offsets": [0, 8192]},
    "b": {"dtype": "F32", "shape": [2], "data_offsets": [8192, 8200]},
}


def checkpoint(folder, header, config="{}"):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    data = bytes(8200)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (folder / "config.json").write_text(config)
    return fingerprint_of_folder(folder)


def test_the_fingerprint_of_a_checkpoint_stays_as_it_is(tmp_path):
    """Stores and files of weights carry it."""
    assert checkpoint(tmp_path, HEADER) == "fbc28a7dedad7e62341cd6f2ecf8b722"
    assert (
        checkpoint(tmp_path, HEADER, '{"limit": [0.0, Infinity]}')
        == "f484a1090b8545a3bfc40e8a91b038cc"
    )


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 10**5,
        b'{"a":' * 10**5,
        {"a": {"data_offsets": [5]}},
        {"a": {"data_offsets": "ab"}},
        {"a": {"data_offsets": [-(10**6), 4]}},
        {"a": {"data_offsets": [8, 0]}},
        {"a": {"data_offsets": [0.5, 4]}},
        {"a": None},
    ],
    ids=lambda header: str(header)[:32],
)
def test_a_damaged_header_is_left_to_the_loader(tmp_path, header):
    assert checkpoint(tmp_path, header)


def test_a_configuration_that_is_nested_without_end_is_a_value_error(tmp_path):
    with pytest.raises(ValueError, match="more than 64 tables and lists"):
        checkpoint(tmp_path, HEADER, '{"a":' * 10**5)
