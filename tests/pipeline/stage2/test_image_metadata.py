"""Metadata of records, except embeddings, after any combination of passes.

Spec: docs/spec/stage2.md#caption-sources, docs/spec/stage2.md#record-fields, docs/spec/stage2.md#pass-names
"""

import errno
import json

import pytest

from imagemill import parts
from imagemill.domain.embedding_specs import DINOV3, T5, T5_TOKENS
from imagemill.errors import Refused
from imagemill.fs.fingerprints import fingerprint
from imagemill.inputs.scan import scan_approved
from imagemill.inputs.sidecars import caption_row
from imagemill.inputs.survey import survey
from imagemill.pipeline.stage2 import image_metadata as facts
from imagemill.pipeline.stage2.image_metadata import (
    ASSET,
    adopt_captions,
    complete_facts,
    complete_masks,
    inspect_image,
    note_missing_captions,
)
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.pipeline.stage2.record_index import read_recorded
from imagemill.store.ledger import FROM_CAPTIONER, FROM_RECORD, Ledger
from tests.helpers.stage2 import embed, photos, picture, record_of, write_text
from tests.helpers.stubs import StubTokenizer


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch):
    """Images are opened, and captions read and adopted, in parts."""
    monkeypatch.setattr(parts, "IMAGES_TOGETHER", 1)


@pytest.fixture
def ledger(data_root):
    with Ledger(data_root.ledger) as ledger:
        yield ledger


@pytest.fixture
def opened(monkeypatch):
    """Record the file names of opened images."""
    names, original = [], facts.inspect_image

    def noting(approved, source, color):
        names.append(source.file_name)
        return original(approved, source, color)

    monkeypatch.setattr(facts, "inspect_image", noting)
    return names


def complete(root, ledger):
    complete_facts(root.approved, survey(root.approved, ledger), ledger)


def problems(ledger):
    return {(p.item, p.asset, p.outcome, p.reason) for p in ledger.problems()}


# ---- images


def test_image_is_read_once_for_fingerprint_size_and_pixels(data_root):
    picture(data_root.approved / "a.png", size=(40, 24))

    row, pixels = inspect_image(data_root.approved, scan_approved(data_root.approved).sources["a"])

    assert (row.height, row.width) == (24, 40)
    assert pixels.shape == (24, 40, 3)
    assert row.fingerprint == fingerprint((data_root.approved / "a.png").read_bytes())


def test_undecodable_image_is_refused(data_root):
    (data_root.approved / "a.png").write_bytes(b"no picture")

    with pytest.raises(Refused) as caught:
        inspect_image(data_root.approved, scan_approved(data_root.approved).sources["a"])
    assert caught.value.reason == "undecodable"


def test_images_opened_by_a_pass_are_not_opened_again(data_root, ledger, opened):
    photos(data_root, "a", "b")
    embed(data_root, DINOV3)
    photos(data_root, "c")

    complete(data_root, ledger)
    assert opened == ["c.png"]
    assert ledger.sources().keys() == set("abc")

    complete(data_root, ledger)
    assert opened == ["c.png"], "and no second time"


def test_replaced_image_is_opened_again(data_root, ledger, opened):
    photos(data_root, "a")
    complete(data_root, ledger)
    picture(data_root.approved / "a.png", size=(16, 16))

    complete(data_root, ledger)

    assert opened == ["a.png", "a.png"]
    assert ledger.sources()["a"].width == 16


def test_refused_image_is_recorded_once_and_opened_again_only_after_a_change(data_root, ledger, opened):
    (data_root.approved / "a.png").write_bytes(b"no picture")

    for _ in range(2):
        complete(data_root, ledger)
    assert opened == ["a.png"]
    assert problems(ledger) == {("a", ASSET, "refused", "undecodable")}

    picture(data_root.approved / "a.png")
    complete(data_root, ledger)
    assert opened == ["a.png", "a.png"]
    assert "a" in ledger.sources()


def test_image_refused_by_an_embedding_pass_is_not_opened_again(data_root, ledger, opened):
    (data_root.approved / "a.png").write_bytes(b"no picture")
    embed(data_root, DINOV3)

    complete(data_root, ledger)

    assert opened == []


@pytest.mark.parametrize("opened_by", ["the next records", "an embedding pass"])
def test_disk_error_is_a_failure_until_the_image_can_be_read(data_root, ledger, monkeypatch, opened_by):
    """The next run retries a *failed* image and removes its problem."""

    def fail(approved, source, color):
        raise OSError(errno.EIO, "input/output error")

    photos(data_root, "a", "b")
    with monkeypatch.context() as patched:
        patched.setattr(facts, "inspect_image", fail)
        complete(data_root, ledger)
    assert problems(ledger) == {(image_id, ASSET, "failed", "read_error") for image_id in "ab"}

    if opened_by == "an embedding pass":
        embed(data_root, DINOV3)
    complete(data_root, ledger)

    assert problems(ledger) == set()
    assert ledger.sources().keys() == {"a", "b"}


