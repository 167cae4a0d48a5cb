"""The merge of ledger and JSONL, which drops nothing.

Spec: docs/spec/conventions.md#jsonl-input, docs/spec/stage2.md#record-fields, docs/spec/stage2.md#merge,
docs/spec/migration.md#forward, docs/spec/conventions.md#image-paths
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagemill.domain.inputs import NEW_INPUTS
from imagemill.domain.layout import DataRoot
from imagemill.domain.stage2_records import RECORD_FIELDS, violations
from imagemill.errors import ImagemillError
from imagemill.formats.jsonl import encode_line, parse_object, read_jsonl
from imagemill.fs.fingerprints import file_signature, posix_signature
from imagemill.inputs.scan import ListedFolder
from imagemill.pipeline.stage2 import record_index
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.pipeline.stage2.merge import Merge, stage1_backup, write_records
from imagemill.pipeline.stage2.record_index import read_recorded, record_id, unfinished
from imagemill.store.ledger import Captioned, CaptionRow, FileRow, Ledger, Problem, SourceRow
from imagemill.store.ledger.captions import mask_text
from tests.helpers.npy_files import write_npy
from tests.helpers.stage2 import record_of, write_text

STAT = posix_signature(1, 2, 3)
MASK = [1] * 2 + [0] * 75


def source(image_id, size=(32, 24)):
    return SourceRow(image_id, f"{image_id}.png", STAT, "pixels", size[1], size[0])


def caption(image_id, text="noise", mask=MASK):
    return CaptionRow(image_id, STAT, text, "sidecar", "words", mask_text(mask))


@pytest.fixture
def root(tmp_path):
    return DataRoot(tmp_path / "data")


def merge(root, *lines, **known):
    """Merge with a file that contains these lines: bytes, text, or objects."""
    write_text(root.stage2_jsonl, *(line if isinstance(line, bytes | str) else json.dumps(line) for line in lines))
    return merge_file(root, **known)


def merge_file(root, *, sources=(), captions=(), **options):
    """Merge the existing file with the data of a new ledger; the result also has the lines of the new file."""
    with Ledger(root.path / "ledger.sqlite") as ledger:
        ledger.record_sources(sources)
        ledger.record_captions(captions)
        merged = write_records(Merge(Inventory(root, 0, ListedFolder([], NEW_INPUTS)), **options), ledger)
    made_while_writing = read_recorded(root.stage2_jsonl)
    record_index._LAST.clear()
    assert made_while_writing == read_recorded(root.stage2_jsonl)
    return SimpleNamespace(
        lines=root.stage2_jsonl.read_bytes().splitlines(keepends=True), counts=merged.counts, problems=merged.problems,
        **{what: [i for i, done in merged.changes if done == what] for what in ("added", "changed", "migrated")},
    )  # fmt: skip


def values(merged):
    return [parse_object(line) for line in merged.lines]


def quarantined(root):
    path = root.quarantine / "approved_image_dataset.jsonl.quarantine.jsonl"
    entries = [line.value for line in read_jsonl(path)] if path.exists() else []
    return [(e["line"], e["why"], bytes.fromhex(e["hex"]) if "hex" in e else e["text"].encode()) for e in entries]


# ---- added records


def test_image_with_a_caption_and_a_mask_becomes_a_valid_record(root):
    merged = merge(root, sources=[source("a")], captions=[caption("a")])

    (record,) = values(merged)
    assert merged.added == ["a"]
    assert tuple(record) == RECORD_FIELDS
    assert violations(record) == []
    assert record == record_of("a")


@pytest.mark.parametrize(
    ("sources", "captions"),
    [([], [caption("a")]), ([source("a")], []), ([source("a")], [caption("a", mask=None)])],
    ids=["not opened", "no caption", "no mask"],
)
def test_incomplete_image_has_no_record_yet(root, sources, captions):
    assert values(merge(root, sources=sources, captions=captions)) == []


def test_lines_are_sorted_by_id(root):
    merged = merge(
        root, record_of("c"), record_of("Z"), sources=[source("b"), source("a")], captions=[caption("a"), caption("b")]
    )  # fmt: skip

    assert [record["image_id"] for record in values(merged)] == ["Z", "a", "b", "c"]


# ---- kept records


def test_unchanged_record_keeps_its_bytes(root):
    """Spelling and order of its keys are kept."""
    odd = json.dumps(dict(sorted(record_of("a", caption="nöise").items())), indent=None, separators=(" ,  ", ":"))

    merged = merge(root, odd, sources=[source("a")], captions=[caption("a", "nöise")])

    assert merged.lines == [odd.encode() + b"\n"]
    assert merged.changed == []


def test_record_of_an_unknown_image_is_kept_unchanged(root):
    line = b'{"image_id": "elsewhere",   "anything": [1.50, null]}'

    assert merge(root, line).lines == [line + b"\n"]


def test_foreign_line_endings_become_one_newline(root):
    line = json.dumps(record_of("a")).encode()

    assert merge(root, line + b"\r").lines == [line + b"\n"]


def test_extra_fields_and_the_path_of_an_earlier_record_are_kept(root):
    """Extra fields of Stage 1 records are kept too."""
    old = record_of("a", caption="old", image_path="elsewhere/a.png", score=0.5, tags=["x", {"y": None}])

    merged = merge(root, old, sources=[source("a")], captions=[caption("a", "new")])

    assert values(merged) == [{**old, "caption": "new"}]
    assert merged.changed == ["a"]


def test_invalid_path_is_replaced(root):
    """Otherwise the record could never become valid."""
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
def test_field_that_contradicts_image_or_tokenizer_is_corrected(root, field, value):
    """Python considers 24.0 and true equal to ints, but a record with them would never be ready."""
    merged = merge(root, record_of("a", **{field: value}), sources=[source("a")], captions=[caption("a")])

    assert values(merged) == [record_of("a")]
    assert violations(values(merged)[0]) == []
    assert merged.changed + merged.migrated == ["a"]
    counter = {"t5_attention_mask": "mask_corrected"}.get(field, f"{field}_corrected")
    # Values that are equal in Python differ in spelling only.
    assert merged.counts[counter] == (
        field in {"height", "width", "t5_attention_mask"} and value != record_of("a")[field]
    )


# ---- Stage 1


def stage1_line(image_id="a", **changes):
    record = {"image_path": f"old/{image_id}.png", "dinov3_embedding": [0.25] * 1024, "caption": "noise",
              "t5_attention_mask": MASK, "height": 24, "width": 32, **changes}  # fmt: skip
    return json.dumps({key: value for key, value in record.items() if value is not None}).encode()


def with_vector(root, image_id="a"):
    """Add a valid DINOv3 file with its row in the ledger."""
    path = root.derived / "dinov3" / f"{image_id}.npy"
    write_npy(path, np.full(1024, 0.25, np.float32))
    with Ledger(root.path / "ledger.sqlite") as ledger:
        ledger.record_files([FileRow("dinov3_npy", image_id, file_signature(path), "pixels", "content", "unknown")])


def test_stage_1_record_is_unchanged_until_its_vector_has_a_file(root):
    """The inline vector leaves the JSONL only after a valid npy file exists."""
    line = stage1_line()

    merged = merge(root, line, sources=[source("a")], captions=[caption("a")])

    assert merged.lines == [line + b"\n"]
    assert merged.counts["stage1"] == 1
    assert [(p.item, p.outcome, p.reason) for p in merged.problems] == [("a", "failed", "missing_vector")]
    assert not stage1_backup(root.stage2_jsonl).exists()


def test_stage_1_record_with_its_vector_in_a_file_becomes_version_2(root):
    """The backup of the JSONL is identical bit for bit."""
    with_vector(root)
    line = stage1_line(score=0.5)

    merged = merge(root, line, sources=[source("a")], captions=[caption("a")])

    assert values(merged) == [{**record_of("a", image_path="old/a.png"), "score": 0.5}]
    assert (merged.migrated, merged.problems) == (["a"], [])
    assert stage1_backup(root.stage2_jsonl).read_bytes() == line + b"\n"


def test_backup_is_never_overwritten(root):
    with_vector(root)
    root.derived.mkdir(exist_ok=True)
    stage1_backup(root.stage2_jsonl).write_bytes(b"the first one")

    merge(root, stage1_line(), sources=[source("a")], captions=[caption("a")])

    assert stage1_backup(root.stage2_jsonl).read_bytes() == b"the first one"


def test_stage_1_record_is_kept_without_a_migration(root):
    """A pass for one kind does not change Stage 1 records."""
    with_vector(root)
    line = stage1_line()

    merged = merge(root, line, sources=[source("a")], captions=[caption("a")], migrate=False)

    assert (merged.lines, merged.problems) == ([line + b"\n"], [])


def test_stage_1_records_beyond_the_limit_are_pending(root):
    with_vector(root, "a"), with_vector(root, "b")

    merged = merge(root, stage1_line("a"), stage1_line("b"), captions=[caption("a"), caption("b")], up_to="a")

    assert (merged.migrated, merged.counts["stage1"]) == (["a"], 1)


def test_stage_1_record_of_a_missing_image_migrates_with_its_own_size(root):
    with_vector(root)

    merged = merge(root, stage1_line(), captions=[caption("a")])

    assert values(merged) == [record_of("a", image_path="old/a.png")]


@pytest.mark.parametrize(
    ("changes", "known", "reason"),
    [
        ({"caption": "  "}, [], "missing_caption"),
        ({"height": None}, ["a"], "missing_size"),
        ({"width": "32"}, ["a"], "missing_size"),
    ],
)  # fmt: skip
def test_incomplete_stage_1_record_is_kept_and_reported_as_failed(root, changes, known, reason):
    with_vector(root)
    line = stage1_line(**changes)

    merged = merge(root, line, captions=map(caption, known))

    assert merged.lines == [line + b"\n"]
    assert [p.reason for p in merged.problems] == [reason]


def test_size_and_mask_of_a_stage_1_record_are_corrected_and_counted(root):
    with_vector(root)

    merged = merge(
        root, stage1_line(height=25, t5_attention_mask=[1] * 77), sources=[source("a")], captions=[caption("a")]
    )

    assert values(merged) == [record_of("a", image_path="old/a.png")]
    assert (merged.counts["height_corrected"], merged.counts["width_corrected"], merged.counts["mask_corrected"]) == (
        1,
        0,
        1,
    )


def test_vector_of_a_record_replaced_by_an_interrupted_writer_is_not_lost(root):
    """The newer line has no vector. Both lines are combined until the vector has a file."""
    root.derived.mkdir(parents=True)
    unfinished(root.stage2_jsonl).write_bytes(json.dumps(record_of("a", image_path="old/a.png")).encode() + b"\n")

    merged = merge(root, stage1_line(), sources=[source("a")], captions=[caption("a")])
    assert values(merged) == [{**record_of("a", image_path="old/a.png"), "dinov3_embedding": [0.25] * 1024}]

    with_vector(root)
    again = merge_file(root, sources=[source("a")], captions=[caption("a")])
    assert values(again) == [record_of("a", image_path="old/a.png")]


def test_record_without_an_id_uses_the_stem_of_its_image(root):
    assert record_id({"image_path": "data/approved/abc123xyz.jpg"}) == "abc123xyz"
    assert record_id({"image_id": "", "image_path": "x/a.b.png"}) == "a.b"
    assert record_id({"image_id": 7}) is None
    assert record_id({"image_path": ""}) is None

    old = {"image_path": "data/approved/a.png", "caption": "old", "note": 1}
    merged = merge(root, old, sources=[source("a")], captions=[caption("a")])
    assert values(merged) == [{**record_of("a"), "note": 1}]


# ---- removed records


def test_last_duplicate_record_wins_and_earlier_ones_are_quarantined(root):
    first, last = record_of("a", note=1), record_of("a", note=2)

    merged = merge(root, first, record_of("b"), last)

    assert values(merged) == [last, record_of("b")]
    assert quarantined(root) == [(1, "replaced by line 3", json.dumps(first).encode())]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("null", "null"), ("[]", "a list"), ("7", "a number"), ("", "blank"), ("{", "malformed"),
        (b'{"image_id": "\xff"}', "malformed: invalid UTF-8"), ("{}", "no image_id and no image_path"),
        ('{"image_id": 7}', "no image_id and no image_path"),
    ],
)  # fmt: skip
def test_invalid_line_is_quarantined_with_its_number(root, line, why):
    merged = merge(root, record_of("a"), line, record_of("b"))

    assert len(merged.lines) == 2
    ((number, reason, raw),) = quarantined(root)
    assert number == 2
    assert reason.startswith(why)
    assert raw == (line if isinstance(line, bytes) else line.encode())


# ---- all rules together

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


@settings(deadline=None, max_examples=40)
@given(lines, known, known, st.booleans())
def test_no_line_is_lost_and_a_second_merge_changes_nothing(tmp_path_factory, raw, opened, captioned, ends):
    root = DataRoot(tmp_path_factory.mktemp("merge") / "data")
    write(root, [line + b"\n" for line in raw] if ends else [b"\n".join(raw)])
    rows = {"sources": list(map(source, opened)), "captions": list(map(caption, captioned))}
    before = list(read_jsonl(root.stage2_jsonl))

    merged = merge_file(root, **rows)

    after = {record_id(record): record for record in values(merged)}
    taken_out = {(number, text) for number, _, text in quarantined(root)}
    changed = {*merged.changed, *merged.migrated}
    for line in before:
        kept = line.value is not None and line.value.items() <= after.get(record_id(line.value), {}).items()
        replaced = line.value is not None and record_id(line.value) in changed
        assert ((line.number, line.raw) in taken_out) + (kept or replaced) >= 1, line
    last = {record_id(line.value): line.value for line in before if line.value is not None}
    for image_id, new in after.items():
        old = last.get(image_id)
        if old is None:
            continue
        assert {k: v for k, v in old.items() if k not in RECORD_FIELDS}.items() <= new.items(), "extras stay"
        if "dinov3_embedding" in old:
            assert new == old
        elif image_id == "elsewhere":
            assert {**new, "dinov3_embedding": 0} == {**old, "dinov3_embedding": 0}
    assert [record_id(record) for record in values(merged)] == sorted(after)
    for image_id in set(opened) & set(captioned) & set(after):
        assert "dinov3_embedding" in after[image_id] or violations(after[image_id]) == []

    again = merge_file(root, **rows)
    assert again.lines == merged.lines
    assert (again.added, again.changed, again.counts["quarantined"]) == ([], [], 0)


@given(records)
def test_written_line_parses_to_the_same_record(record):
    assert parse_object(encode_line(record)) == record


def test_records_of_an_interrupted_writer_are_merged_except_a_truncated_last_line(root):
    """A truncated `.tmp` file loses only its last line. Spec: docs/spec/stage2.md#merge"""
    write_text(root.stage2_jsonl, '{"image_id":"a","note":1}', '{"image_id":"b"}')
    unfinished(root.stage2_jsonl).write_bytes(b'{"image_id":"a","note":2}\n{"image_id":"c"}\n{"image_id":"d","no')

    merged = merge_file(root)

    assert merged.lines == [b'{"image_id":"a","note":2}\n', b'{"image_id":"b"}\n', b'{"image_id":"c"}\n']
    assert [raw for _, _, raw in quarantined(root)] == [b'{"image_id":"a","note":1}', b'{"image_id":"d","no']
    assert not unfinished(root.stage2_jsonl).exists()


