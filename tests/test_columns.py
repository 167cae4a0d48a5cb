"""Columns as text: values come back as they went in, and equal columns are equal."""

from hypothesis import given
from hypothesis import strategies as st

from imagemill.columns import Column

VALUES = st.lists(st.text(st.characters(exclude_characters="/"), max_size=5))


@given(VALUES)
def test_values_come_back(values: list[str]) -> None:
    """Empty ones too, and none at all."""
    assert Column.of(values).values == values


@given(VALUES, VALUES)
def test_equal_columns_hold_equal_values(one: list[str], other: list[str]) -> None:
    """No two lists of values share a text."""
    assert (Column.of(one) == Column.of(other)) == (one == other)
