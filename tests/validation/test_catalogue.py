"""Every rule of the table, satisfied once and violated once. Spec: docs/spec/validation.md#checks"""

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest

from imagemill.domain.buckets import BUCKETS
from imagemill.domain.embedding_specs import DINOV3, VAE
from imagemill.domain.layout import DataRoot
from imagemill.errors import MissingInput
from imagemill.formats.jsonl import read_jsonl, write_jsonl
from imagemill.formats.manifest import read_json, write_json
from imagemill.pipeline.curation.latent_statistics import ALL, LatentMoments, statistics_path
from imagemill.pipeline.curation.near_duplicates import Group, Member, lines_path
from imagemill.pipeline.shards.shard_manifest import SEAL, sealed
from imagemill.pipeline.shards.shard_plan import plan_shards
from imagemill.pipeline.shards.shard_sets import TOMBSTONES, ShardParameters, bucket_folder
from imagemill.pipeline.shards.shard_writer import write_bucket
from imagemill.validation.catalogue import RULES
from imagemill.validation.validator import missing, validate
from tests.helpers.rot import rot
from tests.helpers.situations import (
    GROUP,
    PRESET_RECORD,
    RESCALE,
    SITUATIONS,
    SQUARE,
    repack,
    write_groups,
    write_report,
)
from tests.helpers.stage2 import foreign, picture, ready, record_of, write_text

WIDE = "1216x832"

# ---- how each rule is broken


def record(**changes):
    """Return the second Stage 2 record, changed."""

    def change(root):
        first, second = (line.value for line in read_jsonl(root.stage2_jsonl))
        write_jsonl(root.stage2_jsonl, [first, {**second, **changes}])

    return change


def raw_line(line: bytes):
    def change(where):
        path = where.stage2_jsonl if isinstance(where, DataRoot) else where
        write_text(path, *path.read_bytes().splitlines(), line)

    return change


def npy(array, order="C"):
    def change(root):
        np.save(root.derived / VAE.folder / "a.npy", np.asarray(array, order=order))

    return change


def bytes_of_npy(change_bytes):
    def change(root):
        path = root.derived / DINOV3.folder / "a.npy"
        path.write_bytes(change_bytes(path.read_bytes()))

    return change


def folder_for(name):
    """Put a folder in place of a file."""

    def change(root):
        path = root.path / name
        path.unlink()
        path.mkdir()

    return change


def small_again(folder):
    """Give the same image another size in another record."""
    other = {**PRESET_RECORD, "width": 32, "objects": []}
    write_jsonl(folder / "train.jsonl", [PRESET_RECORD, other])


def no_side(root):
    with closing(sqlite3.connect(root.ledger)) as db, db:
        db.execute("UPDATE sources SET width = 0")


def unlisted(root):
    """Add an npy file without a source."""
    np.save(root.derived / VAE.folder / "stranger.npy", np.zeros(3))


def in_preset(**changes):
    def change(folder):
        write_jsonl(folder / "train.jsonl", [{**PRESET_RECORD, **changes}])

    return change


def with_object(**item):
    return in_preset(objects=[{"desc": "bowl", "bbox_2d": [1, 2, 3, 4], **item}])


def second_image_first(folder):
    """Put norm records in another order than the pixel records."""
    norm = [{**PRESET_RECORD, "objects": []} | {"images": [f"images/{name}.jpg"]} for name in "ba"]
    pixels = [{**PRESET_RECORD, "objects": []} | {"images": [f"images/{name}.jpg"]} for name in "ab"]
    write_jsonl(folder / "train.jsonl", pixels)
    write_jsonl(folder / "train.norm.jsonl", norm)


def recorded_source(base):
    """Record a source of norm and coord that differs from the records of the preset itself, or of its base."""

    def change(folder):
        pixels = [{**PRESET_RECORD, "objects": []}]
        write_jsonl(folder / "train.jsonl", pixels)
        write_jsonl(folder / "train.norm.jsonl", pixels)
        write_jsonl(folder.parent / "small" / "train.jsonl", pixels)
        stats = {"rescale": RESCALE, "coord": {"splits": {"train": {"source": "sha256:0"}}}}
        derived = {"base": {"preset": base}} if base == "small" else {}
        write_json(folder / "pipeline_manifest.json", {"stage_stats": stats} | derived)

    return change


