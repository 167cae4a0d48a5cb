"""The ledger stores rows completely, and finds files by their signature on disk."""

import contextlib
import gc
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagemill.errors import ImagemillError
from imagemill.fs.fingerprints import posix_signature
from imagemill.store.ledger import IN_MEMORY, Captioned, CaptionRow, FileRow, Ledger, Problem, SourceRow
from imagemill.store.ledger.table import in_statements
from tests.helpers.earlier_release import undo_version_14

IDS = st.text("aé\"\\'%", min_size=1, max_size=3)
OLD, NEW = posix_signature(10, 1, 100), posix_signature(10, 2, 101)


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "state" / "ledger.sqlite") as ledger:
        yield ledger


def file_row(stat, source="s1", image_id="a"):
    return FileRow("dinov3_npy", image_id, stat, source, "c", "model")


def test_rows_come_back_as_they_were_recorded(ledger):
    """Every typed row survives the round trip, including masks and missing stats."""
    source = SourceRow("ü.b", "ü.b.jpg", OLD, "xxh3:1", 30, 40)
    caption = CaptionRow("ü.b", None, "two\u2028words", "record", "xxh3:2", "1" * 76 + "0", True)
    problem = Problem(
        "x.gif", "approved_images", "refused", "unsupported_type", "d", "r", None, "run", "2026-01-01T00:00:00+00:00"
    )

    ledger.record_sources([source])
    ledger.record_captions([caption])
    ledger.record_files([file_row(OLD, None)])
    ledger.record_problems([problem])

    assert ledger.sources() == {"ü.b": source}
    assert ledger.captions() == {"ü.b": caption}
    assert ledger.files("dinov3_npy") == {("a", OLD): file_row(OLD, None)}
    assert ledger.problems() == [problem]


def test_files_made_from_an_input_are_found_without_reading_the_others(ledger):
    ledger.record_files(file_row(OLD, f"s{n}", f"{n}") for n in range(2000))
    steps = []
    ledger._db.set_progress_handler(lambda: steps.append(1), 100)

    found = list(ledger.files_of_inputs("dinov3_npy", ["s7", "s70", "none"]))

    assert found == [file_row(OLD, "s7", "7"), file_row(OLD, "s70", "70")]
    assert len(steps) < 10


def test_images_with_some_bytes_are_found_without_reading_the_others(ledger):
    rows = [SourceRow(f"{n}", f"{n}.jpg", OLD, f"s{n // 2}", 30, 40) for n in range(2000)]
    ledger.record_sources(rows)
    steps = []
    ledger._db.set_progress_handler(lambda: steps.append(1), 100)

    found = ledger.sources_with(["s7", "none"])

    assert found == {"14": rows[14], "15": rows[15]}
    assert len(steps) < 10


_SOME = st.sampled_from("ab")
_CHANGES = st.one_of(
    st.tuples(st.just("image"), _SOME, _SOME),
    st.tuples(st.just("file"), _SOME, st.sampled_from(["a", "b", None])),
    st.tuples(st.sampled_from(["no image", "supersede", "restore", "no files", "replace"]), _SOME, _SOME),
)


def _change(ledger, what, image_id, fingerprint, number):
    row = file_row(posix_signature(number, 1, 1), fingerprint, image_id)
    match what:
        case "image":
            ledger.record_sources([SourceRow(image_id, f"{image_id}.jpg", OLD, fingerprint, 30, 40)])
        case "file":
            ledger.record_files([row])
        case "replace":
            ledger.record_files([row])
            ledger.forget_superseded([row])
        case "no image":
            ledger.forget_sources([image_id])
        case "supersede":
            ledger.supersede_files("dinov3_npy", "state")
        case "restore":
            ledger.restore_superseded("dinov3_npy")
        case "no files":
            ledger.forget_files("dinov3_npy")


@given(st.lists(_CHANGES, max_size=12))
@settings(max_examples=200, deadline=None)
def test_what_has_an_input_is_found_after_any_changes(changes):
    with Ledger(IN_MEMORY) as ledger:
        for number, change in enumerate(changes):
            _change(ledger, *change, number)
        files = list(ledger.file_rows("dinov3_npy"))
        images = ledger.sources()
        for inputs in (["a"], ["b"], ["a", "b"], ["c"], []):
            found = list(ledger.files_of_inputs("dinov3_npy", inputs))
            assert sorted(found, key=repr) == sorted((r for r in files if r.source in inputs), key=repr)
            assert list(ledger.files_of_inputs("vae_latents", inputs)) == []
            assert ledger.sources_with(inputs) == {i: r for i, r in images.items() if r.fingerprint in inputs}


