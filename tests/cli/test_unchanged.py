"""A run without news starts no Dagster run; any change is still found. `status` reports the end of the last command.

Reference: docs/decisions/0103-snapshot.md
"""

import json
import os
import re
import shutil
import sqlite3
from contextlib import closing

import dagster as dg
import pytest

from assets.partitions import images
from dagster_project import snapshot as writing
from dagster_project.internals.instance import open_instance
from dagster_project.work import CommandSession
from imagemill.config import Config
from imagemill.domain.embedding_specs import DINOV3
from imagemill.domain.layout import DataRoot
from imagemill.fs.fingerprints import fingerprint
from imagemill.pipeline import snapshot
from imagemill.store.ledger import HISTORY, ROOT_ID, Ledger
from imagemill.store.ledger.schema import SNAPSHOT
from imagemill.store.second_copy import newest
from tests.helpers.commands import called
from tests.helpers.earlier_release import as_of_previous_release
from tests.helpers.stage2 import photos, picture
from tests.helpers.stubs import StubEncoder
from tests.helpers.wiring import stub_every_kind

UNCHANGED = "no Dagster run was started"
BUCKET = "bucket_1024x1024"


@pytest.fixture
def settled(data_root, monkeypatch):
    """Three complete images after a run."""
    stub_every_kind(monkeypatch)
    photos(data_root, "a", "b", "c", size=(24, 24))
    assert called(data_root, "run").code == 0
    return data_root


def is_unchanged(root):
    done = called(root, "run")
    assert done.code == 0, done.text
    return UNCHANGED in done.text


def runs_of(root):
    with open_instance(root) as instance:
        return instance.get_runs_count()


def known_to(root):
    """Return the runs, partitions and materialisations that the history has."""
    with open_instance(root) as instance:
        keys = instance.get_asset_keys()
        made = {key.to_user_string(): instance.get_materialized_partitions(key) for key in keys}
        return [run.run_id for run in instance.get_runs()], instance.get_dynamic_partitions(images.name), made


def summary(text):
    """Return a summary without times, checks (a run repeats only some), and the lines that precede it."""
    kept = [
        line
        for line in text.partition("\nimagemill: ")[2].splitlines()
        if not line.startswith(("  time", "  checks", "  unchanged"))
    ]
    return re.sub(r"rate=\S+", "", "\n".join(kept))


def test_second_run_ends_with_the_same_summary_and_without_a_dagster_run(settled):
    before, ledger = runs_of(settled), settled.ledger.read_bytes()

    short = called(settled, "run")

    assert (short.code, UNCHANGED in short.text) == (0, True)
    assert runs_of(settled) == before
    assert settled.ledger.read_bytes() == ledger
    (settled.state / SNAPSHOT).unlink()
    whole = called(settled, "run")
    assert UNCHANGED not in whole.text
    assert summary(short.text) == summary(whole.text)
    assert runs_of(settled) == before + 1


@pytest.mark.parametrize("shared", [False, True])
def test_upgrade_starts_no_run_and_leaves_the_history_as_it_is(data_root, tmp_path, monkeypatch, shared):
    """In `.dagster`, or alone in a history that others might join."""
    if shared:
        monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    stub_every_kind(monkeypatch)
    photos(data_root, "a", "b", size=(24, 24))
    with monkeypatch.context() as patch:
        patch.setattr(writing, "_record_history", lambda *_: None)
        assert called(data_root, "run").code == 0
    as_of_previous_release(data_root)
    before = known_to(data_root)

    assert is_unchanged(data_root)

    assert known_to(data_root) == before
    with Ledger(data_root.ledger, read_only=True) as ledger:
        assert (ledger.setting(HISTORY), bool(ledger.setting(ROOT_ID))) == (None, True)
    assert is_unchanged(data_root)


def test_upgrade_after_a_change_takes_the_whole_way(settled):
    as_of_previous_release(settled)
    with closing(sqlite3.connect(settled.ledger)) as db:
        db.execute("INSERT INTO settings VALUES ('another', 'process')")
        db.commit()

    assert not is_unchanged(settled)
    assert is_unchanged(settled)


