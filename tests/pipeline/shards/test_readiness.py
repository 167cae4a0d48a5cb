"""Selection of the records that may be packed. Spec: docs/spec/shards.md#readiness"""

import errno
import json
import os

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagemill.domain.buckets import BUCKETS
from imagemill.domain.embedding_specs import DINOV3, T5, VAE, embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.domain.stage2_records import DECODER, is_plain, usual_masks, violations
from imagemill.errors import MissingInput
from imagemill.formats.jsonl import decode_canonical, encode_sorted, parse_object, read_jsonl
from imagemill.formats.npy import NpyStore
from imagemill.fs.fingerprints import file_signature, fingerprint
from imagemill.fs.listing import FileListing
from imagemill.pipeline.shards import readiness
from imagemill.pipeline.shards.kind_files import KindFiles
from imagemill.pipeline.shards.readiness import find_ready, progress_lines
from imagemill.pipeline.stage2 import record_index
from imagemill.store.ledger import Ledger
from imagemill.store.provenance import UNKNOWN
from tests.helpers.stage1 import stage1_record
from tests.helpers.stage2 import (
    embed,
    foreign,
    identity_of,
    photos,
    picture,
    ready,
    record_of,
    stage2,
    write_records,
    write_text,
)


def look(root, *buckets):
    return ready(root, buckets or BUCKETS)


def ids(found):
    return [sample.image_id for sample in found.ready]


def reasons(found):
    return {problem.item: problem.reason for problem in found.problems}


def adds_up(found):
    return found.total_records == len(found.ready) + found.skipped_incomplete + found.filtered


def npy(root, spec, image_id):
    return root.derived / spec.folder / f"{image_id}.npy"


def rewrite(root, change):
    """Change the records of the JSONL one by one."""
    records = [line.value for line in read_jsonl(root.stage2_jsonl)]
    write_text(root.stage2_jsonl, *(json.dumps(change(record)) for record in records))


# ---- the scenarios of the specification


def test_complete_sample_is_identified_as_ready(data_root):
    stage2(data_root, "a", "b")

    found = look(data_root)

    assert ids(found) == ["a", "b"]
    assert (found.total_records, found.skipped_incomplete, found.filtered) == (2, 0, 0)
    sample = found.ready[0]
    assert sample.bucket == "1216x832"
    assert list(sample.mask) == parse_object(sample.record)["t5_attention_mask"]
    assert [file.kind for file in sample.files] == [spec.kind for spec in embedding_specs()]
    for spec, file in zip(embedding_specs(), sample.files, strict=True):
        assert file.stat == file_signature(npy(data_root, spec, "a"))
        assert file.content == fingerprint(npy(data_root, spec, "a").read_bytes())


def test_large_dataset_is_matched_alike(data_root, monkeypatch):
    """Its folders are listed in other processes; one file is missing and one was overwritten in place."""
    stage2(data_root, "a", "b", "c", "d")
    npy(data_root, DINOV3, "b").unlink()
    npy(data_root, VAE, "c").write_bytes(b"no npy")
    small = look(data_root)

    monkeypatch.setattr(record_index, "_MANY_BYTES", 0)
    large = look(data_root)

    assert ids(large) == ids(small) == ["a", "d"]
    assert reasons(large) == reasons(small)
    assert large.ready == small.ready


def test_json_member_is_the_whole_record_with_sorted_keys(data_root):
    """It is UTF-8 and ends with one newline. Spec: docs/spec/shards.md#members"""
    foreign(data_root, record_of("a", caption="Ein Bäumchen", note={"z": 1, "b": 2}))

    (sample,) = look(data_root).ready

    record = json.loads(sample.record)
    assert record["note"] == {"z": 1, "b": 2}
    assert list(record) == sorted(record)
    assert sample.record.endswith(b"}\n")
    assert "Bäumchen".encode() in sample.record
    assert sample.record.index(b'"b":2') < sample.record.index(b'"z":1')


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"caption": None}, "bad_caption"), ({"caption": " "}, "bad_caption"),
        ({"t5_attention_mask": [1] * 76}, "bad_mask"), ({"t5_attention_mask": [0] * 77}, "bad_mask"),
        ({"t5_attention_mask": [2] * 77}, "bad_mask"), ({"t5_attention_mask": None}, "bad_mask"),
        ({"image_path": ""}, "bad_image_path"), ({"height": 0}, "bad_height"), ({"width": 32.0}, "bad_width"),
        ({"aspect_bucket": "512x512"}, "bad_aspect_bucket"), ({"format_version": 1}, "bad_format_version"),
        ({"dinov3_embedding": [0.1]}, "stage1"),
    ],
)  # fmt: skip
def test_incomplete_sample_is_skipped(data_root, change, reason):
    foreign(data_root, record_of("a"))
    rewrite(data_root, lambda record: {**record, **change})

    found = look(data_root)

    assert found.ready == []
    assert (found.total_records, found.skipped_incomplete) == (1, 1)
    assert reasons(found) == {"a": reason}
    assert all(problem.detail and problem.remedy for problem in found.problems)