def preset_image(change_file):
    def change(folder):
        path = folder / "images" / "a.jpg"
        path.unlink()
        change_file(path)
        if path.is_file():  # the base's file too, so that only one rule is violated
            (folder.parent / "small" / "images" / "a.jpg").unlink()
            os.link(path, folder.parent / "small" / "images" / "a.jpg")

    return change


def images_by_link(folder):
    (folder / "images").rename(folder / "elsewhere")
    (folder / "images").symlink_to("elsewhere")


def group(**changes):
    def change(path):
        write_jsonl(path, [{**GROUP, **changes}])

    return change


def shard_file(name, change_bytes):
    def change(root):
        path = bucket_folder(root.shards, SQUARE) / name
        path.write_bytes(change_bytes(path.read_bytes()))

    return change


def set_manifest(change_manifest, *, seal=True):
    def change(root):
        path = bucket_folder(root.shards, SQUARE) / "manifest.json"
        manifest = read_json(path)
        change_manifest(manifest)
        write_json(path, sealed(manifest) if seal else manifest)

    return change


def records_of(**sizes):
    """Return the records of `two_buckets`, some with another size."""
    return [record_of(i, size=size) for i, size in {"a": (24, 24), "b": (24, 24), "wide": (32, 24), **sizes}.items()]


def moved(*, back):
    """Move image `a` to another bucket, with only one of the two folders exchanged before the run is killed.

    Args:
        back: the image is in the new bucket and still in the old one; else it is in neither.
    """

    def change(root):
        kept = bucket_folder(root.shards, SQUARE if back else WIDE)
        shutil.copytree(kept, root.path / "kept")
        foreign(root, *records_of(a=(32, 24)))
        plan = plan_shards(ready(root, BUCKETS).ready, list(BUCKETS), root.shards, ShardParameters(), "replace")
        for bucket in plan.plans:
            write_bucket(plan, bucket, root.derived, {})
        shutil.rmtree(kept)
        shutil.move(root.path / "kept", kept)

    return change


def repacked(change_members):
    return lambda root: repack(root, change_members)


def member(name, data):
    return repacked(lambda members: {**members, name: data})


def statistics(**changes):
    def change(folder):
        for name in (SQUARE, ALL):
            numbers = msgspec.json.decode(statistics_path(folder, name).read_bytes(), type=LatentMoments)
            write_report(statistics_path(folder, name), msgspec.structs.replace(numbers, **changes))

    return change


def groups(*ids, **changes):
    """Return groups with these ids, one string each."""

    def change(folder):
        found = [
            Group(names[0], [Member(i, f"{i}.png", 8, 8, changes.get("cosine", 0.9)) for i in names]) for names in ids
        ]
        write_groups(folder, found)

    return change


def cut(path):
    """Truncate a JPEG, whose header remains valid."""
    picture(path, size=(64, 32))
    path.write_bytes(path.read_bytes()[:-200])


DOUBLE = '{"images":["images/a.jpg"],"objects":[],"width":64,"height":32,"width":64}'