def test_snapshot_of_another_release_holds_unless_its_rules_are_others(settled, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(writing, "version", lambda _: "0.0.9")
        (settled.state / SNAPSHOT).unlink()
        assert not is_unchanged(settled)
    assert is_unchanged(settled)

    later = snapshot.FORMAT + 1
    for module in (snapshot, writing):
        monkeypatch.setattr(module, "FORMAT", later)
    assert not is_unchanged(settled)
    assert is_unchanged(settled)


def test_digest_has_the_settings_of_the_previous_release_while_later_ones_are_unset():
    """If a setting is added, its name belongs in `_ADDED`; after a change of one, or of a default, raise `FORMAT`."""
    text = next(snapshot.settings_lines(Config()))
    assert fingerprint(text.encode()) == "xxh3:9ab3b0c286912f6cbd203d4688cade17"
    assert next(snapshot.settings_lines(Config(name="animals"))) == text.replace("(", "(name='animals', ", 1)


def test_ledger_records_the_history_that_it_reported_to(settled):
    with open_instance(settled) as instance:
        history = instance.run_storage.get_run_storage_id()
    with Ledger(settled.ledger, read_only=True) as ledger:
        assert ledger.setting(HISTORY) == history
    assert newest(settled).copy.settings[HISTORY] == history


def test_refused_images_are_listed_again_with_the_same_exit_code(settled):
    (settled.approved / "torn.png").write_bytes(b"no picture")
    photos(settled, "silent", captions=False)
    whole = called(settled, "run")

    short = called(settled, "run")

    assert UNCHANGED in short.text
    assert whole.code == short.code == 0
    for line in ("torn: cannot be decoded", "silent: no caption for silent.png", "refused=2"):
        assert line in whole.text
        assert line in short.text
    assert called(settled, "run", "--fail-on-skip").code == 1


def edited_record(root):
    lines = root.stage2_jsonl.read_text().replace("noise called b", "by hand")
    root.stage2_jsonl.write_text(lines)


def other_bytes_of_equal_size(path):
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def wiped(root):
    with open_instance(root) as instance:
        instance.wipe_assets([dg.AssetKey("vae_latents")])


def without_partition(root):
    with open_instance(root) as instance:
        instance.delete_dynamic_partition(images.name, "b")


def noted(root):
    with Ledger(root.ledger) as ledger:
        ledger.record_setting("another", "process")


CHANGES = {
    "another image": lambda root: photos(root, "d", size=(24, 24)),
    "another picture": lambda root: picture(root.approved / "a.png", size=(24, 24)),
    "an edited caption": lambda root: (root.approved / "a.txt").write_text("edited"),
    "a removed caption": lambda root: (root.approved / "a.txt").unlink(),
    "a touched image": lambda root: os.utime(root.approved / "b.png", (1, 1)),
    "a removed array": lambda root: (root.derived / "dinov3" / "b.npy").unlink(),
    "a damaged array": lambda root: other_bytes_of_equal_size(root.derived / "vae_latents" / "b.npy"),
    "an edited record": edited_record,
    "removed records": lambda root: root.stage2_jsonl.unlink(),
    "a removed set": lambda root: shutil.rmtree(root.shards / BUCKET),
    "a removed index": lambda root: (root.shards / BUCKET / ".nv-meta" / "index.sqlite").unlink(),
    "a removed card": lambda root: (root.shards / "README.md").unlink(),
    "a setting": lambda root: root.config_file.write_text("write_threads: 3\n"),
    "a withdrawn image": lambda root: called(root, "withdraw", "c"),
    "a note in the ledger": noted,
    "a wiped asset": wiped,
    "a removed partition": without_partition,
    "a removed history": lambda root: shutil.rmtree(root.dagster_home),
}


def test_every_change_is_found_and_the_run_after_it_has_nothing_to_do(settled):
    assert is_unchanged(settled)
    for change, make in CHANGES.items():
        make(settled)
        assert not is_unchanged(settled), change
        assert is_unchanged(settled), f"after {change}"


def test_damaged_tar_is_found_until_its_set_is_written_again(settled):
    other_bytes_of_equal_size(settled.shards / BUCKET / "shard-000000.tar")

    for _ in range(2):
        done = called(settled, "run")
        assert (done.code, UNCHANGED in done.text) == (1, False)

    called(settled, "shards", "--overwrite")
    assert not is_unchanged(settled)
    assert is_unchanged(settled)


def test_change_while_a_run_works_is_found_by_the_next_run(settled, monkeypatch):
    """The run has listed the folders already: its snapshot must not contain what it has not read."""
    late = {
        "late image": lambda: photos(settled, "late", size=(24, 24)),
        "late caption": lambda: (settled.approved / "a.txt").write_text("late"),
        "late record": lambda: edited_record(settled),
        "late damage": lambda: other_bytes_of_equal_size(settled.derived / "dinov3" / "a.npy"),
        "late loss": (settled.derived / "vae_latents" / "c.npy").unlink,
        "late tar": (settled.shards / BUCKET / "shard-000000.tar").unlink,
        "late setting": lambda: noted(settled),
    }
    published = CommandSession.publish
    for name, make in late.items():
        (settled.state / SNAPSHOT).unlink()

        def publish_then_change(work, passes, make=make):
            published(work, passes)
            make()

        monkeypatch.setattr(CommandSession, "publish", publish_then_change)
        called(settled, "run")
        monkeypatch.setattr(CommandSession, "publish", published)
        assert not is_unchanged(settled), name
        assert is_unchanged(settled), f"after {name}"


def captions_of(root):
    with root.stage2_jsonl.open() as lines:
        return {record["image_id"]: record["caption"] for record in map(json.loads, lines)}


def run_and_change_after_the_passes(root, monkeypatch, change):
    embedded = CommandSession.embed

    def embed_then_change(work, *arguments, **options):
        embedded(work, *arguments, **options)
        change(root)

    with monkeypatch.context() as patch:
        patch.setattr(CommandSession, "embed", embed_then_change)
        assert called(root, "run").code == 0


def test_image_and_caption_that_come_during_the_passes_wait_for_the_next_run(settled, monkeypatch):
    def change(root):
        photos(root, "late", size=(24, 24))
        (root.approved / "a.txt").write_text("late")

    photos(settled, "d", size=(24, 24))
    run_and_change_after_the_passes(settled, monkeypatch, change)
    assert captions_of(settled) == {name: f"noise called {name}" for name in "abcd"}

    assert not is_unchanged(settled)
    assert captions_of(settled) == {"a": "late"} | {name: f"noise called {name}" for name in ("b", "c", "d", "late")}
    assert is_unchanged(settled)


def test_record_that_is_edited_during_the_passes_counts_at_once(settled, monkeypatch):
    """A merge with the earlier caption would replace the edit."""
    (settled.approved / "b.txt").unlink()
    photos(settled, "d", size=(24, 24))
    run_and_change_after_the_passes(settled, monkeypatch, edited_record)

    assert captions_of(settled)["b"] == "by hand"


def test_staged_file_of_a_killed_run_is_removed_although_its_kind_has_no_work(settled):
    """A worker may outlive its killed run, and stage a file after the next run has swept the folder."""
    left = settled.derived / "dinov3" / ".tmp-0123abcd-1-2-99x000001"
    left.write_bytes(b"part")
    (settled.approved / "a.txt").write_text("edited")

    assert called(settled, "run").code == 0
    assert not left.exists()


class FailsOnce(StubEncoder):
    """Fails for every image until `well` is set."""

    well = False

    def encode(self, *arguments):
        if not self.well:
            raise RuntimeError("out of order")
        return super().encode(*arguments)


@pytest.mark.parametrize("lost", ["nothing", "the history", "a command"])
def test_history_is_compared_with_the_files_unless_the_last_run_left_nothing_to_do(settled, monkeypatch, lost):
    compared = []
    real = CommandSession._unreported
    monkeypatch.setattr(CommandSession, "_unreported", lambda *given: compared.append(1) or real(*given))
    photos(settled, "d", size=(24, 24))
    if lost == "the history":
        shutil.rmtree(settled.path / ".dagster")
    elif lost == "a command":
        with Ledger(settled.ledger) as ledger:
            ledger.record_setting("another", "process")

    assert called(settled, "run").code == 0

    assert bool(compared) == (lost != "nothing")
    assert all(len(made) == 4 for key, made in known_to(settled)[2].items() if key == "vae_latents")


def test_failed_image_is_tried_again(data_root, monkeypatch):
    stub_every_kind(monkeypatch, FailsOnce)
    monkeypatch.setattr(FailsOnce, "well", False)
    photos(data_root, "a", size=(24, 24))
    assert called(data_root, "run").code == 1
    assert called(data_root, "run").code == 1

    monkeypatch.setattr(FailsOnce, "well", True)

    assert not is_unchanged(data_root)
    assert (data_root.derived / DINOV3.folder / "a.npy").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"release": 1}'])