@pytest.mark.parametrize(
    "field", ["image_id", "image_path", "caption", "t5_attention_mask", "height", "width", "aspect_bucket"]
)
def test_incomplete_sample_without_a_field_is_skipped(data_root, field):
    foreign(data_root, record_of("a"))
    rewrite(data_root, lambda record: {name: value for name, value in record.items() if name != field})

    found = look(data_root)

    assert (len(found.ready), found.skipped_incomplete) == (0, 1)


@pytest.mark.parametrize("spec", embedding_specs(), ids=lambda spec: spec.kind)
def test_incomplete_sample_without_a_file_is_skipped(data_root, spec):
    stage2(data_root, "a", "b")
    npy(data_root, spec, "a").unlink()

    found = look(data_root)

    assert ids(found) == ["b"]
    assert reasons(found) == {"a": "missing_file"}
    assert spec.folder in found.problems[0].detail


@pytest.mark.parametrize("line", ["{", "null", "[1]", "3", b"\xff\xfe", '{"image_id": NaN}', '{"image_id": "a"'])
def test_malformed_jsonl_line_is_skipped_gracefully(data_root, caplog, line):
    """It is logged as a warning and counted, and the scan continues."""
    foreign(data_root, record_of("a"), record_of("b"))
    good = data_root.stage2_jsonl.read_bytes().splitlines()
    write_text(data_root.stage2_jsonl, good[0], line, good[1])

    found = look(data_root)

    assert ids(found) == ["a", "b"]
    assert (found.total_records, found.skipped_incomplete) == (3, 1)
    assert reasons(found) == {"approved_image_dataset.jsonl:2": "malformed"}
    (warning,) = caplog.records
    assert warning.levelname == "WARNING"
    assert "approved_image_dataset.jsonl:2" in warning.getMessage()


def test_many_malformed_lines_are_counted_and_the_first_ones_reported(data_root, caplog):
    write_text(data_root.stage2_jsonl, *["{"] * 1000)

    found = look(data_root)

    assert (found.total_records, found.skipped_incomplete) == (1000, 1000)
    assert len(caplog.records) < 50


# ---- more of readiness


def test_blank_lines_do_not_count(data_root):
    foreign(data_root, record_of("a"))
    write_text(data_root.stage2_jsonl, b"", data_root.stage2_jsonl.read_bytes().strip(), b"  ", b"")

    assert (look(data_root).total_records, ids(look(data_root))) == (1, ["a"])


def test_records_of_other_buckets_are_filtered(data_root):
    foreign(data_root, record_of("wide", size=(48, 24)), record_of("square", size=(24, 24)))

    found = look(data_root, "1024x1024")

    assert (ids(found), found.filtered, found.skipped_incomplete) == (["square"], 1, 0)
    assert adds_up(found)


def test_bucket_is_taken_as_written(data_root):
    """This holds if it is one of the seven."""
    foreign(data_root, record_of("a", size=(24, 24), aspect_bucket="704x1344"))

    assert [sample.bucket for sample in look(data_root).ready] == ["704x1344"]


def test_last_of_several_records_is_packed_once(data_root):
    """An earlier duplicate counts as skipped_incomplete."""
    foreign(data_root, record_of("a", note=1), record_of("b"), record_of("a", note=2))

    found = look(data_root)

    assert ids(found) == ["b", "a"], "in the order of the lines that count"
    assert json.loads(found.ready[1].record)["note"] == 2
    assert (found.total_records, found.skipped_incomplete) == (3, 1)
    assert reasons(found) == {"approved_image_dataset.jsonl:1": "duplicate_id"}