def test_file_that_changes_while_it_is_merged_is_not_replaced(root, monkeypatch):
    """Replacing it would lose a record that another program appended during the merge."""
    write_text(root.stage2_jsonl, json.dumps(record_of("a", height=1)))

    def append(*_):
        with open(root.stage2_jsonl, "a") as file:
            file.write(json.dumps(record_of("b")) + "\n")
        return iter(())

    monkeypatch.setattr("imagemill.pipeline.stage2.merge._corrections", append)
    with pytest.raises(ImagemillError, match="changed while it was merged"):
        merge_file(root, sources=[source("a")], captions=[caption("a")])

    assert [line.value["image_id"] for line in read_jsonl(root.stage2_jsonl)] == ["a", "b"]
    assert [path.name for path in root.derived.iterdir()] == ["approved_image_dataset.jsonl"]


# ---- a merge after few changes


def outcome(root, ledger):
    """Merge; return what it did, and what it left."""
    merged = write_records(Merge(Inventory(root, 0, ListedFolder([], NEW_INPUTS))), ledger)
    made_while_writing = read_recorded(root.stage2_jsonl)
    record_index._LAST.clear()
    assert made_while_writing == read_recorded(root.stage2_jsonl)
    return root.stage2_jsonl.read_bytes(), merged.counts, merged.changes, merged.problems, ledger.recorded_captions()