def test_damaged_snapshot_is_ignored(settled, content):
    (settled.state / SNAPSHOT).write_bytes(content)

    assert not is_unchanged(settled)
    assert called(settled, "status").code == 0


def test_moved_data_root_is_looked_at_again(settled, tmp_path):
    moved = DataRoot(tmp_path / "moved")
    settled.path.rename(moved.path)

    assert not is_unchanged(moved)


def test_status_reports_the_end_of_the_last_command(settled):
    (settled.derived / "dinov3" / "b.npy").unlink()

    said, fresh = called(settled, "status").text, called(settled, "status", "--fresh").text

    assert "state       at the end of the last command, 2" in said
    assert "dinov3_npy  3 done, 0 to do" in said
    assert "changed  " not in said
    assert "state  " not in fresh
    assert "dinov3_npy  2 done, 1 to do" in fresh


def test_status_says_that_names_in_approved_have_changed(settled):
    photos(settled, "d")
    assert "changed     files were added to approved/ or removed since" in called(settled, "status").text
    document = json.loads(called(settled, "status", "--json").text)
    assert (document["names_changed"], document["images"]["seen"]) == (True, 3)

    called(settled, "run")

    document = json.loads(called(settled, "status", "--json").text)
    assert (document["names_changed"], document["images"]["seen"]) == (False, 4)
    assert document["as_of"] > 0
    assert json.loads(called(settled, "status", "--json", "--fresh").text)["as_of"] is None


def test_status_looks_at_the_files_after_another_process_has_changed_the_ledger(settled):
    called(settled, "withdraw", "c")

    assert "state  " not in called(settled, "status").text


def test_status_states_how_pixels_are_read(settled):
    assert "pixels      pixels.color: srgb" in called(settled, "status").text
