"""Why is this image, or why is it not, in the shards? And how does the data root stand?

Spec: docs/spec/conventions.md#missing-sources, docs/spec/conventions.md#no-silent-loss
"""

import json
import os
import shutil

import numpy as np
import pytest

from dagster_project.cli.explain import report_lines
from imagemill.domain.embedding_specs import DINOV3, VAE, embedding_specs
from imagemill.errors import MissingInput
from imagemill.inputs import listing
from imagemill.inputs.survey import survey
from imagemill.pipeline.stage2 import record_index
from imagemill.pipeline.stage2.image_metadata import note_missing_captions
from imagemill.store.ledger import Ledger
from imagemill.store.provenance import UNKNOWN
from tests.helpers.sessions import explain, locate
from tests.helpers.shard_sets import bury
from tests.helpers.stage2 import embed, pack, photos, picture, record_of, stage2, write_text

KINDS = {spec.kind for spec in embedding_specs()}


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


def test_withdrawn_sample_is_in_no_shard(root):
    with Ledger(root.ledger) as ledger:
        ledger.withdraw(["a"])
    pack(root, existing="withdraw")

    assert explain(root, "a")["shard"] is None
    assert explain(root, "b")["shard"]["offset"] == 0


def test_sample_with_a_tombstone_of_an_earlier_release_is_not_shown_as_if_it_counted(root):
    bury(root.shards / "bucket_1216x832", "a")

    assert explain(root, "a")["shard"]["counts no more"] == "withdrawn"
    assert "counts no more" not in explain(root, "b")["shard"]


def test_image_beyond_the_limit_of_its_set_is_reported(root):
    """Why is this image not in the shards? Nothing is wrong with it."""
    pack(root, limit=1)

    assert explain(root, "b")["shard"] is None
    assert "packed with a limit of 1 samples" in "\n".join(report_lines(explain(root, "b")))
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
    for name in ("twin.jpg", "twin.png", "movie.mov", "lonely.txt"):
        (root.approved / name).write_bytes(b"x")
    with Ledger(root.ledger) as ledger:
        survey(root.approved, ledger)

    wanted = {"twin": "id_collision", "movie": "unsupported_type", "lonely": "orphan_caption"}
    assert {reason for _, reason in reasons(explain(root, image_id))} == {wanted[image_id]}


@pytest.mark.parametrize(
    ("names", "source"),
    [
        (["twin.jpg", "twin.png"], "file approved/twin.jpg, approved/twin.png, not used id_collision"),
        (["movie.mov"], "file approved/movie.mov, not used unsupported_type"),
        (["lonely.txt"], "no image in approved/"),
    ],
)
def test_files_that_are_there_and_not_used_are_named(root, names, source):
    """`explain` never reports a file as absent that exists."""
    for name in names:
        (root.approved / name).write_bytes(b"x")
    with Ledger(root.ledger) as ledger:
        survey(root.approved, ledger)

    assert f"  source     {source}" in list(report_lines(explain(root, names[0].partition(".")[0])))


def test_image_that_another_file_joined_is_not_missing(root):
    """A collision after the image was embedded: both files exist, neither is used."""
    shutil.copy(root.approved / "a.png", root.approved / "a.jpg")
    with Ledger(root.ledger) as ledger:
        survey(root.approved, ledger)

    story = explain(root, "a")

    assert story["source"] == {"file": "approved/a.jpg, approved/a.png", "not used": "id_collision"}
    assert story["bucket"] == "1216x832"


def test_unknown_id_is_answered_with_similar_ones(root):
    photos(root, "photo0001", "photo0002", "quite-another")

    with pytest.raises(MissingInput) as caught:
        explain(root, "photo0003")
    assert caught.value.why == "similar names: photo0002, photo0001"

    with pytest.raises(MissingInput, match="similar names: quite-another"):
        explain(root, "Quite-another.png")


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


def test_problem_of_earlier_bytes_is_not_reported_any_more(root):
    photos(root, "c")
    whole = (root.approved / "c.png").read_bytes()
    (root.approved / "c.png").write_bytes(b"no picture")
    embed(root, DINOV3)
    assert explain(root, "c")["problems"]

    (root.approved / "c.png").write_bytes(whole)
    assert explain(root, "c")["problems"] == []


def test_caption_that_is_not_utf8_is_reported_while_it_is_there(root):
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


@pytest.mark.parametrize("image_id", ["missing", "../a", "a" * 300, "a\x00b", "", "derived/a"])
def test_id_that_no_one_has_heard_of_is_said(root, image_id):
    with pytest.raises(MissingInput, match="no image"):
        explain(root, image_id)


# ---- cost


def test_report_examines_the_entries_of_its_image_only(root, monkeypatch):
    """The cost of a report does not grow with the images of the folder, except for their names."""
    photos(root, "a.b", "ab")
    examined, look_up = [], listing._entry
    monkeypatch.setattr(listing, "_entry", lambda path, *given: examined.append(path) or look_up(path, *given))
    monkeypatch.setattr(record_index, "read_typed_spans", lambda *_: pytest.fail("every record was read"))

    explain(root, "a")

    assert sorted(examined) == ["a.png", "a.txt"]


def test_renamed_image_is_reported_under_its_new_name(root):
    """The report finds the earlier name by the bytes of the image."""
    (root.approved / "b.png").rename(root.approved / "c.png")
    (root.approved / "b.txt").rename(root.approved / "c.txt")
    embed(root)

    assert reasons(explain(root, "c")) == {("approved_images", "renamed")}
    assert explain(root, "b")["problems"] == []
    assert explain(root, "b")["source"]["missing"] is True


@pytest.mark.parametrize("spelling", ["caf\\u00e9", "café", "\\u0063af\\u00e9"])
def test_record_is_found_in_any_spelling_of_its_id(root, spelling):
    """JSON has several spellings of a character."""
    line = json.dumps(record_of("a") | {"image_id": "placeholder"}).replace("placeholder", spelling)
    write_text(root.stage2_jsonl, json.dumps(record_of("a")), line)

    assert explain(root, "café")["record"] == 2
    assert explain(root, "a")["record"] == 1


@pytest.mark.parametrize("name", [b"bad\xff.png", b"line\nbreak.png"])
def test_name_that_cannot_be_printed_is_found_as_it_is_listed(root, name):
    """Problems show such names with escapes, and the shown id is what a user can type."""
    (root.approved / os.fsdecode(name)).write_bytes(b"x")
    with Ledger(root.ledger) as ledger:
        (problem,) = survey(root.approved, ledger).problems

    story = explain(root, problem.item.removesuffix(".png"))

    assert reasons(story) == {("approved_images", "bad_id")}
    assert story["source"]["not used"] == "bad_id"
