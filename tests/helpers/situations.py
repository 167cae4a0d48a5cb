"""One valid situation for each kind of file that the validator checks, and the call that validates it.

Tests of a rule change one of these. An unchanged situation has no findings, so each finding is caused by the change.
"""

import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import msgspec

from imagemill.domain.buckets import BUCKETS
from imagemill.domain.embedding_specs import VAE
from imagemill.domain.layout import DataRoot
from imagemill.formats.energon import META, TAR_INDEX_SUFFIX, write_energon
from imagemill.formats.jsonl import encode_line, read_jsonl, write_jsonl
from imagemill.formats.manifest import read_json, write_json
from imagemill.formats.npy import NpyStore
from imagemill.formats.published import POINTER, Pointer, decode_pointer, encode_pointer, set_key, tar_key
from imagemill.formats.tar import IndexEntry, read_shard, write_shard
from imagemill.fs.blobs import Blob
from imagemill.fs.fingerprints import fingerprint, fingerprint_file
from imagemill.fs.location import Location
from imagemill.pipeline.curation.latent_statistics import ALL, LatentMoments, statistics_path
from imagemill.pipeline.curation.near_duplicates import Group, Member, Summary, lines_path, summary_path
from imagemill.pipeline.push import local_sets, set_documents
from imagemill.pipeline.shards.shard_manifest import sealed
from imagemill.pipeline.shards.shard_plan import plan_shards
from imagemill.pipeline.shards.shard_sets import ShardParameters, bucket_folder
from imagemill.pipeline.shards.shard_writer import write_bucket
from imagemill.store.ledger import Ledger
from imagemill.validation import reports
from imagemill.validation.files import embedding_files
from imagemill.validation.findings import Report, collect
from imagemill.validation.published import published_objects
from imagemill.validation.shard_coverage import shard_coverage
from imagemill.validation.stage2 import stage2_records
from imagemill.validation.tables import validate_index_table, validate_ledger_tables, validate_stage2_table
from imagemill.validation.validator import Options, validate, validate_each, verify_stage2
from tests.helpers.sessions import recorded_contents
from tests.helpers.stage2 import foreign, picture, ready, record_of, stage2

SQUARE = "1024x1024"


def stage2_folder(tmp: Path) -> DataRoot:
    root = DataRoot(tmp / "data")
    foreign(root, record_of("a", size=(24, 24)), record_of("b", size=(24, 24)))
    root.approved.mkdir()
    for image_id in ("a", "b"):
        picture(root.approved / f"{image_id}.png", size=(24, 24))
    return root


def check_stage2(root: DataRoot) -> Report:
    return validate(root.stage2_jsonl, options=Options(derived=root.derived, data_root=root))


def check_contents(root: DataRoot) -> Report:
    return verify_stage2(root.stage2_jsonl, root.derived, recorded_contents(root))


def check_table(root: DataRoot) -> Report:
    return collect("table", "stage2", validate_stage2_table(root.stage2_jsonl))


def check_migrating(root: DataRoot) -> Report:
    return collect("records", "stage2", stage2_records(root.stage2_jsonl, migrating=True))


def check_files(root: DataRoot) -> Report:
    spec, store = VAE, NpyStore(root.derived / VAE.folder, VAE)
    with Ledger(root.ledger) as ledger:
        return collect(spec.folder, spec.kind, embedding_files(store, ledger))


PRESET_RECORD = {
    "images": ["images/a.jpg"],
    "objects": [
        {"desc": "bowl", "bbox_2d": [1, 2.5, 30, 31]},
        {"desc": "cup", "poly": [0, 0, 64, 0, 64, 32], "poly_points": 3},
    ],
    "width": 64,
    "height": 32,
}
RESCALE = {"max_pixels": 64 * 64, "image_factor": 32, "min_pixels": 1024}


