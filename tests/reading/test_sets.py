"""Opening of sets, and access to samples by id.

Spec: docs/spec/shards.md#updating-a-set, docs/spec/shards.md#open-readers
"""

import re
import shutil

import numpy as np
import pytest

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.errors import ImagemillError, MissingInput, WrongUsage
from imagemill.formats.jsonl import read_jsonl
from imagemill.formats.manifest import read_json
from imagemill.reading import ShardDataset, ShardSet
from tests.helpers.shard_sets import bury, change_manifest, publish, shard_set
from tests.helpers.stage2 import foreign, record_of
from tests.reading.conftest import SIZES

SQUARE = "bucket_1024x1024"


def test_every_sample_is_found_under_its_true_id(root):
    opened = ShardSet.open(root.shards)

    assert sorted(opened) == sorted(SIZES)
    assert len(opened) == len(SIZES)
    assert "high.and.odd%" in opened
    assert "high%2Eand%2Eodd%25" not in opened


@pytest.mark.parametrize("image_id", ["large", "high.and.odd%", "small3"])
def test_sample_by_id_holds_what_the_files_and_the_record_hold(root, image_id):
    record = next(line.value for line in read_jsonl(root.stage2_jsonl) if line.value["image_id"] == image_id)
    files = {
        s.member.removesuffix(".npy"): np.load(root.derived / s.folder / f"{image_id}.npy") for s in embedding_specs()
    }

    sample = ShardSet.open(root.shards)[image_id]

    assert sample["image_id"] == image_id
    assert sample["bucket"] == record["aspect_bucket"]
    assert sample["caption"] == record["caption"]
    assert sample["json"] == record
    for name, array in files.items():
        np.testing.assert_array_equal(sample[name], array, strict=True)
    np.testing.assert_array_equal(sample["t5m"], np.array(record["t5_attention_mask"], np.uint8), strict=True)


def test_arrays_of_a_sample_may_be_changed(root):
    sample = ShardSet.open(root.shards)["own"]

    sample["vae"] += 1  # raises if the array is a view of the bytes that were read


def test_one_bucket_folder_is_opened_alone(root):
    opened = ShardSet.open(root.shards / SQUARE)

    assert sorted(opened) == ["high.and.odd%", "large", "own", "tiny"]
    assert [bucket.name for bucket in opened.buckets] == ["1024x1024"]


def test_unknown_id_is_a_key_error(root):
    with pytest.raises(KeyError, match="missing"):
        ShardSet.open(root.shards)["missing"]


def test_samples_under_a_tombstone_do_not_count(own_root):
    bury(own_root.shards / SQUARE, "b", "e")

    opened = ShardSet.open(own_root.shards)

    assert sorted(opened) == ["a", "c", "d"]
    delivered = [i for batch in ShardDataset(own_root.shards, 2) for i in batch["image_id"]]
    assert sorted(delivered) == ["a", "c", "d"]


def test_bucket_whose_samples_are_all_buried_gives_no_batch(tmp_path):
    root = shard_set(tmp_path / "data", {"a": (64, 64), "wide": (32, 24)})
    bury(root.shards / SQUARE, "a")

    assert [batch["image_id"] for batch in ShardDataset(root.shards, 2, tail="pad")] == [["wide", "wide"]]


# ---- errors


@pytest.mark.parametrize("name", ["nothing_here", "bucket_1024x1024"])
def test_folder_that_is_not_there_is_reported(tmp_path, name):
    with pytest.raises(MissingInput, match=r"(?s)no shards in .*do: .*imagemill run"):
        ShardSet.open(tmp_path / name)


def test_folder_without_buckets_is_reported(tmp_path):
    with pytest.raises(MissingInput, match="no shards in"):
        ShardSet.open(tmp_path)


def test_missing_manifest_is_reported(own_root):
    (own_root.shards / SQUARE / "manifest.json").unlink()

    with pytest.raises(MissingInput, match=r"(?s)bucket_1024x1024 has no manifest.json.*webdataset.WebDataset"):
        ShardSet.open(own_root.shards)