def test_records_without_an_id_each_have_their_own_row(data_root):
    """Each input that does not reach the output has one row. Spec: docs/spec/conventions.md#completion-and-identity"""
    foreign(data_root, record_of("a"))
    good = data_root.stage2_jsonl.read_bytes().strip()
    write_text(data_root.stage2_jsonl, '{"caption": "x"}', good, '{"image_id": 7}', '{"image_id": ""}')

    found = look(data_root)

    name = data_root.stage2_jsonl.name
    assert reasons(found) == {f"{name}:{number}": "bad_image_id" for number in (1, 3, 4)}
    assert adds_up(found)


@pytest.mark.parametrize("image_id", ["../a", "a/b", "a\x00b", "a" * 300])
def test_id_that_can_name_no_file_is_skipped(data_root, image_id):
    write_text(data_root.stage2_jsonl, json.dumps(record_of(image_id)))

    found = look(data_root)

    assert (len(found.ready), found.skipped_incomplete) == (0, 1)


def test_jsonl_that_is_not_there_is_said(data_root):
    with Ledger(data_root.ledger) as ledger:
        with pytest.raises(MissingInput, match="imagemill stage2"):
            find_ready(data_root.stage2_jsonl, data_root.derived, ledger, buckets=BUCKETS)


def test_empty_jsonl_has_nothing_ready(data_root):
    write_text(data_root.stage2_jsonl)

    assert look(data_root).total_records == 0


# ---- files: valid and current


def not_npy(path):
    path.write_bytes(b"not an npy file")


def truncated(path):
    path.write_bytes(path.read_bytes()[:-1])


def of_another_size(path):
    np.save(path, np.zeros((16, 9, 9), np.float16))


def of_another_dtype(path):
    np.save(path, np.zeros((16, 3, 4), np.float32))


def not_finite(path):
    np.save(path, np.full((16, 3, 4), np.inf, np.float16))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(not_npy, "unreadable"), (truncated, "truncated"), (of_another_size, "wrong_shape"), (of_another_dtype, "wrong_dtype"),
     (not_finite, "non_finite")],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)  # fmt: skip
@pytest.mark.parametrize("known", [True, False])
def test_file_that_is_not_what_its_contract_says_is_not_packed(data_root, spoil, reason, known):
    if known:
        stage2(data_root, "a", "b")
    else:
        foreign(data_root, record_of("a"), record_of("b"))
    spoil(npy(data_root, VAE, "a"))

    found = look(data_root)

    assert ids(found) == ["b"]
    assert reasons(found) == {"a": reason}


def test_layout_that_another_program_wrote_is_packed_and_adopted(data_root):
    """Any Stage 2 layout of the specified form is packed, without ledger, images or version field."""
    foreign(data_root, record_of("a"), record_of("b"))
    rewrite(data_root, lambda record: {k: v for k, v in record.items() if k != "format_version"})

    found = look(data_root)

    assert ids(found) == ["a", "b"]
    assert {file.model_key for sample in found.ready for file in sample.files} == {UNKNOWN}
    assert len(found.adopted) == 6


def test_adopted_file_is_not_read_again(data_root, monkeypatch):
    """A file whose size, mtime and inode are those of its last full check is not read again."""
    foreign(data_root, record_of("a"))
    first = look(data_root)

    monkeypatch.setattr(NpyStore, "check", lambda *_: pytest.fail("read again"))
    again = look(data_root)

    assert again.ready == first.ready
    assert again.adopted == []


def test_file_that_the_ledger_vouches_for_is_not_read(data_root, monkeypatch):
    stage2(data_root, "a")

    monkeypatch.setattr(NpyStore, "check", lambda *_: pytest.fail("read"))
    assert ids(look(data_root)) == ["a"]


@pytest.mark.parametrize("how", ["made", "foreign"])
def test_record_of_another_size_than_its_files_is_not_packed(data_root, how):
    """A ledger row proves that a file is valid, but not that a record describes it correctly."""
    if how == "made":
        stage2(data_root, "a", size=(32, 24))
    else:
        foreign(data_root, record_of("a"))
        assert ids(look(data_root)) == ["a"]
    rewrite(data_root, lambda record: {**record, "height": 32, "width": 24})

    found = look(data_root)

    assert reasons(found) == {"a": "wrong_shape"}


