"""A packing run that continues the last one plans and writes what a run that looks at every record does.

Spec: docs/spec/shards.md#readiness
"""

import contextlib
import json
import os
import random
from unittest import mock

import msgspec
import pytest

from imagemill.config import Config
from imagemill.domain.buckets import BUCKETS
from imagemill.domain.embedding_specs import DINOV3, T5, VAE, embedding_specs
from imagemill.errors import ImagemillError
from imagemill.formats.jsonl import SpanTable, read_jsonl
from imagemill.formats.tar import read_shard
from imagemill.pipeline.shards import readiness
from imagemill.pipeline.shards.known_samples import known_samples, record_packed, state_before
from imagemill.pipeline.shards.packing import PackRequest, plan_packing
from imagemill.pipeline.shards.readiness import find_ready, load_samples
from imagemill.pipeline.shards.shard_sets import INDEX, bucket_folder
from imagemill.pipeline.shards.shard_writer import sample_bytes, write_bucket
from imagemill.pipeline.shards.update import digest_of
from imagemill.pipeline.stage2.current_plans import jobs_in_parts
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.pipeline.stage2.record_index import Recorded, read_recorded
from imagemill.store.ledger import HISTORY, Ledger
from tests.helpers.product import photos as product_photos
from tests.helpers.product import product
from tests.helpers.stage2 import embed, photos, write_records

IMAGES = "abcdefgh"
CONFIG = Config(shard_size=2)
SQUARE, WIDE = "1024x1024", "1216x832"


def request(root, *buckets):
    return PackRequest(buckets or BUCKETS, root.shards, "update")


def plan(root, ledger, *buckets, inventory=None):
    return plan_packing(inventory or Inventory(root), CONFIG, ledger, request(root, *buckets))


def planned(root, ledger):
    """Return the listing of a command that has planned its embedding passes, which compares files with their rows."""
    inventory = Inventory(root)
    list(jobs_in_parts(embedding_specs(), inventory, ledger))
    return inventory


def write(root, ledger, shard_set):
    root.shards.mkdir(exist_ok=True)
    results = [write_bucket(shard_set, each, root.derived, {}) for each in shard_set.plans]
    record_packed(shard_set, ledger)
    return results


def pack(root, ledger, *buckets):
    found, shard_set = plan(root, ledger, *buckets)
    ledger.record_files(found.adopted, made=False)
    return found, write(root, ledger, shard_set)


def known(root, ledger, config=CONFIG):
    """Return the samples that the next packing run knows."""
    state = state_before(Inventory(root), config, root.shards, ledger)
    return set(known_samples(state, BUCKETS, ledger).samples) if state else set()


@pytest.fixture
def root(data_root):
    """A data root with eight packed images in two buckets."""
    photos(data_root, *"abcd", size=(32, 32))
    photos(data_root, *"efgh", size=(48, 32))
    embed(data_root)
    write_records(data_root)
    with Ledger(data_root.ledger) as ledger:
        pack(data_root, ledger)
        assert known(data_root, ledger) == set(IMAGES)
    return data_root


@pytest.fixture
def ledger(root):
    with Ledger(root.ledger) as ledger:
        yield ledger


def shown(found, shard_set):
    """Return what both ways of planning must agree in."""
    ready = [(s.image_id, s.bucket, digest_of(s), s.model_keys, sample_bytes(s)) for s in found.ready]
    counts = found.total_records, found.filtered, found.skipped_incomplete
    plans = [
        (p.bucket, p.digest, p.parameters, p.scratch, p.updates, p.is_from_scratch, p.change.added, p.change.changed,
         p.change.removed, [([s.image_id for s in tar.samples], tar.kept) for tar in p.change.tars])
        for p in shard_set.plans
    ]  # fmt: skip
    return ready, counts, sorted(found.problems, key=lambda p: p.item), found.adopted, plans


@contextlib.contextmanager
def known_noted():
    """Yield the set of known samples whose records are not looked at within the block."""
    noted, with_files = set(), readiness._with_files
    with mock.patch.object(
        readiness, "_with_files", lambda *given: (found := with_files(*given), noted.update(found))[0]
    ):
        yield noted


