"""Incremental changes of a set: tars without a change stay, the others are written. Spec: docs/spec/shards.md#updating-a-set"""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.errors import ImagemillError
from imagemill.formats.tar import read_shard
from imagemill.fs.fingerprints import posix_signature
from imagemill.pipeline.shards import shard_writer
from imagemill.pipeline.shards.readiness import ReadySample
from imagemill.pipeline.shards.shard_plan import PackPlan, plan_shards
from imagemill.pipeline.shards.shard_sets import (
    IndexLine,
    ShardParameters,
    bucket_folder,
    live_lines,
    read_index,
    read_manifest,
)
from imagemill.pipeline.shards.shard_writer import DamagedTar, write_bucket
from imagemill.pipeline.shards.update import LEAST_TARS, TarPlan, cut, digest_of, is_thin, plan_update
from imagemill.store.ledger import FileRow, Ledger
from imagemill.store.provenance import ModelIdentity
from imagemill.validation.validator import validate
from tests.helpers.product import snapshot
from tests.helpers.shard_sets import bury
from tests.helpers.stage2 import embed, identity_of, photos, picture, ready, stage2, write_records

BUCKET = "1216x832"

# ---- the decision


def sample(image_id, content="1"):
    """A ready sample without files."""
    files = tuple(FileRow(s.kind, image_id, posix_signature(1, 2, 3), "s", content, "m") for s in embedding_specs())
    return ReadySample(image_id, BUCKET, image_id.encode(), (1,), files)


def line(image_id, tar, place=0, content="1"):
    digest = digest_of(sample(image_id, content))
    return IndexLine(image_id, image_id, f"shard-{tar:06d}.tar", place, 1, digest)


def present(*tars):
    """Tars of a set: each a string of ids, an upper-case letter for a sample with other content."""
    return [
        (f"shard-{tar:06d}.tar", [line(i.lower(), tar, n, "2" if i.isupper() else "1") for n, i in enumerate(ids)])
        for tar, ids in enumerate(tars)
    ]


def planned(ids):
    return {i: sample(i) for i in ids}


def shown(change):
    """The tars of a plan: `abc` kept, `(abc)` written; an upper-case letter for a sample that is packed from its files."""
    tars = []
    for tar in change.tars:
        ids = "".join(s.image_id if isinstance(s, IndexLine) else s.image_id.upper() for s in tar.samples)
        tars.append(ids if tar.kept else f"({ids})")
    return " ".join(tars)


@pytest.mark.parametrize(
    ("tars", "wanted", "expected"),
    [
        (["abc", "def", "g"], "abcdefg", "abc def g"),
        (["abc", "def", "g"], "abcdefgh", "abc def (gH)"),
        (["abc", "def", "g"], "abcdefghijk", "abc def (gHI) (JK)"),
        (["abc", "def"], "abcdefg", "abc def (G)"),
        (["abc", "dEf", "g"], "abcdefg", "abc (dEf) g"),
        (["abc", "def", "g"], "abcdfg", "abc (df) g"),
        (["abc", "def", "g"], "abcg", "abc g"),
        (["abc", "def", "g"], "abcdf", "abc (df)"),
        (["abc", "def", "g"], "abcdfh", "abc (dfH)"),
        (["abc"], "", ""),
        ([], "abcd", "(ABC) (D)"),
        (["abc"], "cbad", "abc (D)"),
    ],
    ids=[
        "nothing changed", "one added to the last tar", "the last tar filled up, then new ones", "the last tar is full",
        "one changed", "one removed", "a tar emptied", "the last tar emptied", "removed, and the new last tar filled up",
        "all removed", "no tar yet", "another order of the records",
    ],
)  # fmt: skip
def test_only_tars_with_a_change_are_written(tars, wanted, expected):
    assert shown(plan_update(present(*tars), set(), planned(wanted), 3)) == expected


