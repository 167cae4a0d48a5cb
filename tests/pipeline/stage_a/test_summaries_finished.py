"""Finished summaries, kept between runs.

Spec: docs/spec/conventions.md#completion, docs/spec/stage-a.md#reuse-of-summaries
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.formats.jsonl import encode_line, read_jsonl
from imagemill.fs.fingerprints import posix_signature
from imagemill.pipeline.stage_a import summaries
from imagemill.pipeline.stage_a.rank_files import rank_file
from imagemill.pipeline.stage_a.summaries import (
    ADOPTED,
    KEPT_PER_IMAGE,
    SNAPSHOT,
    KnownSummaries,
    import_summaries,
    summary_fingerprint,
)
from imagemill.store.ledger import FinishedSummary, Ledger
from tests.pipeline.stage_a.test_rank_files import line

STAT = posix_signature(10, 20, 30)


def write(store, name, *rows):
    store.mkdir(exist_ok=True)
    (store / name).write_bytes(b"".join(map(encode_line, rows)))


def row(known_by, at, image="a", summary=None, **fields):
    return FinishedSummary(
        fingerprint=known_by, summary=summary or f"{known_by} {at}", image=image, at=at, mission="m", **fields
    )


def known(store):
    return KnownSummaries([store / SNAPSHOT])


def text(index, wanted):
    found = index.find(wanted)
    return found.summary if found else None


def imported(store, output=None, ledger=None):
    """Import into the ledger of a data root beside the store; return its rows."""
    with Ledger(ledger or store.parent / "ledger.sqlite") as opened:
        import_summaries(opened, "m", output or store / "none", store)
        return list(opened.summaries("m"))


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


def test_summary_is_identified_by_name_bytes_and_summarizer():
    base = ("1.jpg", "xxh3:0", "model")

    assert summary_fingerprint(*base) == summary_fingerprint(*base)
    for place in range(3):
        other = [*base]
        other[place] += "x"
        assert summary_fingerprint(*other) != summary_fingerprint(*base)


def test_summary_is_found_by_fingerprint_and_its_file_by_stat(store):
    write(store, SNAPSHOT, row("known", 1, image="pass/x/1.jpg", stat=STAT, content="content", summary="甲"))

    with known(store) as index:
        assert text(index, "known") == "甲"
        assert text(index, "other") is None
        assert index.content("pass/x/1.jpg", STAT) == "content"
        assert index.content("pass/x/1.jpg", posix_signature(10, 21, 30)) is None
        assert index.content("pass/x/2.jpg", STAT) is None


def test_summaries_with_equal_hashes_are_distinguished(store, monkeypatch):
    monkeypatch.setattr(summaries, "hash", lambda _: 0, raising=False)
    write(store, SNAPSHOT, row("k", 1, stat=STAT, content="content"))

    with known(store) as index:
        assert (text(index, "other"), index.content("b", STAT)) == (None, None)
        assert (text(index, "k"), index.content("a", STAT)) == ("k 1", "content")


def test_newest_summary_is_used_from_any_file(store):
    write(store, "rank0.jsonl", row("k", 9), row("k", 4))
    write(store, "rank1.jsonl", row("k", 7))
    write(store, SNAPSHOT, row("k", 8))

    assert imported(store) == [row("k", 9)]
    with known(store) as index:
        assert text(index, "k") == "k 9"


def test_lines_of_rank_files_are_used_if_the_store_has_none(tmp_path, store):
    """Lines of earlier releases have no timestamp. Spec: docs/spec/conventions.md#adoption"""
    output = tmp_path / "output"
    write(store, "rank0.jsonl", row("both", 2))
    write(
        output, rank_file(output, "m", 5).name,
        line(1, fingerprint="both", summary="old"), line(2, fingerprint="lost", summary="乙"),
        line(3, fingerprint="failed", ok=False), line(4, fingerprint="", summary="nothing"),
    )  # fmt: skip

    rows = imported(store, output)

    assert [(each.fingerprint, each.summary, each.at) for each in rows] == [
        ("lost", "乙", ADOPTED),
        ("both", "both 2", 2),
    ]
    with known(store) as index:
        assert [text(index, key) for key in ("both", "lost", "failed", "")] == ["both 2", "乙", None, None]


def test_line_of_a_rank_file_contains_the_state_of_the_image(tmp_path, store):
    """The rank that read the file has written its signature to the line."""
    output = tmp_path / "output"
    write(
        output, rank_file(output, "m", 0).name,
        line(1, fingerprint="k", summary="甲", image="pass/x/1.jpg", stat=STAT, content="content", at=7),
    )  # fmt: skip

    assert imported(store, output) == [row("k", 7, image="pass/x/1.jpg", stat=STAT, content="content", summary="甲")]
    with known(store) as index:
        assert index.content("pass/x/1.jpg", STAT) == "content"


def test_older_line_of_a_rank_file_does_not_replace_a_newer_summary(tmp_path, store):
    """A rank file can outlive several later runs."""
    output = tmp_path / "output"
    write(store, "rank0.jsonl", row("k", 9))
    write(output, rank_file(output, "m", 3).name, line(1, fingerprint="k", summary="old", image="a", at=5))

    assert imported(store, output) == imported(store, output) == [row("k", 9)]


def test_damaged_lines_are_skipped(store):
    good = encode_line(row("k", 1))
    write(store, SNAPSHOT)
    (store / SNAPSHOT).write_bytes(
        b'null\n{"fingerprint":"k","summary":"a\\nb","at":5}\n\xff\n{"fingerprint":"k","summary":"x","at":-1}\n'
        + b'{"fingerprint":"k","summary":"x","at":99999999999999999999}\n' + good + good[:20]
    )  # fmt: skip

    with known(store) as index:
        assert text(index, "k") == "k 1"
    assert imported(store) == [row("k", 1)]


