"""A reader reads only the set that it opened, even if other sets are published later.

Spec: docs/spec/shards.md#replacement
"""

import itertools
import os
import pickle
import shutil

import numpy as np
import pytest

from imagemill.reading import ShardDataset, ShardSet, ShardsReplaced, sets, tars
from tests.helpers.shard_sets import NEW_VALUE, change_values, publish, shard_set

SQUARE = "bucket_1024x1024"


def is_new(values):
    return float(np.asarray(values).flat[0]) == NEW_VALUE


def test_set_of_equal_layout_in_its_place_is_never_read_by_an_open_reader(own_root):
    """Names, sizes and offsets are the same; only the values differ."""
    dataset, opened = ShardDataset(own_root.shards, 1, members=("dinov3",)), ShardSet.open(own_root.shards)
    batches = iter(dataset)
    before = list(itertools.islice(batches, 2))
    change_values(own_root, *"abcde")
    publish(own_root, "replace")

    message = (
        r"(?s)shards of bucket_1024x1024 were replaced.*where:.*shard-00000\d.tar.*do: +open the reader again.*state"
    )
    with pytest.raises(ShardsReplaced, match=message):
        next(batches)
    with pytest.raises(ShardsReplaced, match=message):
        opened["a"]

    assert [is_new(batch["dinov3"]) for batch in before] == [False, False]
    assert {is_new(sample["dinov3"]) for sample in ShardSet.open(own_root.shards).values()} == {True}


def test_set_of_equal_layout_and_times_in_its_place_is_not_read_either(own_root):
    """The set was unpacked from an archive that gives every file the same time."""
    opened = ShardSet.open(own_root.shards)
    tar = own_root.shards / SQUARE / "shard-000000.tar"
    before = tar.stat()
    change_values(own_root, *"abcde")
    publish(own_root, "replace")
    os.utime(tar, ns=(before.st_atime_ns, before.st_mtime_ns))

    assert (before.st_size, before.st_mtime_ns) == (tar.stat().st_size, tar.stat().st_mtime_ns)
    with pytest.raises(ShardsReplaced):
        opened["a"]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_keep_to_the_set_that_was_opened(own_root, start):
    """This includes workers that get the reader by pickle."""
    dataset = ShardDataset(own_root.shards, 1, members=("dinov3",))
    change_values(own_root, *"abcde")
    publish(own_root, "replace")

    with pytest.raises(ShardsReplaced, match="bucket_1024x1024 were replaced"):
        next(iter(dataset.loader(num_workers=1, multiprocessing_context=start)))


def test_pickled_reader_keeps_to_the_set_that_was_opened(own_root):
    opened = pickle.dumps(ShardSet.open(own_root.shards))
    assert not is_new(pickle.loads(opened)["a"]["dinov3"])
    change_values(own_root, *"abcde")
    publish(own_root, "replace")

    with pytest.raises(ShardsReplaced):
        pickle.loads(opened)["a"]


@pytest.mark.parametrize("existing", ["update", "append", "withdraw"])
@pytest.mark.parametrize("hardlinks", [True, False], ids=["hardlinks", "copies"])
def test_tars_that_an_update_keeps_are_read_on(own_root, monkeypatch, existing, hardlinks):
    """Also as copies on a file system without hardlinks, and under another number: the first tar was emptied."""
    opened = ShardSet.open(own_root.shards)
    if not hardlinks:
        monkeypatch.setattr(os, "link", _no_links)
    publish(own_root, existing, withdrawn=["a", "b", "c"])
    assert not (own_root.shards / SQUARE / "shard-000001.tar").exists()
    fingerprints = _counted(monkeypatch)

    assert [opened[image_id]["image_id"] for image_id in "de"] == ["d", "e"]
    assert pickle.loads(pickle.dumps(opened))["d"]["image_id"] == "d"
    with pytest.raises(ShardsReplaced):
        opened["a"]
    assert fingerprints == []  # a copy with the same time is not read in full in each worker and epoch
    assert sorted(ShardSet.open(own_root.shards)) == list("de")


def test_tar_that_an_update_writes_is_not_read_on(own_root):
    """The sample itself did not change, but its tar did."""
    opened = ShardSet.open(own_root.shards)
    change_values(own_root, "b")
    publish(own_root, "update")

    assert opened["d"]["image_id"] == "d"
    with pytest.raises(ShardsReplaced, match="has other bytes"):
        opened["a"]