# rule → (kind of situation, change that violates this rule)
BREAKS = {
    "strict_json": ("stage2", raw_line(b"")),
    "duplicate_key": ("preset", lambda folder: write_text(folder / "train.jsonl", DOUBLE)),
    "read_error": ("stage2", folder_for("derived/dinov3/a.npy")),
    "id": ("stage2", record(image_id="a/b")),
    "path": ("stage2", record(image_path="")),
    "caption": ("stage2", record(caption=" ")),
    "mask": ("stage2", record(t5_attention_mask=[0] * 77)),
    "size": ("stage2", record(width=24.0)),
    "bucket": ("stage2", record(aspect_bucket="512x512")),
    "version": ("stage2", record(format_version=3)),
    "inline": ("stage2", record(dinov3_embedding=[0.5])),
    "duplicate_id": ("stage2", record(image_id="a")),
    "unusual_ratio": ("stage2", record(width=66, aspect_bucket="1344x704")),
    "not_nearest_bucket": ("stage2", record(aspect_bucket="704x1344")),
    "stage1": ("migrating", record(format_version=1)),
    "source_missing": ("stage2", lambda root: (root.approved / "a.png").unlink()),
    "table": ("table", record(height=-8)),
    "ledger_table": ("ledger", no_side),
    "index_table": ("index", shard_file("index.jsonl", lambda data: data.replace(b'"offset":0', b'"offset":1'))),
    "missing_file": ("stage2", lambda root: (root.derived / "dinov3" / "a.npy").unlink()),
    "wrong_dtype": ("stage2", npy(np.zeros((16, 3, 3), np.float32))),
    "wrong_shape": ("files", npy(np.zeros((16, 3, 4), np.float16))),
    "fortran_order": ("stage2", npy(np.zeros((16, 3, 3), np.float16), order="F")),
    "non_finite": ("files", npy(np.full((16, 3, 3), np.nan, np.float16))),
    "truncated": ("stage2", bytes_of_npy(lambda data: data[:-1])),
    "trailing_bytes": ("stage2", bytes_of_npy(lambda data: data + b"0")),
    "unreadable": ("stage2", bytes_of_npy(lambda data: b"no npy" * 100)),
    "unknown_image": ("files", unlisted),
    "images": ("preset", in_preset(images=[])),
    "image_path": ("preset", in_preset(images=["../a.jpg"])),
    "image_size": ("preset", in_preset(width=True)),
    "max_pixels": ("preset", in_preset(width=64 * 64, height=32)),
    "multiple_of": ("preset", in_preset(width=63)),
    "objects": ("preset", in_preset(objects=None)),
    "desc": ("preset", with_object(desc=" ")),
    "legacy_key": ("preset", with_object(bbox=[1, 2, 3, 4])),
    "geometry": ("preset", with_object(poly=[1, 2, 3, 4, 5, 6])),
    "bbox": ("preset", with_object(bbox_2d=[1, 2, 3])),
    "control_character": ("preset", with_object(desc="bowl\x07")),
    "special_token": ("stage2", record(caption="a <|box_start|> of things")),
    "out_of_range": ("preset", with_object(bbox_2d=[1, 2, 1e308, 4])),
    "inverted": ("preset", with_object(bbox_2d=[3, 2, 3, 4])),
    "poly": ("preset", in_preset(objects=[{"desc": "cup", "poly": [1, 2, 3, 4]}])),
    "space": ("preset", with_object(bbox_2d=["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>"])),
    "outside_image": ("preset", with_object(bbox_2d=[300, 300, 320, 320])),
    "beyond_edge": ("preset", with_object(bbox_2d=[1, 2, 65, 4])),
    "two_sizes": ("preset", small_again),
    "images_folder": ("preset", images_by_link),
    "preset_manifest": ("preset", lambda folder: write_text(folder / "pipeline_manifest.json", "{")),
    "no_limits": ("preset", lambda folder: write_json(folder / "pipeline_manifest.json", {})),
    "split_without_pixels": ("preset", lambda folder: write_jsonl(folder / "val.norm.jsonl", [])),
    "split_lines": ("preset", lambda folder: write_jsonl(folder / "train.coord.jsonl", [])),
    "split_order": ("preset", second_image_first),
    "stale_split": ("preset", recorded_source("small_max2")),
    "base_changed": ("preset", recorded_source("small")),
    "legacy_file": ("preset", lambda folder: shutil.copy(folder / "train.jsonl", folder / "train.raw.jsonl")),
    "image_missing": ("preset", preset_image(lambda path: None)),
    "not_a_file": ("preset", preset_image(lambda path: path.mkdir())),
    "undecodable": ("preset", preset_image(cut)),
    "size_differs": ("preset", preset_image(lambda path: picture(path, size=(32, 64)))),
    "not_shared": ("preset", lambda folder: copied(folder / "images" / "a.jpg")),
    "fields": ("stage-a", group(more=1)),
    "group": ("stage-a", group(group_id=" ")),
    "mission": ("stage-a", group(mission="other")),
    "label": ("stage-a", group(label="审核通过")),
    "group_images": ("stage-a", group(images=["1.jpg", "1.jpg"])),
    "coverage": ("stage-a", group(per_image={"image_1": "一"})),
    "summary": ("stage-a", group(per_image={"image_1": "一", "image_2": "a\u2028b"})),
    "duplicate_group": ("stage-a", lambda path: write_jsonl(path, [GROUP, GROUP])),
    "manifest": ("shards", shard_file("manifest.json", lambda data: b"{}")),
    "manifest_digest": ("shards", set_manifest(lambda manifest: manifest.update(appended=True), seal=False)),
    "no_manifest_digest": ("shards", set_manifest(lambda manifest: manifest.pop(SEAL), seal=False)),
    "index": ("shards", shard_file("index.jsonl", lambda data: data + b"null\n")),
    "live_samples": ("shards", set_manifest(lambda manifest: manifest.update(samples=3))),
    "tombstones": ("shards", lambda root: write_text(bucket_folder(root.shards, SQUARE) / TOMBSTONES, "null")),
    "index_order": ("shards", shard_file("index.jsonl", lambda data: b"".join(data.splitlines(True)[::-1]))),
    "set_bucket": ("shards", set_manifest(lambda manifest: manifest.update(bucket="832x1216"))),
    "statistics": ("shards", set_manifest(lambda manifest: manifest["statistics"].update(unmeasured=1))),
    "energon": ("shards", lambda root: (bucket_folder(root.shards, SQUARE) / "shard-000000.tar.idx").unlink()),
    "missing_shard": ("shards", lambda root: (bucket_folder(root.shards, SQUARE) / "shard-000001.tar").unlink()),
    "foreign_shard": ("shards", lambda root: (bucket_folder(root.shards, SQUARE) / "shard-000009.tar").touch()),
    "checksum": ("shards", shard_file("shard-000000.tar", lambda data: data[:-1] + b"1")),
    "members": ("shards", repacked(lambda members: {**members, "extra": b""})),
    "count": ("shards", set_manifest(lambda manifest: manifest["shards"][0].update(samples=2))),
    "record": ("shards", member("json", b"{}")),
    "npy": ("shards", member("vae.npy", b"no npy")),
    "indexed": ("shards", shard_file("index.jsonl", lambda data: data.replace(b'"width":24', b'"width":32'))),
    "live_twice": ("records and shards", moved(back=True)),
    "unpacked": ("records and shards", moved(back=False)),
    "other_bucket": ("records and shards", lambda root: foreign(root, *records_of(wide=(24, 24)))),
    "damaged": ("records of the ledger", lambda root: rot(root.derived / VAE.folder / "a.npy")),
    "verbatim": ("shards", npy(np.ones((16, 3, 3), np.float16))),
    "not_published": ("published shards", repacked(lambda members: {**members, "extra": b""})),
    "missing_object": ("published shards", lambda root: next((root.path / "store/tars").iterdir()).unlink()),
    "not_the_merge": ("reports", lambda folder: write_all(folder, images=2)),
    "impossible": ("reports", statistics(mean=[9.0] * 16)),
    "constant_channel": ("reports", statistics(std=[0.0] * 16)),
    "not_the_summarys": ("reports", lambda folder: write_text(lines_path(folder), "{}")),
    "bad_group": ("reports", groups("a")),
    "two_groups": ("reports", groups("ab", "bc")),
}  # fmt: skip


