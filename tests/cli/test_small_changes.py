"""After a run that left nothing to do, the next one looks at the images that have changed; its result is that of looking at all.

Reference: docs/decisions/0103-snapshot.md
"""

import json
import re
import sqlite3
from contextlib import closing

import pytest

from imagemill.domain.layout import DataRoot
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.store.ledger import Ledger
from imagemill.store.ledger.schema import SNAPSHOT
from tests.helpers.commands import called
from tests.helpers.stage2 import photos, picture
from tests.helpers.wiring import stub_every_kind

NAMES = [f"image{n:02d}" for n in range(24)]

# Reads of the rows of all images, which a run needs unless it knows what has changed.
OF_ALL = ("file_inputs", "merged_captions", "signatures_read", "as_read")

# Tables, with the columns that do not depend on times and inodes.
CONTENTS = {
    "sources": "image_id, file_name, fingerprint, height, width, color",
    "captions": "image_id, text, origin, fingerprint, mask, texts, conflict, signature IS NULL",
    "recorded_captions": "image_id, fingerprint",
    "files": "kind, image_id, content, source",
    "problems": "item, asset, outcome, reason, detail",
}


def filled(path, *, named=False):
    """Return a data root after its first run. `named`: its configuration names a table of captions."""
    root = DataRoot(path)
    root.approved.mkdir(parents=True)
    if named:
        root.config_file.write_text("captions:\n  metadata: table.jsonl\n")
        table(root, "from a table")
    for n, name in enumerate(NAMES):
        picture(root.approved / f"{name}.png", size=(24, 24), seed=n)
        (root.approved / f"{name}.txt").write_text(f"noise called {name}")
    assert called(root, "run").code == 0
    return root


def contents(root):
    """Return records, indices of sets, and rows."""
    files = [root.stage2_jsonl, *sorted(root.shards.glob("bucket_*/index.jsonl"))]
    with closing(sqlite3.connect(root.ledger)) as db:
        rows = {name: sorted(map(repr, db.execute(f"SELECT {c} FROM {name}"))) for name, c in CONTENTS.items()}
    return [path.read_bytes() for path in files], rows


def summary(text):
    """Return the summary without times and the name of the data root."""
    lines = text.partition("\nimagemill: ")[2].splitlines()[1:]
    return [re.sub(r"rate=\S+", "", line) for line in lines if not line.startswith(("  time", "  look"))]


def new_picture(root, name, seed):
    picture(root.approved / f"{name}.png", size=(24, 24), seed=seed)


def moved_away(root, *names):
    for name in names:
        (root.approved / name).rename(root.path / name)


def moved_back(root, *names):
    for name in names:
        (root.path / name).rename(root.approved / name)


def with_metadata(root):
    (root.approved / "metadata.jsonl").write_text('{"file_name": "image07.png", "text": "from a table"}\n')


CHANGES = {
    "another image": lambda root: (new_picture(root, "new", 100), (root.approved / "new.txt").write_text("new")),
    "an image without a caption": lambda root: new_picture(root, "silent", 101),
    "an edited caption": lambda root: (root.approved / "image03.txt").write_text("edited"),
    "another picture": lambda root: new_picture(root, "image04", 102),
    "a torn picture": lambda root: (root.approved / "image05.png").write_bytes(b"no picture"),
    "a removed caption": lambda root: moved_away(root, "image06.txt"),
    "a caption for the image without one": lambda root: (root.approved / "silent.txt").write_text("not silent"),
    "a caption again": lambda root: moved_back(root, "image06.txt"),
    "a blank caption": lambda root: (root.approved / "image07.txt").write_text(" \n"),
    "a caption from a table": with_metadata,
    "a removed image": lambda root: moved_away(root, "image08.png", "image08.txt"),
    "another removed image": lambda root: moved_away(root, "image09.png", "image09.txt"),
    "an image again": lambda root: moved_back(root, "image08.png", "image08.txt"),
    "a sound picture": lambda root: new_picture(root, "image05", 103),
    "a caption that is no text": lambda root: (root.approved / "image10.txt").write_bytes(b"\xff\xfe\xfd"),
    "a renamed image": lambda root: (root.approved / "image11.png").rename(root.approved / "other11.png"),
    "a file of another kind": lambda root: (root.approved / "notes.xyz").write_text("notes"),
    "a text again": lambda root: (root.approved / "image10.txt").write_text("a text"),
}