def test_kept_tar_has_its_earlier_name():
    change = plan_update(present("abc", "def", "g"), set(), planned("defg"), 3)

    assert [tar.kept for tar in change.tars] == ["shard-000001.tar", "shard-000002.tar"]


def test_change_is_counted():
    change = plan_update(present("abC", "def"), set(), planned("bcdefgh"), 3)

    assert (change.added, change.changed, change.removed) == (2, 1, 1)


def test_tombstones_are_folded_in():
    """The tar with a dead sample is written again; a sample that is restored is new."""
    tars = present("abc", "def")
    dead = {tars[0][1][1].place, tars[1][1][2].place}

    change = plan_update(tars, dead, planned("acdef"), 3)

    assert shown(change) == "(ac) (deF)"
    assert (change.added, change.removed) == (1, 0)


ids = st.sampled_from("abcdefghij")
contents = st.sampled_from(["1", "2"])


@given(st.dictionaries(ids, contents), st.dictionaries(ids, contents), st.data(), st.integers(1, 4), st.integers(1, 4))
def test_set_contains_exactly_the_plan_afterwards(before, after, data, old_size, size):
    """In any order, with any tombstones; kept tars are those of the set, no tar is empty, and only the last is filled up."""
    rows = list(before.items())
    tars = [
        (
            f"shard-{n:06d}.tar",
            [line(i, n, m, content) for m, (i, content) in enumerate(rows[start : start + old_size])],
        )
        for n, start in enumerate(range(0, len(rows), old_size))
    ]
    places = [one.place for _, lines in tars for one in lines]
    dead = data.draw(st.sets(st.sampled_from(places))) if places else set()

    change = plan_update(tars, dead, {i: sample(i, content) for i, content in after.items()}, size)

    found = [one for tar in change.tars for one in tar.samples]
    assert len(found) == len(after)
    assert {one.image_id: digest_of(one) for one in found} == {i: digest_of(sample(i, c)) for i, c in after.items()}
    assert all(tar.samples for tar in change.tars)
    assert all(tar.samples == tuple(dict(tars)[tar.kept]) for tar in change.tars if tar.kept)
    assert len([tar for tar in change.tars if len(tar.samples) > max(size, old_size)]) == 0
    order = [places.index(one.place) for one in found if isinstance(one, IndexLine)]
    assert order == sorted(order), "samples keep their order"


@given(st.lists(st.integers(1, 10), max_size=12), st.floats(0, 1))
def test_set_is_thin_if_more_than_the_share_of_its_tars_is_less_than_half_full(sizes, share):
    tars = [TarPlan(tuple(sample(f"{n}-{m}") for m in range(size))) for n, size in enumerate(sizes)]

    below = len([size for size in sizes[:-1] if size < 5])
    expected = len(sizes) >= LEAST_TARS and below / (len(sizes) - 1) > share

    assert is_thin(tars, 10, share) == expected


def test_tars_of_a_new_set_are_full_but_for_the_last():
    assert [len(tar.samples) for tar in cut([sample(str(n)) for n in range(7)], 3)] == [3, 3, 1]


# ---- on disk


def pack(root, existing, identities=None, **parameters):
    """Pack one bucket as the asset does."""
    share = parameters.pop("repack_share", 0.2)
    with Ledger(root.ledger) as ledger:
        withdrawn = ledger.ids("withdrawn")
    found = [sample for sample in ready(root, [BUCKET]).ready if sample.image_id not in withdrawn]
    given_ = {"shard_size": 2, **parameters}
    shard_set: PackPlan = plan_shards(
        found, [BUCKET], root.shards, ShardParameters(**given_), existing, requested=parameters, withdrawn=withdrawn,
        repack_share=share,
    )  # fmt: skip
    return write_bucket(shard_set, shard_set.plans[0], root.derived, identities or {})


def live(root):
    return sorted(line.image_id for line in live_lines(bucket_folder(root.shards, BUCKET)))


def by_tar(root):
    """Ids by tar, as a reader that ignores the index finds them."""
    folder = bucket_folder(root.shards, BUCKET)
    return ["".join(key for key, _ in read_shard(tar)) for tar in sorted(folder.glob("*.tar"))]


