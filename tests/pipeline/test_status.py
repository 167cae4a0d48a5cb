"""The state of a whole data root: figures that add up, and every input that did not reach the output.

Spec: docs/spec/conventions.md#no-silent-loss, docs/spec/conventions.md#refused-and-failed
"""

import json
import os

import msgspec
import pytest

from imagemill.domain.embedding_specs import DINOV3, T5, VAE, embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.errors import MissingInput
from imagemill.fs.fingerprints import FileSignature, file_signature
from imagemill.inputs.survey import survey
from imagemill.pipeline.accounting import ImageCounts
from imagemill.pipeline.stage2.image_metadata import complete_facts
from imagemill.store.ledger import FROM_METADATA, Ledger, Problem
from tests.helpers.sessions import explain, read_status
from tests.helpers.stage2 import embed, pack, photos, record_of, stage2, write_records, write_text

KINDS = {spec.kind for spec in embedding_specs()}


@pytest.fixture
def root(data_root):
    """Two images all the way into shards."""
    stage2(data_root, "a", "b")
    pack(data_root)
    return data_root


def test_data_root_where_nothing_ran_says_what_to_run(data_root):
    for ask in (read_status, lambda root: explain(root, "a")):
        with pytest.raises(MissingInput, match="imagemill run"):
            ask(data_root)


def test_asking_writes_nothing(root):
    """explain and status read only. Spec: docs/spec/conventions.md#command-line"""

    def files():
        # The two beside the ledger are SQLite's own, for any reader.
        paths = (path for path in root.path.rglob("*") if path.is_file() and not path.name.endswith(("-wal", "-shm")))
        return {path: file_signature(path) for path in paths}

    before = files()

    explain(root, "a")
    read_status(root)

    assert files() == before


def test_status_of_a_complete_data_root(root):
    status = read_status(root)

    assert (status.images, status.records) == (ImageCounts(seen=2, up_to_date=2), 2)
    assert status.kinds == {kind: {"done": 2, "to do": 0, "refused": 0} for kind in KINDS}
    assert status.buckets == {"1216x832": (2, 1)}
    assert (status.problems, status.reasons()) == ([], {})


def test_status_counts_what_is_to_do_refused_and_missing(root):
    photos(root, "new")
    (root.approved / "torn.png").write_bytes(b"no picture")
    (root.approved / "twin.jpg").write_bytes(b"x")
    (root.approved / "twin.png").write_bytes(b"x")
    (root.approved / "b.png").unlink()
    (root.approved / "b.txt").unlink()
    (root.derived / "vae_latents" / "a.npy").unlink()
    with Ledger(root.ledger) as ledger:
        complete_facts(root.approved, survey(root.approved, ledger), ledger)

    status = read_status(root)

    assert status.images == ImageCounts(seen=5, waiting=2, refused=3), "a, new, torn and the twins"
    assert status.kinds[DINOV3.kind] == {"done": 1, "to do": 1, "refused": 1}
    assert status.kinds[VAE.kind] == {"done": 0, "to do": 2, "refused": 1}
    assert status.kinds[T5.kind] == {"done": 1, "to do": 1, "refused": 1}
    assert status.reasons() == {"undecodable": 1, "id_collision": 2, "source_missing": 1}
    assert status.records == 2, "a vanished source keeps its record"


def test_image_whose_caption_no_run_has_read_is_waiting(root):
    """It counted as refused, without a reason. One without a caption file is refused by the next run."""
    photos(root, "c")
    photos(root, "d", captions=False)

    assert read_status(root).images == ImageCounts(seen=4, up_to_date=2, waiting=1, refused=1)
    (root.approved / "d.txt").write_text("words")
    status = read_status(root)
    assert status.images == ImageCounts(seen=4, up_to_date=2, waiting=2)
    assert {kind: counts["to do"] for kind, counts in status.kinds.items()} == dict.fromkeys(KINDS, 2)


