"""When images, captions and files changed, in which run, and what a user means by a time.

Spec: docs/spec/conventions.md#what-changed
"""

import time
from contextlib import closing
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from imagemill.errors import WrongUsage
from imagemill.fs.fingerprints import posix_signature
from imagemill.pipeline.changes import parse_since, read_changes
from imagemill.store.ledger import CHANGES_SINCE, CaptionRow, FileRow, Ledger, Problem, SourceRow
from imagemill.store.ledger import overview as overview_module
from imagemill.store.ledger.overview import Additions, Overview, Selection, show_of

SIGNATURE = posix_signature(10, 1, 100)
NOW = datetime(2026, 11, 25, 12, tzinfo=UTC)


def source(image_id="a", fingerprint="f"):
    return SourceRow(image_id, f"{image_id}.jpg", SIGNATURE, fingerprint, 30, 40)


def caption(image_id="a", text="words", **more):
    return CaptionRow(image_id, None, text, "record", f"xxh3:{text}", **more)


def array(image_id="a", content="c", signature=SIGNATURE):
    return FileRow("dinov3_npy", image_id, signature, "s", content, "model")


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when a test says so."""
    now = [1_000]
    monkeypatch.setattr(time, "time", lambda: now[0])
    return now


@pytest.fixture
def ledger(tmp_path, clock):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        yield ledger


def changed(ledger, since):
    images = read_changes(ledger, since).images
    with closing(Overview.of(ledger.path, Additions({}, {}, (), {}, lambda *_: ("", 0.0, 0.0)))) as table:
        shown = {kind: set(table.items(Selection(show_of(kind)))) for kind in images}
        found = {kind: table.items(Selection(show_of(kind), change=(kind, since))) for kind in images}
        assert found == {kind: [item for item in ids if item in shown[kind]] for kind, ids in images.items()}
        assert table.counts_since(since) == {kind: len(items) for kind, items in found.items()}
    return {name: ids for name, ids in images.items() if ids}


def test_new_image_is_added_and_nothing_else(ledger):
    ledger.record_sources([source()])
    ledger.record_captions([caption()])
    ledger.record_files([array()])

    assert changed(ledger, 1_000) == {"added": ["a"]}
    assert changed(ledger, 1_001) == {}


def test_table_reads_once_which_items_have_changed(ledger, clock, monkeypatch):
    """A page needs their number, some of them, and the position of one."""
    ledger.record_sources([source(), source("b")])
    ledger.record_files([array(), array("b")])
    clock[0] = 2_000
    ledger.record_files([array(content="other"), array("b", content="other")])
    reads, attached = [], overview_module.attached
    monkeypatch.setattr(overview_module, "attached", lambda *given: reads.append(given) or attached(*given))

    with closing(Overview.of(ledger.path, Additions({}, {}, (), {}, lambda *_: ("", 0.0, 0.0)))) as table:
        reads.clear()
        selection = Selection(change=("recomputed", 2_000))
        assert (table.count(selection), table.position(selection, "b"), len(reads)) == (2, 1, 1)
        assert [each.item for each in table.select(selection, 1, 1)] == ["b"]
        assert len(reads) == 1
        for other in (Selection(change=("recomputed", 2_001)), Selection(change=("recaptioned", 2_001))):
            assert (table.count(selection), table.items(other)) == (2, [])


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (lambda ledger: ledger.record_sources([source(fingerprint="g")]), "replaced"),
        (lambda ledger: ledger.record_captions([caption(text="others")]), "recaptioned"),
        (lambda ledger: ledger.record_captions([caption(texts=("words", "more"))]), "recaptioned"),
        (lambda ledger: ledger.record_files([array(signature=posix_signature(1, 2, 3))]), "recomputed"),
        (lambda ledger: ledger.record_files([array(content="other")]), "recomputed"),
    ],
)
def test_change_of_a_known_image_is_found_from_its_time_on(ledger, clock, record, kind):
    ledger.record_sources([source()])
    ledger.record_captions([caption()])
    ledger.record_files([array()])
    clock[0] = 2_000
    record(ledger)

    assert changed(ledger, 2_000) == {kind: ["a"]}
    assert changed(ledger, 2_001) == {}


def test_content_that_is_recorded_again_has_not_changed(ledger, clock):
    """Files of other origins, such as adopted ones, have no time."""
    ledger.record_sources([source()])
    ledger.record_captions([caption()])
    ledger.record_files([array()])
    clock[0] = 2_000
    ledger.record_sources([msgspec.structs.replace(source(), file_name="sub/a.jpg")])
    ledger.record_captions([caption(conflict=True, lines=2)])
    ledger.record_masks([("a", "xxh3:words", [1, 0], False)])
    ledger.record_files([array()])
    ledger.record_files([array(signature=posix_signature(1, 2, 3))], made=False)

    assert changed(ledger, 2_000) == {}
    assert ledger.sources()["a"].file_name == "sub/a.jpg"
    assert ledger.captions()["a"].conflict


def test_rows_without_a_time_are_counted_as_unknown(ledger):
    ledger.record_sources([source()], seen=False)
    ledger.record_sources([source("b")])

    assert read_changes(ledger, 0).unknown == 1
    assert changed(ledger, 0) == {"added": ["b"]}


def test_problem_is_newly_refused_then_solved_for_thirty_days(ledger, clock):
    clock[0] = time_of_test = datetime.now(UTC).timestamp()
    since = int(time_of_test) - 60
    ledger.record_problems([Problem("a", "dinov3_npy", "refused", "undecodable", "d", "r")])
    assert changed(ledger, since) == {"newly_refused": ["a"]}

    ledger.clear_problems("dinov3_npy", ["a"])
    ledger.forget_solved()
    assert changed(ledger, since) == {"solved": ["a"]}

    clock[0] = time_of_test + timedelta(days=30, minutes=1).total_seconds()
    ledger.forget_solved()
    assert changed(ledger, since) == {}


def test_problem_that_came_back_is_not_solved(ledger):
    problem = Problem("a", "dinov3_npy", "failed", "read_error", "d", "r")
    ledger.record_problems([problem])
    ledger.clear_problems("dinov3_npy", ["a"])
    ledger.record_problems([problem])

    assert changed(ledger, 0) == {}


def test_image_that_is_gone_keeps_the_time_of_the_first_notice(ledger, clock):
    ledger.note_gone(["a", "b"])
    clock[0] = 2_000
    ledger.note_gone(["a", "c"])

    assert changed(ledger, 1_500) == {"gone": ["c"]}
    assert changed(ledger, 500) == {"gone": ["a", "c"]}


def test_withdrawal_removes_the_mark_and_is_a_change(ledger):
    ledger.mark(["a", "b"])
    ledger.withdraw(["a"])

    assert list(ledger.marks()) == ["b"]
    assert changed(ledger, 0) == {"withdrawn": ["a"]}


def test_mark_keeps_its_first_time(ledger):
    ledger.mark(["a"])
    first = ledger.marks()
    ledger.mark(["a"])

    assert ledger.marks() == first


def test_changes_belong_to_the_run_that_made_them(ledger, clock):
    """Changes of a command before its first run belong to that run, which began when the command did."""
    clock[0] = 1_010
    ledger.record_captions([caption()])
    ledger.in_run("first")
    ledger.record_sources([source()])
    clock[0] = 1_020
    ledger.in_run("second")
    with ledger.helper() as helper:
        helper.record_files([array()])
    ledger.in_run("first")
    ledger.record_sources([source("b")])

    runs = dict(ledger._rows("SELECT run_id, run FROM runs"))
    of = {table: [runs[each] for (each,) in ledger._rows(f"SELECT run_id FROM {table}")]
          for table in ("captions", "sources", "files")}  # fmt: skip
    assert of == {"captions": ["first"], "sources": ["first", "first"], "files": ["second"]}
    assert ledger.run_began_at("first") == {"first": 1_000}
    assert ledger.run_began_at("second") == {"second": 1_020}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24h", NOW - timedelta(days=1)),
        ("90 m", NOW - timedelta(minutes=90)),
        ("2w", NOW - timedelta(days=14)),
        ("2026-11-24T18:30+00:00", datetime(2026, 11, 24, 18, 30, tzinfo=UTC)),
        ("2026-11-24", datetime(2026, 11, 24).astimezone(UTC)),
    ],
)
def test_time_is_a_duration_or_a_date(ledger, text, expected):
    assert parse_since(text, ledger, NOW) == expected.timestamp()


def test_run_is_named_by_the_beginning_of_its_id(ledger):
    ledger.in_run("4c1fd203-aa")
    ledger.in_run("4c1fd204-bb")

    assert parse_since("4c1fd203", ledger, NOW) == 1_000
    for text, why in (("4c1fd20", "2 runs"), ("4c1f", ""), ("yesterday", ""), ("99999999w", ""), ("", "")):
        with pytest.raises(WrongUsage, match="not a time or a run") as refused:
            parse_since(text, ledger, NOW)
        assert why in str(refused.value)


def test_every_kind_of_change_is_listed(ledger):
    assert tuple(read_changes(ledger, 0).images) == CHANGES_SINCE