def test_input_that_is_known_changes_no_page(ledger):
    """Keys are random: without this, a run over many images writes a page per image and kind."""
    ledger.record_files([file_row(OLD)])
    before = ledger._db.total_changes

    ledger._add_inputs([("s1", "a")])
    assert ledger._db.total_changes == before

    ledger._add_inputs([("s1", "a"), ("s2", "a")])
    assert ledger._db.total_changes == before + 1


def test_ledger_of_version_13_finds_inputs_after_its_upgrade(ledger):
    ledger.record_sources([SourceRow("a", "a.jpg", OLD, "s1", 30, 40)])
    ledger.record_files([file_row(OLD, "s2"), file_row(OLD, None, "b"), file_row(OLD, "s3", "c")])
    ledger.supersede_files("dinov3_npy", "state")
    ledger.record_files([msgspec.structs.replace(file_row(NEW, "s2", "b"), kind="vae_latents")])
    ledger.close()
    with contextlib.closing(sqlite3.connect(ledger.path)) as db:
        undo_version_14(db)
        db.execute("PRAGMA user_version = 13")
        db.commit()

    with Ledger(ledger.path) as upgraded:
        assert list(upgraded.sources_with(["s1"])) == ["a"]
        assert [row.image_id for row in upgraded.files_of_inputs("vae_latents", ["s2"])] == ["b"]
        assert upgraded.restore_superseded("dinov3_npy") == 3
        assert [row.image_id for row in upgraded.files_of_inputs("dinov3_npy", ["s2", "s3"])] == ["a", "c"]
        indexes = {name for (name,) in upgraded._rows("SELECT name FROM sqlite_master WHERE type = 'index'")}
        assert not indexes & {"files_by_input", "sources_by_content"}


def test_caption_of_an_earlier_image_is_outdated(ledger):
    ledger.record_sources([SourceRow("a", "a.jpg", OLD, "xxh3:1", 30, 40)])
    ledger.record_captions(
        [
            CaptionRow("a", None, "words", "captioner", "xxh3:2", "1110", True),
            CaptionRow("b", None, "others", "sidecar", "xxh3:3"),
        ]
    )
    ledger.record_captioned([Captioned("a", "xxh3:earlier", "model")])

    assert ledger.captions().keys() == ledger.caption_fingerprints("a", "b").keys() == {"b"}
    assert list(ledger.source_files()) == [("a", "a.jpg")]


def test_new_file_is_known_beside_the_old_until_it_has_its_name(ledger):
    """A kill between commit and rename leaves the old file with its old row."""
    ledger.record_files([file_row(OLD, "old")])
    ledger.record_files([file_row(NEW, "new")])

    assert {row.source for row in ledger.files("dinov3_npy").values()} == {"old", "new"}

    ledger.forget_superseded([file_row(NEW, "new")])
    assert ledger.files("dinov3_npy") == {("a", NEW): file_row(NEW, "new")}


def test_earlier_row_of_a_replaced_link_is_forgotten_although_the_linked_file_stays(ledger):
    """Links to one file have one signature, so a row is superseded by image and signature together."""
    linked = [file_row(OLD, image_id="a"), file_row(OLD, image_id="b")]
    made = [file_row(NEW, image_id="a"), *linked[1:]]
    ledger.record_files(linked)
    ledger.record_files(made)

    ledger.forget_superseded(made)
    assert ledger.files("dinov3_npy") == {("a", NEW): made[0], ("b", OLD): made[1]}


