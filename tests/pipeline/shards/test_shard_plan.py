"""Assignment of samples to tars by bucket, and publication of whole sets. Spec: docs/spec/shards.md#updating-a-set"""

import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import textwrap
from collections import Counter

import numpy as np
import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st

from imagemill.domain.buckets import BUCKETS
from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.errors import ImagemillError, ShardExists, WrongUsage
from imagemill.formats.jsonl import read_jsonl
from imagemill.formats.manifest import read_json, write_json
from imagemill.formats.tar import IndexEntry, read_sample, read_shard
from imagemill.fs.atomic import sweep_temporaries, temporaries
from imagemill.fs.fingerprints import fingerprint_file, posix_signature
from imagemill.pipeline.shards import shard_writer
from imagemill.pipeline.shards.conflicts import conflicts, refuse_conflicts
from imagemill.pipeline.shards.readiness import ReadySample
from imagemill.pipeline.shards.shard_plan import (
    BucketPlan,
    check_buckets,
    plan_shards,
)
from imagemill.pipeline.shards.shard_sets import ShardParameters, read_manifest, shard_name
from imagemill.pipeline.shards.shard_writer import write_bucket
from imagemill.pipeline.shards.update import SetChange, TarPlan
from imagemill.store.ledger import FileRow
from imagemill.store.provenance import UNKNOWN
from tests.helpers.product import PROJECT, snapshot
from tests.helpers.stage2 import embed, foreign, identity_of, picture, ready, record_of, stage2, write_records

SQUARE, TALL, WIDE = "1024x1024", "832x1216", "1216x832"


def sample(image_id, bucket=SQUARE, *, content="c", record=None):
    """Return a ready sample without any file."""
    files = tuple(FileRow(s.kind, image_id, posix_signature(1, 2, 3), "s", content, "m") for s in embedding_specs())
    return ReadySample(image_id, bucket, record or image_id.encode(), (1,), files)


def samples(count, bucket=SQUARE, prefix="i"):
    return [sample(f"{prefix}{n:05d}", bucket) for n in range(count)]


def plan(ready_samples, buckets=BUCKETS, output=None, existing="refuse", **parameters):
    return plan_shards(ready_samples, buckets, output, ShardParameters(**parameters), existing)


def plans(shard_set):
    """Return the ids by shard, of the buckets that have any."""
    return {p.bucket: [[s.image_id for s in shard] for shard in p.shards] for p in shard_set.plans if p.shards}


def order(shard_set):
    return [image_id for shards_ in plans(shard_set).values() for shard in shards_ for image_id in shard]


# ---- planning: the scenarios of the specification


def test_samples_are_grouped_by_bucket():
    planned = plan([sample("a", SQUARE), sample("b", TALL), sample("c", SQUARE)])

    assert plans(planned) == {SQUARE: [["a", "c"]], TALL: [["b"]]}


def test_bucket_filter_restricts_output():
    planned = plan([sample("a", SQUARE), sample("b", TALL)], [SQUARE])

    assert plans(planned) == {SQUARE: [["a"]]}
    assert [p.bucket for p in planned.plans] == [SQUARE]


def test_single_shard_for_small_bucket():
    (planned,) = plan(samples(800), [SQUARE], shard_size=1000).plans

    assert [len(shard) for shard in planned.shards] == [800]


def test_multiple_shards_for_large_bucket():
    (planned,) = plan(samples(2500), [SQUARE], shard_size=1000).plans

    assert [len(shard) for shard in planned.shards] == [1000, 1000, 500]
    assert planned.samples == 2500


def test_shard_files_use_zero_padded_naming():
    assert [shard_name(n) for n in (0, 1, 99)] == ["shard-000000.tar", "shard-000001.tar", "shard-000099.tar"]


def test_limit_restricts_total_output():
    mixed = [s for pair in zip(samples(250), samples(250, TALL, "t"), strict=True) for s in pair]

    planned = plan(mixed, limit=100)

    assert sum(p.samples for p in planned.plans) == 100
    assert sorted(order(planned)) == sorted(s.image_id for s in mixed[:100]), "the first in JSONL order"


def test_limit_applies_after_shuffle():
    shuffled = samples(500)
    random.Random(42).shuffle(shuffled)

    assert order(plan(samples(500), shuffle=True, seed=42, limit=100)) == [s.image_id for s in shuffled[:100]]