@pytest.fixture
def compared(monkeypatch):
    """The images whose rows each merge reads; None for all."""
    found, facts = [], Ledger.facts
    monkeypatch.setattr(Ledger, "facts", lambda self, ids=None: found.append(ids) or facts(self, ids))
    return found


def recorded_images(ledger, *ids, **options):
    ledger.record_sources(source(image_id, **options) for image_id in ids)
    ledger.record_captions(map(caption, ids))


def caption_again(ledger, image_id):
    ledger.record_captions([caption(image_id, "of another image")])
    ledger.record_captioned([Captioned(image_id, "pixels", "key")])


ROW_CHANGES = {
    "added": recorded_images,
    "resized": lambda ledger, i: recorded_images(ledger, i, size=(48, 16)),
    "recaptioned": lambda ledger, i: ledger.record_captions([caption(i, f"another text of {i}")]),
    "without a mask": lambda ledger, i: ledger.record_captions([caption(i, "longer", mask=None)]),
    "with a mask": lambda ledger, i: ledger.record_masks([(i, "words", [1] * 5 + [0] * 72, True)]),
    "forgotten": lambda ledger, i: ledger.forget_sources([i]),
    "captioned by a model": caption_again,
    "failed": lambda ledger, i: ledger.record_problems([Problem(i, "stage2_jsonl", "failed", "why", "what", "do")]),
}
row_changes = st.lists(st.tuples(st.sampled_from(sorted(ROW_CHANGES)), st.sampled_from([*"abcdefgh", "Z", "ß", "new"])))