@given(st.lists(st.tuples(st.integers(), st.none() | st.text()), max_size=1500))
@settings(max_examples=50, deadline=None)
def test_many_rows_of_a_statement_are_inserted_as_one_by_one(rows):
    """Each row after the other, so of two with one key the condition compares the second with the first."""
    insert = "INSERT INTO t (k, v) VALUES (?, ?) ON CONFLICT (k) DO UPDATE SET v = excluded.v WHERE v IS NOT excluded.v"
    rows = [(k % 50, v) for k, v in rows]
    found = []
    for together in (False, True):
        with contextlib.closing(sqlite3.connect(":memory:")) as db:
            db.execute("CREATE TABLE t (k INTEGER PRIMARY KEY, v)")
            if together:
                statements = list(in_statements(insert, rows))
                assert len(statements) == -(-len(rows) // (999 // 2))
                changed = sum(db.execute(*statement).rowcount for statement in statements)
            else:
                changed = sum(db.execute(insert, row).rowcount for row in rows)
            found.append((changed, db.execute("SELECT * FROM t").fetchall()))
    assert found[0] == found[1]


def test_mask_of_an_earlier_caption_is_not_recorded(ledger):
    """A mask belongs to the text it was made from; a caption edited in between gets none."""
    ledger.record_captions([CaptionRow("a", OLD, "new text", "sidecar", "xxh3:new")])

    ledger.record_masks([("a", "xxh3:old", [1] * 77, False)])
    assert ledger.captions()["a"].mask is None

    ledger.record_masks([("a", "xxh3:new", [1] * 77, True)])
    assert (ledger.captions()["a"].tokens, ledger.captions()["a"].truncated) == ([1] * 77, True)


def test_masks_of_many_captions_change_nothing_else(ledger):
    """More than fit into one statement; every third caption has been edited meanwhile, and every fifth is gone."""
    kept = [n for n in range(600) if n % 5]
    rows = [
        CaptionRow(f"i{n}", OLD, f"text {n}", "sidecar", "new" if n % 3 == 0 else "old", "1", lines=2, conflict=True)
        for n in kept
    ]
    ledger.record_captions(rows)

    ledger.record_masks((f"i{n}", "old", [1] * (n % 7) + [0], n % 2 == 0) for n in range(600))

    replaced = msgspec.structs.replace
    assert ledger.captions() == {
        row.image_id: row if n % 3 == 0 else replaced(row, mask="1" * (n % 7) + "0", truncated=n % 2 == 0)
        for n, row in zip(kept, rows, strict=True)
    }


def test_selection_by_ids_takes_more_than_sqlite_has_parameters(ledger):
    ids = [f"i{n}" for n in range(40_000)]
    ledger.record_sources(SourceRow(i, f"{i}.jpg", OLD, "f", 1, 1) for i in ids)

    assert list(ledger.sources(ids[:39_999])) == sorted(ids[:39_999])
    assert ledger.sources(["i7", "absent"]).keys() == {"i7"}


def test_transaction_that_raises_leaves_nothing(ledger):
    def fail_halfway():
        with ledger.transaction():
            ledger.record_files([file_row(OLD)])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()

    assert ledger.files("dinov3_npy") == {}


# ---- since when


FIRST, LATER = "2026-01-01T00:00:00+00:00", "2026-02-02T00:00:00+00:00"


def problem(item="a", reason="undecodable", at="", detail="d"):
    return Problem(item, "dinov3_npy", "refused", reason, detail, "r", at=at)


def test_problem_recorded_again_keeps_its_first_time(ledger):
    """Every survey records the present problems; all other fields of the row are the newest."""
    ledger.record_problems([problem(at=FIRST)])
    ledger.record_problems([problem(at=LATER, detail="truncated")])

    assert ledger.problems() == [problem(at=FIRST, detail="truncated")]


def test_problem_with_another_reason_begins_again(ledger):
    ledger.record_problems([problem(at=FIRST)])
    ledger.record_problems([problem(reason="too_small", at=LATER)])

    assert ledger.problems() == [problem(reason="too_small", at=LATER)]


def test_two_reasons_for_one_input_do_not_move_the_time_of_the_one_that_counts(ledger):
    ledger.record_problems([problem(reason="too_small", at=FIRST)])
    ledger.record_problems([problem(at=LATER), problem(reason="too_small", at=LATER)])

    assert ledger.problems() == [problem(reason="too_small", at=FIRST)]


def test_problem_replaced_by_the_same_one_keeps_its_first_time(ledger):
    """`survey` replaces the rows of its asset and removes those that no longer apply."""
    ledger.record_problems([problem(at=FIRST), problem("b", at=FIRST)])
    ledger.replace_problems("dinov3_npy", [problem(at=LATER), problem("c", at=LATER)])

    assert ledger.problems() == [problem(at=FIRST), problem("c", at=LATER)]


def test_problems_that_are_not_selected_stay_when_others_are_replaced(ledger):
    ledger.record_problems([problem(at=FIRST), problem("b", reason="too_small", at=FIRST)])
    ledger.replace_problems("dinov3_npy", [], lambda problem: problem.reason == "undecodable")

    assert ledger.problems() == [problem("b", reason="too_small", at=FIRST)]


def test_counts_add_up_over_runs(ledger):
    ledger.record_counts("r1", "dinov3_npy", {"computed": 2, "calls": 1})
    ledger.record_counts("r2", "dinov3_npy", {"computed": 3})
    ledger.record_counts("r3", "dinov3_npy", {"computed": 100})

    assert ledger.counts(["r1", "r2"]) == {"dinov3_npy": {"computed": 5, "calls": 1}}


def test_committed_rows_survive_a_killed_process(tmp_path):
    """Rows committed before kill -9 exist afterwards; others do not."""
    path = tmp_path / "ledger.sqlite"
    script = f"""
        import os, signal
        from pathlib import Path
        from imagemill.store.ledger import Ledger, FileRow
        from imagemill.fs.fingerprints import posix_signature
        ledger = Ledger(Path({str(path)!r}))
        row = lambda i: FileRow("k", i, posix_signature(1, 2, 3), "s", "c", "m")
        ledger.record_files([row("kept")])
        with ledger.transaction():
            ledger.record_files([row("lost")])
            os.kill(os.getpid(), signal.SIGKILL)
    """
    process = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert process.returncode == -9

    with Ledger(path) as ledger:
        assert [image_id for image_id, _ in ledger.files("k")] == ["kept"]


def test_file_that_is_no_ledger_is_refused_with_the_remedy(tmp_path):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"not a database, but long enough to look at" * 100)

    with pytest.raises(ImagemillError, match="imagemill repair"):
        Ledger(path)