def test_missing_store_is_empty(store):
    with known(store) as index:
        assert text(index, "k") is None
        assert index.content("a", STAT) is None
    assert imported(store) == []
    assert not store.exists()


def test_open_file_is_read_unchanged_after_its_replacement(store):
    """A rank replaces its own file while its index still refers to the old one."""
    write(store, SNAPSHOT, row("k", 1))
    with known(store) as index:
        (store / SNAPSHOT).unlink()
        write(store, SNAPSHOT, row("other", 2))

        assert text(index, "k") == "k 1"


kept = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from("kmnopqrst"), st.integers(1, 1000)), unique_by=lambda r: r[2]
)


@given(kept, kept)
def test_compaction_keeps_the_newest_few_summaries_of_each_image(tmp_path_factory, one, other):
    """The file that contained a summary makes no difference."""
    store = tmp_path_factory.mktemp("root") / "store"
    write(store, "rank0.jsonl", *(row(key, at, image=image) for image, key, at in one))
    write(store, "rank1.jsonl", *(row(key, 2000 + at, image=image) for image, key, at in other))
    newest = {}
    for image, key, at in sorted([*one, *((i, k, 2000 + at) for i, k, at in other)], key=lambda r: r[2]):
        newest[key] = (image, at)
    expected = set()
    for wanted in "abc":
        mine = sorted(((at, key) for key, (image, at) in newest.items() if image == wanted), reverse=True)
        expected |= {key for _, key in mine[:KEPT_PER_IMAGE]}

    imported(store)

    with known(store) as index:
        found = {key: text(index, key) for key in "kmnopqrst"}
    assert {key: f"{key} {newest[key][1]}" for key in expected} == {key: text for key, text in found.items() if text}
    assert len(expected) == sum(len(list(read_jsonl(path))) for path in store.glob(f"*{SNAPSHOT}"))


def test_equal_images_with_one_name_are_both_kept_with_their_state(store):
    """They are two files with one fingerprint."""
    rows = [row("k", at, image=image, stat=STAT, content="content", summary="甲") for at, image in enumerate("ab", 1)]
    write(store, "rank0.jsonl", *rows)

    assert imported(store) == rows


# ---- files of earlier releases, kills, a lost ledger


def test_files_of_an_earlier_release_are_removed_once_imported(store):
    write(store, SNAPSHOT, row("old", 1, image="b"))
    write(store, "rank0.jsonl", row("k", 2), row("k", 3))

    assert imported(store) == [row("old", 1, image="b"), row("k", 3)]
    assert [path.name for path in store.iterdir()] == [SNAPSHOT]
    assert [each.value["summary"] for each in read_jsonl(store / SNAPSHOT)] == ["old 1", "k 3"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", ["before the snapshot", "before the commit", "before the files are removed"])
def test_killed_import_loses_nothing_and_is_resumed(store, monkeypatch, moment):
    write(store, SNAPSHOT, row("old", 1, image="b"))
    write(store, "rank0.jsonl", row("k", 2))
    write_jsonl, unlink = summaries.write_jsonl, summaries.Path.unlink

    def killed_at_snapshot(*given):
        if moment == "before the commit":
            write_jsonl(*given)
        raise Killed

    def killed_at_removal(path, **given):
        if path.parent == store and path.suffix == ".jsonl":
            raise Killed
        unlink(path, **given)

    with monkeypatch.context() as patch:
        if moment == "before the files are removed":
            patch.setattr(summaries.Path, "unlink", killed_at_removal)
        else:
            patch.setattr(summaries, "write_jsonl", killed_at_snapshot)
        with pytest.raises(Killed):
            imported(store)
    assert (store / "rank0.jsonl").exists()

    assert imported(store) == [row("old", 1, image="b"), row("k", 2)]
    with known(store) as index:
        assert [text(index, key) for key in ("old", "k")] == ["old 1", "k 2"]


def test_lost_ledger_and_lost_snapshot_are_rebuilt_from_each_other(tmp_path, store):
    """ "Finished summaries are also kept in `.imagemill/`": each copy suffices."""
    write(store, "rank0.jsonl", row("k", 2), row("other", 3, image="b"))
    before = imported(store)

    (store / SNAPSHOT).unlink()
    assert imported(store) == before
    assert imported(store, ledger=tmp_path / "new.sqlite") == before


def test_ledger_from_a_backup_imports_summaries_found_only_in_the_snapshot(tmp_path, store):
    write(store, "rank0.jsonl", row("k", 2))
    imported(store)
    write(store, "rank0.jsonl", row("later", 3, image="b"))
    imported(store, ledger=tmp_path / "other.sqlite")
    write(store, "rank0.jsonl", row("latest", 4, image="c"))

    assert [each.fingerprint for each in imported(store)] == ["k", "later", "latest"]


def test_import_without_new_summaries_does_not_change_the_snapshot(store):
    write(store, "rank0.jsonl", row("k", 2))
    imported(store)
    before = (store / SNAPSHOT).stat()

    imported(store)

    after = (store / SNAPSHOT).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_missions_do_not_share_summaries(tmp_path, store):
    write(store, "rank0.jsonl", row("k", 2))
    imported(store)

    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        import_summaries(ledger, "other", tmp_path / "none", tmp_path / "other")
        assert not ledger.has_summaries("other")
        assert ledger.has_summaries("m")