def table(root, text, names=("image12", "image13")):
    """Write a table with a row for each of these images, which the configuration names."""
    rows = [{"file_name": f"{name}.png", "text": f"{text} {name}"} for name in names]
    (root.approved / "table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# With a table that precedes caption files.
OF_TABLE = {
    "an edited table": lambda root: table(root, "from another table"),
    "a row for another image": lambda root: table(root, "from a table", ("image12", "image13", "image14")),
    "a removed row": lambda root: table(root, "of one row", ("image12",)),
    "an edited caption beside a row": lambda root: (root.approved / "image12.txt").write_text("edited"),
    "an edited caption": lambda root: (root.approved / "image03.txt").write_text("edited"),
    "rows for other images": lambda root: table(root, "again", ("image15", "image16")),
}


@pytest.fixture
def asked(monkeypatch):
    """The answers of `in_question`, by data root."""
    answers, real = {}, Inventory.in_question

    def spy(inventory, ledger):
        found = real(inventory, ledger)
        answers.setdefault(inventory.root.path, []).append(found)
        return found

    monkeypatch.setattr(Inventory, "in_question", spy)
    return answers


@pytest.mark.parametrize("changes", [CHANGES, OF_TABLE], ids=["images and captions", "table"])
def test_result_after_a_change_is_that_of_looking_at_every_image(tmp_path, monkeypatch, asked, changes):
    stub_every_kind(monkeypatch)
    knowing, looking = (filled(tmp_path / name / "root", named=changes is OF_TABLE) for name in ("knowing", "looking"))
    assert contents(knowing) == contents(looking)
    for name, change in changes.items():
        asked.clear()
        change(knowing)
        change(looking)
        (looking.state / SNAPSHOT).unlink()

        by_knowing, by_looking = called(knowing, "run"), called(looking, "run")

        assert (by_knowing.code, summary(by_knowing.text)) == (by_looking.code, summary(by_looking.text)), name
        assert contents(knowing) == contents(looking), name
        assert all(found is not None and len(found) < 8 for found in asked[knowing.path]), name
        assert set(asked[looking.path]) == {None}, name


def noting(calls, name, method):
    """Return a method that appends its name and arguments to a list before it is called."""

    def noted(ledger, *given):
        calls.append((name, given))
        return method(ledger, *given)

    return noted


def test_run_after_an_edited_caption_compares_no_other_image(tmp_path, monkeypatch):
    """An image is looked up alone; the rows of all are read once, for the signatures of their files."""
    stub_every_kind(monkeypatch)
    root, read = filled(tmp_path / "root"), []
    (root.approved / "image03.txt").write_text("edited")
    for name in OF_ALL:
        monkeypatch.setattr(Ledger, name, noting(read, name, getattr(Ledger, name)))

    assert called(root, "run").code == 0

    assert {name for name, _ in read} <= {"merged_captions", "signatures_read"}
    assert all(given[-2:] == ("image03", "image03") for _, given in read)
    assert b'"edited"' in root.stage2_jsonl.read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root.derived / "dinov3" / "image01.npy").unlink(),
        lambda root: (root.derived / "dinov3" / "image01.npy").write_bytes(b"other"),
        lambda root: root.stage2_jsonl.write_text(root.stage2_jsonl.read_text().replace("called image01", "by hand")),
        lambda root: root.config_file.write_text("write_threads: 3\n"),
        lambda root: called(root, "withdraw", "image01"),
    ],
    ids=["a removed array", "a damaged array", "an edited record", "a setting", "a withdrawn image"],
)
def test_every_image_is_looked_at_after_a_change_elsewhere(tmp_path, monkeypatch, asked, change):
    stub_every_kind(monkeypatch)
    root = filled(tmp_path / "root")
    asked.clear()
    (root.approved / "image03.txt").write_text("edited")
    change(root)

    assert called(root, "run").code == 0

    assert set(asked[root.path]) == {None}
    assert {path.stem for path in (root.derived / "dinov3").iterdir()} >= set(NAMES)


def test_every_image_is_looked_at_after_many_changes(tmp_path, monkeypatch, asked):
    stub_every_kind(monkeypatch)
    root = filled(tmp_path / "root")
    asked.clear()
    photos(root, *(f"new{n}" for n in range(12)), size=(24, 24))

    assert called(root, "run").code == 0

    assert set(asked[root.path]) == {None}
    assert sum(1 for _ in root.stage2_jsonl.open()) == len(NAMES) + 12