def copied(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


def write_all(folder: Path, **changes) -> None:
    numbers = msgspec.json.decode(statistics_path(folder, ALL).read_bytes(), type=LatentMoments)
    write_report(statistics_path(folder, ALL), msgspec.structs.replace(numbers, **changes))


def test_every_rule_has_a_case():
    """`missing_input` has a separate test, since there is nothing to change."""
    assert BREAKS.keys() | {"missing_input"} == RULES.keys()


@pytest.mark.parametrize("kind", SITUATIONS)
def test_good_situation_keeps_every_rule(tmp_path, kind):
    make, check = SITUATIONS[kind]

    report = check(make(tmp_path))

    assert report.findings == []
    assert report.checked > 0


@pytest.mark.parametrize("rule", BREAKS)
def test_broken_rule_is_found_with_its_remedy_and_severity(tmp_path, rule):
    kind, change = BREAKS[rule]
    make, check = SITUATIONS[kind]
    where = make(tmp_path)
    change(where)

    report = check(where)

    found = [one for one in report.findings if one.rule == rule]
    assert found, report.findings
    assert {one.severity for one in found} == {RULES[rule].severity}
    assert all(one.message and one.remedy and one.file for one in found)
    assert report.passed == all(RULES[name].severity == "warning" for name in report.rules)


def test_what_is_not_there_is_reported_as_a_report(tmp_path):
    (tmp_path / "here.jsonl").touch()
    assert validate(tmp_path / "here.jsonl").passed

    with pytest.raises(MissingInput) as caught:
        validate(tmp_path / "gone.jsonl")
    report = missing(tmp_path / "gone.jsonl", caught.value)
    assert (report.passed, report.rules) == (False, {"missing_input": 1})


@pytest.mark.parametrize("rule", RULES)
def test_row_says_what_it_demands_and_what_to_do(rule):
    row = RULES[rule]

    assert row.description
    assert row.remedy
    assert row.kinds
    assert row.severity in {"error", "warning"}
