"""The table of the viewer after a command: from its snapshot if nothing has changed since, else from the folders.

Spec: docs/spec/conventions.md#viewer. Reference: docs/decisions/0103-snapshot.md
"""

import json
import sqlite3
import time
from contextlib import contextmanager

import msgspec
import pytest

from imagemill.domain.embedding_specs import DINOV3
from imagemill.fs.fingerprints import FileSignature
from imagemill.inputs import scan
from imagemill.pipeline import image_states
from imagemill.pipeline.image_states import read_states
from imagemill.pipeline.session import open_session
from imagemill.pipeline.shards.shard_sets import INDEX, TOMBSTONES, Tombstone, read_index
from imagemill.pipeline.snapshot import read_snapshot
from imagemill.pipeline.stage2 import inventory, record_index
from imagemill.store.ledger import Ledger, SourceRow
from imagemill.store.ledger.overview import Selection
from imagemill.store.ledger.schema import SNAPSHOT
from tests.helpers.commands import called
from tests.helpers.stage2 import photos
from tests.helpers.wiring import stub_every_kind


def states(root, *, fresh=False):
    with open_session(root.path) as session:
        found = read_states(session, fresh=fresh)
        with found.table as table:
            items = table.items(Selection()) + table.items(Selection("withdrawn"))
            return table.states(items), found.problems


def agrees(root):
    """Return whether the snapshot gives the table; compare the table with that of the folders."""
    assert states(root) == states(root, fresh=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(image_states, "Standing")  # which plans every kind
        try:
            states(root)
        except NameError:
            return False
        return True


@pytest.fixture
def root(data_root, monkeypatch):
    """Four complete images, one without a caption and one that cannot be decoded, after a run."""
    stub_every_kind(monkeypatch)
    photos(data_root, "a", "b", "c", "d", size=(24, 24))
    photos(data_root, "silent", size=(24, 24))
    (data_root.approved / "silent.txt").unlink()
    (data_root.approved / "broken.png").write_bytes(b"no image")
    (data_root.approved / "broken.txt").write_text("a caption")
    (data_root.approved / "bell\a.png").write_bytes(b"no image")
    assert called(data_root, "run").code in (0, 3)
    return data_root


def test_table_of_the_snapshot_is_that_of_the_folders(root):
    assert agrees(root)
    found, problems = states(root)
    assert {item: state.outcome for item, state in found.items()} == {
        **dict.fromkeys("abcd", "up_to_date"), "silent": "refused", "broken": "refused", "bell\\x07.png": "refused",
    }  # fmt: skip
    assert found["broken"].file == "broken.png"
    assert {problem.reason for problem in problems} == {"missing_caption", "undecodable", "bad_id"}


def _overwrite_caption(root):
    (root.approved / "a.txt").write_text("something else")


def _add_image(root):
    photos(root, "e", size=(24, 24))


def _rename_image(root):
    (root.approved / "a.png").rename(root.approved / "z.png")


def _remove_array(root):
    (root.derived / DINOV3.folder / "a.npy").unlink()


def _edit_records(root):
    with open(root.stage2_jsonl, "a") as file:
        file.write("no record\n")


def _configure(root):
    root.config_file.write_text("pixels:\n  color: ignore\n")


def _change_ledger(root):
    with Ledger(root.ledger) as ledger:
        ledger.record_sources([SourceRow("gone", "gone.png", FileSignature("posix:1:2:3"), "xxh3:1", 1, 1)])


@pytest.mark.parametrize(
    "change",
    [_overwrite_caption, _add_image, _rename_image, _remove_array, _edit_records, _configure, _change_ledger],
)
def test_any_change_since_is_in_the_table(root, change):
    before = states(root)
    change(root)

    assert not agrees(root)
    assert change in (_configure, _edit_records) or states(root) != before


def test_folder_of_many_images_is_listed_by_another_process(root, monkeypatch):
    monkeypatch.setattr(record_index, "_MANY_BYTES", 0)
    with monkeypatch.context() as patch:
        for module in (scan, inventory):
            patch.delattr(module, "list_approved")
        assert states(root)[0]["a"].outcome == "up_to_date"
        _add_image(root)
        assert states(root)[0]["e"].outcome == "waiting"
    assert not agrees(root)


def test_caller_works_with_the_table_while_the_folder_is_listed(root, monkeypatch):
    order, listing = [], inventory.Inventory.listing_ahead

    @contextmanager
    def noted(self):
        with listing(self) as digest:
            yield lambda: order.append("digest") or digest()

    monkeypatch.setattr(inventory.Inventory, "listing_ahead", noted)
    with open_session(root.path) as session:
        found = read_states(session, meanwhile=order.append)
        found.table.close()

    assert order == [found.table, "digest"]


def test_table_of_an_earlier_state_is_closed(root):
    _add_image(root)
    given = []
    with open_session(root.path) as session:
        found = read_states(session, meanwhile=given.append)
        with found.table as table:
            assert table.state("e").outcome == "waiting"

    assert given != [found.table]
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        given[0].counts()


def test_error_of_the_caller_closes_the_table(root):
    given = []

    def fail(table):
        given.append(table)
        raise KeyError

    with open_session(root.path) as session, pytest.raises(KeyError):
        read_states(session, meanwhile=fail)

    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        given[0].counts()


def test_marks_leave_the_snapshot_valid(root):
    with Ledger(root.ledger) as ledger:
        ledger.mark(["a", "b"])
        ledger.unmark(["b"])

    assert agrees(root)
    assert states(root)[0]["a"].marked
    assert "no Dagster run was started" in called(root, "run").text


def test_mark_after_another_change_leaves_the_snapshot_invalid(root):
    _change_ledger(root)
    with Ledger(root.ledger) as ledger:
        ledger.mark(["a"])

    assert read_snapshot(root) is None
    assert not agrees(root)


def test_mark_does_not_wait_for_a_reader(root):
    began = time.monotonic()
    with Ledger(root.ledger) as reader, Ledger(root.ledger) as ledger:
        reader._db.execute("BEGIN")
        assert list(reader.source_files())  # the transaction reads from here on
        ledger.mark(["a"])

        assert ledger.marks().keys() == {"a"}
    assert time.monotonic() - began < 20, "a connection waits 60 seconds"


def test_withdrawal_leaves_no_snapshot_of_before(root):
    with Ledger(root.ledger) as ledger:
        ledger.withdraw(["a"])

    assert read_snapshot(root) is None


def test_snapshot_of_an_earlier_release_is_not_used_for_the_table(root):
    file = root.state / SNAPSHOT
    kept = json.loads(file.read_bytes())
    del kept["read"], kept["differing"]
    file.write_text(json.dumps(kept))

    assert read_snapshot(root) is not None
    assert not agrees(root)


def test_sample_with_a_tombstone_and_set_with_a_damaged_index_are_not_shown(root):
    ((line, index),) = [(read_index(path.parent)[0], path) for path in root.shards.glob(f"*/{INDEX}")]
    dead = Tombstone(line.image_id, line.shard, line.offset, "withdrawn")
    (index.parent / TOMBSTONES).write_bytes(msgspec.json.encode(dead) + b"\n")
    assert {item for item, state in states(root)[0].items() if state.tar} == set("abcd") - {line.image_id}

    with open(index, "a") as file:
        file.write("damaged\n")
    assert not any(state.tar for state in states(root)[0].values())
