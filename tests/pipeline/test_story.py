"""Why is this image, or why is it not, in the shards? And how does the data root stand? Source: CONTRACTS section 0, "Nothing
disappears silently", "A vanished source"."""

import json
import os

import numpy as np
import pytest

from dagster_project.cli.explain import story_lines
from imagemill.buckets import BUCKETS
from imagemill.embedding_specs import DINOV3, T5, VAE, embedding_specs
from imagemill.errors import MissingInput
from imagemill.files import file_signature
from imagemill.layout import DataRoot
from imagemill.pipeline.shards.readiness import ASSET, find_ready
from imagemill.pipeline.shards.shard_plan import plan_shards
from imagemill.pipeline.shards.shard_sets import ShardParameters
from imagemill.pipeline.shards.shard_writer import write_bucket
from imagemill.pipeline.stage2.facts import complete_facts, note_missing_captions
from imagemill.pipeline.stage2.scan import survey
from imagemill.pipeline.story import explain, open_ledger, read_status
from imagemill.places import locate
from imagemill.provenance import UNKNOWN
from imagemill.store.ledger import Ledger, Problem
from tests.helpers.stage2 import embed, photos, picture, record_of, stage2, write_records, write_text

KINDS = {spec.kind for spec in embedding_specs()}


def pack(root, output=None, existing="replace", **parameters):
    """Shards as the asset makes them, problems noted."""
    with Ledger(root.ledger) as ledger:
        found = find_ready(root.stage2_jsonl, root.derived, ledger, buckets=BUCKETS)
        ledger.record_files(found.adopted)
        ledger.replace_problems(ASSET, found.problems)
        if output:
            ledger.record_setting("place.shards", str(output))
        withdrawn = ledger.ids("withdrawn")
    shard_set = plan_shards(
        found.ready, BUCKETS, output or root.shards, ShardParameters(**parameters), existing, withdrawn=withdrawn
    )
    for plan in shard_set.plans:
        write_bucket(shard_set, plan, root.derived, {})


@pytest.fixture
def root(data_root):
    """Two images all the way into shards."""
    stage2(data_root, "a", "b")
    pack(data_root)
    return data_root


def reasons(story):
    return {(problem["asset"], problem["reason"]) for problem in story["problems"]}


# ---- one image


def test_image_that_went_all_the_way_has_a_place_at_every_station(root):
    story = explain(root, "a")

    assert story["source"]["file"] == "approved/a.png"
    assert (story["source"]["height"], story["source"]["width"]) == (24, 32)
    assert story["source"]["bytes"] == (root.approved / "a.png").stat().st_size
    assert story["bucket"] == "1216x832"
    assert story["caption"] == {"text": "noise called a", "origin": "sidecar", "truncated": False}
    assert story["embeddings"].keys() == KINDS
    assert story["embeddings"]["dinov3_npy"]["file"] == "derived/dinov3/a.npy"
    assert story["embeddings"]["dinov3_npy"]["made from"] == story["source"]["fingerprint"]
    assert story["record"] == 1
    assert story["shard"]["tar"] == "bucket_1216x832/shard-000000.tar"
    assert (story["shard"]["offset"], story["problems"]) == (0, [])
    assert explain(root, "b")["shard"]["offset"] == story["shard"]["size"]


def test_sample_that_counts_no_more_is_not_shown_as_if_it_did(root):
    with Ledger(root.ledger) as ledger:
        ledger.withdraw(["a"])
    pack(root, existing="withdraw")

    assert explain(root, "a")["shard"]["counts no more"] == "withdrawn"
    assert "counts no more" not in explain(root, "b")["shard"]


def test_changed_sample_is_shown_where_its_new_bytes_are(root):
    write_text(root.approved / "a.txt", "another caption")
    embed(root)
    write_records(root)
    pack(root, existing="append")

    shard = explain(root, "a")["shard"]

    assert (shard["tar"], "counts no more" in shard) == ("bucket_1216x832/shard-000001.tar", False)


