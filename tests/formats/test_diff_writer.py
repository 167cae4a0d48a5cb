"""Files that are rewritten only if their content changes."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagemill.formats.diff_writer import Draft
from imagemill.fs.atomic import temporaries


def make(folder, pieces, name="f"):
    draft = Draft(folder, name)
    for piece in pieces:
        draft.write(piece)
    changed = draft.finish()
    draft.publish()
    return changed


@given(old=st.none() | st.binary(max_size=40), pieces=st.lists(st.binary(max_size=12), max_size=5))
@settings(max_examples=150, deadline=None)
def test_file_holds_what_was_written_and_is_called_changed_where_it_did_not(tmp_path_factory, old, pieces):
    """Spec: docs/spec/conventions.md#completion"""
    folder = tmp_path_factory.mktemp("drafts")
    if old is not None:
        (folder / "f").write_bytes(old)

    changed = make(folder, pieces)

    assert (folder / "f").read_bytes() == b"".join(pieces)
    assert changed == (old != b"".join(pieces))
    assert os.listdir(folder) == ["f"]


def test_equal_content_keeps_the_file_and_writes_nothing(tmp_path):
    make(tmp_path, [b"one\n", b"two\n"])
    before = os.stat(tmp_path / "f")

    draft = Draft(tmp_path, "f")
    draft.write(b"one\ntwo\n")

    assert temporaries(tmp_path) == []
    assert not draft.finish()
    draft.publish()
    after = os.stat(tmp_path / "f")
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.parametrize("moment", ["begun", "written", "finished"])
def test_discarded_draft_leaves_the_old_file_and_nothing_else(tmp_path, moment):
    (tmp_path / "f").write_bytes(b"old")
    draft = Draft(tmp_path, "f")
    if moment != "begun":
        draft.write(b"new, and longer")
    if moment == "finished":
        draft.finish()

    draft.discard()

    assert os.listdir(tmp_path) == ["f"]
    assert (tmp_path / "f").read_bytes() == b"old"


def test_draft_follows_its_folder_to_a_new_name(tmp_path):
    """A derived preset is drafted in a folder that is renamed later."""
    (tmp_path / "staging").mkdir()
    draft = Draft(tmp_path / "staging", "f")
    draft.write(b"all of it")
    draft.finish()
    os.rename(tmp_path / "staging", tmp_path / "preset")

    draft.move(tmp_path / "preset")
    draft.publish()

    assert (tmp_path / "preset" / "f").read_bytes() == b"all of it"
