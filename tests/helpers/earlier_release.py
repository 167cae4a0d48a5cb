"""Data roots as earlier releases left them."""

import json
import sqlite3
from contextlib import closing

from imagemill.store.inputs import NAMES
from imagemill.store.ledger import HISTORY, ROOT_ID
from imagemill.store.ledger.schema import SNAPSHOT, state_of_files


def as_of_earlier_release(root):
    """Remove from the ledger, and from its second copies, what versions 6 to 14 added."""
    names = (*NAMES.values(), "adopted.color", ROOT_ID, HISTORY)
    with sqlite3.connect(root.ledger) as db:
        undo_version_12(db)
        for column in ("color", "profile", "first_frame"):
            db.execute(f"ALTER TABLE sources DROP COLUMN {column}")
        for column in ("lines", "conflict", "texts"):
            db.execute(f"ALTER TABLE captions DROP COLUMN {column}")
        for what in ("TABLE arrivals", "TABLE renames", "INDEX files_by_input"):
            db.execute(f"DROP {what}")
        for index in ("content", "signature"):
            db.execute(f"DROP INDEX sources_by_{index}")
        db.executemany("DELETE FROM settings WHERE name = ?", [(name,) for name in names])
        db.execute("PRAGMA user_version = 5")
    for copy in root.path.glob("*/.imagemill.json"):
        document = json.loads(copy.read_bytes())
        for name in names:
            document["settings"].pop(name, None)
        copy.write_text(json.dumps(document))


def undo_version_12(db):
    """Remove what versions 12 to 14 added to a ledger."""
    undo_version_13(db)
    db.execute("DROP TRIGGER problem_solved")
    for table, columns in {"sources": ("added_at",), "captions": (), "files": ()}.items():
        for column in (*columns, "changed_at", "run_id"):
            db.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
    for table in ("runs", "solved", "gone", "marks"):
        db.execute(f"DROP TABLE {table}")


def undo_version_13(db):
    """Remove what versions 13 and 14 added to a ledger."""
    undo_version_14(db)
    for table in ("sources", "captions", "captioned", "files", "problems"):
        for event in ("inserted", "updated", "deleted"):
            db.execute(f"DROP TRIGGER {table}_{event}")
    for table in ("row_changes", "merged", "packed"):
        db.execute(f"DROP TABLE {table}")


def undo_version_14(db):
    """Remove what version 14 added to a ledger."""
    db.execute("DROP TABLE inputs")
    db.execute("CREATE INDEX files_by_input ON files (kind, source)")
    db.execute("CREATE INDEX sources_by_content ON sources (fingerprint)")


def as_of_previous_release(root):
    """Remove what versions 11 to 14 added. The snapshot holds, as after the last command of that release."""
    with closing(sqlite3.connect(root.ledger)) as db:
        undo_version_12(db)
        db.execute("DELETE FROM settings WHERE name IN (?, ?)", (ROOT_ID, HISTORY))
        db.execute("PRAGMA user_version = 10")
        db.commit()
    file = root.state / SNAPSHOT
    snapshot = json.loads(file.read_bytes())
    del snapshot["format"]
    file.write_text(json.dumps({**snapshot, "ledger": state_of_files(root.ledger)}))
