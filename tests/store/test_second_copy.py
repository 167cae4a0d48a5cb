"""Settings and withdrawals survive a loss of the ledger at any time."""

import pytest

from imagemill.domain.inputs import NEW_INPUTS
from imagemill.domain.layout import DataRoot
from imagemill.errors import ImagemillError
from imagemill.store.inputs import recorded_inputs
from imagemill.store.ledger import Ledger
from imagemill.store.second_copy import NAME, newest, open_ledger, read_copy, refresh


@pytest.fixture
def root(tmp_path):
    root = DataRoot(tmp_path / "data")
    root.derived.mkdir(parents=True)
    root.shards.mkdir()
    with open_ledger(root) as ledger:
        ledger.record_setting("identity.k", "{}")
        ledger.withdraw(["a"])
        refresh(root, ledger)
    return root


def known(root):
    with open_ledger(root) as ledger:
        assert recorded_inputs(ledger.setting) == NEW_INPUTS
        settings = ledger.settings()
        return {name: settings[name] for name in settings if name in {"begun", "identity.k"}}, set(ledger.withdrawals())


def test_lost_ledger_takes_everything_from_the_copy_and_is_reported(root, capsys):
    root.ledger.unlink()

    assert known(root) == ({"begun": "1", "identity.k": "{}"}, {"a"})
    assert "was lost" in capsys.readouterr().err
    assert known(root) == ({"begun": "1", "identity.k": "{}"}, {"a"})
    assert capsys.readouterr().err == "", "said once"


def test_ledger_that_was_made_but_not_filled_before_a_kill_is_filled(root):
    root.ledger.unlink()
    Ledger(root.ledger).close()

    assert known(root) == ({"begun": "1", "identity.k": "{}"}, {"a"})


def test_empty_ledger_never_replaces_a_copy(root):
    """This includes a ledger that was opened without restoring first."""
    root.ledger.unlink()
    with Ledger(root.ledger) as empty:
        refresh(root, empty)

    assert newest(root).copy.settings["identity.k"] == "{}"


def test_newer_copy_counts_and_an_unreadable_one_is_passed_over(root):
    with open_ledger(root) as ledger:
        ledger.withdraw(["b"])
        (root.shards / NAME).unlink()
        refresh(root, ledger)
    (root.derived / NAME).write_bytes(b"{")
    root.ledger.unlink()

    assert known(root)[1] == {"a", "b"}


def test_equal_ledgers_have_equal_copies_and_an_unchanged_one_is_not_written_again(root):
    before = (root.derived / NAME).stat().st_mtime_ns
    with open_ledger(root) as ledger:
        refresh(root, ledger)

    assert (root.derived / NAME).stat().st_mtime_ns == before
    assert (root.derived / NAME).read_bytes() == (root.shards / NAME).read_bytes()
    assert read_copy(root.derived / NAME).withdrawn.keys() == {"a"}


def test_folder_that_is_not_there_yet_gets_no_copy(tmp_path):
    root = DataRoot(tmp_path / "data")
    with open_ledger(root) as ledger:
        ledger.record_setting("a", "b")
        refresh(root, ledger)

    assert not root.derived.exists()


def test_unfinished_regeneration_survives_the_loss_of_the_ledger(root):
    """Otherwise the files of two models, adopted as unknown, would be packed together."""
    with open_ledger(root) as ledger:
        ledger.supersede_files("vae_latents", "under way")
        refresh(root, ledger)
    root.ledger.unlink()

    with open_ledger(root) as ledger:
        assert ledger.regenerating() == {"vae_latents": "under way"}


def test_folders_outside_the_root_are_not_taken_from_a_copy(root, tmp_path):
    """A copied `derived/` must not refer to another data root's shards."""
    with open_ledger(root) as ledger:
        ledger.record_setting("place.shards", str(tmp_path / "production"))
        refresh(root, ledger)
    assert "place.shards" not in read_copy(root.derived / NAME).settings
    root.ledger.unlink()

    assert "place.shards" not in known(root)[0]


def test_copy_that_cannot_be_written_is_a_warning(root, capsys, monkeypatch):
    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("imagemill.store.second_copy.write_bytes_atomic", refuse)
    with open_ledger(root) as ledger:
        ledger.withdraw(["b"])
        refresh(root, ledger)

    assert "cannot be written: Read-only file system" in capsys.readouterr().err


def test_copy_that_a_command_requires_is_an_error(root, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("imagemill.store.second_copy.write_bytes_atomic", refuse)
    with open_ledger(root) as ledger:
        ledger.withdraw(["b"])
        with pytest.raises(ImagemillError, match="second copy of the settings cannot be written") as caught:
            refresh(root, ledger, required=True)

    assert "run the same command again" in caught.value.do
