"""Ledgers of every released schema are upgraded, and their data roots go on without a manual step."""

import shutil
import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

from imagemill.embedding_specs import embedding_specs
from imagemill.files import posix_signature
from imagemill.layout import DataRoot
from imagemill.provenance import read_identity
from imagemill.store.ledger import VERSION, Ledger
from tests.helpers.product import imagemill

ROOTS = Path(__file__).parents[1] / "fixtures" / "roots"
RELEASED = sorted(path.name.removesuffix(".tar.xz") for path in ROOTS.glob("*.tar.xz"))


def unpacked(tmp_path, name):
    """A data root of an earlier schema, whose ledger knows the files as they are now: unpacking gave them other inodes."""
    with tarfile.open(ROOTS / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    root = DataRoot(tmp_path / "data")
    with closing(sqlite3.connect(root.ledger)) as db, db:
        for table, path_of in _PATHS.items():
            for row in db.execute(f"SELECT * FROM {table} WHERE inode IS NOT NULL").fetchall():
                path = path_of(root, row)
                if path.exists():
                    stat = path.stat()
                    db.execute(
                        f"UPDATE {table} SET size = ?, mtime_ns = ?, inode = ? WHERE inode = ? AND mtime_ns = ?",
                        (stat.st_size, stat.st_mtime_ns, stat.st_ino, _inode_of(table, row), _mtime_of(table, row)),
                    )
    return root


FOLDERS = {spec.kind: spec.folder for spec in embedding_specs()}
_PATHS = {
    "sources": lambda root, row: root.approved / row[1],
    "captions": lambda root, row: root.approved / f"{row[0]}.txt",
    "files": lambda root, row: root.derived / FOLDERS[row[0]] / f"{row[1]}.npy",
    "problems": lambda root, row: root.approved / f"{row[0]}.jpg",
}
_FIRST_OF_TRIPLE = {"sources": 2, "captions": 1, "files": 2, "problems": 6}


def _inode_of(table, row):
    return row[_FIRST_OF_TRIPLE[table] + 2]


def _mtime_of(table, row):
    return row[_FIRST_OF_TRIPLE[table] + 1]


def rows_before(root):
    with closing(sqlite3.connect(root.ledger)) as db:
        return {name: db.execute(f"SELECT * FROM {name}").fetchall() for name in (*_PATHS, "counts", "withdrawn")}


@pytest.mark.parametrize("name", RELEASED)
def test_every_row_survives_the_upgrade(tmp_path, name):
    root = unpacked(tmp_path, name)
    before = rows_before(root)

    with Ledger(root.ledger) as ledger:
        assert ledger._one("PRAGMA user_version") == (VERSION,)
        sources = {
            (r.image_id, r.file_name, r.stat, r.fingerprint, r.height, r.width) for r in ledger.sources().values()
        }
        files = {
            (row.kind, row.image_id, row.stat, row.source, row.content, row.maker)
            for kind in FOLDERS for row in ledger.files(kind).values()
        }  # fmt: skip
        assert sources == {(*r[:2], posix_signature(*r[2:5]), *r[5:]) for r in before["sources"]}
        assert files == {(*r[:2], posix_signature(*r[2:5]), *r[5:]) for r in before["files"]}
        assert {r.image_id: (r.text, r.origin, r.fingerprint) for r in ledger.captions().values()} == {
            r[0]: (r[4], r[5], r[6]) for r in before["captions"]
        }
        assert {(p.item, p.asset, p.reason, p.at) for p in ledger.problems()} == {
            (r[0], r[1], r[3], r[10]) for r in before["problems"]
        }
        assert ledger.withdrawals() == dict(before["withdrawn"])
        assert {kind: read_identity(ledger, kind).preview for kind in FOLDERS} == dict.fromkeys(FOLDERS, True)


@pytest.mark.parametrize(("name", "command"), [("schema1", "stage2"), ("schema2", "run")])
def test_root_of_an_earlier_release_goes_on_without_making_anything_anew(tmp_path, name, command):
    """No file, record or tar changes a byte or its time. Shard sets of the first schema were never released."""
    root = unpacked(tmp_path, name)
    if command == "stage2":
        shutil.rmtree(root.shards)
    tars = {path: path.stat().st_mtime_ns for path in root.shards.rglob("*.tar")}
    arrays = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in root.derived.rglob("*.npy")}
    records = root.stage2_jsonl.read_bytes()

    done = imagemill(command, "--data-root", root.path, stub=True)

    assert done.returncode == 0, done.stdout + done.stderr
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in root.derived.rglob("*.npy")} == arrays
    assert root.stage2_jsonl.read_bytes() == records
    assert {path: path.stat().st_mtime_ns for path in root.shards.rglob("*.tar")} == tars
    verified = imagemill("verify", "--data-root", root.path, stub=True)
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_ledger_of_version_2_without_a_table_that_came_later_is_upgraded(tmp_path):
    """Early ledgers of version 2 lack tables that were added without a version of their own."""
    root = unpacked(tmp_path, "schema2")
    with closing(sqlite3.connect(root.ledger)) as db, db:
        db.execute("DROP TABLE captioned")

    with Ledger(root.ledger) as ledger:
        assert ledger.captioned() == {}


def test_upgrade_that_is_interrupted_leaves_the_old_schema(tmp_path, monkeypatch):
    """All or nothing: the next start upgrades again."""
    from imagemill.store.ledger import schema

    root = unpacked(tmp_path, "schema2")

    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(schema, "_import_identities", fail)
        with pytest.raises(KeyboardInterrupt):
            Ledger(root.ledger)
    with closing(sqlite3.connect(root.ledger)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (2,)
        assert db.execute("SELECT count(*) FROM claims").fetchone() == (0,)

    with Ledger(root.ledger) as ledger:
        assert len(ledger.sources()) == 4


def test_damaged_identity_of_an_earlier_release_is_not_taken_over(tmp_path):
    root = unpacked(tmp_path, "schema2")
    (root.state / "provenance" / "vae_latents.json").write_bytes(b"{")

    with Ledger(root.ledger) as ledger:
        assert read_identity(ledger, "vae_latents") is None
        assert read_identity(ledger, "dinov3_npy") is not None