def _no_links(*_, **__):
    raise OSError("no links here")


def _counted(monkeypatch):
    """Return the list of files of which `fingerprint_file` is called."""
    calls, real = [], tars.fingerprint_file

    def counted(descriptor):
        calls.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        return real(descriptor)

    monkeypatch.setattr(tars, "fingerprint_file", counted)
    return calls


def test_equal_set_in_its_place_is_read_on(own_root, monkeypatch):
    """A set repacked from the same samples has new tars of the same bytes, each of which is read in full once."""
    fingerprints = _counted(monkeypatch)
    opened = ShardSet.open(own_root.shards)
    tar = own_root.shards / SQUARE / "shard-000000.tar"
    before = tar.stat().st_ino
    publish(own_root, "replace")

    assert tar.stat().st_ino != before
    assert {opened[image_id]["image_id"] for image_id in opened} == set("abcde")
    assert [str(path) for path in sorted(tar.parent.glob("*.tar"))] == sorted(map(str, fingerprints))


def test_tar_of_other_bytes_under_the_old_manifest_is_refused(own_root):
    """Another program copies a set over an open one, file by file."""
    opened = ShardSet.open(own_root.shards)
    tar = own_root.shards / SQUARE / "shard-000000.tar"
    record = b"a picture called a"
    assert record in tar.read_bytes()
    tar.write_bytes(tar.read_bytes().replace(record, record.upper()))

    with pytest.raises(ShardsReplaced, match="other bytes"):
        opened["a"]


def test_repacked_set_is_reported_as_such(own_root):
    """Positions differ; the remedy is to open the set again, not to repack it."""
    publish(own_root, "withdraw", withdrawn=["a"])
    opened = ShardSet.open(own_root.shards)
    publish(own_root, "repack", withdrawn=["a"])

    with pytest.raises(ShardsReplaced, match="open the reader again"):
        opened["b"]


@pytest.mark.parametrize(
    "remove",
    [lambda bucket: (bucket / "shard-000000.tar").unlink(), shutil.rmtree, lambda bucket: bucket.rename("elsewhere")],
    ids=["tar", "bucket", "moved"],
)
def test_tar_that_is_gone_is_reported(own_root, remove, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    opened = ShardSet.open(own_root.shards)
    remove(own_root.shards / SQUARE)

    with pytest.raises(ShardsReplaced, match=r"(?s)replaced or removed.*why: +shard-000000.tar is gone"):
        opened["a"]


def test_reader_does_not_depend_on_the_working_folder(own_root, tmp_path, monkeypatch):
    monkeypatch.chdir(own_root.shards)
    opened = ShardSet.open(".")

    monkeypatch.chdir(tmp_path)

    assert opened["a"]["image_id"] == "a"


# ---- opening


@pytest.mark.parametrize("shard_size", [3, 2], ids=["equal layout", "other tars"])
@pytest.mark.parametrize("step", ["load_manifest", "live_lines"])
def test_set_that_changes_while_it_is_opened_is_read_from_the_beginning(own_root, monkeypatch, step, shard_size):
    """Manifest, index and tars come from one set, even if a mixture of two sets would not be detected."""

    def replace():
        change_values(own_root, *"abcde")
        publish(own_root, "replace", shard_size=shard_size)

    _after_the_first(monkeypatch, step, replace)

    opened = ShardSet.open(own_root.shards)

    assert {is_new(sample["dinov3"]) for sample in opened.values()} == {True}
    (bucket,), (now,) = opened.buckets, ShardSet.open(own_root.shards).buckets
    assert (bucket.manifest, bucket.digest()) == (now.manifest, now.digest())


def test_bucket_that_goes_while_it_is_opened_is_passed_over(tmp_path, monkeypatch):
    """Its last sample was withdrawn; the other bucket is read."""
    root = shard_set(tmp_path / "data", {"a": (64, 64), "wide": (32, 24)})
    _after_the_first(monkeypatch, "load_manifest", lambda: publish(root, "withdraw", withdrawn=["a"]))

    assert list(ShardSet.open(root.shards)) == ["wide"]


def _after_the_first(monkeypatch, step, happens):
    """Call `happens` once, after the opener has taken this step for the first time."""
    take, left = getattr(sets, step), [happens]

    def taken(folder):
        result = take(folder)
        if left:
            left.pop()()
        return result

    monkeypatch.setattr(sets, step, taken)
