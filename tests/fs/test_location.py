"""Locations in object storage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.errors import WrongUsage
from imagemill.fs.location import Location, is_url, parse_location, redact

NAMES = st.text("aZ09-_ .%é日", min_size=1).filter(lambda name: name not in {".", ".."})


@given(bucket=st.from_regex(r"[a-z0-9][a-z0-9.-]{1,20}", fullmatch=True), names=st.lists(NAMES, max_size=4))
def test_location_is_read_as_it_is_written(bucket, names):
    location = Location("s3", bucket, "/".join(names))

    assert parse_location(str(location), "--x") == location
    assert str(location / "a") == f"{location}/a"
    assert is_url(location)


@pytest.mark.parametrize(
    ("given_url", "expected"),
    [
        ("s3://photos", Location("s3", "photos")),
        ("s3://photos/", Location("s3", "photos")),
        ("s3://photos/a/b/", Location("s3", "photos", "a/b")),
        ("s3://photos/50%25", Location("s3", "photos", "50%25")),
        ("https://host:8080/a/b", Location("https", "host:8080", "a/b")),
    ],
)
def test_location_of_a_url(given_url, expected):
    assert parse_location(given_url, "--x") == expected


@pytest.mark.parametrize(
    ("given_url", "what"),
    [
        ("gs://photos/a", "cannot use gs://photos/a"),
        ("s3:/photos/a", "not a location"),
        ("s3:///a", "not a location"),
        ("s3://photos/../a", "not a location"),
        ("s3://photos/a//b", "not a location"),
        ("s3://me:secret@photos/a", "contains credentials"),
        ("s3://me@photos/a", "contains credentials"),
        ("https://host/a?X-Amz-Signature=secret", "contains a query"),
        ("https://host:99x/a", "not a URL"),
    ],
)
def test_url_is_refused(given_url, what):
    with pytest.raises(WrongUsage) as caught:
        parse_location(given_url, "--x")

    assert what in caught.value.what
    assert caught.value.what.startswith("--x: ")
    assert "secret" not in str(caught.value)


def test_only_permitted_schemes_are_read():
    with pytest.raises(WrongUsage, match="cannot use https://host/a"):
        parse_location("https://host/a", "push", schemes=("s3",))


@given(st.text(max_size=20), st.text(max_size=20))
def test_redacted_text_has_no_credentials(before, after):
    text = f"{before} https://user:s3cr3t-word@host/a/b?token=s3cr3t-word {after}"

    assert "s3cr3t-word" not in redact(text)
    assert "https://host/a/b" in redact(text)
    assert redact(redact(text)) == redact(text)