def preset(tmp: Path) -> Path:
    """A derived preset beside its base; the folder of the derived one."""
    base, derived = tmp / "coco" / "small", tmp / "coco" / "small_max2"
    (base / "images").mkdir(parents=True)
    (derived / "images").mkdir(parents=True)
    for name in ("a.jpg", "b.jpg"):
        picture(base / "images" / name, size=(64, 32))
        os.link(base / "images" / name, derived / "images" / name)
    manifest = {"stage_stats": {"rescale": RESCALE}}
    write_json(base / "pipeline_manifest.json", manifest)
    write_json(derived / "pipeline_manifest.json", {**manifest, "base": {"preset": "small"}})
    write_jsonl(derived / "train.jsonl", [PRESET_RECORD, {**PRESET_RECORD, "images": ["images/b.jpg"]}])
    return derived


def check_preset(folder: Path) -> Report:
    found = [*validate_each(folder)]
    findings = [finding for report in found for finding in report.findings]
    return collect(str(folder), "preset", [*findings, sum(report.checked for report in found)])


GROUP = {
    "group_id": "QC-TEMP-20250118-0015956", "mission": "m", "label": "pass", "images": ["1.jpg", "2.JPEG"],
    "per_image": {"image_1": "一", "image_2": "无关图片"},
}  # fmt: skip


def stage_a(tmp: Path) -> Path:
    write_jsonl(tmp / "m_stage_a.jsonl", [GROUP, {**GROUP, "label": "fail"}])
    return tmp / "m_stage_a.jsonl"


def shards(tmp: Path) -> DataRoot:
    root = DataRoot(tmp / "data")
    foreign(root, record_of("a", size=(24, 24)), record_of("b", size=(24, 24)))
    found = ready(root, [SQUARE])
    plan = plan_shards(found.ready, [SQUARE], root.shards, ShardParameters(1), "replace")
    write_bucket(plan, plan.plans[0], root.derived, {})
    return root


def check_shards(root: DataRoot) -> Report:
    return validate(bucket_folder(root.shards, SQUARE), derived=root.derived)


def published(tmp: Path) -> DataRoot:
    """The set of `shards`, and what a push makes of it, as files below `store/`."""
    root = shards(tmp)
    (one,) = local_sets(root.shards).values()
    for name, data in set_documents(one):
        write_object(root, set_key(one.identifier, name), data)
    for shard in one.manifest.shards:
        for suffix in ("", TAR_INDEX_SUFFIX):
            write_object(root, tar_key(shard.checksum) + suffix, (one.folder / f"{shard.name}{suffix}").read_bytes())
    pointer = Pointer(root="root", writer="w", sets={SQUARE: one.identifier}, time=datetime(2026, 1, 1, tzinfo=UTC))
    write_object(root, POINTER, encode_pointer(pointer))
    return root


def write_object(root: DataRoot, key: str, data: bytes) -> None:
    path = root.path / "store" / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


class FolderStore:
    """A store whose objects are files."""

    location = Location("s3", "bucket")

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def list(self, prefix: str) -> Iterator[list[Blob]]:
        for path in sorted((self.folder / prefix).rglob("*")):
            if path.is_file():
                key = path.relative_to(self.folder).as_posix()
                yield [Blob(key, path.stat().st_size, '"tag"', datetime(2026, 1, 1, tzinfo=UTC))]


def check_published(root: DataRoot) -> Report:
    folder = root.path / "store"
    call = SimpleNamespace(
        store=FolderStore(folder),
        output=root.shards,
        pointer=lambda: (decode_pointer((folder / POINTER).read_bytes(), folder), '"tag"'),
    )
    return published_objects(call)


def two_buckets(tmp: Path) -> DataRoot:
    """Two records of one bucket and one of another, all packed."""
    root = DataRoot(tmp / "data")
    foreign(root, record_of("a", size=(24, 24)), record_of("b", size=(24, 24)), record_of("wide", size=(32, 24)))
    plan = plan_shards(ready(root, BUCKETS).ready, list(BUCKETS), root.shards, ShardParameters(), "replace")
    for bucket in plan.plans:
        write_bucket(plan, bucket, root.derived, {})
    return root


