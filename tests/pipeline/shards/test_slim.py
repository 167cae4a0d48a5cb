"""Records told by a look: lines of every spelling, and no line at its neighbours' expense.

That a look tells what a decoder tells: test_readiness.py, on the whole of readiness.
"""

import json

import msgspec
import pytest

from imagemill.formats.jsonl import encode_line
from imagemill.pipeline.shards import slim
from imagemill.pipeline.shards.slim import SlimRecord, slim_of, slim_records
from tests.helpers.stage2 import record_of

USUAL = encode_line(record_of("a"))
RESPELLED = {
    "an extra field": {**record_of("b"), "note": {"z": 1, "b": [True, None]}},
    "an escape": {**record_of("b"), "caption": 'a "photo"\tby night'},
    "another order": dict(sorted(record_of("b").items())),
    "another script": {**record_of("日本 1"), "caption": "富士山"},
    "no version": {key: value for key, value in record_of("b").items() if key != "format_version"},
}


@pytest.mark.parametrize("spell", [encode_line, lambda record: json.dumps(record).encode() + b"\r\n"])
@pytest.mark.parametrize("record", RESPELLED.values(), ids=RESPELLED)
def test_record_is_told_in_any_spelling(record, spell):
    """Files of other programs are packed at nearly the speed of our own."""
    assert [slim_of(record)] == slim_records(spell(record))


@pytest.mark.parametrize(
    "line",
    [b"", b" \r", b"{", b'{"image_id":"a"}', USUAL[:-2], USUAL.rstrip() + b"x", USUAL.replace(b"[1,", b"[2,").rstrip()],
)
def test_line_that_only_a_verdict_tells_comes_back_as_it_is(line):
    """Between two records that are told nevertheless."""
    before, same, after = slim_records(USUAL + line + b"\n" + USUAL)

    assert line == same
    assert before == after == slim_of(record_of("a"))


def test_only_unusual_lines_are_decoded(monkeypatch):
    """One escape in a thousand captions leaves all others to the one expression."""
    odd, decoded = json.dumps(record_of("b")).encode(), []
    decode = slim._decoded
    monkeypatch.setattr(slim, "_decoded", lambda line: decoded.append(line) or decode(line))

    found = slim_records(USUAL * 3 + odd + b"\n\n" + USUAL * 3)

    assert decoded == [odd, b""]
    assert [type(entry) for entry in found] == [SlimRecord] * 4 + [bytes] + [SlimRecord] * 3


def test_last_line_needs_no_newline():
    """A file may end without one, whatever its last line is."""
    assert slim_records(USUAL.rstrip()) == slim_records(USUAL)
    assert slim_records(b"{") == [b"{"]
    assert slim_records(USUAL + b"{") == [*slim_records(USUAL), b"{"]


def test_member_of_any_spelling_is_the_same():
    """Equal records give equal bytes, so that a spelling alone repacks nothing."""
    (usual,), (spaced,) = slim_records(USUAL), slim_records(json.dumps(record_of("a")).encode())

    assert usual == spaced
    assert isinstance(usual, SlimRecord)
    assert msgspec.json.decode(usual.member) == record_of("a")