def test_shuffle_produces_different_order():
    assert order(plan(samples(50), shuffle=True)) != order(plan(samples(50)))
    assert sorted(order(plan(samples(50), shuffle=True))) == order(plan(samples(50)))


def test_seed_ensures_reproducibility():
    """The default seed is 1337."""
    assert order(plan(samples(50), shuffle=True, seed=42)) == order(plan(samples(50), shuffle=True, seed=42))
    assert order(plan(samples(50), shuffle=True, seed=42)) != order(plan(samples(50), shuffle=True, seed=43))
    assert order(plan(samples(50), shuffle=True)) == order(plan(samples(50), shuffle=True, seed=1337))


def test_buckets_are_chosen_before_the_shuffle():
    """The order is: JSONL order, chosen buckets, shuffle, limit, group. Spec: docs/spec/shards.md#order"""
    mixed = [s for pair in zip(samples(50), samples(50, TALL, "t"), strict=True) for s in pair]

    both, alone = plan(mixed, [SQUARE], shuffle=True, limit=10), plan(samples(50), [SQUARE], shuffle=True, limit=10)

    assert order(both) == order(alone)


def test_jsonl_order_is_kept_without_shuffle():
    assert order(plan([sample("b"), sample("a"), sample("c")])) == ["b", "a", "c"]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(BUCKETS)), unique_by=lambda pair: pair[0], max_size=30),
    st.sets(st.sampled_from(BUCKETS), min_size=1), st.integers(1, 7), st.none() | st.integers(1, 40), st.booleans(),
    st.integers(0, 3),
)  # fmt: skip
def test_every_chosen_sample_is_in_exactly_one_shard_of_its_bucket(given_, chosen, size, limit, shuffle, seed):
    ready_samples = [sample(f"{n:02d}", bucket) for n, bucket in given_]
    buckets = check_buckets(chosen)

    planned = plan(ready_samples, buckets, shard_size=size, limit=limit, shuffle=shuffle, seed=seed)

    assert [p.bucket for p in planned.plans] == buckets
    eligible = [s for s in ready_samples if s.bucket in chosen]
    placed = order(planned)
    assert len(placed) == len(set(placed)) == min(len(eligible), limit or len(eligible))
    assert set(placed) <= {s.image_id for s in eligible}
    for p in planned.plans:
        assert all(s.bucket == p.bucket for shard in p.shards for s in shard)
        assert all(len(shard) == size for shard in p.shards[:-1])
        assert all(1 <= len(shard) <= size for shard in p.shards)


def digest(ready_samples, **parameters):
    (planned,) = plan(ready_samples, [SQUARE], **parameters).plans
    return planned.digest


@pytest.mark.parametrize(
    "other",
    [
        [sample("a"), sample("b"), sample("c")], [sample("a")],
        [sample("a"), sample("b", content="d")], [sample("a"), sample("b", record=b"changed")], [],
    ],
    ids=["more", "fewer", "other file", "other record", "none"],
)  # fmt: skip
def test_digest_tells_every_change_of_the_samples(other):
    assert digest(other) != digest([sample("a"), sample("b")])


def test_digest_is_of_the_samples_whatever_their_order_and_cut():
    """Order and cut are parameters in the manifest, which updating a set keeps."""
    assert digest([sample("b"), sample("a")]) == digest([sample("a"), sample("b")])
    assert digest(samples(4), shard_size=2) == digest(samples(4), shard_size=4, shuffle=True)
    assert digest(samples(4), limit=4) == digest(samples(4))


@pytest.mark.parametrize("parameters", [{"shuffle": True, "seed": 5}, {"shard_size": 1}, {"limit": 2}])
def test_bringing_up_to_date_keeps_the_parameters_of_a_set(root, parameters):
    """A run republishes buckets with changed samples but does not undo a shuffle. Spec: docs/spec/shards.md#updating-a-set"""
    pack(root, **parameters)
    before = snapshot(root.shards)
    chosen = list(BUCKETS)

    again = plan_shards(ready(root, chosen).ready, chosen, root.shards, ShardParameters(), "update", requested={})
    for planned in again.plans:
        write_bucket(again, planned, root.derived, {})

    after = snapshot(root.shards)
    assert {name: after.get(name) for name in before} == before