def test_image_whose_caption_has_changed_since_is_waiting(root):
    """It counted as up to date until a run had read the caption."""
    (root.approved / "a.txt").write_text("edited since")

    assert read_status(root).images == ImageCounts(seen=2, up_to_date=1, waiting=1)
    with Ledger(root.ledger) as ledger:
        survey(root.approved, ledger)
    assert read_status(root).kinds[T5.kind] == {"done": 1, "to do": 1, "refused": 0}


def test_blank_caption_file_beside_a_caption_of_a_metadata_file_waits_for_nothing(root):
    """No run uses it, and none records that it has read it."""
    with Ledger(root.ledger) as ledger:
        (row,) = ledger.captions(["a"]).values()
        ledger.record_captions([msgspec.structs.replace(row, stat=FileSignature("rows.csv"), origin=FROM_METADATA)])
    (root.approved / "a.txt").write_text("")

    assert read_status(root).images == ImageCounts(seen=2, up_to_date=2)


def test_input_that_several_assets_refuse_for_one_reason_counts_once(root):
    stat = file_signature(root.approved / "a.png")
    with Ledger(root.ledger) as ledger:
        ledger.record_problems(Problem("a", kind, "refused", "undecodable", "d", "r", stat) for kind in KINDS)

    assert read_status(root).reasons() == {"undecodable": 1}


def test_status_counts_records_that_can_be_read(root):
    write_text(root.stage2_jsonl, json.dumps(record_of("a")), "{", "", "null")

    assert read_status(root).records == 1


def test_set_with_a_damaged_manifest_is_not_counted(root):
    (root.shards / "bucket_1216x832" / "manifest.json").write_text("{")

    assert read_status(root).buckets == {}


def test_status_opens_no_image_and_no_npy(root, monkeypatch):
    """It counts 100,000 images in seconds."""
    opened, open_ = [], os.open

    def noting(path, *rest, **more):
        opened.append(str(path))
        return open_(path, *rest, **more)

    monkeypatch.setattr(os, "open", noting)
    monkeypatch.setattr("imagemill.formats.images.open_rgb", lambda path: pytest.fail("opened an image"))
    read_status(root)

    assert not [name for name in opened if name.endswith((".npy", ".png"))]


def test_root_that_holds_only_other_work_has_a_status(tmp_path):
    """Public data or Stage-A alone: no folder of approved images, and its failures are listed."""
    root = DataRoot(tmp_path / "data")
    with Ledger(root.ledger) as ledger:
        ledger.record_problems([Problem("m/pass/g", "stage_a_groups", "failed", "incomplete_group", "d", "r")])

    status = read_status(root)

    assert (status.images.seen, status.records) == (0, 0)
    assert status.reasons() == {"incomplete_group": 1}


def test_root_without_records_or_shards_has_a_status(tmp_path):
    root = DataRoot(tmp_path / "data")
    root.approved.mkdir(parents=True)
    photos(root, "a")
    embed(root, DINOV3)

    status = read_status(root)
    assert (status.images.seen, status.records, status.buckets) == (1, 0, {})
    assert explain(root, "a")["record"] is None
    write_records(root)
    assert explain(root, "a")["record"] is None, "no mask yet"


def test_failure_that_a_current_file_has_overcome_is_no_problem_any_more(root):
    """A caption edited, failed, and taken back: the file of the first one is current again."""
    failed = Problem("a", T5.kind, "failed", "model_error", "out of memory", "run imagemill again")
    with Ledger(root.ledger) as ledger:
        ledger.record_problems([failed])
    assert read_status(root).problems == []

    (root.derived / T5.folder / "a.npy").unlink()
    assert [(p.item, p.reason) for p in read_status(root).problems] == [("a", "model_error")]


# ---- the list of inputs that did not reach the output


def entries(root):
    return {(p.item, p.reason): p for p in read_status(root).problems}