def assert_same_as_of_all_records(root, ledger):
    """Plan with and without known samples, compare, and write; return the known samples that were packed from their files."""
    before = ledger.packed(root.shards)
    with known_noted() as stayed:
        few = plan(root, ledger)
    assert shown(*plan(root, ledger, inventory=planned(root, ledger))) == shown(*few)
    ledger.record_packed(msgspec.structs.replace(before, parameters=""))
    with known_noted() as of_all_records:
        whole = plan(root, ledger)
    assert not of_all_records
    ledger.record_packed(before)
    assert shown(*few) == shown(*whole)
    loaded = {s.image_id for p in few[1].plans for s in p.packed} & stayed
    ledger.record_files(few[0].adopted, made=False)
    write(root, ledger, few[1])
    samples = load_samples(whole[0].ready, root.stage2_jsonl, root.derived, ledger)
    assert packed_samples(root) == {s.image_id: (s.bucket, s.record) for s in samples}
    return loaded


def packed_samples(root):
    found = {}
    for tar in root.shards.glob("*/*.tar"):
        for key, members in read_shard(tar):
            image_id = json.loads(members["json"])["image_id"]
            assert image_id not in found, key
            found[image_id] = tar.parent.name.removeprefix("bucket_"), members["json"]
    return found


def edit_caption(root, ledger):
    (root.approved / "b.txt").write_text("an edited caption")
    embed(root)
    write_records(root)


def add_images(root, ledger):
    photos(root, "bb", "i", size=(32, 32))
    embed(root)
    write_records(root)


def replace_by_another_size(root, ledger):
    photos(root, "c", size=(48, 32))
    embed(root)
    write_records(root)


def remove_a_file(root, ledger):
    (root.derived / VAE.folder / "d.npy").unlink()


def replace_a_file(root, ledger):
    path = root.derived / DINOV3.folder / "e.npy"
    path.write_bytes((root.derived / DINOV3.folder / "f.npy").read_bytes())


def withdraw(root, ledger):
    ledger.withdraw(["f"])


def edit_records(root, ledger, *, merged=True):
    lines = [msgspec.json.encode({**line.value, "score": 1}) for line in read_jsonl(root.stage2_jsonl)]
    root.stage2_jsonl.write_bytes(b"".join(line + b"\n" for line in lines))
    if merged:
        write_records(root)


def edit_records_without_a_merge(root, ledger):
    edit_records(root, ledger, merged=False)


def damage_an_index(root, ledger):
    path = bucket_folder(root.shards, SQUARE) / INDEX
    line = json.loads(path.read_bytes().splitlines()[0])
    path.write_bytes(path.read_bytes().replace(line["digest"].encode(), b"0" * 32))


def forget_a_file(root, ledger):
    ledger.forget_files(T5.kind)


def fail_an_image(root, ledger):
    ledger.forget_sources(["g"])


def read_pixels_differently(root, ledger):
    ledger.record_setting("pixels.color", "ignore")


def remove_a_set(root, ledger):
    for path in bucket_folder(root.shards, WIDE).rglob("*"):
        if path.is_file():
            path.unlink()