def test_unknown_bucket_is_refused_with_the_seven():
    """No file outside the output directory is touched."""
    for name in ("512x512", "../etc", "", "1024x1024 "):
        with pytest.raises(WrongUsage, match="832x1216"):
            check_buckets([SQUARE, name])


def test_chosen_buckets_stand_once_in_the_seeds_order():
    assert check_buckets([WIDE, SQUARE, WIDE]) == [SQUARE, WIDE]
    assert check_buckets(BUCKETS) == list(BUCKETS)


def test_unknown_way_with_existing_shards_is_refused(tmp_path):
    with pytest.raises(WrongUsage, match="refuse, replace, update"):
        plan([], [SQUARE], tmp_path, existing="Replace")


# ---- writing

NO_MODELS = {}


def identities(root):
    found = {spec.kind: identity_of(root, spec.kind) for spec in embedding_specs()}
    return {kind: identity for kind, identity in found.items() if identity}


def pack(root, *buckets, existing="refuse", output=None, on_sample=lambda size: None, **parameters):
    """Plan, refuse and write, as the asset and its IO manager do; return the results by bucket."""
    chosen = check_buckets(buckets or BUCKETS)
    shard_set = plan(ready(root, chosen).ready, chosen, output or root.shards, existing, **parameters)
    sweep_temporaries(shard_set.output, folders=True)
    refuse_conflicts(shard_set)
    return {
        p.bucket: write_bucket(shard_set, p, root.derived, identities(root), on_sample=on_sample)
        for p in shard_set.plans
    }  # fmt: skip


def statuses(results):
    return {bucket: result.status for bucket, result in results.items() if result.status != "empty"}


def set_files(tars):
    """Return the names of all files of a set with this number of tars."""
    energon = [
        ".nv-meta/" + name
        for name in (".info.json", ".info.yaml", "dataset.yaml", "index.sqlite", "index.uuid", "split.yaml")
    ]
    names = [shard_name(n) for n in range(tars)]
    return ["index.jsonl", "manifest.json", *names, *(f"{name}.idx" for name in names), *energon]


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def mtimes(folder):
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in sorted(folder.rglob("*"))}


def folder_of(root, bucket=SQUARE):
    return root.shards / f"bucket_{bucket}"


@pytest.fixture
def root(data_root):
    """Three square images, one tall."""
    stage2(data_root, "a", "b", "c", size=(24, 24))
    stage2(data_root, "tall", size=(24, 36))
    return data_root


def members(tar):
    with tarfile.open(tar) as opened:
        return {info.name: opened.extractfile(info).read() for info in opened}


def test_bucket_directory_is_created(root):
    pack(root)

    assert sorted(p.name for p in root.shards.iterdir()) == ["bucket_1024x1024", "bucket_832x1216"]


def test_tar_entry_contains_all_five_files_in_order(root):
    """Members are adjacent, json first. Spec: docs/spec/shards.md#members"""
    pack(root, SQUARE)

    assert list(members(folder_of(root) / "shard-000000.tar")) == [
        f"{image_id}.{suffix}" for image_id in "abc" for suffix in ("json", "dinov3.npy", "vae.npy", "t5h.npy", "t5m.npy")
    ]  # fmt: skip


def test_json_metadata_includes_required_fields(root):
    pack(root, SQUARE)

    record = json.loads(members(folder_of(root) / "shard-000000.tar")["a.json"])
    assert record["image_id"] == "a"
    assert record["aspect_bucket"] == SQUARE
    assert record["caption"] == "noise called a"
    assert (record["image_path"], record["height"], record["width"]) == ("data/approved/a.png", 24, 24)


def test_t5_attention_mask_is_saved_as_npy(root):
    """Its dtype is uint8, its length 77."""
    pack(root, SQUARE)

    mask = np.load(io.BytesIO(members(folder_of(root) / "shard-000000.tar")["a.t5m.npy"]))
    assert (mask.dtype, mask.shape) == (np.uint8, (77,))
    assert mask.tolist() == [1] * 4 + [0] * 73


