"""Exclusion of near duplicates from the shards on the command line."""

import json
import shutil

import pytest

from imagemill.domain.layout import DataRoot
from tests.helpers.product import coco_photos, imagemill


def product(root, *arguments, code=0):
    done = imagemill(*arguments, "--data-root", root.path)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def root(tmp_path, coco128):
    """Three photographs and one copy."""
    root = DataRoot(tmp_path / "data")
    coco_photos(coco128, tmp_path / "all")
    root.approved.mkdir(parents=True)
    captioned = sorted(path.stem for path in (tmp_path / "all").glob("*.txt"))[:3]
    for stem in captioned:
        shutil.copy(tmp_path / "all" / f"{stem}.jpg", root.approved)
        shutil.copy(tmp_path / "all" / f"{stem}.txt", root.approved)
    for suffix in (".jpg", ".txt"):
        shutil.copy(root.approved / f"{captioned[0]}{suffix}", root.approved / f"zz_copy{suffix}")
    return root


def test_copy_of_a_photo_is_excluded_on_request_and_reported(root):
    product(root, "run")
    root.config_file.write_text(json.dumps({"near_duplicates": {"threshold": 0.9999, "exclude": True}}))

    product(root, "run")

    assert "near_duplicate" in product(root, "explain", "zz_copy")
    assert "in none" in product(root, "explain", "zz_copy")
    counted = product(root, "shards", "--dry-run", "--overwrite").splitlines()[-1]
    assert "ready_records=3 skipped_incomplete=1" in counted

    root.config_file.unlink()
    product(root, "run")
    assert "near_duplicate" not in product(root, "explain", "zz_copy")
