"""A lost or damaged ledger: error messages of commands, and its reconstruction."""

import shutil
import sqlite3
from contextlib import closing
from types import SimpleNamespace

import pytest

from imagemill.domain.embedding_specs import VAE, embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.errors import ImagemillError
from imagemill.pipeline import repair
from imagemill.pipeline.repair import apply_repair, damage_of, plan_repair
from imagemill.store.ledger import Ledger
from imagemill.store.provenance import UNKNOWN_PREVIEW
from tests.helpers.product import contents, imagemill, photos

KINDS = [spec.kind for spec in embedding_specs()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A root with four packed images, one of them withdrawn."""
    root = DataRoot(tmp_path_factory.mktemp("finished") / "data")
    photos(root.approved, 4)
    assert imagemill("run", "--data-root", root.path, stub=True).returncode == 0
    assert imagemill("withdraw", "photo0002", "--data-root", root.path, stub=True).returncode == 0
    return root


@pytest.fixture
def root(finished, tmp_path):
    """A copy whose files keep their times but get other inodes, as after restoring a backup."""
    shutil.copytree(finished.path, tmp_path / "data")
    return DataRoot(tmp_path / "data")


def rows(root):
    with Ledger(root.ledger, read_only=True) as ledger:
        files = {
            (row.kind, row.image_id): (row.content, row.model_key)
            for kind in KINDS
            for row in ledger.files(kind).values()
        }
        sources = {row.image_id: (row.fingerprint, row.height, row.width) for row in ledger.sources().values()}
        return (
            files,
            sources,
            set(ledger.withdrawals()),
            {k: v for k, v in ledger.settings().items() if "identity" in k},
        )


def repaired(before):
    """Return the rows after a repair: no tar shows any more which model made the files of a withdrawn image."""
    files, *others = before
    of_files = {
        key: (content, UNKNOWN_PREVIEW if key[1] == "photo0002" else made) for key, (content, made) in files.items()
    }
    return of_files, *others


def overwrite_pages(path):
    """Write garbage into every page except the first."""
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = bytearray(path.read_bytes())
    for start in range(4096, len(data), 4096):
        data[start : start + 64] = b"\xff" * 64
    path.write_bytes(data)


DAMAGES = {
    "lost": lambda root: shutil.rmtree(root.state),
    "pages": lambda root: overwrite_pages(root.ledger),
    "garbage": lambda root: root.ledger.write_bytes(b"garbage " * 1000),
    "empty tables": lambda root: _drop_tables(root.ledger),
    "truncated": lambda root: root.ledger.write_bytes(root.ledger.read_bytes()[:5000]),
}


def _drop_tables(path):
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DROP TABLE files")


@pytest.mark.parametrize("damage", DAMAGES)
def test_repaired_ledger_has_models_files_images_and_withdrawals(root, finished, damage):
    """They equal those before the damage. The next run calls no model and changes no byte."""
    before, made = rows(finished), contents(root)
    DAMAGES[damage](root)

    reported = plan_repair(root)
    assert reported.damage
    if damage != "lost":
        assert damage_of(root), "reporting changes nothing"
    kept = apply_repair(root, reported)

    assert rows(root) == repaired(before)
    assert (kept is not None) == (damage != "lost")
    assert not [path for path in root.state.iterdir() if path.name.startswith(".tmp")]
    done = imagemill("run", "--data-root", root.path, stub=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert contents(root) == made
    assert "0 made in 0 model calls" in done.stdout or "nothing to do" in done.stdout


def test_models_come_from_the_manifests_if_the_second_copy_is_lost_too(root, finished):
    before = rows(finished)
    shutil.rmtree(root.state)
    for folder in (root.derived, root.shards):
        (folder / ".imagemill.json").unlink()

    apply_repair(root, plan_repair(root))

    files, sources, _, identities = rows(root)
    assert (files, sources) == repaired(before)[:2]
    assert identities.keys() == before[3].keys()


@pytest.mark.parametrize("damage", ["pages", "garbage", "empty tables", "truncated"])
@pytest.mark.parametrize("command", ["status", "run", "verify", "shards"])
def test_commands_name_the_damage_and_the_remedy(root, damage, command):
    """There is no traceback, and nothing is written."""
    DAMAGES[damage](root)
    before = contents(root)

    said = imagemill(command, "--data-root", root.path, stub=True)

    assert said.returncode == 1
    assert "Traceback" not in said.stdout + said.stderr
    assert "imagemill repair" in said.stderr + said.stdout
    assert contents(root) == before


def test_repair_reports_first_and_writes_only_on_request(root):
    DAMAGES["garbage"](root)
    damaged = root.ledger.read_bytes()

    reported = imagemill("repair", "--data-root", root.path)
    assert reported.returncode == 0, reported.stderr
    assert "nothing was changed" in reported.stdout
    assert root.ledger.read_bytes() == damaged

    applied = imagemill("repair", "--apply", "--data-root", root.path)
    assert applied.returncode == 0, applied.stderr
    (kept,) = root.quarantine.glob("ledger-*")
    assert (kept / root.ledger.name).read_bytes() == damaged
    again = imagemill("repair", "--apply", "--data-root", root.path)
    assert "nothing to repair" in again.stdout


def test_lost_ledger_is_reported_and_models_and_withdrawals_survive(root):
    """A run without `repair` adopts the files. It reads models and withdrawals from the second copy."""
    shutil.rmtree(root.state)

    done = imagemill("run", "--data-root", root.path, stub=True)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "was lost" in done.stderr
    assert "1 withdrawn" in done.stderr
    with Ledger(root.ledger, read_only=True) as ledger:
        assert set(ledger.withdrawals()) == {"photo0002"}
        assert ledger.setting(f"identity.{VAE.kind}")


def test_command_killed_before_reading_the_second_copy_loses_nothing(root):
    """The new ledger exists but is empty: a kill or disk error came between its creation and the copy."""
    identities, withdrawals = rows(root)[3], rows(root)[2]
    shutil.rmtree(root.state)
    Ledger(root.ledger).close()

    done = imagemill("run", "--data-root", root.path, stub=True)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "was lost" in done.stderr
    assert rows(root)[2:] == (withdrawals, identities)
    assert "was lost" not in imagemill("run", "--data-root", root.path, stub=True).stderr


def test_undamaged_ledger_is_not_changed(root):
    before = root.ledger.read_bytes()

    said = imagemill("repair", "--apply", "--data-root", root.path)

    assert said.returncode == 0
    assert "nothing to repair" in said.stdout
    assert root.ledger.read_bytes() == before


def test_folder_without_a_run_has_nothing_to_repair(tmp_path):
    said = imagemill("repair", "--apply", "--data-root", tmp_path)

    assert said.returncode == 1
    assert "nothing has run" in said.stderr
    assert list(tmp_path.iterdir()) == []


def test_ledger_of_a_root_in_use_is_not_replaced(data_root, monkeypatch):
    user = SimpleNamespace(pid=4711, host="elsewhere")
    monkeypatch.setattr(repair, "living", lambda folder: [user])

    with pytest.raises(ImagemillError, match="another process works on this data root: 4711 on elsewhere"):
        apply_repair(data_root, repair.Repair("lost"))
