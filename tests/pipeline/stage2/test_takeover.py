"""Captions, withdrawals and records that a renamed image takes over.

Spec: docs/spec/stage2.md#renames
"""

import json

import msgspec
import pytest

from imagemill.fs.fingerprints import FileSignature
from imagemill.inputs.sidecars import caption_row
from imagemill.pipeline.stage2.takeover import accept_renames, inherited_caption
from imagemill.store.ledger import (
    ACCEPTED,
    FROM_CAPTIONER,
    FROM_METADATA,
    FROM_PREVIEW,
    FROM_RECORD,
    FROM_SIDECAR,
    RECORDED,
    Captioned,
    Ledger,
)
from tests.helpers.stage2 import embed, photos, stage2, surveyed, write_records

FILES = [FROM_SIDECAR, FROM_METADATA]


def row(origin, image_id="old", text="text", **changes):
    return msgspec.structs.replace(caption_row(image_id, text, origin), **changes)


@pytest.mark.parametrize("origin", [FROM_RECORD, FROM_CAPTIONER, FROM_PREVIEW])
def test_image_without_a_caption_takes_over_text_origin_mask_and_all_texts(origin):
    former = row(origin, mask="110", truncated=True, texts=("text", "more"))

    assert inherited_caption(former, None, "new") == msgspec.structs.replace(former, image_id="new")


@pytest.mark.parametrize("origin", FILES)
def test_caption_of_a_file_of_the_earlier_name_becomes_that_of_the_record(origin):
    former = row(origin, stat=FileSignature("posix:1:2:3"), lines=2, conflict=True)

    assert inherited_caption(former, None, "new") == row(FROM_RECORD, "new")


@pytest.mark.parametrize("own", [*FILES, FROM_RECORD])
@pytest.mark.parametrize("former", [*FILES, FROM_RECORD, FROM_CAPTIONER, FROM_PREVIEW])
def test_caption_that_a_person_wrote_for_the_new_name_stays(own, former):
    assert inherited_caption(row(former), row(own, "new", "own"), "new") is None


@pytest.mark.parametrize(
    ("former", "own", "is_taken"),
    [
        (FROM_SIDECAR, FROM_CAPTIONER, True),
        (FROM_RECORD, FROM_PREVIEW, True),
        (FROM_CAPTIONER, FROM_CAPTIONER, True),
        (FROM_CAPTIONER, FROM_PREVIEW, True),
        (FROM_PREVIEW, FROM_PREVIEW, True),
        (FROM_PREVIEW, FROM_CAPTIONER, False),
    ],
)
def test_caption_of_a_model_gives_way_except_a_real_one_to_a_preview(former, own, is_taken):
    assert (inherited_caption(row(former), row(own, "new", "own"), "new") is not None) is is_taken


def test_equal_caption_takes_over_the_mask():
    found = inherited_caption(row(FROM_SIDECAR, mask="10"), row(FROM_SIDECAR, "new"), "new")

    assert found == row(FROM_SIDECAR, "new", mask="10")


def test_nothing_is_taken_over_from_an_image_without_a_caption():
    assert inherited_caption(None, row(FROM_CAPTIONER, "new"), "new") is None


# ---- in a data root


def accept(root):
    with Ledger(root.ledger) as ledger:
        scan = surveyed(root, ledger).scan
        pairs = accept_renames(root, scan, ledger, "run")
        return [(former.image_id, image.image_id) for former, image in pairs]


@pytest.fixture
def root(data_root):
    """Two images, with extra fields in the record of the first, whose file is renamed without its caption."""
    stage2(data_root, "a", "b")
    lines = [json.loads(line) for line in data_root.stage2_jsonl.read_text().splitlines()]
    lines[0] |= {"score": 3, "image_path": "elsewhere/approved/a.png"}
    data_root.stage2_jsonl.write_text("".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines))
    write_records(data_root)
    (data_root.approved / "a.png").rename(data_root.approved / "z.png")
    (data_root.approved / "a.txt").unlink()
    return data_root


def records(root):
    return {line["image_id"]: line for line in map(json.loads, root.stage2_jsonl.read_text().splitlines())}