# A change, and the samples that are known afterwards.
CHANGES = {
    "nothing": (lambda root, ledger: None, IMAGES),
    "an edited caption": (edit_caption, "acdefgh"),
    "new images": (add_images, IMAGES),
    "another bucket": (replace_by_another_size, "abdefgh"),
    "a removed file": (remove_a_file, IMAGES),
    "a replaced file": (replace_a_file, IMAGES),
    "a withdrawal": (withdraw, IMAGES),
    "edited records": (edit_records, ""),
    "edited records, not merged": (edit_records_without_a_merge, ""),
    "a damaged index": (damage_an_index, "efgh"),
    "files without rows": (forget_a_file, ""),
    "an image that was never opened": (fail_an_image, "abcdefh"),
    "another setting": (read_pixels_differently, ""),
    "a removed set": (remove_a_set, "abcd"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_plan_after_a_change_is_that_of_all_records(root, ledger, name):
    change, left = CHANGES[name]
    change(root, ledger)

    assert known(root, ledger) == set(left)
    assert_same_as_of_all_records(root, ledger)
    assert_same_as_of_all_records(root, ledger)


def test_nothing_is_known_after_the_configuration_has_changed(root, ledger):
    """For example `max_upscale`, which refuses images."""
    changed = msgspec.structs.replace(CONFIG, encoders={VAE.kind: {"model": "preview", "max_upscale": 1.01}})

    assert known(root, ledger) == set(IMAGES)
    assert known(root, ledger, changed) == set()
    assert "max_upscale" not in state_before(Inventory(root), changed, root.shards, ledger).parameters, "no secrets"


def test_what_is_known_does_not_depend_on_the_history(root, ledger):
    """A command records its history after it has packed."""
    ledger.record_setting(HISTORY, "another")

    assert known(root, ledger) == set(IMAGES)


def test_run_after_the_first_one_continues_it(data_root):
    parameters = []
    for count in (3, 4):
        product_photos(data_root.approved, count)
        product(data_root, "run")
        with Ledger(data_root.ledger) as ledger:
            parameters.append(ledger.packed(data_root.shards).parameters)

    assert parameters[0] == parameters[1]


def test_several_changes_one_after_another(root, ledger):
    for change in (edit_caption, withdraw, add_images, replace_by_another_size, edit_records, remove_a_file):
        change(root, ledger)
        assert_same_as_of_all_records(root, ledger)
    ledger.restore(["f"])
    assert_same_as_of_all_records(root, ledger)
    assert packed_samples(root).keys() == set("abcefghi") | {"bb"}


@pytest.mark.parametrize("seed", range(4))
def test_changes_in_any_order(root, ledger, seed):
    """The next plan after each change is that of all records, whether or not the changes between were packed."""
    chance = random.Random(seed)
    for name in chance.sample(sorted(CHANGES.keys() - {"a removed set", "files without rows"}), 8):
        with contextlib.suppress(FileNotFoundError):  # of a set or file that an earlier change has removed
            CHANGES[name][0](root, ledger)
        if chance.random() < 0.7:
            assert_same_as_of_all_records(root, ledger)
    assert_same_as_of_all_records(root, ledger)


def test_known_samples_are_packed_from_their_files_if_the_set_is_packed_from_scratch(root, ledger):
    ledger.record_captions([])
    with known_noted() as stayed:
        _, shard_set = plan_packing(
            Inventory(root), CONFIG, ledger, PackRequest(BUCKETS, root.shards, "update", requested={"shard_size": 3})
        )
    assert {s.image_id for p in shard_set.plans for s in p.packed} == set(IMAGES) == stayed
    before = packed_samples(root)

    write(root, ledger, shard_set)

    assert packed_samples(root) == before
    assert len(list(root.shards.glob("*/*.tar"))) == 4
    assert_same_as_of_all_records(root, ledger)


def test_known_samples_of_a_damaged_tar_are_packed_from_their_files(root, ledger):
    before = packed_samples(root)
    (tar,) = bucket_folder(root.shards, SQUARE).glob("*000001.tar")
    data = bytearray(tar.read_bytes())
    data[600] ^= 1
    tar.write_bytes(data)
    (root.approved / "d.txt").write_text("edited")
    embed(root)
    write_records(root)

    assert_same_as_of_all_records(root, ledger)

    after = packed_samples(root)
    assert {i for i in IMAGES if before[i] != after[i]} == {"d"}


def test_record_that_changes_between_plan_and_packing_is_not_packed(root, ledger):
    found, _ = plan(root, ledger)
    edit_records(root, ledger, merged=False)

    with pytest.raises(ImagemillError, match="the record of a, or a file of it, was changed while shards were packed"):
        load_samples(found.ready, root.stage2_jsonl, root.derived, ledger)


def test_row_of_an_earlier_file_is_not_that_of_a_sample(root, ledger):
    """It stays if the process is killed that replaced the file. Rows are in order of their signatures."""
    found, _ = plan(root, ledger)
    (row,) = ledger.file_rows(T5.kind, ["a"])
    for stat in ("posix:0:0:0", "posix:9:9:9"):
        ledger.record_files([msgspec.structs.replace(row, stat=stat, content="xxh3:earlier")])

    (loaded,) = load_samples(found.ready[:1], root.stage2_jsonl, root.derived, ledger)

    assert (loaded.image_id, loaded.files[2]) == ("a", row)


def test_file_of_records_that_is_replaced_while_it_is_read_is_noticed(root, ledger, monkeypatch):
    """The positions of the lines are then those of the earlier file: here, a piece of the new one with two lines."""
    found, _ = plan(root, ledger)
    spans = read_recorded(root.stage2_jsonl).lines
    two = spans["a"]._replace(length=spans["a"].length + 1 + spans["b"].length)
    monkeypatch.setattr(
        readiness, "read_recorded", lambda jsonl: Recorded(lines=SpanTable({**spans, "a": two}.items()))
    )

    with pytest.raises(ImagemillError, match="the record of a, or a file of it, was changed while shards were packed"):
        load_samples(found.ready, root.stage2_jsonl, root.derived, ledger)


@pytest.mark.parametrize(("existing", "left"), [("update", "efgh"), ("withdraw", "adefgh"), ("repack", "efgh")])
def test_run_that_does_not_look_at_all_buckets_or_samples_leaves_the_changes_for_the_next(root, ledger, existing, left):
    """A withdrawal does not write the bucket, of which no sample was withdrawn."""
    edit_caption(root, ledger)
    replace_by_another_size(root, ledger)
    ledger.withdraw(["f"])
    _, shard_set = plan_packing(Inventory(root), CONFIG, ledger, PackRequest([SQUARE], root.shards, existing))

    write(root, ledger, shard_set)

    assert known(root, ledger) == set(left)
    assert_same_as_of_all_records(root, ledger)


def test_run_that_left_a_sample_out_leaves_the_change_for_the_next(root, ledger):
    """A damaged file without a copy: its bucket keeps the earlier sample."""
    edit_caption(root, ledger)
    path = root.derived / T5.folder / "b.npy"
    before, data = path.stat(), bytearray(path.read_bytes())
    data[-1] ^= 1
    with open(path, "r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    _, results = pack(root, ledger)

    assert [file for result in results for file in result.rotten.files] == [(T5.kind, "b")]
    assert known(root, ledger) == set("efgh")
    with known_noted() as stayed:
        plan(root, ledger)
    assert stayed == set("efgh")


def test_only_records_that_are_not_known_are_read(root, ledger, monkeypatch):
    edit_caption(root, ledger)
    read, verdict = [], readiness._verdict
    monkeypatch.setattr(
        readiness, "_verdict", lambda jsonl, number, *given: read.append(number) or verdict(jsonl, number, *given)
    )

    plan(root, ledger)

    assert read == [2]


LINES = {
    "nothing": lambda lines: [],
    "a record of its image path": lambda lines: [json.dumps({"image_path": "data/approved/a.png"})],
    "an earlier record again": lambda lines: [lines[0].replace("noise called a", "another caption")],
    "no object": lambda lines: ["{"],
}


@pytest.mark.parametrize("place", ["in the file", "in that of an interrupted writer"])
@pytest.mark.parametrize("name", LINES)
def test_records_of_any_file_are_packed_as_they_were_planned(root, ledger, name, place):
    """The index of the records may then contain other lines than the plan."""
    lines = root.stage2_jsonl.read_text().splitlines()
    text = "".join(f"{line}\n" for line in LINES[name](lines))
    if place == "in the file":
        with root.stage2_jsonl.open("a") as file:
            file.write(text)
    else:
        root.stage2_jsonl.with_name(f"{root.stage2_jsonl.name}.tmp").write_text(text)
    found = find_ready(root.stage2_jsonl, root.derived, ledger, buckets=BUCKETS)

    _, shard_set = plan_packing(Inventory(root), CONFIG, ledger, PackRequest(BUCKETS, root.shards, "replace"))
    write(root, ledger, shard_set)

    assert packed_samples(root) == {sample.image_id: (sample.bucket, sample.record) for sample in found.ready}
