"""docs/how-to/postgresql.md: its settings and commands, with a real PostgreSQL server."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version

import pytest
from PIL import Image

from tests.docs.console import ROOT
from tests.helpers.postgres import postgres_server

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "how-to" / "postgresql.md").read_text("utf-8")


def _block(language: str, number: int = 0) -> str:
    """Return a code block of the page, which is indented as a part of a list."""
    blocks = re.findall(rf"^    ```{language}\n(.*?)^    ```$", PAGE, re.DOTALL | re.MULTILINE)
    return re.sub("^    ", "", blocks[number], flags=re.MULTILINE)


def test_extra_of_the_page_contains_the_driver():
    (extra,) = re.fullmatch(r"pip install 'imagemill\[(\w+)\]'\n", _block("sh")).groups()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for requirement in extras[extra]:
        assert version(re.match(r"[\w-]+", requirement)[0])


def test_existing_root_moves_to_postgresql_as_the_page_says(tmp_path):
    root = tmp_path / "data"
    settings = _block("yaml")
    (command,) = _block("sh", 1).splitlines()
    (root / "approved").mkdir(parents=True)
    Image.effect_noise((640, 480), 80).convert("RGB").save(root / "approved" / "a.jpg")
    (root / "approved" / "a.txt").write_text("noise")

    def imagemill(*arguments: str) -> str:
        words = [sys.executable, "-m", "dagster_project.cli.main", *arguments, "--data-root", str(root)]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run(words, check=False, env=environment, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    imagemill("run")
    old = {path: path.stat().st_mtime_ns for path in (root / ".dagster" / "history").rglob("*.db")}

    with postgres_server() as server:
        for statement in _block("sql").splitlines():
            server.query(statement)
        there = server.url("imagemill", user="imagemill", password="secret")
        assert "postgresql://imagemill:secret@localhost/imagemill" in settings
        settings = settings.replace("postgresql://imagemill:secret@localhost/imagemill", there)
        (root / ".dagster" / "dagster.yaml").write_text(settings)
        first, second = imagemill(*command.split()[1:]), imagemill("run")

        rows = server.query("SELECT asset_key FROM asset_keys", "imagemill")

    assert "checks     11 of 11 passed" in first
    assert "made 0" in first or "up to date" in first
    assert "no Dagster run was started" in second
    assert {'["dinov3_npy"]', '["bucket_shards"]'} <= {key for (key,) in rows}
    assert old == {path: path.stat().st_mtime_ns for path in (root / ".dagster" / "history").rglob("*.db")}