def test_one_undecodable_image_does_not_stop_the_others(data_root, ledger):
    photos(data_root, *map(str, range(9)))
    (data_root.approved / "4.png").write_bytes(b"")

    complete(data_root, ledger)

    assert ledger.sources().keys() == set("01235678")


# ---- captions


def captions(ledger):
    return {row.image_id: (row.text, row.origin) for row in ledger.captions().values()}


def adopt(root, ledger):
    inventory = Inventory(root)
    inventory.survey(ledger)
    adopt_captions(inventory, ledger)


def test_image_without_a_sidecar_uses_the_caption_of_its_record_byte_for_byte(data_root, ledger):
    """A Stage 1 caption is kept byte for byte."""
    photos(data_root, "a", "b", captions=False)
    stage1 = {"image_path": "data/approved/b.png", "caption": "two\nlines  "}
    write_text(data_root.stage2_jsonl, json.dumps(record_of("a", caption="  one ")), json.dumps(stage1))

    adopt(data_root, ledger)

    assert captions(ledger) == {"a": ("  one ", "record"), "b": ("two\nlines  ", "record")}


def test_sidecar_always_takes_precedence_over_the_record(data_root, ledger):
    photos(data_root, "a", "b")
    (data_root.approved / "b.txt").unlink()
    write_text(data_root.stage2_jsonl, *(json.dumps(record_of(i, caption="of the record")) for i in "ab"))

    adopt(data_root, ledger)
    assert captions(ledger) == {"a": ("noise called a", "sidecar"), "b": ("of the record", "record")}

    (data_root.approved / "b.txt").write_text("of the sidecar")
    adopt(data_root, ledger)
    assert captions(ledger)["b"] == ("of the sidecar", "sidecar")


def test_last_of_several_records_gives_the_caption(data_root, ledger):
    """The last of duplicate records wins. Spec: docs/spec/migration.md#forward"""
    photos(data_root, "a", captions=False)
    write_text(data_root.stage2_jsonl, *(json.dumps(record_of("a", caption=text)) for text in ("first", "last")))

    adopt(data_root, ledger)

    assert captions(ledger) == {"a": ("last", "record")}


@pytest.mark.parametrize(
    "line", ["", "null", "[1]", "{", b"\xff", '{"image_id": "a", "caption": 7}', '{"image_id": "a", "caption": " "}']
)
def test_line_without_a_caption_sets_no_caption(data_root, ledger, line):
    photos(data_root, "a", captions=False)
    write_text(data_root.stage2_jsonl, line)

    adopt(data_root, ledger)

    assert captions(ledger) == {}


def test_record_of_a_missing_image_provides_its_caption_too(data_root, ledger):
    """Its hidden state requires no pixels, and its record may still have to migrate."""
    photos(data_root, "a", captions=False)
    write_text(data_root.stage2_jsonl, json.dumps(record_of("gone", caption=" as it was")))

    adopt(data_root, ledger)

    assert captions(ledger) == {"gone": (" as it was", "record")}


def merged(root, ledger):
    """Mark the records on disk as the output of the last merge."""
    recorded = read_recorded(root.stage2_jsonl)
    ledger.record_recorded_captions(recorded.captions, recorded.texts_of, are_all=True)


def test_caption_edited_in_the_record_replaces_the_copy_in_the_ledger(data_root, ledger):
    """Without a sidecar, the records on disk define the caption; the replaced text goes to quarantine."""
    photos(data_root, "a", captions=False)
    write_text(data_root.stage2_jsonl, json.dumps(record_of("a", caption="old")))
    adopt(data_root, ledger)
    merged(data_root, ledger)

    write_text(data_root.stage2_jsonl, json.dumps(record_of("a", caption="edited\nby hand ")))
    adopt(data_root, ledger)

    assert captions(ledger) == {"a": ("edited\nby hand ", "record")}
    assert ledger.captions()["a"].mask is None, "the mask of the old text does not belong to it"
    (kept,) = data_root.quarantine.glob("*.quarantine.jsonl")
    assert '\\"caption\\":\\"old\\"' in kept.read_text()


def test_records_of_a_newer_export_replace_unmerged_captions(data_root, ledger):
    """Cases: a Stage 1 file that was written again or restored by a rollback."""
    photos(data_root, "a", captions=False)
    write_text(data_root.stage2_jsonl, json.dumps(record_of("a", caption="first export")))
    adopt(data_root, ledger)

    write_text(data_root.stage2_jsonl, json.dumps({"image_path": "data/approved/a.png", "caption": "second export"}))
    adopt(data_root, ledger)

    assert captions(ledger) == {"a": ("second export", "record")}


def test_sidecar_still_takes_precedence_if_the_record_was_edited(data_root, ledger):
    photos(data_root, "a")
    write_text(data_root.stage2_jsonl, json.dumps(record_of("a", caption="edited")))

    adopt(data_root, ledger)

    assert captions(ledger) == {"a": ("noise called a", "sidecar")}