@settings(deadline=None, max_examples=40)
@given(st.lists(row_changes, min_size=1, max_size=3), st.booleans())
def test_merge_of_changed_images_gives_what_a_merge_of_all_images_gives(tmp_path_factory, rounds, is_forgotten):
    """Spec: docs/spec/stage2.md#merge"""
    folder = tmp_path_factory.mktemp("merge")
    roots = DataRoot(folder / "few" / "data"), DataRoot(folder / "all" / "data")
    few, whole = (Ledger(root.ledger) for root in roots)
    with few, whole:
        for root, ledger in zip(roots, (few, whole), strict=True):
            write_text(root.stage2_jsonl, json.dumps(record_of("elsewhere", extra=1)))
            recorded_images(ledger, *"abcdefgh", "Z", "ß")
        assert outcome(roots[0], few) == outcome(roots[1], whole)
        for changes in rounds:
            for name, image_id in changes:
                for ledger in (few, whole):
                    ROW_CHANGES[name](ledger, image_id)
            whole._change("DELETE FROM merged")
            assert outcome(roots[0], few) == outcome(roots[1], whole)
            if is_forgotten:
                few.forget_row_changes()


def test_only_rows_of_changed_images_are_read(root, compared):
    """Spec: docs/spec/stage2.md#merge"""
    with Ledger(root.ledger) as ledger:
        recorded_images(ledger, *"abcdefgh")
        outcome(root, ledger)
        outcome(root, ledger)
        ledger.forget_row_changes()
        assert ledger.row_changes_after(ledger.last_row_change()) == set()
        with Ledger(root.ledger) as other:
            other.record_captions([caption("c", "changed by another process")])
        lines = outcome(root, ledger)[0].splitlines()

    assert compared == [None, [], ["c"]]
    assert [parse_object(line)["image_id"] for line in lines] == list("abcdefgh")
    assert parse_object(lines[2])["caption"] == "changed by another process"