def test_image_beyond_the_limit_of_its_set_says_so(root):
    """Why is this image not in the shards? Nothing is wrong with it."""
    pack(root, limit=1)

    assert explain(root, "b")["shard"] is None
    assert "packed with a limit of 1 samples" in "\n".join(story_lines(explain(root, "b")))
    assert "limit" not in explain(root, "a")
    (root.derived / "dinov3" / "b.npy").unlink()
    assert "limit" not in explain(root, "b"), "the missing file is the reason"


def test_image_that_does_not_open_says_which_asset_refused_it_and_what_to_do(root):
    (root.approved / "torn.png").write_bytes(b"no picture")
    embed(root)

    story = explain(root, "torn")

    assert ("dinov3_npy", "undecodable") in reasons(story)
    assert all(problem["do"] and problem["detail"] for problem in story["problems"])
    assert (story["record"], story["shard"]) == (None, None)
    assert set(story["embeddings"].values()) == {None}


def test_image_without_a_caption_says_so_until_it_has_one(root):
    photos(root, "c", captions=False)
    embed(root)
    with Ledger(root.ledger) as ledger:
        note_missing_captions(survey(root.approved, ledger), ledger)
    assert reasons(explain(root, "c")) == {("stage2_jsonl", "missing_caption")}

    (root.approved / "c.txt").write_text("now")
    with Ledger(root.ledger) as ledger:
        survey(root.approved, ledger)
    assert explain(root, "c")["problems"] == []


@pytest.mark.parametrize("image_id", ["twin", "movie", "lonely"])
def test_name_that_was_refused_is_found_by_its_stem(root, image_id):
    """`explain` answers for what has no id of its own too."""
    for name in ("twin.jpg", "twin.png", "movie.gif", "lonely.txt"):
        (root.approved / name).write_bytes(b"x")
    with Ledger(root.ledger) as ledger:
        survey(root.approved, ledger)

    wanted = {"twin": "id_collision", "movie": "unsupported_type", "lonely": "orphan_caption"}
    assert {reason for _, reason in reasons(explain(root, image_id))} == {wanted[image_id]}


def test_problems_of_an_id_with_a_dot_are_not_those_of_its_stem(root):
    """`a` is another image than `a.b`."""
    photos(root, "a.b")
    (root.approved / "a.b.png").write_bytes(b"no picture")
    embed(root)

    assert explain(root, "a")["problems"] == []
    assert len(explain(root, "a.b")["problems"]) > 0


def test_stale_sample_says_that_it_was_not_packed(root):
    picture(root.approved / "a.png")
    embed(root, VAE)
    pack(root)

    story = explain(root, "a")
    assert reasons(story) == {("bucket_shards", "stale")}
    assert story["shard"] is None


def test_problem_of_earlier_bytes_is_not_told_any_more(root):
    photos(root, "c")
    whole = (root.approved / "c.png").read_bytes()
    (root.approved / "c.png").write_bytes(b"no picture")
    embed(root, DINOV3)
    assert explain(root, "c")["problems"]

    (root.approved / "c.png").write_bytes(whole)
    assert explain(root, "c")["problems"] == []


def test_caption_that_is_not_utf8_is_told_while_it_is_there(root):
    (root.approved / "a.txt").write_bytes(b"caf\xe9")
    with Ledger(root.ledger) as ledger:
        survey(root.approved, ledger)
    assert reasons(explain(root, "a")) == {("captions", "bad_caption")}

    (root.approved / "a.txt").write_text("café")
    assert explain(root, "a")["problems"] == []


def test_vanished_image_keeps_its_story(root):
    (root.approved / "a.png").unlink()

    story = explain(root, "a")

    assert story["source"]["missing"] is True
    assert story["shard"]