def test_bucket_folder_without_tars_is_passed_over(own_root):
    """Its last sample was withdrawn and only foreign files remain, so it is not a set."""
    empty = own_root.shards / "bucket_1216x832"
    empty.mkdir()
    (empty / "notes.txt").write_text("mine")

    assert sorted(ShardSet.open(own_root.shards)) == list("abcde")
    assert ShardDataset(own_root.shards, 2).samples == 5
    with pytest.raises(MissingInput, match="no shards in"):
        ShardSet.open(empty)


@pytest.mark.parametrize("changes", [{"format": "other/1"}, {"bucket": "1x1"}, {"shards": None}])
def test_manifest_of_another_format_is_reported(own_root, changes):
    change_manifest(own_root.shards / SQUARE, **changes)

    with pytest.raises(ImagemillError, match=r"manifest.json was not written by imagemill"):
        ShardSet.open(own_root.shards)


@pytest.mark.parametrize("name", ["index.jsonl", "tombstones.jsonl"])
def test_damaged_document_is_reported(own_root, name):
    (own_root.shards / SQUARE / name).write_text("not json\n")

    with pytest.raises(ImagemillError, match=rf"(?s){name} cannot be read.*where:.*do:"):
        ShardSet.open(own_root.shards)


def test_missing_index_is_reported(own_root):
    (own_root.shards / SQUARE / "index.jsonl").unlink()

    with pytest.raises(ImagemillError, match=r"index.jsonl cannot be read"):
        ShardSet.open(own_root.shards)


def _cut_index(folder):
    lines = (folder / "index.jsonl").read_text().splitlines(keepends=True)
    (folder / "index.jsonl").write_text("".join(lines[:-1]))


def _replace_in_index(old, new):
    def change(folder):
        text = (folder / "index.jsonl").read_text()
        assert re.search(old, text)
        (folder / "index.jsonl").write_text(re.sub(old, new, text, count=1))

    return change


def _cut_tar(folder):
    path = folder / "shard-000001.tar"
    path.write_bytes(path.read_bytes()[:-512])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut_index, "4 live samples, 5 by the manifest"),
        (_cut_tar, r"shard-000001.tar has \d+ bytes, \d+ by the manifest"),
        (lambda folder: (folder / "shard-000001.tar").unlink(), "shard-000001.tar is missing"),
        (_replace_in_index(r'"size":\d+', '"size":99999999'), "the index puts 'a' where shard-000000.tar has no bytes"),
        (
            _replace_in_index("shard-000000.tar", "shard-000007.tar"),
            "the index puts 'a' where shard-000007.tar has no bytes",
        ),
        (_replace_in_index('"key":"a"', '"key":"q"'), "the index gives 'a' the key 'q'"),
    ],
    ids=["index cut", "tar cut", "tar missing", "beyond the end", "unknown tar", "key of another id"],
)
def test_set_that_does_not_agree_with_itself_is_reported(own_root, damage, message):
    damage(own_root.shards / SQUARE)

    with pytest.raises(ImagemillError, match=rf"(?s)do not match.*why: +{message}.*do:"):
        ShardSet.open(own_root.shards)


def test_id_that_is_live_twice_is_reported(own_root):
    _replace_in_index('"image_id":"a","key":"a"', '"image_id":"b","key":"b"')(own_root.shards / SQUARE)

    with pytest.raises(ImagemillError, match="'b' is live twice"):
        ShardSet.open(own_root.shards)


def test_index_of_another_set_is_reported_when_a_sample_is_read(own_root):
    """The set was replaced while it was being read."""
    opened = ShardSet.open(own_root.shards)
    path = own_root.shards / SQUARE / "shard-000000.tar"
    path.write_bytes(path.read_bytes().replace(b"a.json", b"z.json"))

    with pytest.raises(ImagemillError, match=r"shard-000000.tar"):
        opened["a"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [(b"c.vae.npy", b"c.vae.xyz", "no member vae.npy"), (b"\x93NUMPY", b"\x93NUMBY", "shard-000000.tar"),
     (b'"caption"', b'"cuption"', "not a record with a caption"), (b'{"aspect', b'["aspect', "not a record with a caption")],
    ids=["missing member", "npy", "record without caption", "json"],
)  # fmt: skip
def test_damaged_member_is_reported_with_its_tar(own_root, old, new, message):
    path = own_root.shards / SQUARE / "shard-000000.tar"
    content = path.read_bytes()
    assert old in content
    # Header checksums remain valid if only contents change; a changed name needs a new one.
    path.write_bytes(_renamed(content, old, new) if b"vae" in old else content.replace(old, new))

    with pytest.raises(ImagemillError, match=f"(?s){message}") as caught:
        ShardSet.open(own_root.shards)["c"]

    assert "shard-000000.tar" in str(caught.value)


