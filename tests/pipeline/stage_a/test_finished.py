"""Finished summaries, kept from run to run. Source: CONTRACTS section 5 "Resume"; section 0 "Completion is validity"."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.files import posix_signature
from imagemill.formats.jsonl import encode_line, read_jsonl
from imagemill.pipeline.stage_a import finished
from imagemill.pipeline.stage_a.finished import (
    ADOPTED,
    COMPACTED,
    KEPT_PER_IMAGE,
    Finished,
    FinishedIndex,
    Keeper,
    compact,
    summary_fingerprint,
)
from imagemill.pipeline.stage_a.rank_files import rank_file
from tests.pipeline.stage_a.test_rank_files import line

STAT = posix_signature(10, 20, 30)


@pytest.fixture
def any_size(monkeypatch):
    monkeypatch.setattr(finished, "SMALL_BYTES", 0)


def write(store, name, *rows):
    store.mkdir(exist_ok=True)
    (store / name).write_bytes(b"".join(map(encode_line, rows)))


def row(known_by, at, image="a", summary=None, **fields):
    return Finished(fingerprint=known_by, summary=summary or f"{known_by} {at}", image=image, at=at, **fields)


def index_of(store, output=None):
    index = FinishedIndex()
    index.read_all(store, output or store / "none", "m")
    return index


def test_summary_is_known_by_name_bytes_and_summarizer():
    base = ("1.jpg", "xxh3:0", "model")

    assert summary_fingerprint(*base) == summary_fingerprint(*base)
    for place in range(3):
        other = [*base]
        other[place] += "x"
        assert summary_fingerprint(*other) != summary_fingerprint(*base)


def test_kept_summary_is_found_by_fingerprint_and_its_file_by_stat(tmp_path):
    with Keeper(tmp_path, 3) as keeper:
        keeper.keep("pass/x/1.jpg", STAT, "content", "known", "甲")

    with index_of(tmp_path) as index:
        assert index.summary("known") == "甲"
        assert index.summary("other") is None
        assert index.content("pass/x/1.jpg", STAT) == "content"
        assert index.content("pass/x/1.jpg", posix_signature(10, 21, 30)) is None
        assert index.content("pass/x/2.jpg", STAT) is None
    assert [path.name for path in tmp_path.iterdir()] == ["rank3.jsonl"]


def test_equal_hashes_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(finished, "_hash", lambda text: 0)
    write(tmp_path, "rank0.jsonl", row("k", 1, stat=STAT, content="content"))

    with index_of(tmp_path) as index:
        assert (index.summary("other"), index.content("b", STAT)) == (None, None)
        assert (index.summary("k"), index.content("a", STAT)) == ("k 1", "content")


def test_newest_summary_counts_whichever_file_holds_it(tmp_path):
    write(tmp_path, "rank0.jsonl", row("k", 9), row("k", 4))
    write(tmp_path, "rank1.jsonl", row("k", 7))

    with index_of(tmp_path) as index:
        assert index.summary("k") == "k 9"


def test_lines_of_rank_files_count_where_the_store_has_none(tmp_path):
    """Source: CONTRACTS section 0, "left after `.imagemill/` was lost"."""
    store, output = tmp_path / "store", tmp_path / "output"
    write(store, "rank0.jsonl", row("both", 1))
    write(
        output, rank_file(output, "m", 5).name,
        line(1, fingerprint="both", summary="old"), line(2, fingerprint="lost", summary="乙"),
        line(3, fingerprint="failed", ok=False), line(4, fingerprint="", summary="nothing"),
    )  # fmt: skip

    with index_of(store, output) as index:
        assert [index.summary(key) for key in ("both", "lost", "failed", "")] == ["both 1", "乙", None, None]
        with Keeper(store, 5) as keeper:
            keeper.adopt(rank_file(output, "m", 5), index)

    assert [(each.value["fingerprint"], each.value["at"]) for each in read_jsonl(store / "rank5.jsonl")] == [
        ("lost", ADOPTED)
    ]


def test_damaged_lines_are_passed_over(tmp_path):
    good = encode_line(row("k", 1))
    (tmp_path / "rank0.jsonl").write_bytes(
        b'null\n{"fingerprint":"k","summary":"a\\nb","at":5}\n\xff\n{"fingerprint":"k","summary":"x","at":-1}\n'
        + b'{"fingerprint":"k","summary":"x","at":99999999999999999999}\n' + good + good[:20]
    )  # fmt: skip

    with index_of(tmp_path) as index:
        assert index.summary("k") == "k 1"


def test_store_that_is_not_there_knows_nothing(tmp_path):
    with index_of(tmp_path / "none") as index:
        assert index.summary("k") is None
        assert index.content("a", STAT) is None
    assert compact(tmp_path / "none") is False


def test_replaced_file_is_still_read_as_it_was(tmp_path):
    """A rank replaces its own file while its index still points into the old one."""
    write(tmp_path, "rank0.jsonl", row("k", 1))
    with index_of(tmp_path) as index:
        (tmp_path / "rank0.jsonl").unlink()
        write(tmp_path, "rank0.jsonl", row("other", 2))

        assert index.summary("k") == "k 1"


def test_compaction_waits_until_as_much_was_appended_as_is_held(tmp_path):
    write(tmp_path, COMPACTED, *(row(f"k{n}", n, image=f"i{n}") for n in range(5000)))
    write(tmp_path, "rank0.jsonl", row("k1", 7000))

    assert compact(tmp_path) is False
    assert (tmp_path / "rank0.jsonl").exists()


rows = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from("kmnopqrst"), st.integers(1, 1000)), unique_by=lambda r: r[2]
)


@given(rows, rows)
def test_compaction_keeps_the_newest_few_of_each_image(tmp_path_factory, one, other):
    """What is kept does not depend on the file it was in."""
    store = tmp_path_factory.mktemp("store")
    write(store, "rank0.jsonl", *(row(key, at, image=image) for image, key, at in one))
    write(store, "rank1.jsonl", *(row(key, 2000 + at, image=image) for image, key, at in other))
    newest = {}
    for image, key, at in sorted([*one, *((i, k, 2000 + at) for i, k, at in other)], key=lambda r: r[2]):
        newest[key] = (image, at)
    expected = set()
    for wanted in "abc":
        mine = sorted(((at, key) for key, (image, at) in newest.items() if image == wanted), reverse=True)
        expected |= {key for _, key in mine[:KEPT_PER_IMAGE]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finished, "SMALL_BYTES", 0)
        assert bool(one or other) is compact(store)
        assert compact(store) is False

    with index_of(store) as index:
        found = {key: index.summary(key) for key in "kmnopqrst"}
    assert {key: f"{key} {newest[key][1]}" for key in expected} == {key: text for key, text in found.items() if text}
    assert len(expected) == sum(len(list(read_jsonl(path))) for path in store.glob(f"*{COMPACTED}"))


def test_compaction_leaves_one_file(tmp_path, any_size):
    write(tmp_path, COMPACTED, row("k", 1))
    write(tmp_path, "rank0.jsonl", row("k", 2), row("k", 3))

    assert compact(tmp_path) is True
    assert [path.name for path in tmp_path.iterdir()] == [COMPACTED]
    assert [each.value["summary"] for each in read_jsonl(tmp_path / COMPACTED)] == ["k 3"]