def test_adopted_and_unrecorded_files_say_who_made_them(root):
    np.save(root.derived / "dinov3" / "a.npy", np.zeros(1024, np.float32))
    assert explain(root, "a")["embeddings"]["dinov3_npy"]["maker"] == "not in the ledger"

    embed(root, DINOV3)
    assert explain(root, "a")["embeddings"]["dinov3_npy"]["maker"] == UNKNOWN


def test_record_that_counts_is_the_last_one(root):
    lines = root.stage2_jsonl.read_bytes().splitlines()
    write_text(root.stage2_jsonl, *lines, "{", json.dumps(record_of("a")))

    assert explain(root, "a")["record"] == 4


def test_shards_are_looked_for_where_they_were_put(root, tmp_path):
    pack(root, tmp_path / "elsewhere")
    (root.shards / "bucket_1216x832" / "index.jsonl").unlink()

    assert explain(locate(root.path), "a")["shard"]


@pytest.mark.parametrize("line", ["{", "null", "{}", '{"image_id": "a"}', '{"image_id": "a", "shard": 3}'])
def test_damaged_index_stops_no_story(root, line):
    write_text(root.shards / "bucket_1216x832" / "index.jsonl", line)

    assert explain(root, "a")["record"] == 1


@pytest.mark.parametrize("image_id", ["nobody", "../a", "a" * 300, "a\x00b", "", "derived/a"])
def test_id_that_nobody_has_heard_of_is_said(root, image_id):
    with pytest.raises(MissingInput, match="no image"):
        explain(root, image_id)


def test_mistyped_id_is_answered_with_similar_ones(root):
    with pytest.raises(MissingInput, match="similar ids: a"):
        explain(root, "a.png")


def test_data_root_where_nothing_ran_says_what_to_run(data_root):
    for ask in (read_status, lambda root: explain(root, "a"), open_ledger):
        with pytest.raises(MissingInput, match="imagemill run"):
            ask(data_root)


def test_asking_writes_nothing(root):
    """explain and status read only. Source: CONTRACTS section 6."""

    def files():
        # The two beside the ledger are SQLite's own, for any reader.
        paths = (path for path in root.path.rglob("*") if path.is_file() and not path.name.endswith(("-wal", "-shm")))
        return {path: file_signature(path) for path in paths}

    before = files()

    explain(root, "a")
    read_status(root)

    assert files() == before


# ---- the data root


def test_status_of_a_complete_data_root(root):
    status = read_status(root)

    assert (status.images, status.source_missing, status.records) == (2, 0, 2)
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

    assert status.images == 5, "a, new, torn and the twins"
    assert status.source_missing == 1
    assert status.kinds[DINOV3.kind] == {"done": 1, "to do": 1, "refused": 1}
    assert status.kinds[VAE.kind] == {"done": 0, "to do": 2, "refused": 1}
    assert status.kinds[T5.kind] == {"done": 1, "to do": 1, "refused": 1}
    assert status.reasons() == {"undecodable": 1, "id_collision": 2}
    assert status.records == 2, "a vanished source keeps its record"


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
    monkeypatch.setattr("imagemill.pixels.open_rgb", lambda path: pytest.fail("opened an image"))
    read_status(root)

    assert not [name for name in opened if name.endswith((".npy", ".png"))]


def test_root_that_holds_only_other_work_has_a_status(tmp_path):
    """Public data or Stage-A alone: no folder of approved images, and what failed there is told."""
    root = DataRoot(tmp_path / "data")
    with Ledger(root.ledger) as ledger:
        ledger.record_problems([Problem("m/pass/g", "stage_a_groups", "failed", "incomplete_group", "d", "r")])

    status = read_status(root)

    assert (status.images, status.records) == (0, 0)
    assert status.reasons() == {"incomplete_group": 1}


def test_root_without_records_or_shards_has_a_status(tmp_path):
    root = DataRoot(tmp_path / "data")
    root.approved.mkdir(parents=True)
    photos(root, "a")
    embed(root, DINOV3)

    status = read_status(root)
    assert (status.images, status.records, status.buckets) == (1, 0, {})
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