def inodes(root):
    folder = bucket_folder(root.shards, BUCKET)
    return {path.name: path.stat().st_ino for path in sorted(folder.glob("*.tar*"))}


def members(root):
    """Return the members of each sample, by id."""
    folder = bucket_folder(root.shards, BUCKET)
    return {key: values for tar in sorted(folder.glob("*.tar")) for key, values in read_shard(tar)}


def whole(root):
    report = validate(bucket_folder(root.shards, BUCKET), derived=root.derived)
    assert report.passed, report.findings
    return True


def withdraw(root, *image_ids):
    with Ledger(root.ledger) as ledger:
        ledger.withdraw(image_ids)


def change(root, *image_ids):
    """Replace images, and embed them."""
    for number, image_id in enumerate(image_ids):
        picture(root.approved / f"{image_id}.png", seed=70 + number)
    embed(root)
    write_records(root)


def add(root, *image_ids):
    photos(root, *image_ids)
    embed(root)
    write_records(root)


@pytest.fixture
def root(data_root):
    """Five images in tars of two."""
    stage2(data_root, "a", "b", "c", "d", "e")
    pack(data_root, "replace")
    return data_root


def test_unchanged_tars_are_the_same_files_with_their_indices(root):
    before = inodes(root)
    change(root, "c")
    add(root, "f", "g")

    result = pack(root, "update")

    assert by_tar(root) == ["ab", "cd", "ef", "g"]
    now = inodes(root)
    same = {name for name in now if now[name] == before.get(name)}
    assert same == {"shard-000000.tar", "shard-000000.tar.idx"}
    assert (result.samples, result.shards, result.written_samples, len(result.written)) == (7, 4, 5, 3)
    assert (result.change.added, result.change.changed, result.change.removed) == (2, 1, 0)
    assert whole(root)


def test_emptied_tar_is_removed_and_the_next_ones_move_up(root):
    before = inodes(root)
    withdraw(root, "a", "b")

    result = pack(root, "update")

    assert by_tar(root) == ["cd", "e"]
    assert inodes(root)["shard-000000.tar"] == before["shard-000001.tar"]
    assert result.written == ()
    assert [one.shard for one in read_index(bucket_folder(root.shards, BUCKET))] == [
        "shard-000000.tar", "shard-000000.tar", "shard-000001.tar",
    ]  # fmt: skip
    assert whole(root)


@pytest.mark.parametrize("existing", ["update", "append"])
def test_members_are_those_of_packing_from_scratch(root, existing):
    """Also if the updated set has another order; `repack` gives the bytes of packing from scratch."""
    change(root, "b")
    add(root, "ab")
    withdraw(root, "d")
    pack(root, existing)
    updated, manifest = members(root), read_manifest(bucket_folder(root.shards, BUCKET))
    assert manifest.appended

    assert pack(root, "repack").status == "written"
    repacked = {path: data for path, (data, _) in snapshot(root.shards).items()}
    pack(root, "replace")

    assert members(root) == updated
    assert {path: data for path, (data, _) in snapshot(root.shards).items()} == repacked
    scratch = read_manifest(bucket_folder(root.shards, BUCKET))
    assert (manifest.digest, manifest.samples) == (scratch.digest, scratch.samples)
    assert not scratch.appended


def test_update_that_gives_the_bytes_of_packing_from_scratch_need_not_be_repacked(root):
    add(root, "f")
    pack(root, "update")

    before = snapshot(root.shards)
    assert pack(root, "repack").status == "unchanged"
    pack(root, "replace")
    assert {p: data for p, (data, _) in snapshot(root.shards).items()} == {p: data for p, (data, _) in before.items()}


@pytest.mark.parametrize("existing", ["update", "append", "withdraw", "repack"])
def test_without_a_change_nothing_is_written(root, existing):
    before = snapshot(root.shards)

    assert pack(root, existing).status == "unchanged"
    assert snapshot(root.shards) == before