def test_npy_files_are_copied_as_is(root):
    """They are equal byte for byte, with any npy header."""
    with open(root.derived / "vae_latents" / "a.npy", "wb") as file:
        np.lib.format.write_array(file, np.full((16, 3, 3), 2, np.float16), version=(2, 0))
    pack(root, SQUARE)

    found = members(folder_of(root) / "shard-000000.tar")
    for image_id in "abc":
        for spec in embedding_specs():
            on_disk = (root.derived / spec.folder / f"{image_id}.npy").read_bytes()
            assert found[f"{image_id}.{spec.member}"] == on_disk


def test_index_names_every_sample_and_where_it_lies(root):
    pack(root, SQUARE, shard_size=2)

    lines = [line.value for line in read_jsonl(folder_of(root) / "index.jsonl")]
    assert [(line["image_id"], line["shard"]) for line in lines] == [
        ("a", "shard-000000.tar"), ("b", "shard-000000.tar"), ("c", "shard-000001.tar"),
    ]  # fmt: skip
    for line in lines:
        found = read_sample(folder_of(root) / line["shard"], IndexEntry(line["key"], line["offset"], line["size"]))
        assert json.loads(found["json"])["image_id"] == line["image_id"]


def test_manifest_tells_counts_checksums_parameters_and_provenance(root):
    shutil.rmtree(root.derived / "dinov3")
    foreign(root, *(line.value for line in read_jsonl(root.stage2_jsonl)))
    pack(root, SQUARE, shard_size=2, shuffle=True, seed=5)

    manifest = read_manifest(folder_of(root))
    assert manifest
    assert (manifest.bucket, manifest.samples) == (SQUARE, 3)
    assert manifest.members == ["json", "dinov3.npy", "vae.npy", "t5h.npy", "t5m.npy"]
    assert manifest.parameters == ShardParameters(2, True, 5, None)
    assert [shard.samples for shard in manifest.shards] == [2, 1]
    for shard in manifest.shards:
        tar = folder_of(root) / shard.name
        assert (shard.bytes, shard.checksum) == (tar.stat().st_size, fingerprint_file(tar))
    provenance = manifest.provenance["dinov3_npy"]
    assert (provenance.model, provenance.preview, provenance.unknown_maker) == ("preview", True, 3)
    assert provenance.key == identities(root)["dinov3_npy"].key


def test_results_count_what_was_written(root):
    sizes = []

    results = pack(root, shard_size=2, on_sample=sizes.append)

    square, tall = results[SQUARE], results[TALL]
    assert (square.samples, square.shards, tall.samples, tall.shards) == (3, 2, 1, 1)
    assert square.bytes == sum(tar.stat().st_size for tar in folder_of(root).glob("*.tar"))
    assert len(sizes) == 4
    assert {result.status for bucket, result in results.items() if bucket not in {SQUARE, TALL}} == {"empty"}


def test_equal_samples_give_equal_bytes_whatever_their_times(root, tmp_path):
    """This holds on any machine. Spec: docs/spec/shards.md#updating-a-set"""
    copy = DataRoot(tmp_path / "elsewhere" / "data")
    shutil.copytree(root.path, copy.path)
    for number, path in enumerate(copy.derived.rglob("*.npy")):
        os.utime(path, ns=(number * 10**9, number * 10**9))
        path.chmod(0o600)

    pack(root, shuffle=True)
    pack(copy, shuffle=True)

    assert contents(copy.shards) == contents(root.shards)


@pytest.mark.parametrize(
    "image_id", ["a.b", "v1.2.3", "100%", "%2E", "a b", "ü.日本", "ﬀ", "-", "a" * 200, "x.json", "._."]
)
def test_odd_id_is_read_back_by_webdataset_with_all_its_members(data_root, image_id):
    """A key ends at the first dot, so dots and percent signs are encoded. Spec: docs/spec/shards.md#updating-a-set"""
    foreign(data_root, record_of(image_id, size=(16, 16)), record_of("next", size=(16, 16)))
    pack(data_root, SQUARE)

    tars = [str(tar) for tar in folder_of(data_root).glob("*.tar")]
    first, second = webdataset.WebDataset(tars, shardshuffle=False, empty_check=False)
    assert {name for name in first if not name.startswith("__")} == {
        "json", "dinov3.npy", "vae.npy", "t5h.npy", "t5m.npy",
    }  # fmt: skip
    assert json.loads(first["json"])["image_id"] == image_id
    assert second["__key__"] == "next"
    (line, _) = (line.value for line in read_jsonl(folder_of(data_root) / "index.jsonl"))
    assert (line["image_id"], line["key"]) == (image_id, first["__key__"])


