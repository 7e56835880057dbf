# SPDX-License-Identifier: Apache-2.0
import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered.untrusted import MAX_NESTING, parse_json

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