@pytest.mark.parametrize(
    ("parameters", "why"), [({"shard_size": 3}, "parameters"), ({"shuffle": True}, "parameters"), ({}, "")]
)
def test_changed_parameters_pack_the_set_from_scratch(root, parameters, why):
    add(root, "f")

    result = pack(root, "update", **parameters)

    assert result.scratch == why
    assert len(result.written) == (result.shards if why else 1)
    assert whole(root)


def test_shuffled_set_is_packed_from_scratch(root):
    pack(root, "replace", shuffle=True)
    add(root, "f")

    result = pack(root, "update")

    assert (result.scratch, len(result.written)) == ("shuffled", 3)
    assert read_manifest(bucket_folder(root.shards, BUCKET)).parameters.shuffle


@pytest.mark.parametrize(("share", "why"), [(0.2, "thin"), (0.5, "")])
def test_set_whose_tars_would_be_thin_is_packed_from_scratch(data_root, share, why):
    stage2(data_root, *(f"{n:02}" for n in range(15)))
    pack(data_root, "replace", shard_size=3)
    withdraw(data_root, "00", "01", "03", "04")

    result = pack(data_root, "update", repack_share=share)

    assert result.scratch == why
    assert by_tar(data_root)[0] == ("020506" if why else "02")
    assert whole(data_root)


def test_set_of_other_kinds_is_packed_from_scratch(root):
    from tests.helpers.shard_sets import change_manifest

    folder = bucket_folder(root.shards, BUCKET)
    change_manifest(folder, members=["json", "dinov3.npy", "t5m.npy"], digest="0" * 64)

    assert pack(root, "update").scratch == "kinds"
    assert whole(root)


@pytest.mark.parametrize("damage", ["foreign", "missing lines"])
def test_set_with_an_unusable_index_is_packed_from_scratch(root, damage):
    """An index of another program lacks the digests by which changed samples are recognised."""
    path = bucket_folder(root.shards, BUCKET) / "index.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    foreign = json.dumps({"image_id": "a", "key": "a", "shard": "shard-000000.tar", "offset": 0, "size": 1}) + "\n"
    path.write_text(foreign if damage == "foreign" else "".join(lines[:-1]))
    add(root, "f")

    assert pack(root, "update").scratch == "index"
    assert live(root) == list("abcdef")
    assert whole(root)


def flip(path, at=3000):
    """Change one byte, and keep size and modification time."""
    before, data = path.stat(), bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_samples_of_a_damaged_tar_are_packed_from_their_files(root):
    flip(bucket_folder(root.shards, BUCKET) / "shard-000001.tar")
    withdraw(root, "d")

    result = pack(root, "update")

    assert (len(result.written), live(root)) == (1, list("abce"))
    assert whole(root)


def test_damaged_tar_stops_a_withdrawal_that_would_copy_from_it(root):
    """A withdrawal packs no files; the old set stays."""
    flip(bucket_folder(root.shards, BUCKET) / "shard-000001.tar")
    withdraw(root, "d")
    before = snapshot(root.shards)

    with pytest.raises(DamagedTar, match=r"(?s)a tar is damaged.*shard-000001.tar.*checksum.*--overwrite"):
        pack(root, "withdraw")
    assert snapshot(root.shards) == before


def test_index_that_lacks_samples_stops_a_withdrawal(root):
    """It would lose the samples that it lacks."""
    path = bucket_folder(root.shards, BUCKET) / "index.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    withdraw(root, "a")

    with pytest.raises(
        ImagemillError, match=r"(?s)index.jsonl does not list the samples of the manifest's tars.*--overwrite"
    ):
        pack(root, "withdraw")


def test_unreadable_index_stops_a_withdrawal(root):
    (bucket_folder(root.shards, BUCKET) / "index.jsonl").write_text('{"image_id": "a"}\n')
    withdraw(root, "a")

    with pytest.raises(ImagemillError, match=r"(?s)index.jsonl cannot be read.*--overwrite"):
        pack(root, "withdraw")