# ---- existing shards


def test_existing_shard_blocks_write(root):
    """It raises FileExistsError, and nothing is written in any bucket. Spec: docs/spec/shards.md#existing-shards"""
    pack(root, TALL)
    before = mtimes(root.shards)

    with pytest.raises(FileExistsError) as caught:
        pack(root)

    assert isinstance(caught.value, ShardExists)
    assert all(text in str(caught.value) for text in ("bucket_832x1216/shard-000000.tar", "--overwrite"))
    assert mtimes(root.shards) == before


def test_any_tar_in_the_folder_blocks_write(root):
    """This includes tars that another program wrote."""
    folder_of(root).mkdir(parents=True)
    (folder_of(root) / "train-0001.tar").touch()

    with pytest.raises(ShardExists):
        pack(root, SQUARE)


def test_conflicts_of_every_bucket_are_listed(root):
    pack(root)
    chosen = [SQUARE, TALL]

    found = conflicts(plan(ready(root, chosen).ready, chosen, root.shards))

    assert [text.partition("/")[0] for text in found] == ["bucket_1024x1024", "bucket_832x1216"]


@pytest.mark.parametrize("existing", ["refuse", "replace", "update"])
def test_dry_run_does_not_write_files(root, existing):
    """Planning and checking for conflicts touches nothing."""
    shard_set = plan(ready(root, BUCKETS).ready, BUCKETS, root.shards, existing)

    assert conflicts(shard_set) == []
    assert Counter({p.bucket: p.samples for p in shard_set.plans})[SQUARE] == 3
    assert not root.shards.exists()


def test_overwrite_flag_allows_replacement_and_no_stale_shard_survives(root):
    """The whole set is replaced at once."""
    pack(root, SQUARE, shard_size=1)
    (folder_of(root) / "train-0001.tar").touch()

    result = pack(root, SQUARE, existing="replace", shard_size=3)[SQUARE]

    assert result.status == "written"
    assert sorted(set_files(1)) == sorted(contents(folder_of(root)))
    assert not temporaries(root.shards)


def test_overwrite_leaves_other_buckets_alone(root):
    pack(root)
    before = mtimes(folder_of(root, TALL))

    pack(root, SQUARE, existing="replace")

    assert mtimes(folder_of(root, TALL)) == before


@pytest.mark.parametrize("existing", ["replace", "update"])
def test_chosen_bucket_without_samples_ends_with_none(root, existing):
    pack(root)
    (root.derived / "vae_latents" / "tall.npy").unlink()

    assert statuses(pack(root, existing=existing))[TALL] == "removed"
    assert not folder_of(root, TALL).exists()
    assert not temporaries(root.shards)


@pytest.mark.parametrize(
    "damage", ["", "{", "null", '{"format": "imagemill-shards/2"}', '{"format": "imagemill-shards/2", "shards": 3}']
)
def test_overwrite_replaces_a_set_whose_manifest_is_damaged(root, damage):
    pack(root, SQUARE)
    (folder_of(root) / "manifest.json").write_text(damage)

    assert read_manifest(folder_of(root)) is None
    assert pack(root, SQUARE, existing="replace")[SQUARE].status == "written"


NONSENSE = {
    "no samples in a tar": ("parameters", {"shard_size": 0}),
    "a text for a number": ("parameters", {"shard_size": "many"}),
    "a limit of nothing": ("parameters", {"limit": 0}),
    "a tar elsewhere": ("shards", [{"name": "../shard-000000.tar", "samples": 1, "bytes": 1, "checksum": ""}]),
    "no provenance": ("provenance", None),
    "unknown whether it was appended to": ("appended", "yes"),
}


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE)
@pytest.mark.parametrize("existing", ["update", "append", "repack"])
def test_manifest_that_says_nonsense_is_not_ours(root, nonsense, existing):
    """The set is refused with the remedy, and replaced on request; nothing crashes. Spec: docs/spec/shards.md#updating-a-set"""
    pack(root, SQUARE)
    path = folder_of(root) / "manifest.json"
    write_json(path, read_json(path) | dict([nonsense]))

    planned = plan_shards([], [SQUARE], root.shards, ShardParameters(), existing, requested={})

    assert "without a usable manifest" in conflicts(planned)[0]
    assert pack(root, SQUARE, existing="replace")[SQUARE].status == "written"