def test_caption_comes_from_the_record_after_its_sidecar_is_removed(data_root, ledger):
    """The caption was merged into the record; later edits of the record are used."""
    photos(data_root, "a")
    adopt(data_root, ledger)
    write_text(data_root.stage2_jsonl, json.dumps(record_of("a", caption="noise called a")))
    merged(data_root, ledger)
    (data_root.approved / "a.txt").unlink()

    adopt(data_root, ledger)
    assert captions(ledger) == {"a": ("noise called a", "record")}

    write_text(data_root.stage2_jsonl, json.dumps(record_of("a", caption="edited")))
    adopt(data_root, ledger)
    assert captions(ledger) == {"a": ("edited", "record")}


def test_model_caption_is_not_replaced_by_the_text_it_replaced(data_root, ledger):
    """The record contains the earlier text until the merge, which is not an edit."""
    photos(data_root, "a", captions=False)
    write_text(data_root.stage2_jsonl, json.dumps(record_of("a", caption="by the old model")))
    adopt(data_root, ledger)
    merged(data_root, ledger)
    ledger.record_captions([caption_row("a", "by the new model", FROM_CAPTIONER)])

    adopt(data_root, ledger)

    assert captions(ledger) == {"a": ("by the new model", "captioner")}


def test_caption_blanked_in_the_record_is_kept(data_root, ledger):
    """A blank text is not a caption, so the existing one is kept."""
    photos(data_root, "a", captions=False)
    write_text(data_root.stage2_jsonl, json.dumps(record_of("a", caption="old")))
    adopt(data_root, ledger)

    write_text(data_root.stage2_jsonl, json.dumps(record_of("a", caption=" ")))
    adopt(data_root, ledger)

    assert captions(ledger) == {"a": ("old", "record")}


def test_image_without_any_caption_has_a_row_until_it_gets_one(data_root, ledger):
    """No image is lost silently after any combination of passes."""
    photos(data_root, "a", "b", captions=False)
    (data_root.approved / "b.png").write_bytes(b"no picture")
    complete(data_root, ledger)

    note_missing_captions(survey(data_root.approved, ledger), ledger)
    assert ("a", ASSET, "refused", "missing_caption") in problems(ledger)
    assert ("b", ASSET, "refused", "undecodable") in problems(ledger), "one that does not open keeps its reason"

    (data_root.approved / "a.txt").write_text("now")
    note_missing_captions(survey(data_root.approved, ledger), ledger)
    assert problems(ledger) == {("b", ASSET, "refused", "undecodable")}


def test_persistent_problem_keeps_its_first_time(data_root, ledger):
    """Each run checks again whether images open, have a caption, and are refused by name."""
    photos(data_root, "a", "b", captions=False)
    (data_root.approved / "b.png").write_bytes(b"no picture")
    (data_root.approved / "x.psd").write_bytes(b"")

    def look():
        complete(data_root, ledger)
        note_missing_captions(survey(data_root.approved, ledger), ledger)

    look()
    first = "2026-01-01T00:00:00+00:00"
    ledger._change("UPDATE problems SET at = ?", (first,))
    look()

    assert {(p.item, p.reason): p.at for p in ledger.problems()} == {
        ("a", "missing_caption"): first, ("b", "undecodable"): first, ("x.psd", "unsupported_type"): first,
    }  # fmt: skip


# ---- masks


def test_tokenizer_is_loaded_only_for_captions_without_a_mask(data_root, ledger):
    """The mask comes from the tokenizer alone, which any pass may load."""
    asked = []

    def masks():
        def tokenise(captions):
            asked.append(list(captions))
            return StubTokenizer().masks(captions)

        return tokenise

    photos(data_root, "a")
    embed(data_root, T5)
    complete_masks(ledger, masks)
    assert asked == [], "T5 recorded the mask it used"

    photos(data_root, "b")
    survey(data_root.approved, ledger)
    complete_masks(ledger, masks)
    assert asked == [["noise called b"]]
    assert ledger.captions()["b"].mask == ledger.captions()["a"].mask == "1" * 4 + "0" * 73


def test_captions_without_a_mask_are_read_in_parts(ledger):
    """Each of them once, although their masks are recorded meanwhile."""
    ids = [f"{number:05d}" for number in range(1300)]
    ledger.record_captions([caption_row(image_id, (f"photo {image_id}",), FROM_RECORD) for image_id in ids])
    parts = []

    def tokenise(captions):
        parts.append(len(captions))
        return StubTokenizer().masks(captions)

    complete_masks(ledger, lambda: tokenise)

    assert (sum(parts), max(parts)) == (1300, 512)
    assert list(ledger.unmasked(T5_TOKENS, 512)) == []


def test_order_of_passes_does_not_change_the_ledger(data_root, ledger, tmp_path):
    """Any order of passes gives the same result as `all`. Spec: docs/spec/stage2.md#pass-names"""
    photos(data_root, "a", "b")
    embed(data_root)
    by_all = ledger.sources(), ledger.captions()
    with Ledger(tmp_path / "other.sqlite") as other:
        complete(data_root, other)
        complete_masks(other, lambda: StubTokenizer().masks)
        assert (other.sources(), other.captions()) == by_all
