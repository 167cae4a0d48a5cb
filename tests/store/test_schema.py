"""Ledgers of every released schema are upgraded, and their data roots keep working without a manual step."""

import shutil
import sqlite3
from contextlib import closing

import pytest

from imagemill.fs.fingerprints import posix_signature
from imagemill.store.ledger import VERSION, Captioned, Ledger
from imagemill.store.provenance import read_identity
from tests.helpers.earlier_roots import FOLDERS, PATHS, RELEASED, unpacked
from tests.helpers.product import imagemill


def rows_before(root):
    with closing(sqlite3.connect(root.ledger)) as db:
        return {name: db.execute(f"SELECT * FROM {name}").fetchall() for name in (*PATHS, "counts", "withdrawn")}


@pytest.mark.parametrize("name", RELEASED)
def test_every_row_survives_the_upgrade(tmp_path, name):
    root = unpacked(tmp_path, name)
    before = rows_before(root)

    with Ledger(root.ledger) as ledger:
        assert ledger._one("PRAGMA user_version") == (VERSION,)
        assert ledger.check() is None, "every table can be read"
        sources = {
            (r.image_id, r.file_name, r.stat, r.fingerprint, r.height, r.width) for r in ledger.sources().values()
        }
        files = {
            (row.kind, row.image_id, row.stat, row.source, row.content, row.model_key)
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
def test_root_of_an_earlier_release_goes_on_without_making_anything_again(tmp_path, name, command):
    """No byte or time of a file, record or tar changes. Shard sets of the first schema were never released."""
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
    """Early ledgers of version 2 lack tables that were added without a new version."""
    root = unpacked(tmp_path, "schema2")
    with closing(sqlite3.connect(root.ledger)) as db, db:
        db.execute("DROP TABLE captioned")

    with Ledger(root.ledger) as ledger:
        assert ledger.captioned() == {}


def test_captions_of_models_in_a_ledger_of_version_4_count_as_whole(tmp_path, monkeypatch):
    from imagemill.store.ledger import schema

    path = tmp_path / "ledger.sqlite"
    with monkeypatch.context() as earlier, closing(sqlite3.connect(path, isolation_level=None)) as db:
        earlier.setattr(schema, "VERSION", 4)
        earlier.setattr(schema, "_STEPS", {n: file for n, file in schema._STEPS.items() if n <= 4})
        schema.migrate(db, path)
        db.execute("INSERT INTO captioned (image_id, image, maker) VALUES ('a', 'xxh3:1', 'key')")

    with Ledger(path) as ledger:
        assert ledger.captioned() == {"a": Captioned("a", "xxh3:1", "key", cut_off=False)}
        assert ledger.cut_off() == set()


def test_upgrade_that_is_interrupted_leaves_the_old_schema(tmp_path, monkeypatch):
    """The upgrade is atomic: the next start upgrades again."""
    from imagemill.store.ledger import schema

    root = unpacked(tmp_path, "schema2")

    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setitem(schema._AFTERWARDS, 3, fail)
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