def test_one_transaction_ends_the_rows_of_the_earlier_id(root):
    with Ledger(root.ledger) as ledger:
        ledger.record_captioned([Captioned("a", "xxh3:1", "key", cut_off=True)])
        ledger.withdraw(["a"])
        files = ledger.files("dinov3_npy", ["a"])

    assert accept(root) == [("a", "z")]

    with Ledger(root.ledger) as ledger:
        assert ledger.ids("sources") == {"b", "z"}
        assert ledger.captions().keys() == {"b", "z"}
        assert ledger.captioned() == {"z": Captioned("z", "xxh3:1", "key", cut_off=True)}
        assert ledger.withdrawals().keys() == {"z"}
        assert ledger.arrivals() == {}
        assert ledger.files("dinov3_npy", ["a"]) == files, "the arrays are still there"
        assert [(rename.former, rename.image_id, rename.state) for rename in ledger.renames()] == [("a", "z", ACCEPTED)]


def test_failure_within_the_transaction_changes_nothing(root, monkeypatch):
    with Ledger(root.ledger) as ledger:
        before = {table: ledger.cells(table, ["*"]) for table in ("sources", "captions", "recorded_captions", "files")}
    monkeypatch.setattr(
        "imagemill.store.ledger.renames.RENAMES.insert", "INSERT INTO no_such_table VALUES (?, ?, ?, ?)"
    )
    with pytest.raises(Exception, match="no_such_table"):
        accept(root)
    monkeypatch.undo()

    with Ledger(root.ledger) as ledger:
        after = {table: ledger.cells(table, ["*"]) for table in before}
        assert [line for line in after["sources"] if line[0] != "z"] == before["sources"]
        assert after["captions"] == before["captions"]
    assert accept(root) == [("a", "z")]


def test_record_continues_under_the_new_id_with_extra_fields_and_the_form_of_its_path(root):
    old = records(root)["a"]
    accept(root)

    merged = write_records(root)

    assert merged.counts["renamed"] == 1
    assert list(records(root)) == ["b", "z"]
    assert records(root)["z"] == old | {"image_id": "z", "image_path": "elsewhere/approved/z.png"}
    with Ledger(root.ledger) as ledger:
        assert [rename.state for rename in ledger.renames()] == [RECORDED]
    assert write_records(root).counts["rewritten"] == 0


def test_merge_that_is_repeated_after_a_kill_quarantines_the_line_once(root):
    accept(root)
    before = root.stage2_jsonl.read_bytes()
    write_records(root)
    first = root.stage2_jsonl.read_bytes()
    root.stage2_jsonl.write_bytes(before)  # as if the process had died before the replacement
    with Ledger(root.ledger) as ledger:
        ledger.advance_renames(["a"], ACCEPTED)

    write_records(root)

    assert root.stage2_jsonl.read_bytes() == first
    (kept,) = root.quarantine.glob("*.jsonl")
    assert len(kept.read_text().splitlines()) == 1


def test_line_of_the_earlier_id_stays_until_the_new_record_can_be_written(root):
    """A caption whose tokens are not known yet, after an interrupt."""
    (root.approved / "z.txt").write_text("not tokenised yet")
    accept(root)

    write_records(root)

    assert list(records(root)) == ["a", "b"]
    with Ledger(root.ledger) as ledger:
        assert [rename.state for rename in ledger.renames()] == [ACCEPTED]
        assert surveyed(root, ledger).recorded.lines.keys() == {"b"}
    embed(root)
    write_records(root)
    assert {image_id: record["caption"] for image_id, record in records(root).items()} == {
        "b": "noise called b",
        "z": "not tokenised yet",
    }
    assert records(root)["z"]["score"] == 3


def test_new_image_of_the_earlier_name_gets_a_record_of_its_own(root):
    """Although the records have not been written since the rename."""
    accept(root)
    photos(root, "a")
    (root.approved / "a.txt").write_text("another picture")
    embed(root)

    write_records(root)

    found = records(root)
    assert {image_id: record.get("score") for image_id, record in found.items()} == {"a": None, "b": None, "z": 3}


def test_record_of_stage_1_is_migrated_before_it_is_renamed(root):
    line = records(root)["a"]
    old = {key: value for key, value in line.items() if key not in ("format_version", "aspect_bucket")}
    root.stage2_jsonl.write_text("".join(f"{json.dumps(each)}\n" for each in (old, records(root)["b"])))

    assert accept(root) == []
    write_records(root)
    assert accept(root) == [("a", "z")]