def test_no_file_is_read_for_samples_that_are_copied(root, monkeypatch):
    add(root, "f")
    opened = []
    real = shard_writer.write_shard

    def watched(path, samples, **how):
        kept = list(samples)
        opened.extend(key for key, given_ in kept if not all(isinstance(data, bytes) for _, data in given_))
        return real(path, kept, **how)

    monkeypatch.setattr(shard_writer, "write_shard", watched)
    pack(root, "update")

    assert opened == ["f"]


def test_tombstones_of_an_earlier_release_are_folded_in(root):
    folder = bucket_folder(root.shards, BUCKET)
    bury(folder, "b")
    withdraw(root, "b")
    assert live(root) == list("acde")

    pack(root, "append")

    assert by_tar(root) == ["a", "cd", "e"]
    assert not (folder / "tombstones.jsonl").exists()
    assert read_manifest(folder).tombstones == 0
    assert whole(root)


def test_updating_where_no_set_is_writes_one(data_root):
    stage2(data_root, "a")

    assert pack(data_root, "append").written_samples == 1
    assert live(data_root) == ["a"]


# ---- withdrawals


@pytest.mark.parametrize("shuffle", [False, True])
def test_withdrawn_sample_is_in_no_tar_until_it_is_restored(root, shuffle):
    """A withdrawal leaves changed samples alone; a restored sample is packed from its files, behind the others."""
    recorded = {spec.kind: identity_of(root, spec.kind) for spec in embedding_specs()}
    pack(root, "replace", recorded, shuffle=shuffle, seed=1)
    order = "".join(by_tar(root))
    change(root, "c")
    withdraw(root, "a")

    pack(root, "withdraw", recorded)

    assert "".join(by_tar(root)) == order.replace("a", "")
    assert validate(bucket_folder(root.shards, BUCKET)).passed
    assert pack(root, "withdraw").status == "unchanged"
    with Ledger(root.ledger) as ledger:
        ledger.restore(["a"])
    pack(root, "withdraw", recorded)
    assert "".join(by_tar(root)) == order.replace("a", "") + "a"


def test_withdrawn_sample_stays_out_of_every_later_set(root):
    withdraw(root, "a")

    for existing in ("append", "repack", "replace", "update"):
        pack(root, existing)
        assert live(root) == list("bcde"), existing


def test_withdrawing_says_no_other_model_of_the_samples_that_stay(root):
    """The manifest records the model that made the tars' content, not the present one.

    Spec: docs/spec/conventions.md#completion-and-identity
    """
    folder = bucket_folder(root.shards, BUCKET)
    kinds = [spec.kind for spec in embedding_specs()]
    preview = {kind: ModelIdentity(kind=kind, model="preview", preview=True, facts={"weights": "1"}) for kind in kinds}
    real = {kind: ModelIdentity(kind=kind, model="real", facts={"weights": "2"}) for kind in kinds}
    pack(root, "replace", preview)
    before = read_manifest(folder).provenance
    withdraw(root, "a")

    pack(root, "withdraw", real)

    assert read_manifest(folder).provenance == before
    assert all(entry.preview for entry in before.values())


def test_last_withdrawal_removes_the_set(root):
    withdraw(root, *"abcde")

    assert pack(root, "withdraw").status == "removed"
    assert not bucket_folder(root.shards, BUCKET).exists()


def test_files_that_are_not_of_the_set_come_along(root):
    """Replacing a set deletes no foreign file."""
    folder = bucket_folder(root.shards, BUCKET)
    (folder / "notes.txt").write_text("mine")
    (folder / "more").mkdir()
    (folder / "more" / "deep.txt").write_text("mine too")
    (folder / "stale.tar").write_bytes(b"")

    pack(root, "replace")

    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "more" / "deep.txt").read_text() == "mine too"
    assert not (folder / "stale.tar").exists(), "no stale shard survives"
