"""`imagemill marks`, `withdraw --marked`, `withdraw --from` and `status --since` on the command line.

Spec: docs/spec/shards.md#withdrawals, docs/spec/conventions.md#what-changed
"""

import json
import subprocess

import pytest
from PIL import Image

from imagemill.domain.embedding_specs import DINOV3
from imagemill.domain.layout import DataRoot
from imagemill.store.ledger import Ledger
from tests.helpers.product import command, photos, product


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = DataRoot(tmp_path_factory.mktemp("marks") / "data")
    photos(root.approved, 6)
    product(root, "run")
    return root


def marked(root, *ids):
    with Ledger(root.ledger) as ledger:
        ledger.unmark(ledger.marks())
        ledger.mark(ids)


def withdrawn(root):
    with Ledger(root.ledger) as ledger:
        return sorted(ledger.withdrawals())


def test_marked_images_are_withdrawn_and_no_longer_marked(root):
    marked(root, "photo0001", "photo0004")
    assert product(root, "marks").count(", marked 20") == 2
    assert list(json.loads(product(root, "marks", "--json"))) == ["photo0001", "photo0004"]

    said = product(root, "withdraw", "--marked")

    assert "withdrawn: photo0001, photo0004" in said
    assert "samples: 0 added, 0 changed, 2 removed" in said
    assert withdrawn(root) == ["photo0001", "photo0004"]
    assert json.loads(product(root, "marks", "--json")) == {}
    assert "nothing to do: no image is marked" in product(root, "withdraw", "--marked")
    assert "restored: photo0001, photo0004" in product(root, "withdraw", "--restore", "photo0001", "photo0004")


@pytest.mark.parametrize("piped", [False, True])
def test_images_of_a_list_are_withdrawn_and_restored(root, tmp_path, piped):
    listed = "photo0002\r\n\n" + "sub/photo0003.jpg".removeprefix("sub/") + "\nphoto0002\n"
    file = tmp_path / "bad.txt"
    file.write_text(listed)
    for more, expected in ((), ["photo0002", "photo0003"]), (("--restore",), []):
        if piped:
            words = command("withdraw", "--from", "-", *more, "--data-root", root.path, stub=True)
            subprocess.run(words, input=listed, text=True, check=True, timeout=300)
        else:
            product(root, "withdraw", "--from", file, *more)
        assert withdrawn(root) == expected


def test_unknown_image_of_a_list_changes_nothing(root, tmp_path):
    file = tmp_path / "bad.txt"
    file.write_text("photo0002\nphoto9\n")

    assert "no image photo9" in product(root, "withdraw", "--from", file, code=1)
    assert withdrawn(root) == []


@pytest.mark.parametrize(
    "given",
    [(), ("photo0001", "--marked"), ("--marked", "--from", "x"), ("--marked", "--restore"), ("--from", "absent")],
)
def test_images_are_named_in_one_way(root, given):
    assert "do:" in product(root, "withdraw", *given, code=2)


def test_marks_are_cleared(root):
    marked(root, "photo0005")

    assert "removed 1 mark" in product(root, "marks", "--clear")
    assert "0 marked images" in product(root, "marks")
    assert "exclude each other" in product(root, "marks", "--clear", "--json", code=2)


def since(root, when):
    images = json.loads(product(root, "status", "--since", when, "--json"))["images"]
    return {name: ids for name, ids in images.items() if ids}


def test_status_lists_what_changed_since_a_run(tmp_path):
    root = DataRoot(tmp_path / "data")
    photos(root.approved, 8)
    (root.approved / "photo0006.jpg").write_bytes(b"no image")
    product(root, "run", code=0)
    assert since(root, "1h") == {
        "added": [f"photo000{n}" for n in (0, 1, 2, 3, 4, 5, 7)],
        "newly_refused": ["photo0006"],
    }
    product(root, "withdraw", "photo0004")
    with Ledger(root.ledger) as ledger:  # one hour later
        for table, column in (
            ("sources", "added_at"), ("sources", "changed_at"), ("captions", "changed_at"), ("files", "changed_at"),
            ("runs", "began_at"),
        ):  # fmt: skip
            ledger._change(f"UPDATE {table} SET {column} = {column} - 3600")
        ledger._change("UPDATE problems SET at = '2026-01-01T00:00:00+00:00'")
        ledger._change("UPDATE withdrawn SET at = '2026-01-01T00:00:00+00:00'")

    photos(root.approved, 9)
    Image.new("RGB", (48, 32), "red").save(root.approved / "photo0000.jpg")
    (root.approved / "photo0001.txt").write_text("another caption")
    (root.derived / DINOV3.folder / "photo0002.npy").unlink()
    (root.approved / "photo0003.jpg").unlink()
    Image.new("RGB", (48, 32), "blue").save(root.approved / "photo0006.jpg")
    (root.approved / "photo0007.jpg").touch()
    product(root, "run")
    product(root, "withdraw", "photo0005")

    with Ledger(root.ledger) as ledger:
        run = max(ledger._rows("SELECT began_at, run FROM runs WHERE run IN (SELECT run_id FROM counts)"))[1]
    expected = {
        "added": ["photo0006", "photo0008"],
        "replaced": ["photo0000"],
        "recaptioned": ["photo0001"],
        "recomputed": ["photo0000", "photo0001", "photo0002"],
        "withdrawn": ["photo0005"],
        "newly_refused": ["photo0003.txt"],
        "solved": ["photo0006"],
        "gone": ["photo0003"],
    }
    assert since(root, "30m") == expected
    assert since(root, run[:8]).keys() <= expected.keys()
    said = product(root, "status", "--since", "30m")
    assert "newly refused       1: photo0003.txt\n" in said
    assert "gone                1: photo0003" in said
    with Ledger(root.ledger) as ledger:
        ledger._change("UPDATE sources SET changed_at = NULL WHERE image_id = 'photo0008'")
    assert "unknown             1: an earlier release recorded" in product(root, "status", "--since", "30m")
    assert "not a time or a run" in product(root, "status", "--since", "yesterday", code=2)