def test_deleted_image_is_listed_with_both_remedies(root):
    (root.approved / "b.png").unlink()

    found = entries(root)

    assert list(found) == [("b", "source_missing")]
    assert found["b", "source_missing"].outcome == "gone"
    assert "b.png is no longer in approved/" in found["b", "source_missing"].detail
    assert "`imagemill withdraw b`" in found["b", "source_missing"].remedy


def test_renamed_image_is_listed_under_its_new_name_until_the_old_one_is_withdrawn(root):
    """Without it, two identical samples would stay in the shards."""
    (root.approved / "b.png").rename(root.approved / "c.png")
    (root.approved / "b.txt").rename(root.approved / "c.txt")
    embed(root)
    write_records(root)

    found = entries(root)

    assert list(found) == [("c", "renamed")]
    assert "the same bytes as b.png, which no longer exists" in found["c", "renamed"].detail
    assert "`imagemill withdraw b`" in found["c", "renamed"].remedy
    assert ("gone", "renamed") in {(p["outcome"], p["reason"]) for p in explain(root, "c")["problems"]}
    with Ledger(root.ledger) as ledger:
        ledger.withdraw(["b"])
    assert entries(root) == {}


def test_quarantined_lines_are_listed_by_file_and_number_until_they_are_removed(root):
    before = root.stage2_jsonl.read_text()
    write_text(root.stage2_jsonl, *before.splitlines(), '{"image_id": ', json.dumps({"image_id": "../x"}))
    root.stage2_jsonl.write_text(root.stage2_jsonl.read_text() + before.splitlines()[0] + "\n")
    write_records(root)

    found = entries(root)

    name = root.stage2_jsonl.name
    assert list(found) == [(f"{name}:1", "duplicate_id"), (f"{name}:3", "malformed_line"), (f"{name}:4", "bad_id")]
    kept = f".imagemill/quarantine/{name}.quarantine.jsonl"
    assert all(kept in problem.remedy for problem in found.values())
    assert read_status(root).complete is False
    (root.quarantine / f"{name}.quarantine.jsonl").unlink()
    assert entries(root) == {}


def test_caption_in_quarantine_is_not_a_missing_input(root):
    """Its text was replaced by a sidecar; the image has a sample."""
    write_text(root.approved / "a.txt", "another caption")
    embed(root)
    write_records(root)

    assert list(root.quarantine.iterdir())
    assert entries(root) == {}


def test_problem_of_several_assets_is_one_entry_with_the_first_time(root):
    stat = file_signature(root.approved / "a.png")
    times = ["2026-01-03T00:00:00+00:00", "2026-01-01T00:00:00+00:00", "2026-01-02T00:00:00+00:00"]
    (root.derived / VAE.folder / "a.npy").unlink()
    for spec in (DINOV3, T5):
        (root.derived / spec.folder / "a.npy").unlink()
    with Ledger(root.ledger) as ledger:
        ledger.record_problems(
            Problem("a", kind, "refused", "undecodable", f"of {kind}", "r", stat, at=at)
            for kind, at in zip(sorted(KINDS), times, strict=True)
        )

    (entry,) = read_status(root).problems

    assert (entry.assets, entry.since) == (sorted(KINDS), times[1])
    assert entry.detail == f"of {sorted(KINDS)[1]}"


def test_folder_or_dangling_link_named_like_an_image_is_not_an_image_seen(root):
    (root.approved / "folder.jpg").mkdir()
    (root.approved / "dangling.jpg").symlink_to("nowhere")
    with Ledger(root.ledger) as ledger:
        survey(root.approved, ledger)

    status = read_status(root)

    assert status.images.seen == 2
    assert status.reasons() == {"not_a_file": 1}


def test_problems_of_other_work_are_listed_but_do_not_concern_stage2(root):
    with Ledger(root.ledger) as ledger:
        ledger.record_problems([Problem("m/pass/g", "stage_a_groups", "failed", "incomplete_group", "d", "r")])

    status = read_status(root)

    assert [p.item for p in status.problems] == ["m/pass/g"]
    assert status.stage2_problems == []
    assert status.complete