def test_files_of_a_replaced_image_are_stale_until_they_are_made_again(data_root):
    stage2(data_root, "a", "b")
    picture(data_root.approved / "a.png")
    embed(data_root, VAE)

    found = look(data_root)
    assert ids(found) == ["b"]
    assert reasons(found) == {"a": "stale"}
    assert "earlier image" in found.problems[0].detail

    embed(data_root, DINOV3)
    assert ids(look(data_root)) == ["a", "b"]


def test_hidden_states_of_an_edited_caption_are_stale(data_root):
    stage2(data_root, "a")
    (data_root.approved / "a.txt").write_text("other words")
    embed(data_root, T5)

    assert reasons(look(data_root)) == {"a": "stale"}, "the record still has the earlier caption"
    write_records(data_root)
    assert ids(look(data_root)) == ["a"]


def test_vanished_image_stays_ready(data_root):
    """A vanished source makes nothing stale. Spec: docs/spec/conventions.md#completion-and-identity"""
    stage2(data_root, "a")
    (data_root.approved / "a.png").unlink()
    (data_root.approved / "a.txt").unlink()
    write_records(data_root)

    assert ids(look(data_root)) == ["a"]


def test_touched_file_keeps_its_maker(data_root):
    """Equal bytes are the same file, regardless of its times."""
    stage2(data_root, "a")
    os.utime(npy(data_root, VAE, "a"), ns=(7, 7))

    (sample,) = look(data_root).ready

    identity = identity_of(data_root, VAE.kind)
    assert identity
    assert sample.files[1].model_key == identity.key


def test_touched_file_of_a_replaced_image_is_still_stale(data_root):
    stage2(data_root, "a")
    picture(data_root.approved / "a.png")
    embed(data_root, VAE)
    os.utime(npy(data_root, DINOV3, "a"), ns=(7, 7))

    assert reasons(look(data_root)) == {"a": "stale"}


def test_file_that_cannot_be_read_fails_its_sample_alone(data_root, monkeypatch):
    """Disk errors are failures, not refusals, and never affect other samples."""
    foreign(data_root, record_of("a"), record_of("b"))
    check = NpyStore.check

    def fail(self, image_id, *size):
        if image_id == "a":
            raise OSError(errno.EIO, "input/output error")
        return check(self, image_id, *size)

    monkeypatch.setattr(NpyStore, "check", fail)
    found = look(data_root)

    assert ids(found) == ["b"]
    assert [(p.item, p.outcome, p.reason) for p in found.problems] == [("a", "failed", "read_error")]


def test_file_replaced_while_records_are_read_is_taken_as_it_is_now(data_root, monkeypatch):
    """A pass of another process publishes between listing and reading."""
    stage2(data_root, "a")
    store = NpyStore(data_root.derived / VAE.folder, VAE)
    os.utime(store.path("a"), ns=(7, 7))
    check = NpyStore.check

    def replaced_meanwhile(self, image_id, *size):
        monkeypatch.setattr(NpyStore, "check", check)
        store.path("a").unlink()
        photos(data_root, "a")
        embed(data_root)
        write_records(data_root)
        return "xxh3:of the earlier bytes"

    monkeypatch.setattr(NpyStore, "check", replaced_meanwhile)
    with Ledger(data_root.ledger) as ledger:
        found = find_ready(data_root.stage2_jsonl, data_root.derived, ledger, buckets=BUCKETS)

    for sample in found.ready:
        assert sample.files[1].stat == store.stat("a")
        assert sample.files[1].content == fingerprint(store.path("a").read_bytes())


def test_rows_are_read_while_another_process_lists_the_files(data_root, monkeypatch):
    """A file that is replaced after its row was read, and before it is listed, is checked again."""
    stage2(data_root, "a", "b", "c")
    alone, order = look(data_root), []
    start, rows = readiness.start_listing, KindFiles.rows

    def read(kind, ids):
        order.append("read")
        return rows(kind, ids)

    def started(*given):
        yield from order.append("listed") or start(*given)

    monkeypatch.setattr(readiness, "has_many", lambda jsonl: True)
    monkeypatch.setattr(readiness, "start_listing", started)
    monkeypatch.setattr(KindFiles, "rows", read)

    assert look(data_root) == alone
    assert order == ["read", "read", "read", "listed"]

    def replaced(*given):
        yield from os.utime(npy(data_root, VAE, "b"), ns=(7, 7)) or start(*given)

    monkeypatch.setattr(readiness, "start_listing", replaced)
    found = look(data_root)

    assert ids(found) == ["a", "b", "c"]
    assert [(row.image_id, row.stat) for row in found.adopted] == [("b", file_signature(npy(data_root, VAE, "b")))]