def test_ledger_that_cannot_be_reached_is_not_called_broken(tmp_path):
    path = tmp_path / "ledger.sqlite"
    path.mkdir()

    with pytest.raises(ImagemillError, match="make the folder writable") as error:
        Ledger(path)
    assert "imagemill repair" not in str(error.value)


def test_processes_that_meet_in_a_new_root_make_one_ledger(tmp_path):
    """Spec: docs/spec/conventions.md#leases"""
    script = """
        import sys
        from pathlib import Path
        from imagemill.store.ledger import Ledger
        print(flush=True)
        sys.stdin.readline()  # until every process is ready
        for n in range(40):
            Ledger(Path(sys.argv[1], str(n), "ledger.sqlite")).close()
    """
    model_keys = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(4)
    ]
    for model_key in model_keys:
        assert model_key.stdout.readline()
    for model_key in model_keys:
        model_key.stdin.close()

    assert [model_key.wait(timeout=120) for model_key in model_keys] == [0] * 4


def test_ledger_in_memory_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with Ledger(IN_MEMORY) as ledger:
        assert ledger.problems() == []

    assert list(tmp_path.iterdir()) == []


def test_ledger_of_a_later_version_is_refused(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()

    with pytest.raises(ImagemillError, match="upgrade imagemill"):
        Ledger(path)


@pytest.mark.parametrize("begun", [False, True], ids=["no byte yet", "no table yet"])
def test_ledger_whose_making_was_stopped_is_made_by_the_next_reader(tmp_path, begun):
    """A killed first run does not block later commands, and users need not move a file."""
    path = tmp_path / "ledger.sqlite"
    path.touch()
    if begun:
        with contextlib.closing(sqlite3.connect(path)) as half:
            half.execute("PRAGMA journal_mode = WAL")

    with Ledger(path, read_only=True) as ledger:
        assert ledger.problems() == []
        assert ledger.settings().keys() == {"root.id"}


def test_ledger_in_a_folder_that_cannot_be_written_to_can_be_read(tmp_path, monkeypatch):
    """For example a mounted backup: SQLite would create files beside it."""
    from imagemill.store.ledger import database

    folder = tmp_path / "state"
    with Ledger(folder / "ledger.sqlite") as ledger:
        ledger.record_setting("a", "b")
    before = sorted(path.name for path in folder.iterdir())
    monkeypatch.setattr(database.os, "access", lambda path, mode: False)

    with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.setting("a") == "b"
        assert sorted(path.name for path in folder.iterdir()) == before


def test_rows_that_are_dropped_after_the_ledger_was_closed_are_no_error(tmp_path, monkeypatch):
    """An unrelated exception ends a loop over rows, whose generator is collected after the ledger was closed."""
    dropped = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.record_setting("a", "1")
        ledger.record_setting("b", "2")
        rows = ledger._rows("SELECT * FROM settings")
        next(rows)
    del rows
    gc.collect()

    assert dropped == []


def test_use_of_a_closed_ledger_is_not_called_damage(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.close()

    with pytest.raises(sqlite3.ProgrammingError):
        ledger.settings()


def test_error_of_the_disk_is_not_called_damage(ledger):
    """SQLite reports it for reads and writes of any file; the ledger itself may be intact."""
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorname = "SQLITE_IOERR_READ"

    with pytest.raises(ImagemillError, match="the ledger cannot be read or written") as caught, ledger._errors():
        raise error

    assert "check the disk" in str(caught.value.do)


def test_ledger_of_a_process_that_was_killed_within_a_transaction_is_read(tmp_path):
    """The remaining journal must be rolled back, which a read-only connection cannot do."""
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = DELETE")
        db.execute("PRAGMA cache_size = 1")  # so that pages of the transaction reach the file
        db.execute("BEGIN")
        db.executemany("INSERT INTO withdrawn VALUES (?, 'now')", ((f"image{n}",) for n in range(5000)))
        copy = tmp_path / "killed" / "ledger.sqlite"
        copy.parent.mkdir()
        for suffix in ("", "-journal"):
            shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")

    with Ledger(copy, read_only=True) as ledger:
        assert ledger.withdrawals() == {}


def test_ledger_that_cannot_be_opened_is_a_message_with_a_remedy(tmp_path):
    (tmp_path / "ledger.sqlite").mkdir()

    with pytest.raises(ImagemillError, match="the ledger cannot be used: unable to open database file") as caught:
        Ledger(tmp_path / "ledger.sqlite")
    assert "make the folder writable" in caught.value.do


def test_changes_of_the_helper_do_not_count_as_those_of_another_connection(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger, Ledger(path) as other:
        before = ledger.version_seen()
        with ledger.helper() as helper:
            helper.record_setting("a", "1")
        assert ledger.version_seen() == before

        with ledger.helper() as helper:
            helper.record_setting("a", "2")
            other.record_setting("b", "1")
        assert ledger.version_seen() != before, "another process may have changed anything"

        seen = ledger.version_seen()
        other.record_setting("b", "2")
        with ledger.helper() as helper:
            helper.record_setting("a", "3")
        assert ledger.version_seen() != seen, "changed before the helper began"


@given(
    st.dictionaries(st.tuples(IDS, st.sampled_from([OLD, NEW])), st.sampled_from([None, 'a "source"', "é\x01"])),
    st.lists(IDS, max_size=6), st.integers(1, 3),
)  # fmt: skip
def test_rows_of_some_images_are_those_among_the_rows_of_all(files, ids, together):
    rows = [FileRow("k", image_id, stat, source, "content", "model") for (image_id, stat), source in files.items()]
    with Ledger(IN_MEMORY) as ledger, mock.patch("imagemill.store.ledger.database._IMAGES_AT_ONCE", together):
        ledger.record_files(rows)
        asked = [*dict.fromkeys([*ids, *(image_id for image_id, _ in list(files)[::2])])]

        found = list(ledger.file_rows("k", asked))

        assert {(row.image_id, row.stat): row for row in found} == {
            key: row for key, row in ledger.files("k").items() if key[0] in asked
        }
        assert len(found) == len(set(found))


def test_changes_of_images_with_equal_ones_are_in_memory_once(ledger):
    ledger.record_changes([(i, kind, "computed") for i in "abc" for kind in ("x", "y")])
    ledger.record_changes([("c", "x", "linked"), ("a", "x", "computed")])

    found = ledger.changes()

    both = {("x", "computed"), ("y", "computed")}
    assert found == {"a": both, "b": both, "c": both | {("x", "linked")}}
    assert found["a"] is found["b"]