# ---- bringing sets up to date


def test_update_writes_what_is_new_and_leaves_what_is_the_same(root):
    assert statuses(pack(root, existing="update")) == {SQUARE: "written", TALL: "written"}
    before = mtimes(root.shards)

    again = pack(root, existing="update")

    assert statuses(again) == {SQUARE: "unchanged", TALL: "unchanged"}
    assert (again[SQUARE].samples, again[SQUARE].shards) == (3, 1)
    assert again[SQUARE].bytes == (folder_of(root) / "shard-000000.tar").stat().st_size
    assert mtimes(root.shards) == before


def test_update_republishes_exactly_the_buckets_whose_samples_changed(root):
    pack(root, existing="update")
    before = mtimes(folder_of(root))
    picture(root.approved / "tall.png", size=(24, 36))
    embed(root)

    assert statuses(pack(root, existing="update")) == {SQUARE: "unchanged", TALL: "written"}
    assert mtimes(folder_of(root)) == before


def test_update_follows_a_sample_that_changes_its_bucket(root):
    pack(root, existing="update")
    picture(root.approved / "a.png", size=(24, 36))
    embed(root)
    write_records(root)

    assert statuses(pack(root, existing="update")) == {SQUARE: "written", TALL: "written"}
    keys = [key for key, _ in read_shard(folder_of(root, TALL) / "shard-000000.tar")]
    assert keys == ["tall", "a"], "new samples follow those of the set"


def test_update_refuses_tars_without_our_manifest(root):
    """Only sets whose manifest is ours and matches the tars are updated."""
    pack(root, existing="update")
    (folder_of(root) / "manifest.json").unlink()
    before = mtimes(root.shards)

    with pytest.raises(ShardExists, match="without a manifest of imagemill"):
        pack(root, existing="update")
    assert mtimes(root.shards) == before


@pytest.mark.parametrize("damage", ["cut", "added", "removed"])
def test_update_refuses_tars_that_are_not_those_of_the_manifest(root, damage):
    pack(root, existing="update", shard_size=2)
    tar = folder_of(root) / "shard-000000.tar"
    match damage:
        case "cut":
            tar.write_bytes(tar.read_bytes()[:-512])
        case "added":
            (folder_of(root) / "shard-000009.tar").touch()
        case "removed":
            tar.unlink()

    with pytest.raises(ShardExists, match="not those of its manifest"):
        pack(root, existing="update", shard_size=2)


def test_update_writes_tars_that_someone_deleted(root):
    """A manifest alone is not a set."""
    pack(root, existing="update")
    (folder_of(root) / "shard-000000.tar").unlink()

    assert statuses(pack(root, existing="update"))[SQUARE] == "written"
    assert (folder_of(root) / "shard-000000.tar").is_file()


def test_update_writes_an_index_that_someone_deleted(root):
    pack(root, existing="update")
    (folder_of(root) / "index.jsonl").unlink()

    assert statuses(pack(root, existing="update"))[SQUARE] == "written"
    assert (folder_of(root) / "index.jsonl").is_file()


def test_update_does_not_take_anothers_manifest_for_ours(root):
    pack(root, existing="update")
    manifest = read_json(folder_of(root) / "manifest.json")
    write_json(folder_of(root) / "manifest.json", {**manifest, "format": "another-shards/2"})

    with pytest.raises(ShardExists):
        pack(root, existing="update")


# ---- what happens meanwhile


@pytest.mark.parametrize("change", ["touched", "replaced", "removed"])
def test_file_changed_between_plan_and_write_is_an_error_and_leaves_the_old_set(root, change):
    pack(root, SQUARE)
    before = contents(root.shards)
    shard_set = plan(ready(root, [SQUARE]).ready, [SQUARE], root.shards, "replace")
    path = root.derived / "vae_latents" / "b.npy"
    match change:
        case "touched":
            os.utime(path, ns=(1, 1))
        case "replaced":
            np.save(path, np.zeros((16, 3, 3), np.float16))
        case "removed":
            path.unlink()

    with pytest.raises(ImagemillError, match="changed while it was being packed") as caught:
        write_bucket(shard_set, shard_set.plans[0], root.derived, NO_MODELS)

    assert str(path) in str(caught.value)
    assert contents(root.shards) == before
    assert not temporaries(root.shards)