def test_process_that_lists_the_files_is_awaited_without_records(data_root, monkeypatch):
    write_text(data_root.stage2_jsonl, "{")
    listings = iter([FileListing()] * 3)
    monkeypatch.setattr(readiness, "has_many", lambda jsonl: True)
    monkeypatch.setattr(readiness, "start_listing", lambda *given: listings)

    assert look(data_root).skipped_incomplete == 1
    assert list(listings) == []


# ---- progress


def test_progress_during_scan(data_root, capsys):
    """One line is printed for every so many ready records. Spec: docs/spec/shards.md#progress"""
    foreign(data_root, *(record_of(f"r{n}") for n in range(7)))
    (data_root.derived / VAE.folder / "r2.npy").unlink()

    with Ledger(data_root.ledger) as ledger:
        find_ready(
            data_root.stage2_jsonl, data_root.derived, ledger, buckets=BUCKETS, on_ready=progress_lines(2)
        )  # fmt: skip

    assert capsys.readouterr().out.splitlines() == [
        "total_records=7 ready_records=2 skipped_incomplete=0",
        "total_records=7 ready_records=4 skipped_incomplete=1",
        "total_records=7 ready_records=6 skipped_incomplete=1",
    ]


# ---- all of it

names = st.sampled_from(["a", "b", "c", "gone"])
good = st.builds(record_of, names, size=st.just((16, 16)))
bad = st.builds(
    lambda record, change: {**record, **change}, good,
    st.fixed_dictionaries({}, optional={
        "caption": st.none(), "t5_attention_mask": st.just([2]), "height": st.just(10**400), "aspect_bucket": st.just("x"),
        "image_id": st.none() | st.integers() | st.just("../x"),
    }),
)  # fmt: skip
jsonl = st.lists(st.one_of(good.map(json.dumps), bad.map(json.dumps), st.binary(max_size=6)), max_size=8)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    root = DataRoot(tmp_path_factory.mktemp("packed") / "data")
    foreign(root, *(record_of(name, size=(16, 16)) for name in "abc"))
    return root


@settings(deadline=None, max_examples=40)
@given(jsonl, st.lists(st.sampled_from(["1024x1024", "832x1216"]), min_size=1, unique=True))
def test_counters_always_add_up(packed, lines, buckets):
    """total_records = ready_records + skipped_incomplete + filtered, for any bytes."""
    write_text(packed.stage2_jsonl, *lines)

    found = look(packed, *buckets)

    assert adds_up(found)
    assert found.total_records == sum(bool(line.strip()) for line in packed.stage2_jsonl.read_bytes().split(b"\n"))
    assert len(found.problems) == found.skipped_incomplete
    assert len(set(ids(found))) == len(found.ready)
    assert set(ids(found)) <= set("abc")
    assert {sample.bucket for sample in found.ready} <= set(buckets)


USUAL, OTHER = (msgspec.json.encode(record_of(name, size=(16, 16))).decode() for name in "ab")


def respelled(**change):
    """Return the changed record in the form that most programs write."""
    return json.dumps({**json.loads(USUAL), **change})


