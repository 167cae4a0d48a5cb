"""The table of the viewer (imagemill/store/ledger/overview.py)."""

from contextlib import closing

import msgspec
import pytest

from imagemill.fs.fingerprints import FileSignature
from imagemill.store.ledger import Captioned, CaptionRow, Ledger, SourceRow
from imagemill.store.ledger.overview import Additions, ImageState, Listed, Overview, Selection

SIGNATURE = FileSignature("posix:1:2:3")


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger #1?.sqlite") as ledger:  # characters that an address would give a meaning
        yield ledger


def _states(ledger, *, differing=None, reasons=None, samples=(), duplicates=None) -> dict[str, ImageState]:
    added = Additions(
        differing or {}, reasons or {}, samples, duplicates or {}, lambda width, height: (f"{width}x{height}", 0.5, 2.0)
    )
    with closing(Overview.of(ledger.path, added)) as table:
        items = table.items(Selection()) + table.items(Selection("withdrawn"))
        return table.states(items)


def _source(image_id: str, width: int = 40) -> SourceRow:
    return SourceRow(image_id, f"{image_id}.jpg", SIGNATURE, "xxh3:1", 30, width)


def test_image_of_the_ledger_is_up_to_date_under_its_name_unless_it_differs(ledger):
    ledger.record_sources([_source("a"), _source("b", 50), _source("c"), _source("d")])
    differing = {"b": Listed("b.png", "waiting"), "c": None, "new": Listed("new.jpg", "failed"), "record": None}

    states = _states(ledger, differing=differing)

    assert {item for item, state in states.items() if state.added_at} == set("abcd")
    assert {item: msgspec.structs.replace(state, added_at=None) for item, state in states.items()} == {
        "a": ImageState("a", "a.jpg", True, "up_to_date", (), 40, 30, "40x30", 0.5, 2.0),
        "b": ImageState("b", "b.png", True, "waiting", (), 50, 30, "50x30", 0.5, 2.0),
        "c": ImageState("c", None, False, "", (), 40, 30, "40x30", 0.5, 2.0),
        "d": ImageState("d", "d.jpg", True, "up_to_date", (), 40, 30, "40x30", 0.5, 2.0),
        "new": ImageState("new", "new.jpg", True, "failed"),
        "record": ImageState("record"),
    }


def test_caption_has_the_number_of_its_tokens_even_if_it_is_outdated(ledger):
    ledger.record_sources([_source("a")])
    ledger.record_captions(
        [
            CaptionRow("a", None, "words", "captioner", "xxh3:2", "1110", True),
            CaptionRow("b", None, "others", "sidecar", "xxh3:3"),
        ]
    )
    ledger.record_captioned([Captioned("a", "xxh3:earlier", "model")])

    states = _states(ledger)

    assert [states["a"].caption, states["a"].origin, states["a"].tokens, states["a"].truncated] == [
        "words",
        "captioner",
        3,
        True,
    ]
    assert states["b"] == ImageState("b", caption="others", origin="sidecar")


def test_sample_reasons_withdrawal_mark_and_duplicate_belong_to_an_image_or_make_an_item(ledger):
    ledger.record_sources([_source("a")])
    ledger.record_withdrawals({"a": "2026-01-02", "gone": "2026-01-03"})
    ledger.mark(["a", "other"])

    states = _states(
        ledger,
        reasons={"a": {"too_small", "renamed"}, "notes.doc": {"unsupported_type"}},
        samples=[("a", "bucket_1/0.tar", 512), ("unknown", "bucket_1/0.tar", 0)],
        duplicates={"a": "z", "absent": "z"},
    )

    a = states.pop("a")
    assert (a.reasons, a.tar, a.offset, a.duplicate_of) == (("renamed", "too_small"), "bucket_1/0.tar", 512, "z")
    assert (a.withdrawn, a.marked) == ("2026-01-02", True)
    assert states == {
        "gone": ImageState("gone", withdrawn="2026-01-03"),
        "other": ImageState("other", marked=True),
        "notes.doc": ImageState("notes.doc", reasons=("unsupported_type",)),
        "unknown": ImageState("unknown", tar="bucket_1/0.tar", offset=0),
    }


def test_later_sample_of_an_image_counts(ledger):
    states = _states(ledger, samples=[("a", "bucket_1/0.tar", 0), ("a", "bucket_2/0.tar", 512)])

    assert (states["a"].tar, states["a"].offset) == ("bucket_2/0.tar", 512)


def test_folders_are_those_of_the_images_that_are_there(ledger):
    files = ("a.jpg", "b/c.jpg", "b/d.jpg", "b/e f/b/g.jpg", "gone/h.jpg")
    ledger.record_sources(SourceRow(file, file, SIGNATURE, "xxh3:1", 30, 40) for file in files)
    added = Additions({"gone/h.jpg": None}, {}, (), {}, lambda *_: ("", 0.0, 0.0))
    with closing(Overview.of(ledger.path, added)) as table:
        assert table.folders() == ["", "b", "b/e f/b"]


def test_table_does_not_hold_the_ledger(ledger):
    with closing(Overview.of(ledger.path, Additions({}, {}, (), {}, lambda *_: ("", 0.0, 0.0)))) as table:
        ledger.mark(["later"])
        ledger.file_state()  # fails to shorten the log if another connection still reads

        assert table.count(Selection()) == 0
        assert not ledger.path.with_name(f"{ledger.path.name}-wal").stat().st_size
