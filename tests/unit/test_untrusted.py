# SPDX-License-Identifier: Apache-2.0
import contextlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered.untrusted import MAX_NESTING, parse_json, parse_toml, read_regular_file

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text("ab"), inner), max_leaves=20
)


@given(VALUES)
def test_ordinary_json_is_what_the_standard_parser_reads(value):
    text = json.dumps(value)
    assert parse_json(text) == parse_json(text.encode()) == value


@given(st.text() | st.binary())
def test_whatever_is_given_only_a_value_error_is_raised(text):
    with contextlib.suppress(ValueError):
        parse_json(text)


def test_nesting_has_a_limit_that_is_not_the_stack():
    deepest = "[" * MAX_NESTING + "]" * MAX_NESTING
    assert parse_json(deepest)
    for text in (f"[{deepest}]", "[" * 10**6, '{"a":' * 10**6):
        with pytest.raises(ValueError, match="more than 64"):
            parse_json(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1, "b": 2, "a": 3}', "'a' occurs 2 times"),
        ("NaN", "NaN is not a finite"),
        ("[-Infinity]", "-Infinity is not a finite"),
        ("-1e400", "-1e400 is not a finite"),
        ("1" * 20, "20 digits"),
        (r'{"\udc00": 1}', "surrogate"),
    ],
)
def test_what_has_no_one_meaning_is_refused(text, says):
    with pytest.raises(ValueError, match=says):
        parse_json(text)


def test_a_caller_may_check_numbers_itself():
    text = f"[NaN, -Infinity, 1e400, 1{'0' * 5000}, 12]"
    values = parse_json(text, any_number=True)
    assert [str(value) for value in values] == ["nan", "-inf", "inf", "inf", "12"]


@given(st.text() | st.binary())
def test_toml_raises_nothing_but_value_errors(text):
    with contextlib.suppress(ValueError):
        parse_toml(text)


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 10**5, "a = " + "{a = " * 10**4, "a." * 999 + "a = 1"]
)
def test_nested_toml_has_the_same_limit(text):
    with pytest.raises(ValueError, match="more than 64"):
        parse_toml(text)


@pytest.mark.parametrize("limit", [10, 10**15, 10**19, 10**300], ids="{:.0e}".format)
def test_a_file_is_read_up_to_any_limit(tmp_path: Path, limit):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert read_regular_file(path, max_bytes=limit) == b"0123456789"
    os.truncate(path, 11)
    if limit == 10:
        with pytest.raises(ValueError, match="has 11 B, more than 10 B"):
            read_regular_file(path, max_bytes=limit)


def test_what_is_no_regular_file_is_not_opened_for_long(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ValueError, match="is not a regular file"):
            read_regular_file(path, max_bytes=10)