UNUSUAL = (
    # Other encodings of valid records.
    respelled(), respelled(note={"z": [1, 1e3], "b": "ä\u2028"}), respelled(caption='a "STOP" sign'), respelled(caption="\té"),
    json.dumps(dict(sorted(json.loads(USUAL).items()))), USUAL.replace(',"format_version":2', ""), USUAL + "\r", " " + USUAL,
    USUAL.replace("noise", "\\u00e9"), USUAL.replace("noise", "été"), USUAL.replace(",", ", "), USUAL.replace(":", " :\t"),
    USUAL.replace("}", ',"caption":"another"}'), USUAL.replace("}", ',"height":16,"note":null}'),
    # Ids that are not valid file names, or whose file is missing.
    *(respelled(image_id=image_id) for image_id in ("日本", "", ".", "..", "a/b", "a\\b", "a\tb", "a\u2028b", None, 7)),
    USUAL.replace('"a"', '"日本"'), USUAL.replace('"a"', '"c.d"'),
    # Records that only look valid.
    *(respelled(height=height) for height in (0, -16, 16.0, True, "16", 10**400)), USUAL.replace(":16,", ":1e1,"),
    *(respelled(format_version=version) for version in (1, 2.0, "2", None)), respelled(aspect_bucket="16x16"),
    *(respelled(t5_attention_mask=mask) for mask in ([], [0] * 77, [1.0] * 77, [True] * 77, [0] * 5 + [1] * 72, "[1]")),
    USUAL.replace("[1,", "[2,"), respelled(caption=" \u00a0"), respelled(image_path="\u3000"), USUAL.replace("noise", "\x7f"),
    USUAL.replace("noise", "\u00a0"), USUAL.replace("data/approved/a.png", "\u3000"),
    respelled(dinov3_embedding=None), '{"image_path": "x.jpg", "caption": "x"}',
    # Lines that are not records.
    "", " \r", "\ufeff" + USUAL, "{", "[]", "null", "x" + USUAL, USUAL + USUAL, USUAL[:-1], USUAL[:-1] + ",", USUAL[1:],
    *(USUAL.replace("}", f',"note":{value}}}') for value in ("NaN", "1e999", '"\\ud800"', '"\x01"', "[" * 2000)),
    USUAL.encode().replace(b"noise", b"\xff"), USUAL.encode().replace(b"}", b',"note":"\xff"}'),
)  # fmt: skip


def canonical_record(raw):
    """Return the typed record of a line that is ready without `violations`."""
    found = decode_canonical(raw + b"\n", DECODER)[0]
    return None if isinstance(found, bytes) or not is_plain(found, usual_masks()) else found


@pytest.mark.parametrize("line", UNUSUAL)
def test_canonical_record_is_valid(line):
    """It may leave any line to `violations`."""
    raw = line if isinstance(line, bytes) else line.encode()

    if found := canonical_record(raw):
        record = parse_object(raw) or {}
        assert violations(record) == []
        assert json.loads(encode_sorted(found)) == record


def test_line_of_this_program_is_canonical():
    assert canonical_record(USUAL.encode())


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.one_of(st.sampled_from([USUAL, OTHER]), st.sampled_from(UNUSUAL)), max_size=6),
    st.booleans(),
)
def test_canonical_lines_are_packed_as_decoded_ones(packed, lines, ended):
    """The outcome does not depend on the surrounding lines."""
    write_text(packed.stage2_jsonl, *lines)
    if not ended:
        packed.stage2_jsonl.write_bytes(packed.stage2_jsonl.read_bytes().removesuffix(b"\n"))
    with pytest.MonkeyPatch.context() as patched:
        looked = look(packed)
        patched.setattr(readiness, "is_plain", lambda record, masks: False)
        decoded = look(packed)

    assert [(s.image_id, s.bucket, s.record, s.mask, tuple(s.files)) for s in looked.ready] == [
        (s.image_id, s.bucket, s.record, s.mask, tuple(s.files)) for s in decoded.ready
    ]
    assert looked.problems == decoded.problems
    assert (looked.total_records, looked.filtered) == (decoded.total_records, decoded.filtered)


FOUR = ("a", "b", "c", "d")


def spoiled(root):
    """Write four samples with this program, two of which have files that do not match their ledger rows."""
    stage2(root, *FOUR)
    npy(root, VAE, "b").write_bytes(b"no npy")
    npy(root, T5, "c").unlink()
    npy(root, DINOV3, "stranger").write_bytes(b"no npy")
    return root


@pytest.fixture(scope="module")
def shared_root(tmp_path_factory):
    root = DataRoot(tmp_path_factory.mktemp("made") / "data")
    root.approved.mkdir(parents=True)
    return spoiled(root)


@settings(deadline=None, max_examples=30)
@given(st.permutations(FOUR), st.integers(0, 4), st.sampled_from([json.dumps, msgspec.json.encode]))
def test_order_and_company_of_records_change_no_verdict(shared_root, order, count, spell):
    """Each record has the same outcome alone."""
    records = {name: spell(record_of(name, caption=f"noise called {name}", size=(32, 24))) for name in FOUR}
    chosen = order[:count]

    together = verdicts(shared_root, [records[name] for name in chosen])

    alone = [verdicts(shared_root, [records[name]]) for name in chosen]
    assert [sample for one in alone for sample in one[0]] == together[0]
    assert {item: why for one in alone for item, why in one[1].items()} == together[1]
    assert {"a", "d"} & set(chosen) == {sample[0] for sample in together[0]}


