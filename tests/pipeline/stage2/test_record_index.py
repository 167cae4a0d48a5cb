"""The index of the records: the same by the fast way as by decoding each line.

Spec: docs/spec/conventions.md#jsonl-input, docs/spec/stage2.md#merge
"""

import json

from hypothesis import example, given
from hypothesis import strategies as st

from imagemill.formats.jsonl import encode_line, read_jsonl
from imagemill.pipeline.stage2 import record_index
from imagemill.pipeline.stage2.record_index import Recorded, last_index, read_recorded, unfinished
from imagemill.validation.tables import _unusual_records
from tests.helpers.stage2 import record_of

values = {
    "caption": ["another", "", " ", None, "é", ["a"]],
    "captions": [["another", "b"], ["noise", "b"], ["a", "a"], [], "a"],
    "image_id": ["a", "b c", "x/y", "", None, "é", "\x01"],
    "t5_attention_mask": [[1] + [0] * 76, [0] * 77, [[1]], None, [1e5] * 77],
    "format_version": [1, 2, "2", None],
    "dinov3_embedding": [[0.5]],
    "repeats": [0, 1, 2],
    "more": [0],
}
change = st.sampled_from([(name, value) for name, of_name in values.items() for value in of_name])
changes = st.lists(change, max_size=2).map(dict)
records = st.builds(lambda name, new: {**record_of(name), **new}, st.sampled_from(["a", "b c", "é", "10%2Fd"]), changes)
encoded = st.one_of(
    records.map(encode_line),
    records.map(lambda record: json.dumps(record).encode() + b"\n"),
    records.map(lambda record: encode_line(record)[:-1] + b"\r\n"),
    records.map(lambda record: encode_line(dict(reversed(record.items())))),
    st.sampled_from(
        [b"\n", b"null\n", b"{\n", b"\xff\n", b'{"image_path":"data/approved/a.jpg","dinov3_embedding":[NaN]}\n']
    ),
)
DEEP = encode_line(record_of("a")).replace(
    b'"t5_attention_mask":[', b'"t5_attention_mask":[' + b"[" * 2000 + b"]" * 2000 + b","
)


@example(lines=[encode_line(record_of("a"))] * 2, left=[encode_line(record_of("a"))], ends=True)
@example(lines=[encode_line(record_of("a", captions=["noise", "b"]))], left=[], ends=True)
@example(lines=[DEEP, encode_line(record_of("é"))], left=[], ends=False)
@given(lines=st.lists(encoded, max_size=8), left=st.lists(encoded, max_size=3), ends=st.booleans())
def test_index_is_that_of_each_line_decoded_by_itself(tmp_path_factory, lines, left, ends):
    jsonl = tmp_path_factory.mktemp("index") / "x.jsonl"
    jsonl.write_bytes(b"".join(lines) if ends else b"".join(lines)[:-1])
    if left:
        unfinished(jsonl).write_bytes(b"".join(left))

    index = read_recorded(jsonl)
    assert index == line_by_line(jsonl)
    if index.is_usual and not left:
        assert _unusual_records(jsonl, migrating=False) == (len(index.lines), [])
    assert last_index(jsonl) is index


def test_valid_records_are_not_decoded_one_by_one(tmp_path, monkeypatch):
    jsonl = tmp_path / "x.jsonl"
    jsonl.write_bytes(b"".join(encode_line(record_of(name)) for name in ("a", "b c", "é")))
    expected = line_by_line(jsonl)
    monkeypatch.setattr(record_index, "_take", None)

    assert read_recorded(jsonl) == expected


def line_by_line(jsonl):
    found = Recorded()
    for path in (jsonl, unfinished(jsonl)):
        for line in read_jsonl(path) if path.is_file() else ():
            record_index._take(found, path, line)
    return found