def edit_a_record(root, ledger):
    lines = root.stage2_jsonl.read_bytes().replace(b'"height":24', b'"height":25', 1)
    root.stage2_jsonl.write_bytes(lines)


def leave_lines_of_an_interrupted_writer(root, ledger):
    write_text(unfinished(root.stage2_jsonl), json.dumps(record_of("left")))


def add_a_record_of_stage_1(root, ledger):
    edit_a_record(root, ledger)
    with open(root.stage2_jsonl, "ab") as file:
        file.write(stage1_line("old") + b"\n")


def lose_a_row_change(root, ledger):
    ledger._change("UPDATE merged SET seen = seen - 1")
    ledger.record_conflicts({"a": True})
    ledger._change("DELETE FROM row_changes WHERE number <= (SELECT seen + 1 FROM merged)")


def merge_by_another_release(root, ledger):
    ledger._change("UPDATE merged SET parameters = replace(parameters, 'data', 'other')")


@pytest.mark.parametrize(
    "change",
    [
        edit_a_record,
        leave_lines_of_an_interrupted_writer,
        add_a_record_of_stage_1,
        lose_a_row_change,
        merge_by_another_release,
        lambda root, ledger: root.stage2_jsonl.unlink(),
        lambda root, ledger: ledger.record_captions([caption(image_id, "changed") for image_id in "abcde"]),
    ],
    ids=["edit", "interrupted writer", "stage 1", "unknown changes", "other parameters", "lost file", "most images"],
)
def test_all_images_are_compared_after_another_change(root, compared, change):
    """Spec: docs/spec/stage2.md#merge"""
    with Ledger(root.ledger) as ledger:
        recorded_images(ledger, *"abcdefgh")
        outcome(root, ledger)
        change(root, ledger)
        lines = outcome(root, ledger)[0].splitlines()

    assert compared == [None, None]
    found = {record_id(record): record for record in map(parse_object, lines)}
    assert set("abcdefgh") <= found.keys()
    assert all(found[image_id]["height"] == 24 for image_id in "abcdefgh")


def test_merge_that_was_interrupted_before_its_end_is_followed_by_one_of_all_images(root, compared, monkeypatch):
    """The file is new, but not yet recorded as merged."""
    with Ledger(root.ledger) as ledger:
        recorded_images(ledger, *"abcdefgh")
        outcome(root, ledger)
        ledger.record_captions([caption("c", "changed")])
        with monkeypatch.context() as killed:
            killed.setattr(Ledger, "record_verified", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                outcome(root, ledger)
        outcome(root, ledger)

    assert compared == [None, ["c"], None]