def verdicts(root, lines):
    write_text(root.stage2_jsonl, *lines)
    found = look(root)
    return [(s.image_id, s.record, tuple(s.files)) for s in found.ready], {p.item: p for p in found.problems}


def test_only_a_file_that_the_ledger_does_not_know_is_read(data_root, monkeypatch):
    """Reordered records, and additional or missing records and files make no difference."""
    spoiled(data_root)
    lines = data_root.stage2_jsonl.read_bytes().splitlines()
    write_text(data_root.stage2_jsonl, *lines[::-1][:3])
    read, check = [], NpyStore.check
    monkeypatch.setattr(NpyStore, "check", lambda self, name, *size: read.append(name) or check(self, name, *size))

    found = look(data_root)

    assert ids(found) == ["d"]
    assert read == ["b"]


def test_image_without_a_file_of_every_kind_has_no_file_read(data_root, monkeypatch):
    """An image that waits for its caption has no hidden state and no record."""
    photos(data_root, "A", captions=False)
    stage2(data_root, "a", "b", "c")

    monkeypatch.setattr(NpyStore, "check", lambda *_: pytest.fail("a file is read"))
    found = look(data_root)

    assert ids(found) == ["a", "b", "c"]
    assert [{file.image_id for file in sample.files} for sample in found.ready] == [{"a"}, {"b"}, {"c"}]


# ---- near duplicates


def test_image_that_another_one_stands_for_is_skipped_where_asked(data_root):
    """It is counted like every other record that is not packed."""
    stage2(data_root, "a", "b")
    stage2(data_root, "tall", size=(24, 36))
    with Ledger(data_root.ledger) as ledger:
        found = find_ready(
            data_root.stage2_jsonl, data_root.derived, ledger, buckets=["1216x832"],
            excluded={"b": "cosine 0.9900 to a", "tall": "cosine 0.9800 to a", "gone": "cosine 1.0000 to a"},
        )  # fmt: skip

    assert ids(found) == ["a"]
    assert (found.skipped_incomplete, found.filtered) == (1, 1)
    assert adds_up(found)
    (problem,) = found.problems
    assert (problem.item, problem.outcome, problem.reason) == ("b", "refused", "near_duplicate")
    assert problem.detail == "cosine 0.9900 to a"
    assert "near_duplicates.exclude: false" in problem.remedy


@pytest.mark.parametrize("inline", [True, False], ids=["with its vector", "without"])
def test_stage_1_record_waits_for_its_migration(data_root, inline):
    """It is not missing a field by mistake: its reason and remedy name the migration."""
    record = stage1_record(0)
    if not inline:
        del record["dinov3_embedding"]
    write_text(data_root.stage2_jsonl, json.dumps(record))

    found = look(data_root)

    (problem,) = found.problems
    assert (problem.reason, found.skipped_incomplete) == ("stage1", 1)
    assert "imagemill run" in problem.remedy


@pytest.mark.parametrize("allowed", [False, True])
def test_caption_of_a_preview_model_is_packed_only_where_that_is_allowed(data_root, allowed):
    """Spec: docs/spec/shards.md#preview-captions"""
    stage2(data_root, "a", "b")
    with Ledger(data_root.ledger) as ledger:
        rows = {row.image_id: row for row in ledger.captions().values()}
        ledger.record_captions([msgspec.structs.replace(rows["a"], origin="preview captioner")])
        found = find_ready(data_root.stage2_jsonl, data_root.derived, ledger, buckets=BUCKETS, allow_preview=allowed)

    assert ids(found) == (["a", "b"] if allowed else ["b"])
    assert [(p.item, p.reason) for p in found.problems] == ([] if allowed else [("a", "preview_caption")])


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from(["..", ".", "/", "\\", "a", "\0", "\n", "victim"]), min_size=1, max_size=6).map("".join)
)
def test_record_whose_id_would_leave_the_folder_is_refused(tmp_path_factory, image_id):
    """Its files are not accessed, and nothing of it is packed."""
    root = DataRoot(tmp_path_factory.mktemp("ids") / "data")
    write_text(root.stage2_jsonl, json.dumps(record_of("a") | {"image_id": image_id}))
    found = ready(root, BUCKETS)

    assert not found.ready
    (problem,) = found.problems
    plain = not set(image_id) & set("/\\\0\n") and image_id not in {".", ".."}
    assert problem.reason == ("missing_file" if plain else "bad_image_id")
