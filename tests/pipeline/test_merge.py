"""Ledger and JSONL brought together; nothing is dropped. Source: seed 000, "Atomic JSONL updates"; CONTRACTS section 0 "JSONL
input", section 1 "merge", "record", "migration"."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagemill.files import StatTriple
from imagemill.formats.jsonl import encode_line, parse_object, read_jsonl
from imagemill.layout import DataRoot
from imagemill.ledger import CaptionRow, SourceRow
from imagemill.pipeline.merge import existing_lines, plan_merge, quarantine, record_id, unfinished
from imagemill.records import RECORD_FIELDS, record_problem
from tests.helpers.stage2 import record_of, write_text

STAT = StatTriple(1, 2, 3)
MASK = [1] * 2 + [0] * 75


def source(image_id, size=(32, 24)):
    return SourceRow(image_id, f"{image_id}.png", STAT, "pixels", size[1], size[0])


def caption(image_id, text="noise", mask=MASK):
    return CaptionRow(image_id, STAT, text, "sidecar", "words", mask)


def by_id(*rows):
    return {row.image_id: row for row in rows}


@pytest.fixture
def root(tmp_path):
    return DataRoot(tmp_path / "data")


def merge(root, *lines, sources=(), captions=()):
    """Merge with a file of these lines: bytes, text, or objects."""
    write_text(root.stage2_jsonl, *(line if isinstance(line, bytes | str) else json.dumps(line) for line in lines))
    return plan_merge(read_jsonl(root.stage2_jsonl), by_id(*sources), by_id(*captions), root)


def values(merged):
    return [parse_object(line) for line in merged.ordered()]


# ---- what is added


def test_image_with_a_caption_and_a_mask_becomes_a_valid_record(root):
    merged = merge(root, sources=[source("a")], captions=[caption("a")])

    (record,) = values(merged)
    assert merged.added == ["a"]
    assert tuple(record) == RECORD_FIELDS
    assert record_problem(record) is None
    assert record == record_of("a")


@pytest.mark.parametrize(
    ("sources", "captions"),
    [([], [caption("a")]), ([source("a")], []), ([source("a")], [caption("a", mask=None)])],
    ids=["not opened", "no caption", "no mask"],
)
def test_image_that_lacks_something_has_no_record_yet(root, sources, captions):
    assert values(merge(root, sources=sources, captions=captions)) == []


def test_lines_stand_in_order_of_id(root):
    merged = merge(
        root, record_of("c"), record_of("Z"), sources=[source("b"), source("a")], captions=[caption("a"), caption("b")]
    )  # fmt: skip

    assert [record["image_id"] for record in values(merged)] == ["Z", "a", "b", "c"]


# ---- what is kept


def test_record_that_nothing_changed_keeps_its_bytes(root):
    """In its own spelling and order of keys."""
    odd = json.dumps(dict(sorted(record_of("a", caption="nöise").items())), indent=None, separators=(" ,  ", ":"))

    merged = merge(root, odd, sources=[source("a")], captions=[caption("a", "nöise")])

    assert merged.ordered() == [odd.encode() + b"\n"]
    assert merged.changed == []


def test_record_of_an_image_we_do_not_know_is_kept_as_it_is(root):
    line = b'{"image_id": "elsewhere",   "anything": [1.50, null]}'

    assert merge(root, line).ordered() == [line + b"\n"]


def test_line_endings_of_another_system_become_one_newline(root):
    line = json.dumps(record_of("a")).encode()

    assert merge(root, line + b"\r").ordered() == [line + b"\n"]


def test_extra_fields_and_the_path_of_an_earlier_record_are_kept(root):
    """Any extra fields a Stage 1 record had."""
    old = record_of("a", caption="old", image_path="elsewhere/a.png", score=0.5, tags=["x", {"y": None}])

    merged = merge(root, old, sources=[source("a")], captions=[caption("a", "new")])

    assert values(merged) == [{**old, "caption": "new"}]
    assert merged.changed == ["a"]


def test_path_that_is_none_is_replaced(root):
    """Else the record could never become valid."""
    for path in (7, "", "  ", None, ["a.png"]):
        merged = merge(root, record_of("a", image_path=path), sources=[source("a")], captions=[caption("a")])
        assert values(merged) == [record_of("a")]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("height", 25), ("height", 24.0), ("width", "32"), ("t5_attention_mask", [1] * 77),
        ("t5_attention_mask", [True] * 2 + [0] * 75), ("t5_attention_mask", [1.0] * 2 + [0] * 75),
        ("aspect_bucket", "1024x1024"), ("format_version", 1), ("format_version", 2.0), ("format_version", True),
    ],
)  # fmt: skip
def test_field_that_image_or_tokenizer_know_better_is_corrected(root, field, value):
    """24.0 and true are no ints, though Python calls them equal: such a record would never be ready."""
    merged = merge(root, record_of("a", **{field: value}), sources=[source("a")], captions=[caption("a")])

    assert values(merged) == [record_of("a")]
    assert record_problem(values(merged)[0]) is None
    assert merged.changed == ["a"]


def test_stage_1_record_waits_for_its_migration_untouched(root):
    """The inline vector leaves the JSONL only after a valid npy exists."""
    line = json.dumps({"image_path": "data/approved/a.png", "dinov3_embedding": [0.25] * 4}).encode()

    merged = merge(root, line, sources=[source("a")], captions=[caption("a")])

    assert merged.ordered() == [line + b"\n"]
    assert (merged.stage1, merged.changed, merged.added) == (["a"], [], [])


def test_record_without_an_id_takes_its_images_stem(root):
    assert record_id({"image_path": "data/approved/abc123xyz.jpg"}) == "abc123xyz"
    assert record_id({"image_id": "", "image_path": "x/a.b.png"}) == "a.b"
    assert record_id({"image_id": 7}) is None
    assert record_id({"image_path": ""}) is None

    old = {"image_path": "data/approved/a.png", "caption": "old", "note": 1}
    merged = merge(root, old, sources=[source("a")], captions=[caption("a")])
    assert values(merged) == [{**record_of("a"), "note": 1}]


# ---- what is taken out


def test_last_of_several_records_wins_and_the_earlier_ones_are_quarantined(root):
    first, last = record_of("a", note=1), record_of("a", note=2)

    merged = merge(root, first, record_of("b"), last)

    assert values(merged) == [last, record_of("b")]
    assert merged.quarantined == [(1, "replaced by line 3", json.dumps(first).encode())]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("null", "null"), ("[]", "a list"), ("7", "a number"), ("", "blank"), ("{", "malformed"),
        (b'{"image_id": "\xff"}', "malformed: invalid UTF-8"), ("{}", "no image_id and no image_path"),
        ('{"image_id": 7}', "no image_id and no image_path"),
    ],
)  # fmt: skip
def test_line_that_is_no_record_is_quarantined_with_its_number(root, line, why):
    merged = merge(root, record_of("a"), line, record_of("b"))

    assert len(merged.ordered()) == 2
    ((number, reason, raw),) = merged.quarantined
    assert number == 2
    assert reason.startswith(why)
    assert raw == (line if isinstance(line, bytes) else line.encode())


def test_quarantine_keeps_every_line_once_and_says_how_many_are_new(tmp_path):
    lines = [(3, "malformed", b"{"), (9, "malformed: invalid UTF-8", b"\xff\x00")]

    assert quarantine(tmp_path / "q", "x.jsonl", lines) == 2
    assert quarantine(tmp_path / "q", "x.jsonl", [lines[0], (3, "malformed", b"[")]) == 1
    assert quarantine(tmp_path / "q", "x.jsonl", []) == 0

    kept = [line.value for line in read_jsonl(tmp_path / "q" / "x.jsonl.quarantine.jsonl")]
    assert kept == [
        {"line": 3, "why": "malformed", "text": "{"},
        {"line": 9, "why": "malformed: invalid UTF-8", "hex": "ff00"},
        {"line": 3, "why": "malformed", "text": "["},
    ]


def test_nothing_to_quarantine_leaves_no_file(tmp_path):
    assert quarantine(tmp_path / "q", "x.jsonl", []) == 0
    assert not (tmp_path / "q").exists()


# ---- all of it

ids = st.sampled_from(["a", "b", "c.d", "ü", "elsewhere"])
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
extras = st.dictionaries(st.text(max_size=4), st.recursive(scalars, st.lists, max_leaves=4), max_size=3)
records = st.builds(lambda i, more, changes: {**more, **record_of(i), **changes}, ids, extras, extras)
stage1 = st.builds(
    lambda i, more: {**more, "image_path": f"data/approved/{i}.png", "dinov3_embedding": [0.5]}, ids, extras
)
broken = st.binary(max_size=12).filter(lambda raw: b"\n" not in raw)
lines = st.lists((records | stage1).map(lambda r: json.dumps(r).encode()) | broken, max_size=8)
known = st.lists(ids.filter(lambda i: i != "elsewhere"), unique=True)


def write(root, raw):
    root.stage2_jsonl.parent.mkdir(parents=True, exist_ok=True)
    root.stage2_jsonl.write_bytes(b"".join(raw))


@settings(deadline=None, max_examples=60)
@given(lines, known, known, st.booleans())
def test_no_line_is_lost_and_a_second_merge_changes_nothing(tmp_path_factory, raw, opened, captioned, ends):
    root = DataRoot(tmp_path_factory.mktemp("merge") / "data")
    write(root, [line + b"\n" for line in raw] if ends else [b"\n".join(raw)])
    sources, captions = by_id(*map(source, opened)), by_id(*map(caption, captioned))
    before = list(read_jsonl(root.stage2_jsonl))

    merged = plan_merge(before, sources, captions, root)

    out = merged.ordered()
    quarantined = {(number, text) for number, _, text in merged.quarantined}
    for line in before:
        kept = line.raw.rstrip(b"\r\n") + b"\n" in out
        replaced = line.value is not None and record_id(line.value) in merged.changed
        assert ((line.number, line.raw) in quarantined) + (kept or replaced) >= 1, line
    last = {record_id(line.value): line.value for line in before if line.value is not None}
    for image_id, line in merged.lines.items():
        old = last.get(image_id)
        if old is None:
            continue
        new = parse_object(line)
        assert new is not None
        assert {k: v for k, v in old.items() if k not in RECORD_FIELDS}.items() <= new.items(), "extras stay"
        if "dinov3_embedding" in old or image_id == "elsewhere":
            assert new == old
    names = [record_id(parse_object(line) or {}) for line in out]
    assert names == sorted(set(names))
    for image_id in set(opened) & set(captioned) - set(merged.stage1):
        assert record_problem(parse_object(merged.lines[image_id]) or {}) is None

    write(root, out)
    again = plan_merge(read_jsonl(root.stage2_jsonl), sources, captions, root)
    assert again.ordered() == out
    assert (again.added, again.changed, again.quarantined) == ([], [], [])


@given(records)
def test_line_we_write_reads_back_as_the_same_record(record):
    assert parse_object(encode_line(record)) == record


def test_records_an_interrupted_writer_left_are_merged_and_a_torn_tail_loses_its_last_line(tmp_path):
    """A torn `.tmp` tail loses only its last line. Source: CONTRACTS section 1, "merge"."""
    jsonl = tmp_path / "approved_image_dataset.jsonl"
    jsonl.write_bytes(b'{"image_id":"a","note":1}\n{"image_id":"b"}\n')
    unfinished(jsonl).write_bytes(b'{"image_id":"a","note":2}\n{"image_id":"c"}\n{"image_id":"d","no')

    merge = plan_merge(existing_lines(jsonl), {}, {}, DataRoot(tmp_path))

    assert merge.ordered() == [b'{"image_id":"a","note":2}\n', b'{"image_id":"b"}\n', b'{"image_id":"c"}\n']
    assert [raw for _, _, raw in merge.quarantined] == [b'{"image_id":"a","note":1}', b'{"image_id":"d","no']