def _renamed(content, old, new):
    """Return a member under another name, with a valid header checksum."""
    start = content.index(old)
    header = bytearray(content[start : start + 512].replace(old, new))
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return content[:start] + bytes(header) + content[start + 512 :]


def test_what_a_preview_model_made_is_refused_unless_allowed(tmp_path):
    root = shard_set(tmp_path / "data", {"a": (64, 64)}, preview=True)

    with pytest.raises(ImagemillError, match=r"(?s)output of a preview model: .*vae_latents.*allow_preview=True"):
        ShardSet.open(root.shards)
    with pytest.raises(ImagemillError, match="output of a preview model"):
        ShardDataset(root.shards, 1)

    assert list(ShardSet.open(root.shards, allow_preview=True)) == ["a"]
    assert len(ShardDataset(root.shards, 1, allow_preview=True)) == 1


def test_unknown_member_is_refused_with_the_choice(root):
    with pytest.raises(WrongUsage, match=r"(?s)no member 'pose'.*choose from json, dinov3, vae, t5h, t5m"):
        ShardDataset(root.shards, 1, members=("vae", "pose"))


def test_manifest_of_a_set_lists_the_members_that_are_read(root):
    """The names of `members` come from the set itself, so that a new kind needs no change here."""
    assert read_json(root.shards / SQUARE / "manifest.json")["members"] == [
        "json", *(spec.member for spec in embedding_specs()), "t5m.npy",
    ]  # fmt: skip


# ---- an id in two buckets, damaged tars

READERS = [
    pytest.param(ShardSet.open, id="ShardSet"),
    pytest.param(lambda folder, **options: ShardDataset(folder, 1, **options), id="ShardDataset"),
]


@pytest.fixture
def moved(tmp_path):
    """Sets left by a kill between two buckets' exchanges: `a` is in its new bucket and still in the old one."""
    root = shard_set(tmp_path / "data", {"a": (64, 64), "b": (64, 64), "wide": (32, 24)})
    old = root.shards / SQUARE
    shutil.copytree(old, tmp_path / "kept")
    foreign(root, record_of("a", size=(32, 24)), record_of("b", size=(64, 64)), record_of("wide", size=(32, 24)))
    publish(root, "replace")
    shutil.rmtree(old)
    shutil.copytree(tmp_path / "kept", old)
    return root


@pytest.mark.parametrize("open_set", READERS)
def test_id_that_is_live_in_two_buckets_is_refused_by_both_readers(moved, open_set):
    with pytest.raises(ImagemillError, match=r"'a' is live twice, in bucket_\d+x\d+ and bucket_\d+x\d+") as error:
        open_set(moved.shards)

    assert "imagemill run" in str(error.value)


@pytest.mark.parametrize("open_set", READERS)
def test_flipped_byte_is_found_on_opening_if_asked(own_root, open_set):
    tar = own_root.shards / SQUARE / "shard-000001.tar"
    data = bytearray(tar.read_bytes())
    data[-3000] ^= 1
    tar.write_bytes(data)

    open_set(own_root.shards)
    with pytest.raises(ImagemillError, match=r"shard-000001.tar is damaged"):
        open_set(own_root.shards, verify=True)


@pytest.mark.parametrize("open_set", READERS)
def test_whole_set_opens_with_verification(own_root, open_set):
    open_set(own_root.shards, verify=True)


@pytest.mark.parametrize("open_set", READERS)
def test_cut_tar_is_found_on_opening_by_both_readers(own_root, open_set):
    tar = own_root.shards / SQUARE / "shard-000001.tar"
    tar.write_bytes(tar.read_bytes()[:-512])

    with pytest.raises(ImagemillError, match=r"shard-000001.tar has \d+ bytes"):
        open_set(own_root.shards)