def test_interrupt_leaves_the_old_set(root):
    pack(root, SQUARE)
    before = contents(root.shards)

    def interrupt(size):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(root, SQUARE, existing="replace", on_sample=interrupt)
    assert contents(root.shards) == before
    assert not temporaries(root.shards)


KILLED = """
    import os, signal, sys
    from pathlib import Path
    sys.path.insert(0, {project!r})
    from imagemill.fs import swap
    from imagemill.domain.layout import DataRoot
    from imagemill.pipeline.shards import shard_plan, shard_sets, shard_writer
    from tests.helpers.stage2 import ready

    kill = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    {when}
    root = DataRoot(Path({root!r}))
    chosen = ["1024x1024"]
    parameters = shard_sets.ShardParameters(shard_size=1)
    shard_set = shard_plan.plan_shards(ready(root, chosen).ready, chosen, root.shards, parameters, "replace")
    shard_writer.write_bucket(shard_set, shard_set.plans[0], root.derived, {{}}, on_sample=on_sample)
"""
MOMENTS = {
    "amid the samples": "done = []; on_sample = lambda size: kill() if len(done) == 1 else done.append(1)",
    "before the exchange": "on_sample = lambda size: None; shard_writer.replace_folder = kill",
    "after the exchange": "on_sample = lambda size: None; swap.shutil.rmtree = kill",
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_writer_leaves_a_whole_set_and_the_next_run_sweeps(root, moment):
    """After kill -9 there is the complete old set or the complete new one. Spec: docs/spec/shards.md#replacement"""
    pack(root, existing="update", shard_size=3)
    old = contents(folder_of(root))

    script = textwrap.dedent(KILLED).format(project=str(PROJECT), root=str(root.path), when=MOMENTS[moment])
    done = subprocess.run([sys.executable, "-c", script], cwd=PROJECT, check=False, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr

    new = set_files(3)
    if moment == "after the exchange":
        assert sorted(contents(folder_of(root))) == sorted(new)
    else:
        assert contents(folder_of(root)) == old
    manifest = read_manifest(folder_of(root))
    assert manifest
    assert {s.name: s.checksum for s in manifest.shards} == {
        tar.name: fingerprint_file(tar) for tar in folder_of(root).glob("*.tar")
    }
    assert len(temporaries(root.shards)) == 1

    pack(root, SQUARE, existing="update", shard_size=1)
    assert sorted(contents(folder_of(root))) == sorted(new)
    assert temporaries(root.shards) == [], "also where nothing had to be written"


def test_set_of_a_living_writer_is_not_swept(root):
    living = shard_writer.temporary_path(root.shards)
    living.mkdir(parents=True)

    pack(root, SQUARE)

    assert living.is_dir()


def test_bucket_plan_counts_its_samples():
    tars = TarPlan((sample("a"), sample("b"))), TarPlan((sample("c"),), "shard-000003.tar")
    plan = BucketPlan(SQUARE, SetChange(tars), "", ShardParameters())
    assert (plan.samples, plan.total) == (2, 3)
    assert BucketPlan(SQUARE, SetChange(), "", ShardParameters()).total == 0


def test_unknown_makers_are_counted(data_root):
    """`unknown` may occur beside one known model, and is counted in the manifest.

    Spec: docs/spec/conventions.md#completion-and-identity
    """
    stage2(data_root, "a", "b", size=(16, 16))
    path = data_root.derived / "dinov3" / "a.npy"
    np.save(path, np.zeros(1024, np.float32))
    found = ready(data_root, [SQUARE])
    assert [s.files[0].model_key == UNKNOWN for s in found.ready] == [True, False]
    pack(data_root, SQUARE)

    manifest = read_manifest(folder_of(data_root))
    assert manifest
    assert {kind: entry.unknown_maker for kind, entry in manifest.provenance.items()} == {
        "dinov3_npy": 1, "vae_latents": 0, "t5_hidden": 0,
    }  # fmt: skip