def check_coverage(root: DataRoot) -> Report:
    with Ledger(root.ledger) as ledger:
        found = shard_coverage(root.stage2_jsonl, root.derived, root.shards, ledger)
        return collect("shards", "records and shards", found)


def curated(tmp: Path) -> Path:
    """Statistics of one bucket and of all; one group of two."""
    ones = [1.0] * 16
    numbers = LatentMoments(
        buckets=[SQUARE], model="m", fingerprint="f", images=1, values_per_channel=9, left_out={}, mean=ones,
        m2=[4.0] * 16, std=[2 / 3] * 16, min=[0.0] * 16, max=[2.0] * 16, scaled=None,
    )  # fmt: skip
    for name in (SQUARE, ALL):
        write_report(statistics_path(tmp, name), numbers)
    write_groups(tmp, [Group("a", [Member("a", "a.png", 8, 8, 1.0), Member("b", "b.png", 8, 8, 0.99)])])
    return tmp


def write_report(path: Path, value: msgspec.Struct) -> None:
    path.parent.mkdir(exist_ok=True)
    write_json(path, value)


def write_groups(folder: Path, groups: list[Group]) -> None:
    lines = b"".join(encode_line(group) for group in groups)
    lines_path(folder).write_bytes(lines)
    summary = Summary(
        fingerprint="f", threshold=0.9, images=2, groups=1, members=2, left_out={}, lines=fingerprint(lines)
    )
    write_report(summary_path(folder), summary)


def check_reports(folder: Path) -> Report:
    return collect("reports", "reports", [*reports.latent_statistics(folder), *reports.near_duplicates(folder)])


def repack(root, change, *, honest=True, name="shard-000000.tar"):
    """Write one tar again with other members. `honest`: update its checksum and size in the manifest, and the indexes."""
    folder = bucket_folder(root.shards, SQUARE)
    path = folder / name
    samples = [(key, list(change(dict(members)).items())) for key, members in read_shard(path)]
    entries = write_shard(path, samples)
    if not honest:
        return
    manifest = read_json(folder / "manifest.json")
    for shard in manifest["shards"]:
        if shard["name"] == name:
            shard.update(checksum=fingerprint_file(path), bytes=path.stat().st_size)
    write_json(folder / "manifest.json", sealed(manifest))
    index = [line.value for line in read_jsonl(folder / "index.jsonl")]
    for line in index:
        line.update(next(({"offset": e.offset, "size": e.size} for e in entries if e.key == line["key"]), {}))
    write_jsonl(folder / "index.jsonl", index)
    tars = {shard["name"]: [] for shard in manifest["shards"]}
    for line in index:
        tars[line["shard"]].append(IndexEntry(line["key"], line["offset"], line["size"]))
    shutil.rmtree(folder / META)
    write_energon(folder, list(tars.items()), bucket=SQUARE)


def embedded(tmp: Path) -> DataRoot:
    root = DataRoot(tmp / "data")
    root.approved.mkdir(parents=True)
    stage2(root, "a", "b", size=(24, 24))
    return root


def check_ledger(root):
    with Ledger(root.ledger) as ledger:
        return collect("ledger", "ledger", validate_ledger_tables(ledger))


# kind → (function that makes it below an empty folder, function that validates it)
SITUATIONS = {
    "stage2": (stage2_folder, check_stage2),
    "records of the ledger": (embedded, check_contents),
    "migrating": (stage2_folder, check_migrating),
    "table": (stage2_folder, check_table),
    "files": (embedded, check_files),
    "ledger": (embedded, check_ledger),
    "index": (
        shards,
        lambda root: collect("index", "shards", validate_index_table(bucket_folder(root.shards, SQUARE))),
    ),
    "preset": (preset, check_preset),
    "stage-a": (stage_a, validate),
    "shards": (shards, check_shards),
    "published shards": (published, check_published),
    "records and shards": (two_buckets, check_coverage),
    "reports": (curated, check_reports),
}
